"""How far an output may be from the oracle's: a running error analysis, not a chosen tolerance.

Let s = scale * q.k, w = softmax(s), o = sum w v; u the unit roundoff of the storage type, u32 that of float32, in which
products are accumulated. The terms, each a worst case:

- the relative error of one weight: eps_j = (head_size + 6) u32 |scale| (|q|.|k_j|) + (2 (max s - s_j) + 12) u32. The
  weights are normalised, so that it moves o by at most sum_j w_j eps_j (|v_j| + |o|);
- accumulation, rescaling by blocks and division: (n + 8 (n / block + 1) + 16) u32 of A = sum w |v|;
- weights rounded to the storage type before P.V: u A, and half the smallest subnormal times sum |v| * max w;
- the output rounded to the storage type.

An implementation that rounds s to the storage type declares it; then eps_j becomes expm1(eps_j + 3 u |s_j|).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

UNIT_FLOAT32 = 2.0**-24
SMALLEST_BLOCK = 16
"""Keys in one tile of an online softmax; fewer tiles would only make the bound smaller."""


SLACK = 1.0 + 2.0**-10
"""For the float32 arithmetic of the bound itself."""


@dataclass(frozen=True)
class Bound:
    """What the bound depends on besides the values."""

    dtype: torch.dtype
    """Storage type of weights and output."""
    rounds_scores: bool = False


def worst_case_bound(
    bound: Bound,
    scale: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: torch.Tensor,
    weights: torch.Tensor,
    visible: torch.Tensor,
    output: torch.Tensor,
) -> torch.Tensor:
    """Return the largest error that a right implementation can make, float64 like `output`.

    Args:
        bound: the storage type, and what the implementation declares.
        scale: softmax scale, float64, broadcast to `scores`.
        query, output: float64 [..., num_queries, head_size].
        key, value: float64 [..., num_keys, head_size].
        scores: [..., num_queries, num_keys], before the mask; `weights` after it.
        visible: bool, broadcast to `scores`.
    """
    # The bound itself is computed in float32: it needs no more than a few digits, and the slack below covers them.
    query, key, value, scores, weights, output = (x.float() for x in (query, key, value, scores, weights, output))
    scale = scale.float()
    info = torch.finfo(bound.dtype)
    unit, half_subnormal = info.eps / 2, info.smallest_normal * info.eps / 2
    head_size = query.shape[-1]
    products = scale.abs() * (query.abs() @ key.abs().transpose(-1, -2))
    maximum = scores.masked_fill(~visible, float("-inf")).amax(-1, keepdim=True)
    eps = (head_size + 6) * UNIT_FLOAT32 * products + (2 * (maximum - scores).clamp(min=0) + 12) * UNIT_FLOAT32
    if bound.rounds_scores:
        eps = torch.expm1(eps + 3 * unit * scores.abs())
    else:
        eps = torch.expm1(eps)
    weighted_eps = (weights * eps).masked_fill(~visible, 0.0)
    absolute = value.abs()
    magnitude = weights @ absolute
    # To first order the weights move by their own error less the mean one; the mean divides the rest.
    mean_eps = weighted_eps.sum(-1, keepdim=True)
    from_weights = (weighted_eps @ absolute + output.abs() * mean_eps) / (1 - mean_eps).clamp(min=0.5)
    num_keys = visible.sum(-1, keepdim=True).float()
    accumulation = (num_keys + 8 * (num_keys / SMALLEST_BLOCK + 1) + 16) * UNIT_FLOAT32 * magnitude
    rounded = unit * magnitude
    rounded = rounded + half_subnormal * (visible.float() @ absolute) * weights.amax(-1, keepdim=True)
    total = from_weights + accumulation + rounded
    return SLACK * (total + (unit * (output.abs() + total)).clamp(min=half_subnormal)).double()
