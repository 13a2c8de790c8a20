"""REG: registration."""

from __future__ import annotations

from harness.checks.base import BASE_CASE, Kind, check, layer_spec, must_raise, require
from harness.contract import Phase, Surface, Unsupported


@check(Kind.SURFACE, "REG-1")
def layer_is_found_under_its_prefix(surface: Surface) -> None:
    """A layer built with a prefix is in static_forward_context under it, as that very object."""
    config = surface.new_config(BASE_CASE.model_spec())
    layers = {index: surface.build_layer(config, layer_spec(index)) for index in (0, 1)}
    for index, layer in layers.items():
        name = BASE_CASE.layer_name(index)
        got = surface.registry(config).get(name)
        require(got is layer, f"static_forward_context[{name!r}] is {got!r:.80}, but should be the layer built with it")


@check(Kind.SURFACE, "REG-2")
def duplicate_prefix_is_refused(surface: Surface) -> None:
    """A second layer with the same prefix raises, and the first object stays."""
    config = surface.new_config(BASE_CASE.model_spec())
    first = surface.build_layer(config, layer_spec(0))
    name = BASE_CASE.layer_name(0)
    must_raise(
        lambda: surface.build_layer(config, layer_spec(0)),
        f"a second layer {name}",
        Phase.BUILD,
        ValueError,
        f"Duplicate layer name: {name}",
    )
    require(
        surface.registry(config).get(name) is first, f"static_forward_context[{name!r}] is no longer the first layer"
    )


@check(Kind.SURFACE, "REG-3")
def get_layers_filters_and_keeps_the_order(surface: Surface) -> None:
    """Layers are found by type and by name, in the order in which they registered."""
    config = surface.new_config(BASE_CASE.model_spec())
    order = (2, 0, 1)
    for index in order:
        surface.build_layer(config, layer_spec(index))
    surface.registry(config)["model.something.7"] = surface.not_a_layer
    names = [BASE_CASE.layer_name(index) for index in order]
    got = list(surface.get_layers(config))
    require(got == names, f"get_layers={got}, but should be {names}")
    got = list(surface.get_layers(config, [names[2], names[0]]))
    require(set(got) == {names[0], names[2]}, f"get_layers with two names={got}, but should be {[names[0], names[2]]}")


@check(Kind.SURFACE, "REG-4")
def refused_layer_leaves_no_trace(surface: Surface) -> None:
    """A construction that raises leaves the registry as it was."""
    config = surface.new_config(BASE_CASE.model_spec())
    surface.build_layer(config, layer_spec(0))
    before = dict(surface.registry(config))
    for spec, what in (
        (layer_spec(1, target=1), "its KV-sharing target"),
        (layer_spec(1, num_kv_heads=3), "its number of KV heads"),
        (layer_spec(0), "its name"),
    ):
        try:
            surface.build_layer(config, spec)
        except Exception:
            after = surface.registry(config)
            extra = [name for name in after if after[name] is not before.get(name)]
            require(
                after == before,
                f"BUILD: a layer refused for {what} stays in static_forward_context: {extra}, but should not",
            )


@check(Kind.SURFACE, "REG-5")
def layer_without_a_config_is_refused(surface: Surface) -> None:
    """Building a layer with no current config raises and says how to set one."""
    must_raise(
        lambda: surface.build_layer_without_config(layer_spec(0)),
        "a layer built with no current config",
        Phase.BUILD,
        (AssertionError, ValueError, RuntimeError),
        names=("config",),
    )


@check(Kind.SURFACE, "REG-6")
def empty_prefix_is_refused(surface: Surface) -> None:
    """An empty prefix is refused."""
    config = surface.new_config(BASE_CASE.model_spec())
    must_raise(
        lambda: surface.build_layer(config, layer_spec(0, layer_name="")),
        "a layer with an empty prefix",
        Phase.BUILD,
        (ValueError, AssertionError),
    )


@check(Kind.SURFACE, "REG-7")
def indivisible_heads_are_refused(surface: Surface) -> None:
    """num_heads not divisible by num_kv_heads is refused at BUILD."""
    config = surface.new_config(BASE_CASE.model_spec())
    must_raise(
        lambda: surface.build_layer(config, layer_spec(0, num_heads=4, num_kv_heads=3)),
        "a layer with 4 heads and 3 KV heads",
        Phase.BUILD,
        (ValueError, AssertionError, NotImplementedError),
    )


@check(Kind.SURFACE, "REG-7")
def undeclared_feature_is_refused(surface: Surface) -> None:
    """A head size that the backend does not declare is refused at BUILD with the reason."""
    undeclared = getattr(surface, "undeclared_head_size", 0)
    if undeclared is None:
        raise Unsupported("every head size is declared")
    config = surface.new_config(BASE_CASE.model_spec())
    must_raise(
        lambda: surface.build_layer(config, layer_spec(0, head_size=undeclared)),
        f"a layer with head_size {undeclared}",
        Phase.BUILD,
        (ValueError, AssertionError, NotImplementedError),
        names=("head_size",),
    )
