"""Hypothesis strategies for cases. Only structure and one seed are drawn; the values come from the seed."""

from __future__ import annotations

from hypothesis import strategies as st

from harness.case import ALLOCATIONS, DTYPES, VALUES, Case
from harness.contract import Info

HEAD_SIZES = (8, 16, 24, 32, 64, 80, 96, 128, 192, 256)
BLOCK_SIZES = (1, 2, 3, 4, 8, 16, 32, 48, 64, 128)
MAX_LAYERS = 6


@st.composite
def kv_sharing(draw: st.DrawFn, allowed: bool = True) -> tuple[int, ...]:
    """1 to 6 layers, each with its own cache or that of an earlier one."""
    num_layers = draw(st.integers(1, MAX_LAYERS))
    sharing: list[int] = []
    for _ in range(num_layers):
        owners = [layer for layer, target in enumerate(sharing) if target == -1]
        shares = allowed and owners and draw(st.integers(0, 2)) == 2
        sharing.append(draw(st.sampled_from(owners)) if shares else -1)
    return tuple(sharing)


@st.composite
def steps(draw: st.DrawFn, max_reqs: int = 6, max_steps: int = 4, max_prefill: int = 70) -> tuple[tuple[int, ...], ...]:
    """Prefills, chunks and decodes: each request is not scheduled, decodes, or gets a chunk."""
    num_reqs = draw(st.integers(1, max_reqs))
    longest = draw(st.sampled_from([max_prefill, max_prefill, 4 * max_prefill]))
    query_len = st.one_of(st.sampled_from([1, 1, 0]), st.integers(0, 5), st.integers(0, longest))
    step = st.lists(query_len, min_size=num_reqs, max_size=num_reqs).filter(any).map(tuple)
    return tuple(draw(st.lists(step, min_size=1, max_size=max_steps)))


@st.composite
def cases(draw: st.DrawFn, info: Info | None = None, *, small: bool = False) -> Case:
    """Cases within what `info` declares; `small`: for implementations that are slow."""
    info = info or Info("any", "")
    num_kv_heads = draw(st.integers(1, 2 if small else 4) | st.just(2 if small else 8))
    # The largest sizes are drawn less often, since they cost the most.
    largest = draw(st.sampled_from([(128, 64), (128, 64), (1024, 4096)]))
    head_sizes = [size for size in info.head_sizes or HEAD_SIZES if size <= largest[0]]
    block_sizes = [size for size in info.block_sizes or BLOCK_SIZES if size <= largest[1]]
    return Case(
        steps=draw(steps(4, 3, 40) if small else steps()),
        kv_sharing=draw(kv_sharing(info.kv_sharing)),
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_size=draw(st.sampled_from(head_sizes or list(info.head_sizes or ()))),
        block_size=draw(st.sampled_from(block_sizes or list(info.block_sizes or ()))),
        vary_scale=draw(st.booleans()),
        fused_qkv=draw(st.booleans()),
        scale_percent=draw(st.sampled_from([100, 50, 200])),
        dtype=draw(st.sampled_from([dtype for dtype in DTYPES if dtype in info.dtypes])),
        padding=draw(st.integers(0, 3)),
        spare_blocks=draw(st.integers(0, 3)),
        allocation=draw(st.sampled_from(ALLOCATIONS)),
        shuffle_requests=draw(st.booleans()),
        values=draw(st.sampled_from(VALUES)),
        seed=draw(st.integers(0, (1 << 32) - 1)),
    )
