"""Faults of CTX: the forward context."""

# The docstring of a fault says what it does; a broken function has the signature of the right one.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, make_dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import reference_impl.context
from harness.faults.base import Patch, fault
from harness.faults.binding import ADAPTER
from reference_impl.backends.eager import EagerImpl, write_kv_cache
from reference_impl.config import ForwardConfig
from reference_impl.context import ForwardContext, get_attention_context, get_forward_context, set_forward_context
from reference_impl.errors import ForwardContextNotSetError
from reference_impl.metadata import BatchDescriptor, CUDAGraphMode

CONTEXT = "reference_impl.context"


def override_is(override: Callable[[ForwardContext | None], Iterator[None]]) -> list[Patch]:
    """Replace the one function through which every context is installed."""
    manager = contextmanager(override)
    return [
        patch(f"{CONTEXT}.override_forward_context", manager),
        patch(f"{ADAPTER}.override_forward_context", manager),
    ]


def field_is(name: str, value: Callable[[Any], Any]) -> list[Patch]:
    """Install contexts with one field changed."""

    @contextmanager
    def enter(*arguments: Any, **options: Any) -> Iterator[ForwardContext]:
        with set_forward_context(*arguments, **options) as context:
            setattr(context, name, value(getattr(context, name)))
            yield context

    return [patch(f"{ADAPTER}.set_forward_context", enter)]


def resolution_is(resolve: Callable[[str], tuple[Any, Any, torch.Tensor, Any]]) -> list[Patch]:
    """Replace the look-up of a layer in the context."""
    return [patch("reference_impl.ops.get_attention_context", resolve)]


@fault("reading_outside_a_context_is_refused", "CTX-1")
def none_outside_a_context() -> Iterable[Patch]:
    """get_forward_context returns None when no context is set."""

    def get() -> Any:
        try:
            return get_forward_context()
        except ForwardContextNotSetError:
            return None

    return [patch(f"{CONTEXT}.get_forward_context", get), patch(f"{ADAPTER}.get_forward_context", get)]


@fault("reading_outside_a_context_is_refused", "CTX-1")
def last_context_is_used_outside() -> Iterable[Patch]:
    """Outside a context the last one that was left is still in force."""
    last = ForwardContext({}, {}, {})

    def get() -> Any:
        nonlocal last
        with suppress(ForwardContextNotSetError):
            last = get_forward_context()
        return last

    return [patch(f"{CONTEXT}.get_forward_context", get), patch(f"{ADAPTER}.get_forward_context", get)]


@fault("previous_context_is_restored", "CTX-2")
def context_leaks_on_an_exception() -> Iterable[Patch]:
    """The context is restored after the block, but not in a finally."""

    def override(context: ForwardContext | None) -> Iterator[None]:
        entries = reference_impl.context._stack.entries
        entries.append(context)
        yield
        entries.pop()

    return override_is(override)


@fault("previous_context_is_restored", "CTX-2")
def context_leaks_on_an_interrupt() -> Iterable[Patch]:
    """The context is restored after an Exception, but not after a KeyboardInterrupt."""

    def override(context: ForwardContext | None) -> Iterator[None]:
        entries = reference_impl.context._stack.entries
        entries.append(context)
        try:
            yield
        except Exception:
            entries.pop()
            raise
        entries.pop()

    return override_is(override)


@fault("previous_context_is_restored", "CTX-2")
def context_is_cleared_and_not_restored() -> Iterable[Patch]:
    """Leaving a nested context leaves none set, instead of the outer one."""

    def override(context: ForwardContext | None) -> Iterator[None]:
        entries = reference_impl.context._stack.entries
        entries.append(context)
        try:
            yield
        finally:
            entries.clear()

    return override_is(override)


@fault("context_hands_out_the_objects_themselves", "CTX-3")
def registry_is_copied() -> Iterable[Patch]:
    """The context hands out a copy of the registry, which does not see later layers."""
    return field_is("no_compile_layers", dict)


@fault("context_hands_out_the_objects_themselves", "CTX-3")
def metadata_is_copied() -> Iterable[Patch]:
    """The context hands out a copy of the metadata dict."""
    return field_is("attn_metadata", lambda given: dict(given) if isinstance(given, dict) else given)


@fault("metadata_is_found_in_every_form", "CTX-4")
def metadata_of_the_first_layer() -> Iterable[Patch]:
    """Every layer is given the metadata of the first entry, whatever its name."""

    def resolve(layer_name: str) -> tuple[Any, Any, torch.Tensor, Any]:
        given = get_forward_context().attn_metadata
        first = next(iter(given.values())) if isinstance(given, dict) else given
        with patch.object(get_forward_context(), "attn_metadata", first):
            return get_attention_context(layer_name)

    return resolution_is(resolve)


