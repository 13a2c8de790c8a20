"""Step 2: each view is bound to its layer, by name (BND-3, BND-4, BND-6; KVS-6)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from reference_impl.config import ForwardConfig
from reference_impl.errors import KVCacheBindingError, UnknownLayerError
from reference_impl.layers.base import AttentionLayerBase
from reference_impl.registry import get_layers


def bind_kv_caches(config: ForwardConfig, kv_caches: Mapping[str, torch.Tensor]) -> None:
    """Bind each cache to the layer of its name; a KV-sharing layer gets its target's.

    Everything is checked before anything is bound.

    Raises:
        UnknownLayerError: a cache for a name that is not registered.
        KVCacheBindingError: a layer that has a spec and gets no cache, or one that is bound already.
    """
    layers = get_layers(config, AttentionLayerBase)
    for name in kv_caches:
        if name not in layers:
            raise UnknownLayerError(
                f"{name}: no attention layer of this name is registered, so its KV cache cannot be bound"
            )
    for name, layer in layers.items():
        if layer.get_kv_cache_spec() is not None and name not in kv_caches:
            raise KVCacheBindingError(f"layer {name} has a KV cache spec, but no KV cache was given for it")
        if layer.kv_cache.numel():
            raise KVCacheBindingError(f"layer {name} is bound to a KV cache already: clear_kv_caches first")
    for name, kv_cache in kv_caches.items():
        layers[name].bind_kv_cache(kv_cache)
    for layer in layers.values():
        if layer.kv_sharing_target_layer_name is not None:
            layer.bind_kv_cache(layers[layer.kv_sharing_target_layer_name].kv_cache)


def clear_kv_caches(config: ForwardConfig) -> None:
    """Detach every view, so that the buffer can be freed (BND-11)."""
    for layer in get_layers(config, AttentionLayerBase).values():
        layer.bind_kv_cache(torch.empty(0))
