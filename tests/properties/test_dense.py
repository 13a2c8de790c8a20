"""The oracle against computations that share nothing with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.dense import Row, dense_attention
from harness.tolerance import Bound


def row(query_len: int, seq_len: int, num_heads: int, num_kv_heads: int, head_size: int, seed: int) -> Row:
    generator = torch.Generator().manual_seed(seed)
    return Row(
        torch.randn(query_len, num_heads, head_size, generator=generator),
        torch.randn(seq_len, num_kv_heads, head_size, generator=generator),
        torch.randn(seq_len, num_kv_heads, head_size, generator=generator),
        scale=head_size**-0.5 * (1 + seed % 2),
    )


lengths = st.integers(1, 40).flatmap(lambda seq_len: st.tuples(st.integers(1, seq_len), st.just(seq_len)))


@given(st.lists(lengths, min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 4), st.integers(0, 99))
def test_batched_oracle_equals_a_plain_loop(row_lengths, num_kv_heads, group, seed):
    rows = [row(q, n, num_kv_heads * group, num_kv_heads, 8, seed + i) for i, (q, n) in enumerate(row_lengths)]
    results = dense_attention(rows, Bound(torch.float32))
    assert len(results) == len(rows)
    for given_row, result in zip(rows, results, strict=True):
        query_len, seq_len, scale = given_row.query.shape[0], given_row.key.shape[0], given_row.scale
        for i in range(query_len):
            for head in range(num_kv_heads * group):
                visible = seq_len - query_len + i + 1
                keys = given_row.key[:visible, head // group].double()
                weights = torch.softmax(scale * keys @ given_row.query[i, head].double(), 0)
                want = weights @ given_row.value[:visible, head // group].double()
                assert torch.allclose(result.output[i, head], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_sdpa_stays_within_the_bound(dtype, factor):
    """No false alarm on an implementation that is right, and the bound is not much wider than its error."""
    ratios = []
    for seed in range(50):
        given_row = row(5, 37, 4, 4, 32, seed)
        given_row = Row(*((factor * x).to(dtype) for x in (given_row.query, given_row.key, given_row.value)), 32**-0.5)
        (result,) = dense_attention([given_row], Bound(dtype))
        mask = torch.ones(5, 37, dtype=torch.bool).tril(32)
        got = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (given_row.query, given_row.key, given_row.value)), attn_mask=mask
        )[0].transpose(0, 1)
        ratios.append(float(((got.double() - result.output).abs() / result.bound).max()))
    assert max(ratios) <= 1.0
    # A bound that nothing comes near would see nothing.
    assert max(ratios) > 0.001


@given(st.integers(2, 64), st.integers(0, 999))
def test_dropping_the_newest_token_is_outside_the_bound(seq_len, seed):
    given_row = row(1, seq_len, 2, 1, 16, seed)
    (right,) = dense_attention([given_row], Bound(torch.float32))
    (wrong,) = dense_attention(
        [replace(given_row, key=given_row.key[:-1], value=given_row.value[:-1])], Bound(torch.float32)
    )
    assert ((right.output - wrong.output).abs() > right.bound).any()
