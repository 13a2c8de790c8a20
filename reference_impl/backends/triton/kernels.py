"""The two kernels: cache write, and paged attention for prefill, chunked prefill and decode alike.

Both run compiled on a GPU and, with TRITON_INTERPRET=1 set before triton is imported, interpreted on the CPU. The
interpreter does bf16 arithmetic on raw bits and truncates when it narrows to bf16; under the constexpr INTERPRET the
kernels widen before each dot and round before each cast, which changes nothing on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _narrow(x, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """Cast float32 `x` to `dtype`, rounding to nearest even also where the interpreter would truncate."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        x = tl.where(is_nan, bits, rounded).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def write_kv_cache_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, head_size]
    value_ptr,  # [num_tokens, num_kv_heads, head_size]
    kv_cache_ptr,  # [num_blocks, 2, block_size, num_kv_heads, head_size]
    slot_mapping_ptr,  # [num_tokens]
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_cache_block,
    stride_cache_kv,
    stride_cache_slot,
    stride_cache_head,
    block_size,
    num_tokens,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,  # next power of two of NUM_KV_HEADS * HEAD_SIZE
):
    """Copy all heads of K and V of a few tokens into their slots; a negative slot is padding (WRT-2)."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    element = tl.arange(0, BLOCK)
    head = element // HEAD_SIZE
    dim = element % HEAD_SIZE
    mask = (slot >= 0)[:, None] & (element < NUM_KV_HEADS * HEAD_SIZE)[None, :]
    target = (
        kv_cache_ptr
        + ((slot // block_size) * stride_cache_block + (slot % block_size) * stride_cache_slot)[:, None]
        + (head * stride_cache_head + dim)[None, :]
    )
    key_offset = token[:, None] * stride_key_token + (head * stride_key_head + dim)[None, :]
    value_offset = token[:, None] * stride_value_token + (head * stride_value_head + dim)[None, :]
    key = tl.load(key_ptr + key_offset, mask=mask, other=0.0)
    value = tl.load(value_ptr + value_offset, mask=mask, other=0.0)
    tl.store(target, key, mask=mask)
    tl.store(target + stride_cache_kv, value, mask=mask)


@triton.jit
def _find_request(query_start_loc_ptr, tile, num_reqs, BLOCK_Q: tl.constexpr):
    """Return the request that query tile `tile` belongs to.

    Each request owns query_len // BLOCK_Q + 1 tiles, so that request r begins at tile
    query_start_loc[r] // BLOCK_Q + r; this is a binary search for the last one that begins at or before `tile`.
    """
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def paged_attention_kernel(
    output_ptr,  # [num_tokens, num_heads, head_size]
    query_ptr,  # [num_tokens, num_heads, head_size]
    kv_cache_ptr,  # [num_blocks, 2, block_size, num_kv_heads, head_size]
    block_table_ptr,  # [num_reqs, max_num_blocks]
    seq_lens_ptr,  # [num_reqs]
    query_start_loc_ptr,  # [num_reqs + 1]
    num_reqs,
    scale_log2,  # softmax scale * log2(e)
    stride_output_token,
    stride_output_head,
    stride_query_token,
    stride_query_head,
    stride_cache_block,
    stride_cache_kv,
    stride_cache_slot,
    stride_cache_head,
    stride_block_table,
    block_size,
    GROUP_SIZE: tl.constexpr,  # query heads that share a KV head
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,  # next power of two
    BLOCK_Q: tl.constexpr,  # query tokens in a tile
    BLOCK_M: tl.constexpr,  # rows in a tile: query tokens * GROUP_SIZE, rounded up
    BLOCK_N: tl.constexpr,  # keys in a tile
    INTERPRET: tl.constexpr,
):
    """One program a query tile and KV head: the heads of a group share each load of K and V."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = _find_request(query_start_loc_ptr, tile, num_reqs, BLOCK_Q)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    first_query = (tile - (query_start // BLOCK_Q + request)) * BLOCK_Q
    if first_query >= query_len:
        return

    seq_len = tl.load(seq_lens_ptr + request)
    context_len = seq_len - query_len
    row = tl.arange(0, BLOCK_M)
    query = first_query + row // GROUP_SIZE  # index within the request
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    row_mask = (row // GROUP_SIZE < BLOCK_Q) & (query < query_len)
    dim = tl.arange(0, HEAD_SIZE_PADDED)
    dim_mask = dim < HEAD_SIZE
    token = (query_start + query).to(tl.int64)
    q = tl.load(
        query_ptr + token[:, None] * stride_query_token + head[:, None] * stride_query_head + dim[None, :],
        mask=row_mask[:, None] & dim_mask[None, :],
        other=0.0,
    )
    if INTERPRET:
        q = q.to(tl.float32)

    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    weight_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_SIZE_PADDED], dtype=tl.float32)
    block_row_ptr = block_table_ptr + request.to(tl.int64) * stride_block_table
    # No key beyond the last query of the tile is visible to any of its rows.
    end = tl.minimum(seq_len, context_len + first_query + BLOCK_Q)
    for start in range(0, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        # What lies behind the sequence may be NaN, and 0 * NaN is NaN: load zeros instead (INV-7).
        in_sequence = position < end
        block = tl.load(block_row_ptr + position // block_size, mask=in_sequence, other=0).to(tl.int64)
        slot_ptr = (
            kv_cache_ptr
            + block * stride_cache_block
            + (position % block_size) * stride_cache_slot
            + kv_head.to(tl.int64) * stride_cache_head
        )
        k = tl.load(slot_ptr[None, :] + dim[:, None], mask=dim_mask[:, None] & in_sequence[None, :], other=0.0)
        v = tl.load(
            slot_ptr[:, None] + stride_cache_kv + dim[None, :],
            mask=dim_mask[None, :] & in_sequence[:, None],
            other=0.0,
        )
        if INTERPRET:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = scale_log2 * tl.dot(q, k, input_precision="ieee")
        visible = position[None, :] <= context_len + query[:, None]
        scores = tl.where(visible & in_sequence[None, :], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        # A row that has seen no key yet keeps m = -inf; -inf - -inf would be NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(scores - m_safe[:, None])
        rescale = tl.exp2(m - m_safe)
        weight_sum = weight_sum * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    out = acc / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
    tl.store(
        output_ptr + token[:, None] * stride_output_token + head[:, None] * stride_output_head + dim[None, :],
        _narrow(out, output_ptr.dtype.element_ty, INTERPRET),
        mask=row_mask[:, None] & dim_mask[None, :],
    )
