"""ATT-1, WRT-1, WRT-2: both backends against dense attention, over a prefill, a chunk and a decode in one batch."""

from __future__ import annotations

import pytest
import torch

from reference_impl.config import CacheConfig, ForwardConfig, set_current_config
from reference_impl.context import set_forward_context
from reference_impl.kv_cache.allocate import allocate_kv_caches, get_kv_cache_specs
from reference_impl.kv_cache.bind import bind_kv_caches
from reference_impl.layers.attention import Attention
from reference_impl.metadata import CommonAttentionMetadata

QUERY_LENS = (5, 1, 3)
SEQ_LENS = (5, 9, 6)
BLOCK_TABLE = ((7, 2, 0), (9, 3, 4), (1, 8, 0))
BLOCK_SIZE = 4
POISON = 6e4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_size", [8, 24])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_paged_equals_dense_and_only_the_slots_change(backend, num_heads, num_kv_heads, head_size, dtype):
    config = ForwardConfig(dtype=dtype, cache=CacheConfig(BLOCK_SIZE), backend=backend)
    scale = head_size**-0.5
    with set_current_config(config):
        layer = Attention(num_heads, head_size, scale, num_kv_heads, prefix="model.layers.0.self_attn.attn")
    _, caches = allocate_kv_caches(get_kv_cache_specs(config), num_blocks=10)
    bind_kv_caches(config, caches)
    generator = torch.Generator().manual_seed(0)
    layer.kv_cache.fill_(POISON)
    full = [torch.randn(2, n, num_kv_heads, head_size, generator=generator).to(dtype) for n in SEQ_LENS]
    slots, expected_cache = [], layer.kv_cache.clone()
    for kv, query_len, seq_len, row in zip(full, QUERY_LENS, SEQ_LENS, BLOCK_TABLE, strict=True):
        for position in range(seq_len):
            block, offset = row[position // BLOCK_SIZE], position % BLOCK_SIZE
            expected_cache[block, :, offset] = kv[:, position]
            if position < seq_len - query_len:
                layer.kv_cache[block, :, offset] = kv[:, position]
            else:
                slots.append(block * BLOCK_SIZE + offset)
    num_tokens, padded = sum(QUERY_LENS), sum(QUERY_LENS) + 2
    new = torch.cat([kv[:, -query_len:] for kv, query_len in zip(full, QUERY_LENS, strict=True)], dim=1)
    new = torch.nn.functional.pad(new, (0, 0, 0, 0, 0, padded - num_tokens), value=POISON)
    query = torch.randn(padded, num_heads * head_size, generator=generator).to(dtype)
    common = CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 5, 6, 9], dtype=torch.int32),
        seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32),
        block_table=torch.tensor(BLOCK_TABLE, dtype=torch.int32),
        slot_mapping=torch.tensor([*slots, -1, -1]),
        num_actual_tokens=num_tokens,
        max_query_len=max(QUERY_LENS),
        max_seq_len=max(SEQ_LENS),
    )
    metadata = {layer.layer_name: layer.attn_backend.get_builder_cls()().build(common)}
    with set_forward_context(metadata, config, slot_mapping={layer.layer_name: common.slot_mapping}):
        output = layer(query, new[0].reshape(padded, -1), new[1].reshape(padded, -1))

    assert torch.equal(layer.kv_cache, expected_cache)
    assert not output[num_tokens:].any()
    start = 0
    for kv, query_len, seq_len in zip(full, QUERY_LENS, SEQ_LENS, strict=True):
        q = query[start : start + query_len].view(query_len, num_heads, head_size).double()
        k, v = kv.double().repeat_interleave(num_heads // num_kv_heads, dim=2)
        scores = scale * torch.einsum("qhd,khd->hqk", q, k)
        hidden = torch.ones(query_len, seq_len).triu(seq_len - query_len + 1).bool()
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        want = torch.einsum("hqk,khd->qhd", weights, v).reshape(query_len, -1)
        # Half an ulp of the output, and the weights rounded once to the storage type: u * sum(w |v|).
        bound = torch.einsum("hqk,khd->qhd", weights, v.abs()).reshape(query_len, -1)
        unit = torch.finfo(dtype).eps
        assert ((output[start : start + query_len].double() - want).abs() <= (unit + 1e-5) * (bound + want.abs())).all()
        start += query_len
