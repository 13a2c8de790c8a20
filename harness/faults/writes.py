"""Faults of WRT: what is written to the cache, and what is not."""

# The docstring of a fault says what it does; a broken function has the signature of the right one.

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch

from harness.faults.base import Patch, fault
from reference_impl.backends.eager import EagerImpl, write_kv_cache
from reference_impl.context import get_forward_context
from reference_impl.layers.attention import Attention
from reference_impl.metadata import PAD_SLOT_ID

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def write_is(write: Write) -> list[Patch]:
    """Replace the write: (key, value, kv_cache, slot_mapping)."""
    return [patch("reference_impl.backends.eager.write_kv_cache", write)]


def slots_are(change: Callable[[torch.Tensor], torch.Tensor]) -> list[Patch]:
    """Write to other slots; the caller's slot mapping stays as it is."""
    return write_is(lambda key, value, cache, slots: write_kv_cache(key, value, cache, change(slots.clone())))


def _write_unfiltered(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    block_size = kv_cache.shape[2]
    for which, given in enumerate((key, value)):
        kv_cache[slots // block_size, which, slots % block_size] = given.to(kv_cache.dtype)


# Written wrongly, or not at all.


@fault("written_slots_hold_kv", "WRT-1")
def nothing_is_written() -> Iterable[Patch]:
    """The cache is never written."""
    return write_is(lambda *arguments: None)


@fault("written_slots_hold_kv", "WRT-1")
def last_token_is_not_written() -> Iterable[Patch]:
    """The last token of a step is not written."""

    def drop_last(slots: torch.Tensor) -> torch.Tensor:
        slots[(slots != PAD_SLOT_ID).nonzero()[-1]] = PAD_SLOT_ID
        return slots

    return slots_are(drop_last)


@fault("written_slots_hold_kv", "WRT-1")
def written_for_prefills_only() -> Iterable[Patch]:
    """The token of a request that decodes is not written."""
    forward: Any = EagerImpl.forward

    def skip_decodes(impl: EagerImpl, *arguments: Any) -> None:
        *given, metadata, slots, output = arguments
        if metadata is not None and slots is not None:
            starts, slots = metadata.query_start_loc, slots.clone()
            for start, end, seq_len in zip(starts, starts[1:], metadata.seq_lens, strict=False):
                if end - start == 1 and seq_len > 1:
                    slots[start] = PAD_SLOT_ID
        forward(impl, *given, metadata, slots, output)

    return [patch.object(EagerImpl, "forward", skip_decodes)]


@fault("written_slots_hold_kv", "WRT-1")
def key_and_value_exchanged() -> Iterable[Patch]:
    """K is written where V belongs, and V where K belongs."""
    return write_is(lambda key, value, cache, slots: write_kv_cache(value, key, cache, slots))


@fault("written_slots_hold_kv", "WRT-1")
def key_written_twice() -> Iterable[Patch]:
    """K is written to both halves of the cache."""
    return write_is(lambda key, value, cache, slots: write_kv_cache(key, key, cache, slots))


@fault("written_slots_hold_kv", "WRT-1")
def first_kv_head_written_to_all() -> Iterable[Patch]:
    """Every KV head of the cache gets the first one."""

    def write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        write_kv_cache(key[:, :1].expand_as(key), value[:, :1].expand_as(value), kv_cache, slots)

    return write_is(write)


@fault("written_slots_hold_kv", "WRT-1")
def written_with_half_the_bits() -> Iterable[Patch]:
    """What is written was rounded to bfloat16 on the way, which a float32 or float16 cache shows."""

    def write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        write_kv_cache(key.bfloat16(), value.bfloat16(), kv_cache, slots)

    return write_is(write)


@fault("written_slots_hold_kv", "WRT-1")
def last_layer_does_not_write() -> Iterable[Patch]:
    """The last layer of a model never writes."""
    forward: Any = EagerImpl.forward

    def attend(impl: EagerImpl, layer: Any, *arguments: Any) -> None:
        *given, slots, output = arguments
        last = next(reversed(get_forward_context().no_compile_layers))
        forward(impl, layer, *given, None if layer.layer_name == last else slots, output)

    return [patch.object(EagerImpl, "forward", attend)]


@fault("output_matches_dense", "OPS-3")
def read_before_the_write() -> Iterable[Patch]:
    """The cache is read before this step's tokens are written: the bytes are right afterwards, the output is not."""
    forward: Any = EagerImpl.forward

    def attend(impl: EagerImpl, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, *rest: Any) -> None:
        metadata, slots, output = rest
        forward(impl, layer, query, key, value, kv_cache, metadata, None, output)
        if slots is not None:
            write_kv_cache(key, value, kv_cache, slots)

    return [patch.object(EagerImpl, "forward", attend)]


@fault("written_slots_hold_kv", "WRT-1")
def tokens_written_in_reverse() -> Iterable[Patch]:
    """The tokens of a step are written in reverse order into its slots."""

    def write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        real = int((slots != PAD_SLOT_ID).sum())
        write_kv_cache(key[:real].flip(0), value[:real].flip(0), kv_cache, slots[:real])

    return write_is(write)


@fault("written_slots_hold_kv", "WRT-1")
def written_by_logical_position() -> Iterable[Patch]:
    """A slot's block number is lost: every token goes to its offset in block 1."""

    def write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        block_size = kv_cache.shape[2]
        write_kv_cache(key, value, kv_cache, torch.where(slots < 0, slots, block_size + slots % block_size))

    return write_is(write)


# Written where nothing should be.


@fault("other_slots_untouched", "WRT-2")
def written_to_the_next_slot() -> Iterable[Patch]:
    """Each token is written one slot too far."""

    def write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        num_slots = kv_cache.shape[0] * kv_cache.shape[2]
        write_kv_cache(key, value, kv_cache, torch.where(slots < 0, slots, (slots + 1) % num_slots))

    return write_is(write)


@fault("other_slots_untouched", "WRT-2")
def pad_slot_taken_from_the_end() -> Iterable[Patch]:
    """Slot -1 is taken as Python takes an index of -1: padding lands in the last slot of the cache."""
    return write_is(_write_unfiltered)


@fault("other_slots_untouched", "WRT-2")
def rest_of_the_block_is_cleared() -> Iterable[Patch]:
    """Writing a token clears the slots behind it in its block."""

    def write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        block_size = kv_cache.shape[2]
        for slot in slots.tolist():
            if slot != PAD_SLOT_ID:
                kv_cache[slot // block_size, :, slot % block_size + 1 :] = 0
        write_kv_cache(key, value, kv_cache, slots)

    return write_is(write)


@fault("other_slots_untouched", "WRT-2")
def written_to_every_layer() -> Iterable[Patch]:
    """A layer's keys and values are written into the caches of all layers, and every layer's call overwrites them."""

    def write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        layers: Any = get_forward_context().no_compile_layers.values()
        for layer in layers:
            write_kv_cache(key, value, layer.kv_cache, slots)
        write_kv_cache(key, value, kv_cache, slots)

    return write_is(write)


@fault("other_slots_untouched", "WRT-2")
def keys_scaled_in_the_cache() -> Iterable[Patch]:
    """The keys that a request gathers are scaled in the cache itself, again in every step."""
    gather = EagerImpl._gather

    def scale(kv_cache: torch.Tensor, block_row: torch.Tensor, seq_len: int) -> Any:
        result = gather(kv_cache, block_row, seq_len)
        kv_cache[block_row[0].long(), 0] *= 0.5
        return result

    return [patch.object(EagerImpl, "_gather", staticmethod(scale))]


@fault("other_slots_untouched", "WRT-2")
def old_blocks_are_freed_too_early() -> Iterable[Patch]:
    """The first block of a request is cleared in the first step that begins behind it."""
    forward: Any = EagerImpl.forward

    def clear(impl: EagerImpl, *arguments: Any) -> None:
        forward(impl, *arguments)
        kv_cache, metadata = arguments[4], arguments[5]
        if metadata is not None:
            starts, lengths = metadata.query_start_loc, metadata.seq_lens
            for row, start, end, seq_len in zip(metadata.block_table, starts, starts[1:], lengths, strict=False):
                if seq_len - (end - start) > kv_cache.shape[2]:
                    kv_cache[int(row[0])] = 0

    return [patch.object(EagerImpl, "forward", clear)]


@fault("null_block_is_never_written", "BND-7")
def padding_written_to_the_null_block() -> Iterable[Patch]:
    """Slot -1 becomes slot 0: padding lands in the null block."""
    return slots_are(lambda slots: slots.clamp(min=0))


@fault("null_block_is_never_written", "BND-7")
def block_numbers_start_at_zero() -> Iterable[Patch]:
    """Slots are counted as if there were no null block: everything lies one block too early."""

    def earlier(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        write_kv_cache(key, value, kv_cache, torch.where(slots < 0, slots, slots - kv_cache.shape[2]))

    gather = EagerImpl._gather
    read = staticmethod(lambda kv_cache, row, seq_len: gather(kv_cache, (row - 1).clamp(min=0), seq_len))
    return [*write_is(earlier), patch.object(EagerImpl, "_gather", read)]


@fault("sharing_layer_writes_nothing", "KVS-5")
def sharing_layer_overwrites_its_target() -> Iterable[Patch]:
    """A sharing layer writes its own keys and values over those of its target."""
    writes = property(lambda layer: layer.attn_backend.forward_includes_kv_cache_update)
    return [patch.object(Attention, "impl_writes_kv_cache", writes)]


@fault("sharing_layer_writes_nothing", "KVS-5", backend="triton")
def sharing_layer_calls_the_update_op() -> Iterable[Patch]:
    """With a separate update op, it is called for a sharing layer too."""
    forward = Attention.forward

    def attend(layer: Attention, *arguments: Any) -> torch.Tensor:
        with patch.object(layer, "kv_sharing_target_layer_name", None):
            return forward(layer, *arguments)

    return [patch.object(Attention, "forward", attend)]
