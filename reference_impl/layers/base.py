"""What every registered layer offers (steps 1 and 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from reference_impl.kv_cache.spec import KVCacheSpec


class RegisteredLayer(torch.nn.Module):
    """A layer that is found by name outside of model code. Only some of them have a cache."""

    layer_name: str


class AttentionLayerBase(RegisteredLayer):
    """A registered layer that has, or shares, a KV cache."""

    kv_cache: torch.Tensor
    """The view that `bind_kv_cache` stored; an empty placeholder before that (BND-1)."""
    kv_sharing_target_layer_name: str | None = None

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Store this layer's view. Layers whose page holds more than one tensor override this (BND-5)."""
        self.kv_cache = kv_cache

    def get_kv_cache_spec(self) -> KVCacheSpec | None:
        """Return what this layer needs of a block; None when it needs no cache of its own (KVS-6)."""
        raise NotImplementedError
