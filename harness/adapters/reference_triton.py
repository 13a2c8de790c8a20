"""The project's own reference with its Triton backend: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported, which is why this module imports it last.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from harness.adapters.reference import ReferenceImplementation
from reference_impl.backends.triton.backend import INTERPRET


class _Kept:
    """The scope of a patch that stays."""

    def restore(self) -> None:
        """Do nothing."""


def speed_up_interpreter() -> None:
    """Patch Triton's language once in this process, not at each launch and call, and check no integer for overflow.

    Takes half of the time off. A process interprets or compiles, never both, so that the patch may stay. Where a
    release of Triton has no such places, it is left as it is.
    """
    from triton.runtime import interpreter

    patch_language = getattr(interpreter, "_patch_lang", None)
    options = getattr(interpreter, "InterpreterOptions", None)
    if patch_language is None or options is None or "sanitize_overflow" not in getattr(options, "__annotations__", {}):
        return
    patched: dict[int, Any] = {}

    def patch_once(function: Any) -> _Kept:
        # The globals of a function say which modules of the language it sees.
        if id(function.__globals__) not in patched:
            patch_language(function)
            patched[id(function.__globals__)] = function.__globals__
        return _Kept()

    interpreter._patch_lang = patch_once
    interpreter.interpreter_builder.options = options(sanitize_overflow=False)


if INTERPRET:
    speed_up_interpreter()

triton = ReferenceImplementation(
    "reference-triton",
    "triton",
    "cpu" if INTERPRET else "cuda",
    INTERPRET,
    ("Triton runs in the interpreter, on the CPU",) if INTERPRET else (),
)
