"""Faults of ATT and INV: numerics and invariances."""

# The docstring of a fault says what it does; a broken function has the signature of the right one.

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from harness.adapters.reference import ReferenceModel
from harness.faults.base import Patch, fault
from reference_impl.backends.eager import EagerImpl, EagerMetadata
from reference_impl.context import get_forward_context
from reference_impl.layers.attention import Attention

Attend = Callable[[EagerImpl, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Gathered = tuple[torch.Tensor, torch.Tensor]


def attention_is(attend: Attend) -> list[Patch]:
    """Replace the attention of one request: (impl, query, keys, values)."""
    return [patch.object(EagerImpl, "_attend", attend)]


def gathering_is(gather: Callable[[torch.Tensor, torch.Tensor, int], Gathered]) -> list[Patch]:
    """Replace the reading of one request's keys and values: (kv_cache, block_row, seq_len)."""
    return [patch.object(EagerImpl, "_gather", staticmethod(gather))]


def metadata_is(change: Callable[[Any, EagerMetadata], EagerMetadata]) -> list[Patch]:
    """Give the backend other metadata: (layer, metadata)."""
    forward: Any = EagerImpl.forward

    def attend(impl: EagerImpl, layer: Any, *arguments: Any) -> None:
        query, key, value, kv_cache, metadata, slots, output = arguments
        changed = metadata if metadata is None else change(layer, metadata)
        forward(impl, layer, query, key, value, kv_cache, changed, slots, output)

    return [patch.object(EagerImpl, "forward", attend)]


def _attend(
    impl: EagerImpl,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    first: int | None = None,
    softmax: Callable[[torch.Tensor], torch.Tensor] = lambda scores: torch.softmax(scores, -1),
    keys_of: Callable[[int], int] | None = None,
) -> torch.Tensor:
    """Attend: query i sees the keys up to first + i; keys_of gives the KV head of a head."""
    # query: [query_len, num_heads, head_size]; keys, values: [num_kv_heads, seq_len, head_size]
    query_len, seq_len, group = query.shape[0], keys.shape[1], impl.num_heads // impl.num_kv_heads
    heads = [head // group if keys_of is None else keys_of(head) for head in range(impl.num_heads)]
    positions = torch.arange(seq_len)
    last = (seq_len - query_len if first is None else first) + torch.arange(query_len)
    scores = impl.scale * (query.float().transpose(0, 1) @ keys[heads].transpose(-1, -2))
    weights = softmax(scores.masked_fill(positions > last.clamp(min=0)[:, None], float("-inf")))
    return (weights @ values[heads]).transpose(0, 1)


def _offset(query: torch.Tensor, keys: torch.Tensor) -> int:
    return keys.shape[1] - query.shape[0]


# The mask.


@fault("output_matches_dense", "ATT-12")
def future_key_is_visible() -> Iterable[Patch]:
    """A query also sees the key after its own."""
    return attention_is(lambda impl, q, k, v: _attend(impl, q, k, v, first=_offset(q, k) + 1))


@fault("output_matches_dense", "ATT-12")
def newest_key_is_hidden() -> Iterable[Patch]:
    """A query does not see its own key."""
    return attention_is(lambda impl, q, k, v: _attend(impl, q, k, v, first=_offset(q, k) - 1))


@fault("output_matches_dense", "ATT-12")
def mask_is_missing() -> Iterable[Patch]:
    """Every query of a step sees all keys: right for decodes, wrong for prefills."""
    return attention_is(lambda impl, q, k, v: _attend(impl, q, k, v, first=k.shape[1]))


@fault("output_matches_dense", "ATT-12")
def first_key_is_hidden() -> Iterable[Patch]:
    """The key of position 0 is not attended once a request has a context."""

    def attend(impl: EagerImpl, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        begin = 1 if query.shape[0] < keys.shape[1] else 0
        return _attend(impl, query, keys[:, begin:], values[:, begin:])

    return attention_is(attend)


@fault("output_ignores_chunking", "INV-3")
def chunk_offset_is_ignored() -> Iterable[Patch]:
    """Query positions are counted from 0 in each step: right for a first prefill, wrong for what follows."""
    return attention_is(lambda impl, q, k, v: _attend(impl, q, k, v, first=0))


@fault("output_ignores_chunking", "INV-3")
def context_is_ignored() -> Iterable[Patch]:
    """A chunk of more than one token attends only its own keys, as a prefill without a cache would."""

    def attend(impl: EagerImpl, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        length = query.shape[0] if query.shape[0] > 1 else keys.shape[1]
        return _attend(impl, query, keys[:, -length:], values[:, -length:])

    return attention_is(attend)


# Heads, scale and softmax.


@fault("output_matches_dense", "ATT-1")
def heads_are_interleaved() -> Iterable[Patch]:
    """Head h reads KV head h % num_kv_heads instead of h // group_size."""
    return attention_is(lambda impl, q, k, v: _attend(impl, q, k, v, keys_of=lambda head: head % impl.num_kv_heads))


@fault("output_matches_dense", "ATT-1")
def all_heads_read_the_first_kv_head() -> Iterable[Patch]:
    """Every head reads KV head 0: right for MQA only."""
    return attention_is(lambda impl, q, k, v: _attend(impl, q, k, v, keys_of=lambda head: 0))


def _with_scale(scale: Callable[[float], float]) -> list[Patch]:
    attend = EagerImpl._attend

    def scaled(impl: EagerImpl, *arguments: torch.Tensor) -> torch.Tensor:
        other: Any = SimpleNamespace(**(vars(impl) | {"scale": scale(impl.scale)}))
        return attend(other, *arguments)

    return attention_is(scaled)


@fault("output_matches_dense", "ATT-1")
def scale_is_missing() -> Iterable[Patch]:
    """q.k is not scaled."""
    return _with_scale(lambda scale: 1.0)


@fault("output_matches_dense", "ATT-1")
def scale_is_applied_twice() -> Iterable[Patch]:
    """q.k is scaled twice."""
    return _with_scale(lambda scale: scale * scale)


@fault("output_matches_dense", "ATT-1")
def maximum_is_not_subtracted() -> Iterable[Patch]:
    """The softmax does not subtract the maximum: large scores overflow."""

    def softmax(scores: torch.Tensor) -> torch.Tensor:
        return scores.exp() / scores.exp().sum(-1, keepdim=True)

    return attention_is(lambda impl, q, k, v: _attend(impl, q, k, v, softmax=softmax))


@fault("output_matches_dense", "ATT-1")
def scores_are_rounded() -> Iterable[Patch]:
    """q.k is rounded to bfloat16 before the softmax, and this is not declared."""
    return attention_is(
        lambda impl, q, k, v: _attend(
            impl, q, k, v, softmax=lambda scores: torch.softmax(scores.bfloat16().float(), -1)
        )
    )


@fault("output_matches_dense", "ATT-1")
def tiles_are_averaged() -> Iterable[Patch]:
    """Each tile of at most 16 keys is normalised by itself, and the tiles are averaged instead of rescaled."""

    def softmax(scores: torch.Tensor) -> torch.Tensor:
        tiles = [torch.softmax(tile, -1).nan_to_num() for tile in torch.chunk(scores, -(-scores.shape[-1] // 16), -1)]
        return torch.cat(tiles, -1) / sum(tile.sum(-1, keepdim=True) for tile in tiles)

    return attention_is(lambda impl, q, k, v: _attend(impl, q, k, v, softmax=softmax))


# What is read of the cache.


@fault("output_ignores_block_names", "INV-1")
def blocks_taken_as_contiguous() -> Iterable[Patch]:
    """The block table is ignored behind its first entry: a request's blocks are taken to follow each other."""
    gather = EagerImpl._gather

    def contiguous(kv_cache: torch.Tensor, block_row: torch.Tensor, seq_len: int) -> Gathered:
        count = -(-seq_len // kv_cache.shape[2])
        row = (block_row[0] + torch.arange(count)) % kv_cache.shape[0]
        return gather(kv_cache, row, seq_len)

    return gathering_is(contiguous)


@fault("output_ignores_block_names", "INV-1")
def blocks_read_in_physical_order() -> Iterable[Patch]:
    """A request's blocks are read in the order of their numbers."""
    gather = EagerImpl._gather

    def in_order(kv_cache: torch.Tensor, block_row: torch.Tensor, seq_len: int) -> Gathered:
        return gather(kv_cache, block_row[: -(-seq_len // kv_cache.shape[2])].sort().values, seq_len)

    return gathering_is(in_order)


@fault("output_matches_dense", "ATT-1")
def last_partial_block_is_dropped() -> Iterable[Patch]:
    """The number of blocks is rounded down: a last block that is not full is not read, unless it is the only one."""
    gather = EagerImpl._gather

    def floor(kv_cache: torch.Tensor, block_row: torch.Tensor, seq_len: int) -> Gathered:
        full = seq_len // kv_cache.shape[2] * kv_cache.shape[2]
        keys, values = gather(kv_cache, block_row, seq_len)
        hidden = torch.arange(seq_len)[None, :, None] >= (full or seq_len)
        return keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)

    return gathering_is(floor)


@fault("output_matches_dense", "ATT-1")
def layout_is_guessed() -> Iterable[Patch]:
    """A block is read as [num_kv_heads, block_size, head_size], but is written the other way."""

    def gather(kv_cache: torch.Tensor, block_row: torch.Tensor, seq_len: int) -> Gathered:
        block_size, num_kv_heads = kv_cache.shape[2:4]
        pages = kv_cache[block_row[: -(-seq_len // block_size)].long()]
        keys, values = pages.view(-1, 2, num_kv_heads, block_size, pages.shape[-1]).transpose(2, 3).unbind(1)
        return (
            keys.flatten(0, 1)[:seq_len].float().transpose(0, 1),
            values.flatten(0, 1)[:seq_len].float().transpose(0, 1),
        )

    return gathering_is(gather)


@fault("output_matches_dense", "ATT-1")
def keys_and_values_exchanged_on_reading() -> Iterable[Patch]:
    """K is read where V lies, and V where K lies."""
    gather = EagerImpl._gather
    return gathering_is(lambda *arguments: gather(*arguments)[::-1])


@fault("output_ignores_unused_cache", "INV-7")
def tail_of_the_last_block_is_read() -> Iterable[Patch]:
    """A decode has no mask: it also attends the slots of its last block that nobody wrote yet."""
    gather, attend = EagerImpl._gather, EagerImpl._attend

    def whole_blocks(impl: EagerImpl, layer: Any, query: Any, key: Any, value: Any, *rest: Any) -> None:
        del layer, key, value
        kv_cache, metadata, _, output = rest
        for request, seq_len in enumerate(metadata.seq_lens):
            start, end = metadata.query_start_loc[request : request + 2]
            if end - start == 1:
                block_size = kv_cache.shape[2]
                whole = -(-seq_len // block_size) * block_size
                keys, values = gather(kv_cache, metadata.block_table[request], whole)
                output[start:end] = attend(impl, query[start:end], keys, values).to(output.dtype)

    forward: Any = EagerImpl.forward

    def both(impl: EagerImpl, *arguments: Any) -> None:
        forward(impl, *arguments)
        if arguments[5] is not None:
            whole_blocks(impl, *arguments)

    return [patch.object(EagerImpl, "forward", both)]


@fault("output_ignores_unused_cache", "INV-7")
def masked_values_are_multiplied() -> Iterable[Patch]:
    """Slots behind the last token get a weight that is tiny instead of 0."""
    gather = EagerImpl._gather

    def leak(kv_cache: torch.Tensor, block_row: torch.Tensor, seq_len: int) -> Gathered:
        block_size = kv_cache.shape[2]
        keys, values = gather(kv_cache, block_row, seq_len)
        _, all_values = gather(kv_cache, block_row, -(-seq_len // block_size) * block_size)
        return keys, values + 1e-4 * all_values[:, seq_len:].sum(1, keepdim=True)

    return gathering_is(leak)


@fault("output_ignores_unused_cache", "INV-7")
def table_tail_is_read() -> Iterable[Patch]:
    """The block behind a request's last one is read too, and its keys are attended."""
    gather = EagerImpl._gather

    def longer(kv_cache: torch.Tensor, block_row: torch.Tensor, seq_len: int) -> Gathered:
        block_size = kv_cache.shape[2]
        first, junk = gather(kv_cache, block_row, seq_len), gather(kv_cache, block_row.flip(0), block_size)
        keys, values = (torch.cat([tail, whole], 1) for whole, tail in zip(first, junk, strict=True))
        return keys, values

    return gathering_is(longer)


# Which request is which.


@fault("output_ignores_request_order", "INV-2")
def rows_of_the_table_are_swapped() -> Iterable[Patch]:
    """Each request reads the blocks of the one before it in the batch."""

    def roll(layer: Any, metadata: EagerMetadata) -> EagerMetadata:
        return EagerMetadata(metadata.query_start_loc, metadata.seq_lens, metadata.block_table.roll(1, 0))

    return metadata_is(roll)


@fault("output_ignores_request_order", "INV-2")
def all_requests_have_the_first_length() -> Iterable[Patch]:
    """The keys of every request are cut at the length of the first one, if that is enough for its queries."""

    def first_length(layer: Any, metadata: EagerMetadata) -> EagerMetadata:
        starts, lengths = metadata.query_start_loc, metadata.seq_lens
        cut = [max(min(n, lengths[0]), starts[r + 1] - starts[r]) for r, n in enumerate(lengths)]
        return EagerMetadata(starts, cut, metadata.block_table)

    return metadata_is(first_length)


@fault("output_ignores_other_requests", "INV-2")
def longest_length_is_used_for_all() -> Iterable[Patch]:
    """Every request attends as many keys as the longest one of the batch, as far as its row of the table reaches."""

    def longest(layer: Any, metadata: EagerMetadata) -> EagerMetadata:
        reach = metadata.block_table.shape[1] * layer.block_size
        return EagerMetadata(
            metadata.query_start_loc,
            [min(max(metadata.seq_lens), reach)] * len(metadata.seq_lens),
            metadata.block_table,
        )

    return metadata_is(longest)


@fault("output_ignores_other_requests", "INV-2")
def outputs_of_requests_are_swapped() -> Iterable[Patch]:
    """The first row of the output and the last real one change places."""
    forward: Any = EagerImpl.forward

    def swap(impl: EagerImpl, *arguments: Any) -> None:
        forward(impl, *arguments)
        metadata, output = arguments[5], arguments[-1]
        if metadata is not None:
            last = metadata.query_start_loc[-1] - 1
            output[[0, last]] = output[[last, 0]]

    return [patch.object(EagerImpl, "forward", swap)]


@fault("output_matches_dense", "ATT-1")
def block_table_of_the_first_step() -> Iterable[Patch]:
    """A layer keeps the block table of its first step, as a captured graph that is not fed does."""

    def stale(layer: Any, metadata: EagerMetadata) -> EagerMetadata:
        first = vars(layer).setdefault("first_block_table", metadata.block_table.clone())
        table = metadata.block_table.clone()
        rows, columns = (min(a, b) for a, b in zip(first.shape, table.shape, strict=True))
        table[:rows, :columns] = first[:rows, :columns]
        return EagerMetadata(metadata.query_start_loc, metadata.seq_lens, table)

    return metadata_is(stale)


@fault("output_matches_dense", "ATT-1")
def lengths_of_the_step_before() -> Iterable[Patch]:
    """A request's length is that before the step, wherever enough keys are left for its queries."""

    def stale(layer: Any, metadata: EagerMetadata) -> EagerMetadata:
        starts, lengths = metadata.query_start_loc, metadata.seq_lens
        query_lens = [end - start for start, end in pairwise(starts)]
        before = [n - q if n - q >= q else n for n, q in zip(lengths, query_lens, strict=True)]
        return EagerMetadata(starts, before, metadata.block_table)

    return metadata_is(stale)


@fault("output_matches_dense", "KVS-5")
def sharing_layer_reads_a_copy() -> Iterable[Patch]:
    """A sharing layer reads its target's cache as it was before the step."""
    bind, forward = Attention.bind_kv_cache, Attention.forward
    views: dict[int, tuple[Attention, torch.Tensor]] = {}

    def bind_copy(layer: Attention, kv_cache: torch.Tensor) -> None:
        sharing = layer.kv_sharing_target_layer_name is not None
        bind(layer, kv_cache.clone() if sharing and kv_cache.numel() else kv_cache)
        if sharing:
            views[id(layer)] = (layer, kv_cache)

    def attend(layer: Attention, *arguments: Any) -> torch.Tensor:
        output = forward(layer, *arguments)
        if id(layer) in views:
            layer.kv_cache.copy_(views[id(layer)][1])
        return output

    return [patch.object(Attention, "bind_kv_cache", bind_copy), patch.object(Attention, "forward", attend)]


# The output.


def _output_is(change: Callable[[torch.Tensor, torch.Tensor, EagerMetadata], None]) -> list[Patch]:
    """Change the output after the fact: (output, what was in its memory, metadata)."""
    forward: Any = EagerImpl.forward

    def attend(impl: EagerImpl, *arguments: Any) -> None:
        metadata, output = arguments[5], arguments[-1]
        before = output.clone().fill_(3.0)  # memory that is not written holds anything: here, always the same
        forward(impl, *arguments)
        if metadata is not None:
            change(output, before, metadata)

    return [patch.object(EagerImpl, "forward", attend)]


@fault("output_matches_dense", "ATT-1")
def last_row_is_not_written() -> Iterable[Patch]:
    """The output of the last token of the step is left as it was."""

    def leave(output: torch.Tensor, before: torch.Tensor, metadata: EagerMetadata) -> None:
        last = metadata.query_start_loc[-1] - 1
        output[last] = before[last]

    return _output_is(leave)


@fault("output_matches_dense", "ATT-1")
def output_is_added() -> Iterable[Patch]:
    """The result is added to what is in the output's memory."""

    def add(output: torch.Tensor, before: torch.Tensor, metadata: EagerMetadata) -> None:
        output.add_(before)

    return _output_is(add)


@fault("output_matches_dense", "ATT-1")
def last_dim_is_not_written() -> Iterable[Patch]:
    """A head size that is no multiple of 8 is cut to one: the dims behind it are zeros."""

    def cut(output: torch.Tensor, before: torch.Tensor, metadata: EagerMetadata) -> None:
        if output.shape[-1] % 8:
            output[..., output.shape[-1] // 8 * 8 :] = 0

    return _output_is(cut)


# Steps that do not run at all.


@fault("every_step_runs", "ATT-1")
def output_has_the_type_of_the_arithmetic() -> Iterable[Patch]:
    """The output is float32, whatever the type of the query."""
    forward = Attention.forward
    return [patch.object(Attention, "forward", lambda *arguments: forward(*arguments).float())]


@fault("every_step_runs", "ATT-1")
def padding_is_cut_off() -> Iterable[Patch]:
    """The rows of padding are missing from what attend returns."""
    attend = ReferenceModel.attend

    def cut(model: ReferenceModel, layer_name: str, *tensors: torch.Tensor) -> torch.Tensor:
        metadata = get_forward_context().attn_metadata[layer_name]
        return attend(model, layer_name, *tensors)[: metadata.query_start_loc[-1]]

    return [patch.object(ReferenceModel, "attend", cut)]


@fault("every_step_runs", "ATT-1")
def head_size_must_be_a_power_of_two() -> Iterable[Patch]:
    """A head size that is no power of two fails inside the backend, although any is declared."""
    attend = EagerImpl._attend

    def reshape(impl: EagerImpl, *arguments: torch.Tensor) -> torch.Tensor:
        other: Any = SimpleNamespace(**(vars(impl) | {"head_size": 1 << (impl.head_size.bit_length() - 1)}))
        return attend(other, *arguments)

    return attention_is(reshape)


@fault("output_matches_dense", "ATT-1")
def outputs_share_one_buffer() -> Iterable[Patch]:
    """Every layer returns the same buffer, so that a layer overwrites what an earlier one returned."""
    buffers: dict[tuple[Any, ...], torch.Tensor] = {}
    right: Any = ReferenceModel.attend

    def attend(model: ReferenceModel, layer_name: str, *tensors: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = right(model, layer_name, *tensors)
        buffer = buffers.setdefault((output.shape, output.dtype), torch.empty_like(output))
        return buffer.copy_(output)

    return [patch.object(ReferenceModel, "attend", attend)]


@fault("output_matches_dense", "ATT-1")
def scale_of_the_layer_is_ignored() -> Iterable[Patch]:
    """The softmax scale is always 1 / sqrt(head_size), whatever the layer was built with."""
    init: Any = EagerImpl.__init__

    def build(impl: EagerImpl, num_heads: int, head_size: int, scale: float, num_kv_heads: int) -> None:
        init(impl, num_heads, head_size, head_size**-0.5, num_kv_heads)

    return [patch.object(EagerImpl, "__init__", build)]


@fault("output_matches_dense", "ATT-1")
def scale_of_the_first_layer_is_used_for_all() -> Iterable[Patch]:
    """One scale, that of the first layer, is used for all layers of the model."""
    build: Any = ReferenceModel.__init__

    def init(model: ReferenceModel, *arguments: Any) -> None:
        build(model, *arguments)
        layers = list(model.layers.values())
        for layer in layers:
            layer.impl.scale = layers[0].impl.scale

    return [patch.object(ReferenceModel, "__init__", init)]


@fault("output_matches_dense", "ATT-1")
def strides_are_taken_for_contiguous() -> Iterable[Patch]:
    """The query is read as if it were contiguous, which a slice of a fused projection is not."""
    right: Any = ReferenceModel.attend

    def attend(model: ReferenceModel, layer_name: str, query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        strides = torch.empty(query.shape, device="meta").stride()
        output: torch.Tensor = right(model, layer_name, query.as_strided(query.shape, strides), *others)
        return output

    return [patch.object(ReferenceModel, "attend", attend)]
