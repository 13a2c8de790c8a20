"""BND: KV-cache binding."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from harness.checks.base import BASE_CASE, Kind, Scene, check, must_raise, require, same_views
from harness.contract import NULL_BLOCK_ID, Phase, Surface
from harness.run import Observation
from harness.verdict import Violation

TWO_LAYERS = replace(BASE_CASE, kv_sharing=(-1, -1))


@check(Kind.SURFACE, "BND-1")
def unbound_layer_fails_by_name(surface: Surface) -> None:
    """Before binding, kv_cache is an empty placeholder; a step that needs the cache fails, naming the layer."""
    scene = Scene(surface, bind=False)
    placeholder = surface.kv_cache(scene.layers[0])
    require(
        placeholder.numel() == 0, f"kv_cache before binding has shape {tuple(placeholder.shape)}, but should be empty"
    )
    must_raise(scene.run, "a step with no cache bound", Phase.STEP, Exception, names=(scene.names[0],))


@check(Kind.SURFACE, "BND-2")
def caches_have_the_size_of_their_spec_and_do_not_overlap(surface: Surface) -> None:
    """Sizes come from the specs, and live bytes of two layers never overlap."""
    scene = Scene(surface, replace(BASE_CASE, kv_sharing=(-1, -1, -1)))
    spans = []
    for name, layer in zip(scene.names, scene.layers, strict=True):
        cache = surface.kv_cache(layer)
        size = cache.numel() * cache.element_size()
        want = scene.plan.num_blocks * surface.page_size_bytes(scene.config, name)
        require(size == want, f"the cache of {name} has {size} bytes, but should have {want}")
        spans.append((cache.data_ptr(), cache.data_ptr() + size, name))
    spans.sort()
    for (_, end, first), (start, _, second) in pairwise(spans):
        require(end <= start, f"the caches of {first} and {second} overlap by {end - start} bytes")
    # What is written to one layer must not show in another.
    for index, name in enumerate(scene.names):
        before = [scene.views(other) for other in range(3)]
        surface.kv_cache(scene.layers[index]).fill_(1.0 + index)
        for other in range(3):
            changed = not same_views(before[other], scene.views(other))
            require(
                changed == (other == index),
                f"writing the cache of {name} and reading {scene.names[other]}: changed={changed}",
            )


@check(Kind.SURFACE, "BND-3")
def binding_keeps_its_address(surface: Surface) -> None:
    """Bound once: the same storage and address through any number of steps."""
    scene = Scene(surface, TWO_LAYERS)
    before = [(surface.kv_cache(layer).data_ptr(), surface.kv_cache(layer).shape) for layer in scene.layers]
    for number in (0, 1, 1):
        scene.run(number)
        after = [(surface.kv_cache(layer).data_ptr(), surface.kv_cache(layer).shape) for layer in scene.layers]
        require(after == before, f"kv_cache moved in step {number + 1}: {after}, but should be {before}", step=number)


@check(Kind.SURFACE, "BND-3", strict=True)
def second_binding_is_refused(surface: Surface) -> None:
    """A second binding is refused unless the caches were cleared."""
    scene = Scene(surface, TWO_LAYERS)
    again = surface.allocate(scene.config, scene.plan.num_blocks)
    must_raise(lambda: surface.bind(scene.config, again), "a second binding", Phase.BIND, Exception)
    surface.clear(scene.config)
    surface.bind(scene.config, again)


@check(Kind.SURFACE, "BND-4")
def binding_is_by_name(surface: Surface) -> None:
    """Caches are bound by layer name, never by position."""
    scene = Scene(surface, replace(BASE_CASE, kv_sharing=(-1, -1, -1)), bind=False)
    caches = surface.allocate(scene.config, scene.plan.num_blocks)
    shuffled = {name: caches[name] for name in (scene.names[2], scene.names[0], scene.names[1])}
    surface.bind(scene.config, shuffled)
    for name, layer in zip(scene.names, scene.layers, strict=True):
        got = surface.kv_cache(layer).data_ptr()
        require(
            got == caches[name].data_ptr(),
            f"{name} is bound to {got:#x}, but should be to {caches[name].data_ptr():#x}",
        )


@check(Kind.SURFACE, "BND-5")
def bind_kv_cache_may_be_overridden(surface: Surface) -> None:
    """Binding goes through the layer's own bind_kv_cache, so that a layer can split its page."""
    scene = Scene(surface, TWO_LAYERS, bind=False)
    seen: list[torch.Tensor] = []
    layer = scene.layers[1]
    layer.bind_kv_cache = seen.append
    caches = surface.allocate(scene.config, scene.plan.num_blocks)
    surface.bind(scene.config, caches)
    require(
        len(seen) == 1, f"bind_kv_cache of {scene.names[1]} was called {len(seen)} times, but should be called once"
    )
    require(seen[0].data_ptr() == caches[scene.names[1]].data_ptr(), "bind_kv_cache was given another layer's cache")


@check(Kind.SURFACE, "BND-6")
def cache_for_an_unknown_layer_is_refused(surface: Surface) -> None:
    """A cache for an unknown layer raises KeyError with the name."""
    scene = Scene(surface, TWO_LAYERS, bind=False)
    caches = surface.allocate(scene.config, scene.plan.num_blocks)
    unknown = "model.layers.9.self_attn.attn"
    caches[unknown] = caches[scene.names[0]]
    must_raise(
        lambda: surface.bind(scene.config, caches),
        "a cache for an unknown layer",
        Phase.BIND,
        KeyError,
        names=(unknown,),
    )


@check(Kind.SURFACE, "BND-6")
def layer_without_a_cache_is_refused(surface: Surface) -> None:
    """A layer that has a spec and gets no cache is refused at BIND."""
    scene = Scene(surface, TWO_LAYERS, bind=False)
    caches = surface.allocate(scene.config, scene.plan.num_blocks)
    del caches[scene.names[1]]
    must_raise(
        lambda: surface.bind(scene.config, caches),
        f"binding with no cache for {scene.names[1]}",
        Phase.BIND,
        Exception,
        names=(scene.names[1],),
    )


@check(Kind.CASE, "BND-7")
def null_block_is_never_written(observation: Observation) -> None:
    """Block 0 is the null block and slot -1 is no slot: no step writes there."""
    for number, step in enumerate(observation.steps):
        for layer, record in enumerate(step.layers):
            if record.cache_before is None or record.cache_after is None:
                continue
            before, after = (
                (views[0][NULL_BLOCK_ID], views[1][NULL_BLOCK_ID])
                for views in (record.cache_before, record.cache_after)
            )
            if not same_views(before, after):
                raise Violation(
                    "the null block (block 0) was written, but should never be",
                    step=number,
                    layer_name=observation.case.layer_name(layer),
                )