@fault("metadata_is_found_in_every_form", "CTX-4")
def missing_metadata_taken_for_profiling() -> Iterable[Patch]:
    """A layer without metadata is run as in a profiling run, and gives zeros."""

    def resolve(layer_name: str) -> tuple[Any, Any, torch.Tensor, Any]:
        context = get_forward_context()
        given = context.attn_metadata
        if isinstance(given, dict) and layer_name not in given:
            with patch.object(context, "attn_metadata", None):
                return get_attention_context(layer_name)
        return get_attention_context(layer_name)

    return resolution_is(resolve)


@fault("metadata_is_found_in_every_form", "CTX-4")
def list_of_metadata_taken_for_profiling() -> Iterable[Patch]:
    """Metadata in a list of dicts is not understood, and the step is run as a profiling run."""

    def resolve(layer_name: str) -> tuple[Any, Any, torch.Tensor, Any]:
        context = get_forward_context()
        given = context.attn_metadata
        with patch.object(context, "attn_metadata", None if isinstance(given, list) else given):
            return get_attention_context(layer_name)

    return resolution_is(resolve)


@fault("slot_mapping_must_be_a_dict", "CTX-5")
def list_of_slot_mappings_accepted() -> Iterable[Patch]:
    """A slot mapping in a list is treated as none, so that nothing is written."""

    def resolve(layer_name: str) -> tuple[Any, Any, torch.Tensor, Any]:
        context = get_forward_context()
        given = context.slot_mapping
        with patch.object(context, "slot_mapping", given if isinstance(given, dict) else {}):
            return get_attention_context(layer_name)

    return resolution_is(resolve)


@fault("without_slots_nothing_is_written", "CTX-6")
def missing_slots_are_made_up() -> Iterable[Patch]:
    """A layer without slots writes its tokens one after the other, from slot 0."""
    forward: Any = EagerImpl.forward

    def write(impl: EagerImpl, layer: Any, query: Any, key: Any, value: Any, cache: Any, *rest: Any) -> None:
        metadata, slots, output = rest
        if slots is None:
            slots = torch.arange(key.shape[0])
        forward(impl, layer, query, key, value, cache, metadata, slots, output)

    return [patch.object(EagerImpl, "forward", write)]


@fault("without_slots_nothing_is_written", "CTX-6")
def slots_of_any_layer() -> Iterable[Patch]:
    """A layer that is not in the slot mapping takes the slots of the first one that is."""

    def resolve(layer_name: str) -> tuple[Any, Any, torch.Tensor, Any]:
        metadata, layer, kv_cache, slots = get_attention_context(layer_name)
        given = get_forward_context().slot_mapping
        return metadata, layer, kv_cache, next(iter(given.values()), None) if slots is None else slots

    return resolution_is(resolve)


@fault("profiling_run_does_not_crash_and_still_writes", "CTX-7")
def profiling_run_returns_before_the_write() -> Iterable[Patch]:
    """Without metadata the backend returns at once, although there are slots."""
    forward: Any = EagerImpl.forward

    def skip(impl: EagerImpl, *arguments: Any) -> None:
        *given, metadata, slots, output = arguments
        forward(impl, *given, metadata, None if metadata is None else slots, output)

    return [patch.object(EagerImpl, "forward", skip)]


@fault("profiling_run_does_not_crash_and_still_writes", "CTX-7")
def profiling_run_writes_the_null_block() -> Iterable[Patch]:
    """A profiling run without slots writes its tokens into the null block."""
    forward: Any = EagerImpl.forward

    def write(impl: EagerImpl, layer: Any, query: Any, key: Any, value: Any, cache: Any, *rest: Any) -> None:
        if rest[0] is None and rest[1] is None:
            write_kv_cache(key, value, cache, torch.zeros(key.shape[0], dtype=torch.int64))
        forward(impl, layer, query, key, value, cache, *rest)

    return [patch.object(EagerImpl, "forward", write)]


@fault("profiling_run_gives_zeros", "CTX-7")
def profiling_run_leaves_the_output() -> Iterable[Patch]:
    """Without metadata the output is left as it was allocated."""
    forward: Any = EagerImpl.forward

    def leave(impl: EagerImpl, *arguments: Any) -> None:
        *given, metadata, slots, output = arguments
        forward(impl, *given, metadata, slots, torch.empty_like(output) if metadata is None else output)

    return [patch.object(EagerImpl, "forward", leave)]


@fault("profiling_run_gives_zeros", "CTX-7")
def profiling_run_gives_the_query() -> Iterable[Patch]:
    """Without metadata the output is the query."""
    forward: Any = EagerImpl.forward

    def copy(impl: EagerImpl, layer: Any, query: torch.Tensor, *rest: Any) -> None:
        forward(impl, layer, query, *rest)
        if rest[3] is None:
            rest[-1].copy_(query)

    return [patch.object(EagerImpl, "forward", copy)]


@fault("context_has_all_fields", "CTX-8")
def context_lacks_a_field() -> Iterable[Patch]:
    """The context has no field ubatch_slices."""
    smaller = make_dataclass(
        "ForwardContext", [(f.name, Any, f) for f in fields(ForwardContext) if f.name != "ubatch_slices"]
    )

    def make(**values: Any) -> Any:
        del values["ubatch_slices"]
        return smaller(**values)

    return [patch(f"{CONTEXT}.ForwardContext", make)]


