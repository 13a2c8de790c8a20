"""Faults of REG: registration."""

# The docstring of a fault says what it does; a broken function has the signature of the right one.

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import reference_impl.registry
from harness.faults.base import Patch, fault
from reference_impl.backends.base import AttentionBackend
from reference_impl.config import ForwardConfig, get_current_config
from reference_impl.layers.attention import Attention

ATTENTION = "reference_impl.layers.attention"


def check_prefix_is(function: Callable[[ForwardConfig, str], None]) -> list[Patch]:
    """Replace the rule for names, in both modules that call it."""
    return [
        patch.object(reference_impl.registry, "check_prefix", function),
        patch(f"{ATTENTION}.check_prefix", function),
    ]


@fault("layer_is_found_under_its_prefix", "REG-1")
def registered_under_a_short_name() -> Iterable[Patch]:
    """The registry's key is the prefix without its last part."""

    def register(config: ForwardConfig, prefix: str, layer: Any) -> None:
        config.static_forward_context[prefix.rpartition(".")[0]] = layer

    return [patch(f"{ATTENTION}.register_layer", register)]


@fault("layer_is_found_under_its_prefix", "REG-1")
def impl_registered_instead_of_the_layer() -> Iterable[Patch]:
    """The registry holds the layer's impl, not the layer itself."""

    def register(config: ForwardConfig, prefix: str, layer: Any) -> None:
        config.static_forward_context[prefix] = layer.impl

    return [patch(f"{ATTENTION}.register_layer", register)]


@fault("duplicate_prefix_is_refused", "REG-2")
def second_layer_replaces_the_first() -> Iterable[Patch]:
    """A second layer with a prefix that is taken replaces the first one."""
    return check_prefix_is(lambda config, prefix: None)


@fault("duplicate_prefix_is_refused", "REG-2")
def second_layer_replaces_the_first_and_is_refused() -> Iterable[Patch]:
    """A second layer with a prefix that is taken is refused, but only after it has replaced the first one."""
    check_prefix = reference_impl.registry.check_prefix

    def register(config: ForwardConfig, prefix: str, layer: Any) -> None:
        taken = prefix in config.static_forward_context
        config.static_forward_context[prefix] = layer
        if taken:
            check_prefix(config, prefix)

    return [patch(f"{ATTENTION}.register_layer", register), patch(f"{ATTENTION}.check_prefix", lambda *_: None)]


@fault("get_layers_filters_and_keeps_the_order", "REG-3")
def layers_sorted_by_name() -> Iterable[Patch]:
    """get_layers sorts by name instead of keeping the order of registration."""
    get_layers = reference_impl.registry.get_layers

    def sort(*arguments: Any) -> dict[str, Any]:
        return dict(sorted(get_layers(*arguments).items()))

    return [patch("harness.adapters.reference.get_layers", sort)]


@fault("get_layers_filters_and_keeps_the_order", "REG-3")
def layers_of_any_type() -> Iterable[Patch]:
    """get_layers ignores the type that is asked for."""
    get_layers = reference_impl.registry.get_layers
    return [patch("harness.adapters.reference.get_layers", lambda config, _, names: get_layers(config, object, names))]


@fault("get_layers_filters_and_keeps_the_order", "REG-3")
def names_ignored() -> Iterable[Patch]:
    """get_layers ignores the names that are asked for."""
    get_layers = reference_impl.registry.get_layers
    return [patch("harness.adapters.reference.get_layers", lambda config, kind, _: get_layers(config, kind))]


@fault("refused_layer_leaves_no_trace", "REG-4")
def registered_before_it_is_checked() -> Iterable[Patch]:
    """A layer registers first and is checked afterwards, so that a refused one stays."""
    check_supported = Attention._check_supported

    def register_and_check(layer: Attention) -> None:
        get_current_config().static_forward_context[layer.layer_name] = layer
        check_supported(layer)

    return [
        patch.object(Attention, "_check_supported", register_and_check),
        patch(f"{ATTENTION}.register_layer", lambda *_: None),
    ]


@fault("layer_without_a_config_is_refused", "REG-5")
def default_config_made_up() -> Iterable[Patch]:
    """A layer that is built with no config current gets a new one, which nobody else knows."""
    return [patch(f"{ATTENTION}.get_current_config", ForwardConfig)]


@fault("empty_prefix_is_refused", "REG-6")
def empty_prefix_accepted() -> Iterable[Patch]:
    """A layer registers under the empty name."""
    check_prefix = reference_impl.registry.check_prefix
    return check_prefix_is(lambda config, prefix: check_prefix(config, prefix) if prefix else None)


@fault("indivisible_heads_are_refused", "REG-7")
def indivisible_heads_accepted() -> Iterable[Patch]:
    """Nothing is checked when a layer is built."""
    return [patch.object(Attention, "_check_supported", lambda layer: None)]


@fault("undeclared_feature_is_refused", "REG-7")
def head_size_not_checked() -> Iterable[Patch]:
    """The backend says that it supports any head size, also those that it cannot run."""
    return [patch.object(AttentionBackend, "supports_head_size", lambda head_size: True)]


@fault("undeclared_feature_is_refused", "REG-7")
def head_size_refused_without_a_reason() -> Iterable[Patch]:
    """A head size that is not supported is refused, but the message does not say what is wrong."""
    check_supported = Attention._check_supported

    def refuse(layer: Attention) -> None:
        try:
            check_supported(layer)
        except ValueError as error:
            raise type(error)("this layer is not supported") from None

    return [patch.object(Attention, "_check_supported", refuse)]
