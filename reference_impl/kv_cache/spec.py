"""Step 2: what a layer needs of one block."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVCacheSpec:
    """Base of the specs. Layers with equal specs form a group and share a block table (BND-9)."""

    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer (BND-2)."""
        raise NotImplementedError


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """K and V of every token, for as long as the request lives."""

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def page_size_bytes(self) -> int:
        """2 (K and V) * block_size * num_kv_heads * head_size * itemsize."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize
