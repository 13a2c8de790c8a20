"""Faults of BND: KV-cache binding."""

# The docstring of a fault says what it does; a broken function has the signature of the right one.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest.mock import patch

import torch

from harness.faults.base import Patch, fault
from reference_impl.config import ForwardConfig
from reference_impl.kv_cache.allocate import allocate_kv_caches
from reference_impl.kv_cache.bind import bind_kv_caches, clear_kv_caches
from reference_impl.kv_cache.spec import FullAttentionSpec
from reference_impl.layers.attention import Attention
from reference_impl.layers.base import AttentionLayerBase
from reference_impl.registry import get_layers

ADAPTER = "harness.adapters.reference"
Caches = Mapping[str, torch.Tensor]


def allocation_is(change: Callable[[torch.Tensor, dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> list[Patch]:
    """Change the views that allocation cut from its buffer."""

    def allocate(*arguments: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        buffer, views = allocate_kv_caches(*arguments)
        return buffer, change(buffer, views)

    return [patch(f"{ADAPTER}.allocate_kv_caches", allocate)]


def _own_layers(config: ForwardConfig) -> dict[str, AttentionLayerBase]:
    layers = get_layers(config, AttentionLayerBase)
    return {name: layer for name, layer in layers.items() if layer.get_kv_cache_spec() is not None}


@fault("unbound_layer_fails_by_name", "BND-1")
def unbound_cache_is_not_noticed() -> Iterable[Patch]:
    """A step with no cache bound fails somewhere inside the backend, in words that name no layer."""
    return [patch("reference_impl.ops._check_bound", lambda layer_name, kv_cache: None)]


@fault("unbound_layer_fails_by_name", "BND-1")
def placeholder_is_not_empty() -> Iterable[Patch]:
    """A layer is built with a cache of one block, so that a step runs before anything is bound."""
    build = Attention.__init__

    def init(layer: Attention, *arguments: Any, **options: Any) -> None:
        build(layer, *arguments, **options)
        layer.kv_cache = torch.zeros(1, 2, layer.block_size, layer.num_kv_heads, layer.head_size, dtype=layer.dtype)

    return [patch.object(Attention, "__init__", init)]


@fault("caches_have_the_size_of_their_spec_and_do_not_overlap", "BND-2")
def two_layers_have_the_same_bytes() -> Iterable[Patch]:
    """Every layer is given the view that was cut for the first one."""
    return allocation_is(lambda buffer, views: dict.fromkeys(views, next(iter(views.values()))))


@fault("caches_have_the_size_of_their_spec_and_do_not_overlap", "BND-2")
def caches_overlap_by_one_block() -> Iterable[Patch]:
    """The last block of a layer is the first one of the next."""

    def overlap(buffer: torch.Tensor, views: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        flat = buffer.view(next(iter(views.values())).dtype)
        return {
            name: flat[index * (view.numel() - view[0].numel()) :][: view.numel()].view(view.shape)
            for index, (name, view) in enumerate(views.items())
        }

    return allocation_is(overlap)


@fault("caches_have_the_size_of_their_spec_and_do_not_overlap", "BND-2")
def one_block_too_few() -> Iterable[Patch]:
    """A cache has no room for its last block, as if the null block took none."""
    return allocation_is(lambda buffer, views: {name: view[:-1] for name, view in views.items()})


@fault("caches_have_the_size_of_their_spec_and_do_not_overlap", "BND-2")
def page_size_of_keys_alone() -> Iterable[Patch]:
    """The spec's page size counts K and forgets V."""
    own: Any = vars(FullAttentionSpec)["page_size_bytes"]

    # Memory for V is found behind all the same, or the view could not be cut: only what the spec says is wrong.
    def allocate(specs: Mapping[str, Any], *rest: Any) -> Any:
        with patch.object(FullAttentionSpec, "page_size_bytes", own):
            return allocate_kv_caches(specs, *rest)

    return [
        patch.object(FullAttentionSpec, "page_size_bytes", property(lambda spec: own.fget(spec) // 2)),
        patch(f"{ADAPTER}.allocate_kv_caches", allocate),
    ]


@fault("binding_keeps_its_address", "BND-3")
def cache_moves_in_every_step() -> Iterable[Patch]:
    """A layer replaces its cache by a copy in every call, as an update without mutation would."""
    forward = Attention.forward

    def move(layer: Attention, *arguments: Any) -> torch.Tensor:
        layer.kv_cache = layer.kv_cache.clone()
        return forward(layer, *arguments)

    return [patch.object(Attention, "forward", move)]


@fault("second_binding_is_refused", "BND-3")
def second_binding_replaces_the_first() -> Iterable[Patch]:
    """Binding again replaces the caches silently, while a captured graph still has the old address."""

    def bind(config: ForwardConfig, kv_caches: Caches) -> None:
        clear_kv_caches(config)
        bind_kv_caches(config, kv_caches)

    return [patch(f"{ADAPTER}.bind_kv_caches", bind)]


@fault("second_binding_is_refused", "BND-3")
def second_binding_is_ignored() -> Iterable[Patch]:
    """Binding again does nothing, and says nothing."""

    def bind(config: ForwardConfig, kv_caches: Caches) -> None:
        if not any(layer.kv_cache.numel() for layer in _own_layers(config).values()):
            bind_kv_caches(config, kv_caches)

    return [patch(f"{ADAPTER}.bind_kv_caches", bind)]


@fault("binding_is_by_name", "BND-4")
def bound_by_position() -> Iterable[Patch]:
    """Caches are bound in the order in which they come."""

    def bind(config: ForwardConfig, kv_caches: Caches) -> None:
        bind_kv_caches(config, dict(zip(_own_layers(config), kv_caches.values(), strict=True)))

    return [patch(f"{ADAPTER}.bind_kv_caches", bind)]


@fault("binding_is_by_name", "BND-4")
def bound_by_sorted_name() -> Iterable[Patch]:
    """Layers are sorted by name and caches are not."""

    def bind(config: ForwardConfig, kv_caches: Caches) -> None:
        bind_kv_caches(config, dict(zip(sorted(_own_layers(config)), kv_caches.values(), strict=True)))

    return [patch(f"{ADAPTER}.bind_kv_caches", bind)]


@fault("bind_kv_cache_may_be_overridden", "BND-5")
def cache_assigned_past_the_layer() -> Iterable[Patch]:
    """The caches are assigned to the layers from outside, past their bind_kv_cache."""

    def bind(config: ForwardConfig, kv_caches: Caches) -> None:
        with patch.object(AttentionLayerBase, "bind_kv_cache", _assign):
            for layer in get_layers(config, AttentionLayerBase).values():
                vars(layer).pop("bind_kv_cache", None)
            bind_kv_caches(config, kv_caches)

    return [patch(f"{ADAPTER}.bind_kv_caches", bind)]


def _assign(layer: AttentionLayerBase, kv_cache: torch.Tensor) -> None:
    layer.kv_cache = kv_cache


@fault("cache_for_an_unknown_layer_is_refused", "BND-6")
def cache_for_an_unknown_layer_is_ignored() -> Iterable[Patch]:
    """A cache with a name that no layer has is left aside."""

    def bind(config: ForwardConfig, kv_caches: Caches) -> None:
        known = get_layers(config, AttentionLayerBase)
        bind_kv_caches(config, {name: cache for name, cache in kv_caches.items() if name in known})

    return [patch(f"{ADAPTER}.bind_kv_caches", bind)]


@fault("layer_without_a_cache_is_refused", "BND-6")
def layer_without_a_cache_is_forgotten() -> Iterable[Patch]:
    """A layer that is given no cache keeps its placeholder until a step fails."""

    def bind(config: ForwardConfig, kv_caches: Caches) -> None:
        for name, kv_cache in kv_caches.items():
            get_layers(config, AttentionLayerBase)[name].bind_kv_cache(kv_cache)

    return [patch(f"{ADAPTER}.bind_kv_caches", bind)]
