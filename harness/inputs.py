"""Case to tensors: q, k and v of every layer, request and position, from the case's seed alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.case import Case

PADDING_VALUE = -6e4
"""What rows of padding hold: large, finite in float16, and not what a poisoned cache holds: a write must show."""


@dataclass(frozen=True)
class Inputs:
    """Values by position, so that any way to cut a request into steps sees the same ones (INV-3)."""

    query: list[torch.Tensor]
    """[num_reqs] of [num_layers, total_len, num_heads, head_size], in the case's dtype."""
    key: list[torch.Tensor]
    """[num_reqs] of [num_layers, total_len, num_kv_heads, head_size]."""
    value: list[torch.Tensor]
    """[num_reqs] of [num_layers, total_len, num_kv_heads, head_size]."""


def make_inputs(case: Case, device: str = "cpu") -> Inputs:
    """Derive all values from `case.seed`."""
    dtype = getattr(torch, case.dtype)
    factor, offset = {"normal": (1.0, 0.0), "large": (8.0, 0.0), "offset": (1.0, 4.0)}[case.values]
    inputs = Inputs([], [], [])
    for request, total_len in enumerate(case.total_lens):
        # A generator for each request: a request's values do not depend on the others (INV-2).
        generator = torch.Generator().manual_seed((case.seed * 1_000_003 + request) % (1 << 63))
        heads = case.num_heads + 2 * case.num_kv_heads
        drawn = torch.randn(case.num_layers, total_len, heads, case.head_size, generator=generator)
        drawn = (factor * drawn + offset).to(dtype).to(device)
        query, key, value = torch.split(drawn, [case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=2)
        inputs.query.append(query)
        inputs.key.append(key)
        inputs.value.append(value)
    return inputs
