"""Steps 3 and 5: the runner sets the forward context each step, and layers resolve their name in it.

The context of a thread is the top of that thread's own stack, so it never leaks into another one (CTX-9).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from reference_impl.errors import (
    ContextOrderError,
    ForwardContextNotSetError,
    InvalidForwardContextError,
    UnknownLayerError,
)
from reference_impl.metadata import BatchDescriptor, CUDAGraphMode

if TYPE_CHECKING:
    from reference_impl.config import ForwardConfig
    from reference_impl.layers.attention import Attention
    from reference_impl.layers.base import RegisteredLayer


@dataclass
class ForwardContext:
    """What one forward pass can look up (CTX-8)."""

    no_compile_layers: dict[str, RegisteredLayer]
    """The registry itself, not a copy (CTX-3)."""
    attn_metadata: Any
    """Dict from layer name to metadata; a list of such dicts (the first is the base model's); or one object for all."""
    slot_mapping: Any
    """Dict from layer name to int64 [num_tokens]; a list of such dicts for microbatches."""
    dp_metadata: Any = None
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    batch_descriptor: BatchDescriptor | None = None
    ubatch_slices: Any = None
    skip_compiled: bool = False
    is_padding: torch.Tensor | None = None
    """bool [num_tokens]: rows that belong to no request."""
    additional_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        mode = self.cudagraph_runtime_mode
        if not (isinstance(mode, CUDAGraphMode) and mode.valid_runtime_modes()):
            raise InvalidForwardContextError(f"Invalid cudagraph runtime mode: {mode}")


class _Stack(threading.local):
    """The contexts that a thread has entered and not yet left, the innermost last."""

    def __init__(self) -> None:
        self.entries: list[ForwardContext | None] = []


_stack = _Stack()


def is_forward_context_available() -> bool:
    """Whether `get_forward_context` would return one."""
    return bool(_stack.entries) and _stack.entries[-1] is not None


def get_forward_context() -> ForwardContext:
    """Return the context of the forward pass that runs in this thread.

    Raises:
        ForwardContextNotSetError: there is none (CTX-1).
    """
    entries = _stack.entries
    context = entries[-1] if entries else None
    if context is None:
        raise ForwardContextNotSetError(
            "Forward context is not set. Please use `set_forward_context` to set the forward context."
        )
    return context


@contextmanager
def override_forward_context(context: ForwardContext | None) -> Iterator[None]:
    """Install `context` (None hides the current one) and restore the previous one on any exit (CTX-2).

    Raises:
        ContextOrderError: on exit, when this is not the innermost context of the thread that leaves (CTX-9). Then
            only this context is taken away; those entered after it stay.
    """
    entries = _stack.entries
    entries.append(context)
    try:
        yield
    finally:
        if _stack.entries is entries and entries and entries[-1] is context:
            entries.pop()
        else:
            _leave_out_of_order(entries, context)


def _leave_out_of_order(entries: list[ForwardContext | None], context: ForwardContext | None) -> None:
    for position in reversed(range(len(entries))):
        if entries[position] is context:
            del entries[position]
            break
    raise ContextOrderError(
        "Forward context left out of order: contexts must be left in the thread that entered them, the last one first."
    )


@contextmanager
def set_forward_context(
    attn_metadata: Any,
    config: ForwardConfig,
    *,
    num_tokens: int | None = None,
    num_tokens_across_dp: torch.Tensor | None = None,
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    batch_descriptor: BatchDescriptor | None = None,
    ubatch_slices: Any = None,
    slot_mapping: dict[str, torch.Tensor] | list[dict[str, torch.Tensor]] | None = None,
    skip_compiled: bool = False,
    is_padding: torch.Tensor | None = None,
    additional_kwargs: dict[str, Any] | None = None,
) -> Iterator[ForwardContext]:
    """Install the context of one forward pass for the duration of the block (step 3).

    Raises:
        InvalidForwardContextError: a runtime mode that no step can run in, or `num_tokens_across_dp` that disagrees
            with `num_tokens`; the context that was set before stays (CTX-8, CTX-10).
    """
    if num_tokens_across_dp is not None:
        rank = config.data_parallel_rank
        if int(num_tokens_across_dp[rank]) != num_tokens:
            raise InvalidForwardContextError(
                f"num_tokens_across_dp[{rank}]={int(num_tokens_across_dp[rank])}, but should be num_tokens={num_tokens}"
            )
    if batch_descriptor is None and cudagraph_runtime_mode != CUDAGraphMode.NONE and num_tokens is not None:
        batch_descriptor = BatchDescriptor(num_tokens=num_tokens)
    context = ForwardContext(
        no_compile_layers=config.static_forward_context,
        attn_metadata=attn_metadata,
        slot_mapping={} if slot_mapping is None else slot_mapping,
        dp_metadata=num_tokens_across_dp,
        cudagraph_runtime_mode=cudagraph_runtime_mode,
        batch_descriptor=batch_descriptor,
        ubatch_slices=ubatch_slices,
        skip_compiled=skip_compiled,
        is_padding=is_padding,
        additional_kwargs={} if additional_kwargs is None else additional_kwargs,
    )
    with override_forward_context(context):
        yield context


def get_attention_context(layer_name: str) -> tuple[Any, Attention, torch.Tensor, torch.Tensor | None]:
    """Resolve a name (step 5).

    Returns:
        The layer's metadata for this step (None in a profiling run), the layer, its KV cache, and its slot mapping,
        int64 [num_tokens], or None when nothing is to be written (CTX-6).

    Raises:
        ForwardContextNotSetError: outside a context.
        UnknownLayerError: no layer, or no metadata, of this name (CTX-4).
        InvalidForwardContextError: the slot mapping is not a dict (CTX-5).
    """
    context = get_forward_context()
    attn_metadata = context.attn_metadata
    if isinstance(attn_metadata, list):
        attn_metadata = attn_metadata[0]
    if isinstance(attn_metadata, dict):
        if layer_name not in attn_metadata:
            raise UnknownLayerError(f"{layer_name}: the forward context has no attention metadata for this layer")
        attn_metadata = attn_metadata[layer_name]
    layer: Any = context.no_compile_layers.get(layer_name)
    if layer is None:
        raise UnknownLayerError(f"{layer_name}: no layer of this name is registered")
    slot_mapping = context.slot_mapping
    if not isinstance(slot_mapping, dict):
        raise InvalidForwardContextError(f"Expected slot_mapping to be a dict, got {type(slot_mapping)}. ")
    return attn_metadata, layer, layer.kv_cache, slot_mapping.get(layer_name)
