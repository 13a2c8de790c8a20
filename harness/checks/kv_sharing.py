"""KVS: KV sharing."""

from __future__ import annotations

from dataclasses import replace

from harness.checks.base import BASE_CASE, Kind, Scene, check, layer_spec, must_raise, require, same_views
from harness.contract import LayerSpec, ModelSpec, Phase, Surface
from harness.run import Observation
from harness.verdict import Violation


def _refuse(surface: Surface, spec: LayerSpec, ending: str, what: str, first: LayerSpec | None = None) -> None:
    config = surface.new_config(BASE_CASE.model_spec())
    surface.build_layer(config, first or layer_spec(0))
    target = spec.kv_sharing_target_layer_name
    beginning = f"Specified KV sharing target layer for {spec.layer_name} is not valid: target layer {target} "
    must_raise(lambda: surface.build_layer(config, spec), what, Phase.BUILD, ValueError, beginning + ending)


@check(Kind.SURFACE, "KVS-1")
def target_itself_is_refused(surface: Surface) -> None:
    """A layer cannot share its own cache."""
    _refuse(surface, layer_spec(1, target=1), "cannot be the same as the current layer.", "sharing with itself")


@check(Kind.SURFACE, "KVS-2")
def later_target_is_refused(surface: Surface) -> None:
    """A target that is not registered, and whose index is not smaller, must come before."""
    _refuse(surface, layer_spec(1, target=2), "must come before the current layer.", "sharing with a later layer")


@check(Kind.SURFACE, "KVS-3")
def unknown_target_is_refused(surface: Surface) -> None:
    """A target that is not registered although its index is smaller is not valid."""
    _refuse(
        surface,
        layer_spec(2, target="model.layers.1.self_attn.attn"),
        "is not a valid Attention layer in the model.",
        "sharing with a layer that does not exist",
    )


@check(Kind.SURFACE, "KVS-4")
def target_of_another_type_is_refused(surface: Surface) -> None:
    """A target of another attention type is refused, with the type."""
    config = surface.new_config(BASE_CASE.model_spec())
    layer = surface.build_layer(config, layer_spec(0))
    layer.attn_type = "encoder_only"
    spec = layer_spec(1, target=0)
    beginning = f"Specified KV sharing target layer for {spec.layer_name} is not valid: target layer "
    must_raise(
        lambda: surface.build_layer(config, spec),
        "sharing with a layer of another attention type",
        Phase.BUILD,
        ValueError,
        f"{beginning}{spec.kv_sharing_target_layer_name} must be the same type as the current layer (",
    )


@check(Kind.SURFACE, "KVS-4")
def target_that_is_no_attention_layer_is_refused(surface: Surface) -> None:
    """A target that is no attention layer is refused with a clear error, not an AttributeError."""
    config = surface.new_config(BASE_CASE.model_spec())
    target = BASE_CASE.layer_name(0)
    surface.registry(config)[target] = surface.not_a_layer
    must_raise(
        lambda: surface.build_layer(config, layer_spec(1, target=0)),
        "sharing with an object that is no attention layer",
        Phase.BUILD,
        ValueError,
        names=(target,),
    )


@check(Kind.CASE, "KVS-5")
def sharing_layer_writes_nothing(observation: Observation) -> None:
    """A sharing layer never writes the cache that it reads."""
    case = observation.case
    for number, step in enumerate(observation.steps):
        for layer, record in enumerate(step.layers):
            if case.kv_sharing[layer] == -1 or record.cache_before is None or record.cache_after is None:
                continue
            if not same_views(record.cache_before, record.cache_after):
                changed = (record.cache_before[0] != record.cache_after[0]) | (
                    record.cache_before[1] != record.cache_after[1]
                )
                where = changed.flatten(2).any(-1).nonzero()
                slot = (
                    ""
                    if len(where) == 0
                    else f", first in slot {int(where[0][0]) * case.block_size + int(where[0][1])}"
                )
                target = case.layer_name(case.kv_sharing[layer])
                raise Violation(
                    f"the cache of {target} was changed by the call of the sharing layer{slot}, but should not be",
                    step=number,
                    layer_name=case.layer_name(layer),
                )


@check(Kind.SURFACE, "KVS-6")
def sharing_layer_aliases_its_target(surface: Surface) -> None:
    """A sharing layer has no cache of its own, is in its target's group, and aliases its target's storage."""
    scene = Scene(surface, replace(BASE_CASE, kv_sharing=(-1, -1, 1)))
    sharing, target = scene.names[2], scene.names[1]
    require(
        not surface.needs_own_cache(scene.config, sharing), f"{sharing} has a cache spec, but shares {target}'s cache"
    )
    require(
        surface.group_of(scene.config, sharing) == surface.group_of(scene.config, target),
        f"{sharing} is not in the group of {target}",
    )
    got, want = (surface.kv_cache(scene.layers[index]) for index in (2, 1))
    require(
        got.data_ptr() == want.data_ptr() and got.shape == want.shape and got.stride() == want.stride(),
        f"kv_cache of {sharing} is at {got.data_ptr():#x}, but should be that of {target} at {want.data_ptr():#x}",
    )


@check(Kind.SURFACE, "KVS-7")
def target_of_another_shape_is_refused(surface: Surface) -> None:
    """Unequal head size or number of KV heads is refused."""
    for changes in ({"head_size": 64}, {"num_kv_heads": 4}):
        config = surface.new_config(ModelSpec(BASE_CASE.dtype, BASE_CASE.block_size))
        surface.build_layer(config, layer_spec(0, **changes))
        must_raise(
            lambda config=config: surface.build_layer(config, layer_spec(1, target=0)),  # type: ignore[misc]
            f"sharing with a layer of another {next(iter(changes))}",
            Phase.BUILD,
            ValueError,
        )


@check(Kind.SURFACE, "KVS-8")
def target_that_shares_is_refused(surface: Surface) -> None:
    """A target that itself shares is refused at BUILD."""
    config = surface.new_config(BASE_CASE.model_spec())
    surface.build_layer(config, layer_spec(0))
    surface.build_layer(config, layer_spec(1, target=0))
    must_raise(
        lambda: surface.build_layer(config, layer_spec(2, target=1)),
        "sharing with a layer that itself shares",
        Phase.BUILD,
        ValueError,
    )