@fault("context_has_all_fields", "CTX-8")
def descriptor_is_not_made() -> Iterable[Patch]:
    """The batch descriptor is not made from num_tokens."""
    return field_is("batch_descriptor", lambda given: None)


@fault("context_has_all_fields", "CTX-8")
def descriptor_is_always_made() -> Iterable[Patch]:
    """There is a batch descriptor although the runtime mode is NONE."""
    return field_is("batch_descriptor", lambda given: given or BatchDescriptor(1))


@fault("context_has_all_fields", "CTX-8")
def padding_mask_is_dropped() -> Iterable[Patch]:
    """is_padding is not passed on."""
    return field_is("is_padding", lambda given: None)


@fault("invalid_runtime_mode_is_refused", "CTX-8")
def any_runtime_mode_is_accepted() -> Iterable[Patch]:
    """The runtime mode is not checked."""
    return [patch.object(ForwardContext, "__post_init__", lambda context: None)]


@fault("invalid_runtime_mode_is_refused", "CTX-8")
def context_stays_after_a_refused_mode() -> Iterable[Patch]:
    """A mode that no step can run in is refused only after the context has been installed."""

    @contextmanager
    def enter(attn_metadata: Any, config: ForwardConfig, **options: Any) -> Iterator[ForwardContext]:
        mode = options.get("cudagraph_runtime_mode", CUDAGraphMode.NONE)
        if not mode.valid_runtime_modes():
            reference_impl.context._stack.entries.append(ForwardContext({}, attn_metadata, {}))
        with set_forward_context(attn_metadata, config, **options) as context:
            yield context

    return [patch(f"{ADAPTER}.set_forward_context", enter)]


def _save_and_restore(context: ForwardContext | None) -> Iterator[None]:
    """Save the current context, set another, restore: what a single variable does."""
    entries = reference_impl.context._stack.entries
    previous = entries[-1] if entries else None
    entries[:] = [context]
    try:
        yield
    finally:
        entries[:] = [previous]


@fault("context_left_out_of_order_is_reported", "CTX-9")
def context_is_saved_and_restored() -> Iterable[Patch]:
    """One variable holds the context: left out of order, a context that is over comes back."""
    return override_is(_save_and_restore)


@fault("context_left_out_of_order_is_reported", "CTX-9")
def wrong_order_is_not_reported() -> Iterable[Patch]:
    """A context that is left out of order is taken away silently."""

    def leave(entries: list[Any], context: Any) -> None:
        entries[:] = [entry for entry in entries if entry is not context]

    return [patch(f"{CONTEXT}._leave_out_of_order", leave)]


@fault("suspended_generator_does_not_leak_its_context", "CTX-9")
def context_of_a_generator_comes_back() -> Iterable[Patch]:
    """A generator that is closed takes away the context of its caller, for there is one variable."""
    return override_is(_save_and_restore)


@fault("suspended_generator_does_not_leak_its_context", "CTX-9")
def innermost_context_is_left() -> Iterable[Patch]:
    """Whoever leaves a context takes away the innermost one, whether it is his or not."""

    def leave(entries: list[Any], context: Any) -> None:
        entries.pop()
        raise RuntimeError("Forward context left out of order")

    return [patch(f"{CONTEXT}._leave_out_of_order", leave)]


@fault("threads_have_contexts_of_their_own", "CTX-9")
def context_is_shared_by_all_threads() -> Iterable[Patch]:
    """The stack of contexts is a global one."""
    return [patch(f"{CONTEXT}._stack", SimpleNamespace(entries=[]))]


@fault("lookup_is_by_name", "CTX-13")
def layers_are_counted_in_the_context() -> Iterable[Patch]:
    """The layer is found by the number of calls in the context so far, which is right for one pass in order."""
    counts: dict[int, int] = {}

    def resolve(layer_name: str) -> tuple[Any, Any, torch.Tensor, Any]:
        context = get_forward_context()
        number = counts.get(id(context), 0)
        counts[id(context)] = number + 1
        names = list(context.no_compile_layers)
        return get_attention_context(names[number % len(names)])

    return resolution_is(resolve)


@fault("context_has_all_fields", "CTX-8")
def given_descriptor_is_replaced() -> Iterable[Patch]:
    """A batch descriptor that is passed is replaced by one made from num_tokens."""

    def enter(*arguments: Any, num_tokens: int | None = None, **options: Any) -> Any:
        if options.get("batch_descriptor") is not None:
            options["batch_descriptor"] = BatchDescriptor(num_tokens or 0)
        return set_forward_context(*arguments, num_tokens=num_tokens, **options)

    return [patch(f"{ADAPTER}.set_forward_context", enter)]


@fault("context_has_all_fields", "CTX-8")
def additional_kwargs_are_shared() -> Iterable[Patch]:
    """All contexts that are given no additional_kwargs have one dict of them together."""
    return field_is("additional_kwargs", lambda given, shared={}: given or shared)  # type: ignore[misc]
