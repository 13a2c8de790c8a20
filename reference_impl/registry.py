"""Step 1: the layer registers itself by name.

Also the rule for KV-sharing targets, which is checked against the registry when a layer is built.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeVar

from reference_impl.errors import DuplicateLayerNameError, EmptyLayerNameError, KVSharingTargetError

if TYPE_CHECKING:
    from reference_impl.config import ForwardConfig
    from reference_impl.layers.attention import Attention
    from reference_impl.layers.base import RegisteredLayer

LayerT = TypeVar("LayerT")


def check_prefix(config: ForwardConfig, prefix: str) -> None:
    """Refuse a name that cannot be registered.

    Raises:
        EmptyLayerNameError: `prefix` is empty (REG-6).
        DuplicateLayerNameError: `prefix` is taken (REG-2).
    """
    if not prefix:
        raise EmptyLayerNameError("Empty layer name: give each layer the prefix under which its model holds it.")
    if prefix in config.static_forward_context:
        raise DuplicateLayerNameError(f"Duplicate layer name: {prefix}")


def register_layer(config: ForwardConfig, prefix: str, layer: RegisteredLayer) -> None:
    """Enter `layer` under `prefix` (REG-1). Call it last in a constructor: one that raises leaves no trace (REG-4)."""
    check_prefix(config, prefix)
    config.static_forward_context[prefix] = layer


def get_layers(
    config: ForwardConfig, layer_type: type[LayerT], names: Collection[str] | None = None
) -> dict[str, LayerT]:
    """Return the registered layers of `layer_type`, in registration order (REG-3).

    `names` narrows the result to these names.
    """
    return {
        name: layer
        for name, layer in config.static_forward_context.items()
        if isinstance(layer, layer_type) and (names is None or name in names)
    }


def extract_layer_index(layer_name: str) -> int:
    """Return the one integer among the dot-separated parts of `layer_name`.

    Raises:
        ValueError: there is none, or more than one.
    """
    indices = [int(part) for part in layer_name.split(".") if re.fullmatch(r"\d+", part)]
    if len(indices) != 1:
        raise ValueError(f"layer name {layer_name} should contain exactly one integer, but has {len(indices)}")
    return indices[0]


def check_kv_sharing_target(config: ForwardConfig, layer: Attention, prefix: str, target_name: str) -> None:
    """Refuse a KV-sharing target that is not an earlier layer with a cache of the same shape (KVS-1..4, 7, 8).

    Raises:
        KVSharingTargetError: with the reason.
    """
    message = f"Specified KV sharing target layer for {prefix} is not valid: target layer {target_name} "
    if target_name == prefix:
        raise KVSharingTargetError(message + "cannot be the same as the current layer.")
    target: Any = config.static_forward_context.get(target_name)
    if target is None:
        if extract_layer_index(prefix) <= extract_layer_index(target_name):
            raise KVSharingTargetError(message + "must come before the current layer.")
        raise KVSharingTargetError(message + "is not a valid Attention layer in the model.")
    target_type = getattr(target, "attn_type", None)
    if target_type != layer.attn_type:
        raise KVSharingTargetError(message + f"must be the same type as the current layer ({layer.attn_type}).")
    if target.kv_sharing_target_layer_name is not None:
        raise KVSharingTargetError(message + f"itself shares the cache of {target.kv_sharing_target_layer_name}.")
    for name in ("head_size", "num_kv_heads", "kv_cache_dtype"):
        got, want = getattr(layer, name), getattr(target, name)
        if got != want:
            raise KVSharingTargetError(message + f"has {name} {want}, but the current layer has {got}.")
