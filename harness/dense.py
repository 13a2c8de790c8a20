"""The oracle: dense causal attention in float64, with the error bound of each element.

It knows nothing of blocks, tables or slots: it is given each request's keys and values by position. Many requests,
layers and steps are computed in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.tolerance import Bound, worst_case_bound


@dataclass(frozen=True)
class Row:
    """One request in one step and layer."""

    query: torch.Tensor
    """[query_len, num_heads, head_size]: the last query_len positions."""
    key: torch.Tensor
    """[seq_len, num_kv_heads, head_size]."""
    value: torch.Tensor
    """[seq_len, num_kv_heads, head_size]."""
    scale: float
    """Factor on q.k before the softmax."""


@dataclass(frozen=True)
class Expected:
    """What the output should be, each float64 [query_len, num_heads, head_size]."""

    output: torch.Tensor
    bound: torch.Tensor


MAX_SCORES = 1 << 20
"""Scores of one batch, padding included; longer lists are cut into several batches."""


def dense_attention(rows: Sequence[Row], bound: Bound) -> list[Expected]:
    """Attend causally for each row: query i of query_len sees the keys up to position seq_len - query_len + i."""
    # Rows of like lengths side by side, so that little of a batch is padding.
    order = sorted(range(len(rows)), key=lambda i: (rows[i].query.shape[0].bit_length(), rows[i].key.shape[0]))
    results: list[Expected | None] = [None] * len(rows)
    batch: list[int] = []
    widest_query = widest_key = 0
    for index in order:
        query_len, num_heads, _ = rows[index].query.shape
        seq_len = rows[index].key.shape[0]
        wider_query, wider_key = max(widest_query, query_len), max(widest_key, seq_len)
        another_bucket = batch and query_len.bit_length() != widest_query.bit_length()
        if another_bucket or (batch and wider_query * wider_key * num_heads * (len(batch) + 1) > MAX_SCORES):
            _attend_batch(rows, batch, bound, results)
            batch, wider_query, wider_key = [], query_len, seq_len
        batch.append(index)
        widest_query, widest_key = wider_query, wider_key
    if batch:
        _attend_batch(rows, batch, bound, results)
    return [result for result in results if result is not None]


def _attend_batch(rows: Sequence[Row], batch: list[int], bound: Bound, results: list[Expected | None]) -> None:
    # query: [rows, query_len, num_heads, head_size]; key, value: [rows, seq_len, num_kv_heads, head_size]
    query_lens = torch.tensor([rows[i].query.shape[0] for i in batch])
    seq_lens = torch.tensor([rows[i].key.shape[0] for i in batch])
    pad = torch.nn.utils.rnn.pad_sequence
    query = pad([rows[i].query for i in batch], batch_first=True).double()
    key = pad([rows[i].key for i in batch], batch_first=True).double()
    value = pad([rows[i].value for i in batch], batch_first=True).double()
    scale = torch.tensor([rows[i].scale for i in batch], dtype=torch.float64).view(-1, 1, 1, 1)
    num_rows, max_query, num_heads, head_size = query.shape
    num_kv_heads = key.shape[2]
    # Heads of a group side by side: [rows, num_kv_heads, group * max_query, head_size].
    group = num_heads // num_kv_heads
    grouped = query.view(num_rows, max_query, num_kv_heads, group, head_size).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(num_rows, num_kv_heads, group * max_query, head_size)
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    positions = torch.arange(key.shape[2])
    last_visible = (seq_lens - query_lens)[:, None] + torch.arange(max_query)
    # Rows behind a request's last query see its last key: they are cut off below, and must only not be NaN.
    last_visible = torch.minimum(last_visible, seq_lens[:, None] - 1)
    visible = (positions <= last_visible[..., None])[:, None].repeat(1, 1, group, 1)
    scores = scale * (grouped @ key.transpose(-1, -2))
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    output = weights @ value
    allowed = worst_case_bound(bound, scale, grouped, key, value, scores, weights, visible, output)
    for position, i in enumerate(batch):
        results[i] = Expected(
            *(
                x[position]
                .view(num_kv_heads, group, max_query, head_size)[:, :, : rows[i].query.shape[0]]
                .permute(2, 0, 1, 3)
                .reshape(-1, num_heads, head_size)
                for x in (output, allowed)
            )
        )
