"""What a fault is: a few patches of the reference that break one sentence of the contract.

A fault is written as a function that returns its patches; its docstring says what the broken implementation does. The
patches are in force inside `inject()`, which yields the broken implementation, and are all undone when it is left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import reference_impl.context
from harness.adapters.reference import ReferenceImplementation, eager
from harness.adapters.reference_triton import triton

Patch = AbstractContextManager[Any]
Inject = Callable[[], AbstractContextManager[ReferenceImplementation]]


@dataclass(frozen=True)
class Fault:
    """A wrong implementation, and the check that must see it."""

    name: str
    clause: str
    check: str
    """Name in CHECKS; other checks may see the fault too."""
    sentence: str
    """What the broken implementation does."""
    inject: Inject
    """Returns a context manager that yields the broken implementation."""


def fault(check: str, clause: str, *, backend: str = "eager") -> Callable[[Callable[[], Iterable[Patch]]], Fault]:
    """Make a function that returns patches a fault that `check` must see.

    Args:
        check: name in CHECKS.
        clause: the clause that is broken.
        backend: of the reference, "eager" or "triton"; the first is the faster one to judge.
    """
    model = {"eager": eager, "triton": triton}[backend]

    def register(patches: Callable[[], Iterable[Patch]]) -> Fault:
        name = patches.__name__

        @contextmanager
        def inject() -> Iterator[ReferenceImplementation]:
            with ExitStack() as stack:
                # Contexts of its own: what a broken implementation leaves set must not reach anybody else.
                stack.enter_context(patch.object(reference_impl.context, "_stack", reference_impl.context._Stack()))
                for one in patches():
                    stack.enter_context(one)
                broken = copy.copy(model)
                broken.info = replace(model.info, name=f"{model.info.name}:{name}")
                yield broken

        return Fault(name, clause, check, " ".join((patches.__doc__ or "").split()), inject)

    return register
