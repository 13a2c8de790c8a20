"""Steps 4 and 6: the two custom ops, and the name as an opaque value.

The ops are registered once, when this module is imported. For the compiler each is one node whose inputs are tensors
and a name; everything else is looked up in the forward context at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library, infer_schema

from reference_impl.context import get_attention_context
from reference_impl.errors import KVCacheBindingError, KVCacheUpdateUnsupportedError

HAS_OPAQUE_TYPE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 11)

_OpaqueBase: Any = object
if HAS_OPAQUE_TYPE:
    from torch._opaque_base import OpaqueBase as _OpaqueBase


class LayerName(_OpaqueBase):  # type: ignore[misc]
    """A layer name that `torch.compile` lifts as a graph input instead of baking it in as a constant (CMP-2)."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerName) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.value)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """Return the expression that makes this value in generated code, and the names that it needs."""
        return f"LayerName({self.value!r})", {"LayerName": LayerName}


if HAS_OPAQUE_TYPE:
    from torch._library.opaque_object import register_opaque_type

    register_opaque_type(LayerName, typ="value", hoist=True)

if TYPE_CHECKING:
    from typing import TypeAlias

    LayerNameType: TypeAlias = str | LayerName
else:
    LayerNameType = LayerName if HAS_OPAQUE_TYPE else str


def encode_layer_name(layer_name: str) -> str | LayerName:
    """Wrap a name for the ops: a `LayerName` on torch 2.11 or newer, else the str itself."""
    return LayerName(layer_name) if HAS_OPAQUE_TYPE else layer_name


def resolve_layer_name(layer_name: str | LayerName) -> str:
    """Return the str behind what `encode_layer_name` made."""
    return layer_name.value if isinstance(layer_name, LayerName) else layer_name


def _check_bound(layer_name: str, kv_cache: torch.Tensor) -> None:
    if kv_cache.numel() == 0:
        raise KVCacheBindingError(f"layer {layer_name} has no KV cache: bind_kv_caches before the first step")


def unified_kv_cache_update(key: torch.Tensor, value: torch.Tensor, layer_name: LayerNameType) -> torch.Tensor:
    """Write this step's keys and values into the layer's cache.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size].
        layer_name: the layer that was built with this prefix.

    Returns:
        An empty tensor, the dummy dependency. Passed to `unified_attention_with_output`, it keeps the compiler from
        moving the read before the write (OPS-3).

    Raises:
        KVCacheUpdateUnsupportedError: the backend has no `do_kv_cache_update` (OPS-4).
        KVCacheBindingError: there are slots, but the layer has no cache (BND-1).
    """
    name = resolve_layer_name(layer_name)
    _, layer, kv_cache, slot_mapping = get_attention_context(name)
    if slot_mapping is not None:
        if not hasattr(layer.impl, "do_kv_cache_update"):
            raise KVCacheUpdateUnsupportedError(f"{type(layer.impl).__name__} does not support kv cache update")
        _check_bound(name, kv_cache)
        layer.impl.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
    return key.new_empty(0)


def _unified_kv_cache_update_fake(key: torch.Tensor, value: torch.Tensor, layer_name: LayerNameType) -> torch.Tensor:
    return key.new_empty(0)


def unified_attention_with_output(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    output: torch.Tensor,
    layer_name: LayerNameType,
    kv_cache_dummy_dep: torch.Tensor | None = None,
) -> None:
    """Attend, and write the result into `output`.

    Args:
        query, output: [num_tokens, num_heads, head_size].
        key, value: [num_tokens, num_kv_heads, head_size].
        layer_name: the layer that was built with this prefix.
        kv_cache_dummy_dep: what `unified_kv_cache_update` returned; not used, only ordered.

    Raises:
        KVCacheBindingError: there is metadata, but the layer has no cache (BND-1).
    """
    name = resolve_layer_name(layer_name)
    attn_metadata, layer, kv_cache, slot_mapping = get_attention_context(name)
    writes = slot_mapping is not None and layer.impl_writes_kv_cache
    if attn_metadata is not None or writes:
        _check_bound(name, kv_cache)
    layer.impl.forward(layer, query, key, value, kv_cache, attn_metadata, slot_mapping if writes else None, output)


def _unified_attention_with_output_fake(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    output: torch.Tensor,
    layer_name: LayerNameType,
    kv_cache_dummy_dep: torch.Tensor | None = None,
) -> None:
    return None


_library: Any = Library("proptable", "DEF")  # type: ignore[no-untyped-call]
"""Kept alive for as long as the process: the ops live exactly as long as this object."""


def _register(name: str, function: Any, fake: Any, mutates_args: list[str]) -> None:
    _library.define(name + infer_schema(function, mutates_args=mutates_args))
    for key in ("CPU", "CUDA"):
        _library.impl(name, function, dispatch_key=key)
    _library._register_fake(name, fake)


# The annotations are strings here (`from __future__ import annotations`); the schema needs the types.
for _function in (unified_kv_cache_update, unified_attention_with_output):
    _function.__annotations__ = {
        name: {"torch.Tensor": torch.Tensor, "torch.Tensor | None": torch.Tensor | None, "None": None}.get(
            hint, LayerNameType
        )
        for name, hint in _function.__annotations__.items()
    }
_register("unified_kv_cache_update", unified_kv_cache_update, _unified_kv_cache_update_fake, [])
_register(
    "unified_attention_with_output",
    unified_attention_with_output,
    _unified_attention_with_output_fake,
    ["output"],
)
