"""Ten fixed cases, from the simplest on: if these fail, the adapter is wrong rather than the kernel."""

from __future__ import annotations

from dataclasses import replace

from harness.case import Case
from harness.contract import Info


def smoke_cases(info: Info) -> dict[str, Case]:
    """Return the ten cases, with sizes and dtype that are declared."""
    head_size = 32 if info.head_sizes is None or 32 in info.head_sizes else info.head_sizes[0]
    block_size = 16 if info.block_sizes is None or 16 in info.block_sizes else info.block_sizes[0]
    dtype = "float32" if "float32" in info.dtypes else info.dtypes[0]
    one = Case(
        steps=((1,),),
        num_heads=2,
        num_kv_heads=2,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        allocation="ascending",
    )
    longer = block_size + 3
    return {
        "one token": one,
        "a prefill within a block": replace(one, steps=((min(5, block_size),),)),
        "a prefill over two blocks": replace(one, steps=((longer,),)),
        "a prefill and a decode": replace(one, steps=((longer,), (1,))),
        "a prefill in two chunks": replace(one, steps=((longer,), (longer,))),
        "two requests": replace(one, steps=((longer, 2), (1, 1))),
        "scattered blocks": replace(one, steps=((2 * longer, longer), (1, 2)), allocation="shuffled"),
        "grouped query heads": replace(one, steps=((longer, 2), (1, 1)), num_heads=4),
        "rows of padding": replace(one, steps=((longer, 2), (1, 1)), padding=3),
        "two layers" if not info.kv_sharing else "a layer that shares another's cache": replace(
            one, steps=((longer, 2), (1, 1)), kv_sharing=(-1, 0) if info.kv_sharing else (-1, -1)
        ),
    }
