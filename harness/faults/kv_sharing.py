"""Faults of KVS: KV sharing. Those of the cache's bytes are in `writes`."""

# The docstring of a fault says what it does.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

from harness.faults.base import Patch, fault
from harness.faults.registration import ATTENTION
from reference_impl.config import ForwardConfig
from reference_impl.errors import KVSharingTargetError
from reference_impl.kv_cache.spec import FullAttentionSpec
from reference_impl.layers.attention import Attention
from reference_impl.registry import check_kv_sharing_target


def without_rule(*words: str) -> list[Patch]:
    """Accept the targets that are refused with one of these words."""

    def check(config: ForwardConfig, layer: Attention, prefix: str, target_name: str) -> None:
        try:
            check_kv_sharing_target(config, layer, prefix, target_name)
        except KVSharingTargetError as error:
            if not any(word in str(error) for word in words):
                raise

    return [patch(f"{ATTENTION}.check_kv_sharing_target", check)]


@fault("target_itself_is_refused", "KVS-1")
def target_itself_accepted() -> Iterable[Patch]:
    """A layer may name itself as its target, and then has no cache at all."""
    return without_rule("cannot be the same as the current layer")


@fault("later_target_is_refused", "KVS-2")
def later_target_accepted() -> Iterable[Patch]:
    """A layer may share with one that is built after it."""
    return without_rule("must come before the current layer")


@fault("later_target_is_refused", "KVS-2")
def later_target_called_invalid() -> Iterable[Patch]:
    """A target that comes later is refused in the words for one that does not exist."""

    def check(config: ForwardConfig, layer: Attention, prefix: str, target_name: str) -> None:
        with patch("reference_impl.registry.extract_layer_index", side_effect=(1, 0)):
            check_kv_sharing_target(config, layer, prefix, target_name)

    return [patch(f"{ATTENTION}.check_kv_sharing_target", check)]


@fault("unknown_target_is_refused", "KVS-3")
def unknown_target_accepted() -> Iterable[Patch]:
    """A target that no layer has as its name is accepted, and is missed only when the caches are bound."""
    return without_rule("is not a valid Attention layer in the model")


@fault("target_of_another_type_is_refused", "KVS-4")
def target_of_another_type_accepted() -> Iterable[Patch]:
    """The attention type of the target is not compared."""
    return without_rule("must be the same type as the current layer")


@fault("target_that_is_no_attention_layer_is_refused", "KVS-4")
def target_that_is_no_attention_layer_trips() -> Iterable[Patch]:
    """The target's attention type is read before it is known to have one, which gives an AttributeError."""

    def check(config: ForwardConfig, layer: Attention, prefix: str, target_name: str) -> None:
        target: Any = config.static_forward_context.get(target_name)
        if target is None or target.attn_type == layer.attn_type:
            check_kv_sharing_target(config, layer, prefix, target_name)

    return [patch(f"{ATTENTION}.check_kv_sharing_target", check)]


@fault("sharing_layer_aliases_its_target", "KVS-6")
def sharing_layer_has_a_cache_of_its_own() -> Iterable[Patch]:
    """A sharing layer has a cache spec, so that memory is taken for it."""

    def spec(layer: Attention) -> FullAttentionSpec:
        return FullAttentionSpec(layer.block_size, layer.num_kv_heads, layer.head_size, layer.kv_cache_dtype)

    return [patch.object(Attention, "get_kv_cache_spec", spec)]


@fault("sharing_layer_aliases_its_target", "KVS-6")
def sharing_layer_gets_a_copy() -> Iterable[Patch]:
    """A sharing layer is bound to a copy of its target's cache."""
    bind_kv_cache = Attention.bind_kv_cache

    def bind(layer: Attention, kv_cache: Any) -> None:
        bind_kv_cache(layer, kv_cache if layer.kv_sharing_target_layer_name is None else kv_cache.clone())

    return [patch.object(Attention, "bind_kv_cache", bind)]


@fault("target_of_another_shape_is_refused", "KVS-7")
def target_of_another_shape_accepted() -> Iterable[Patch]:
    """The shapes of the two caches are not compared."""
    return without_rule("but the current layer has")


@fault("target_of_another_shape_is_refused", "KVS-7")
def target_with_other_kv_heads_accepted() -> Iterable[Patch]:
    """The head sizes of the two caches are compared, but not the numbers of KV heads."""
    return without_rule("has num_kv_heads")


@fault("target_that_shares_is_refused", "KVS-8")
def target_that_shares_accepted() -> Iterable[Patch]:
    """A layer may share with one that itself shares, and finds no group for its target later."""
    return without_rule("itself shares the cache of")
