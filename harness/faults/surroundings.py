"""Faults of ERR: what an error of the surroundings leaves behind."""

# The docstring of a fault says what it does.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import reference_impl.context
from harness.adapters.reference import ReferenceModel
from harness.contract import StepPlan
from harness.faults.base import Patch, fault
from reference_impl.backends.eager import EagerImpl
from reference_impl.context import get_forward_context


def step_is(step: Any) -> list[Patch]:
    """Replace the context of a step: a generator function of (model, plan)."""
    return [patch.object(ReferenceModel, "forward_context", contextmanager(step))]


_forward_context = ReferenceModel.forward_context


@fault("next_step_is_right_after_an_error", "ERR-1")
def caches_are_cleared_after_an_error() -> Iterable[Patch]:
    """When a step fails, the caches of all requests are cleared."""

    def step(model: ReferenceModel, plan: StepPlan) -> Iterator[None]:
        try:
            with _forward_context(model, plan):
                yield
        except Exception:
            for layer in model.layers.values():
                layer.kv_cache.zero_()
            raise

    return step_is(step)


@fault("next_step_is_right_after_an_error", "ERR-1")
def lengths_are_counted_twice_after_an_error() -> Iterable[Patch]:
    """A model counts how often a step failed, and takes its tokens for written: the mask begins too late."""

    def step(model: ReferenceModel, plan: StepPlan) -> Iterator[None]:
        lost = vars(model).get("lost", 0)
        reach = len(plan.block_table[0]) * model.config.cache.block_size
        longer = tuple(min(seq_len + lost, reach) for seq_len in plan.seq_lens)
        try:
            with _forward_context(model, replace(plan, seq_lens=longer)):
                yield
        except Exception:
            vars(model)["lost"] = lost + 1
            raise

    return step_is(step)


@fault("next_step_is_right_after_an_error", "ERR-1")
def layer_stays_in_use_after_an_error() -> Iterable[Patch]:
    """A failed step marks its layers as in use, and a layer in use does not write."""

    def step(model: ReferenceModel, plan: StepPlan) -> Iterator[None]:
        try:
            with _forward_context(model, plan):
                yield
        except Exception:
            for layer in model.layers.values():
                vars(layer)["in_use"] = True
            raise

    forward: Any = EagerImpl.forward

    def attend(impl: EagerImpl, layer: Any, *arguments: Any) -> None:
        *given, slots, output = arguments
        forward(impl, layer, *given, None if vars(layer).get("in_use") else slots, output)

    return [*step_is(step), patch.object(EagerImpl, "forward", attend)]


@fault("next_step_is_right_after_an_error", "ERR-1")
def metadata_of_a_failed_step_stays() -> Iterable[Patch]:
    """The plan of a step that failed is not taken away, and the next step runs with it."""

    def step(model: ReferenceModel, plan: StepPlan) -> Iterator[None]:
        state = vars(model)
        state["plan"] = state.get("plan") or plan
        with _forward_context(model, state["plan"]):
            yield
        state["plan"] = None

    return step_is(step)


@fault("next_step_is_right_after_an_error", "ERR-1")
def context_of_a_failed_step_stays_set() -> Iterable[Patch]:
    """The context of a step that failed is not taken away: later steps set theirs on top of it."""

    def step(model: ReferenceModel, plan: StepPlan) -> Iterator[None]:
        context = None
        try:
            with _forward_context(model, plan):
                context = get_forward_context()
                yield
        except Exception:
            reference_impl.context._stack.entries.append(context)
            raise

    return step_is(step)
