"""Step 2: one backing buffer, and a view of it for each layer (BND-2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from reference_impl.config import ForwardConfig
from reference_impl.errors import KVCacheBindingError
from reference_impl.kv_cache.spec import FullAttentionSpec, KVCacheSpec
from reference_impl.layers.base import AttentionLayerBase
from reference_impl.registry import get_layers

ALIGNMENT = 256
"""Bytes; each layer's view begins at a multiple, as a CUDA allocation would."""


def get_kv_cache_specs(config: ForwardConfig) -> dict[str, KVCacheSpec]:
    """Return the spec of each layer that needs a cache of its own, in registration order."""
    specs = {name: layer.get_kv_cache_spec() for name, layer in get_layers(config, AttentionLayerBase).items()}
    return {name: spec for name, spec in specs.items() if spec is not None}


def allocate_kv_caches(
    specs: Mapping[str, KVCacheSpec], num_blocks: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Allocate one buffer and cut a view for each layer.

    Returns:
        The buffer, uint8 [total bytes], and for each layer name its view
        [num_blocks, 2, block_size, num_kv_heads, head_size] in the dtype of its spec.
    """
    if num_blocks < 1:
        raise KVCacheBindingError(f"num_blocks={num_blocks}, but should be at least 1: block 0 is the null block")
    offsets: dict[str, int] = {}
    total = 0
    for name, spec in specs.items():
        offsets[name] = total
        size = num_blocks * spec.page_size_bytes
        total += -(-size // ALIGNMENT) * ALIGNMENT
    buffer = torch.zeros(total, dtype=torch.uint8, device=device)
    views: dict[str, torch.Tensor] = {}
    for name, spec in specs.items():
        assert isinstance(spec, FullAttentionSpec), f"no layout for {type(spec).__name__} of {name}"
        start = offsets[name]
        raw = buffer[start : start + num_blocks * spec.page_size_bytes]
        views[name] = raw.view(spec.dtype).view(num_blocks, 2, spec.block_size, spec.num_kv_heads, spec.head_size)
    return buffer, views
