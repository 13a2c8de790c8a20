"""Overhead of the forward context and of the attention ops, the reference beside the real vLLM, in one process.

The kernels do nothing, so that only what the contract itself costs is timed. The two take turns, and the ratio is that
of medians: it holds on a noisy machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from harness.adapters.reference import ReferenceSurface, eager
from harness.adapters.vllm import vllm
from harness.case import Case
from harness.checks.base import Scene
from reference_impl.backends.eager import EagerBackend, EagerImpl

NUM_LAYERS = 32
ROUNDS = 60
CASE = Case(steps=((1,),), kv_sharing=(-1,) * NUM_LAYERS, num_heads=8, num_kv_heads=2, head_size=64)


def nothing(*arguments: Any, **options: Any) -> None:
    """Stand in for a kernel."""


class NothingImpl(EagerImpl):
    """An implementation whose kernels do nothing."""

    forward = nothing
    do_kv_cache_update = nothing


class NothingBackend(EagerBackend):
    """A backend with a separate cache write, as vLLM's CPU backend is."""

    forward_includes_kv_cache_update: ClassVar[bool] = False

    @staticmethod
    def get_impl_cls() -> type[EagerImpl]:
        """Return the class whose kernels do nothing."""
        return NothingImpl


class NothingSurface(ReferenceSurface):
    """The reference's surface with that backend."""

    def __init__(self) -> None:
        super().__init__(eager)
        make = self.new_config

        def new_config(*arguments: Any, **options: Any) -> Any:
            config = make(*arguments, **options)
            config.backend = "__main__:NothingBackend"
            return config

        self.new_config = new_config


def seconds(function: Callable[[], None], repeats: int) -> float:
    """Return seconds of one call."""
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - begin) / repeats


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    scenes = {"reference": Scene(NothingSurface(), CASE), "vllm": Scene(vllm.surface(), CASE)}
    for layer in scenes["vllm"].layers:
        layer.impl.forward = nothing
        layer.impl.do_kv_cache_update = nothing
    tasks: dict[str, dict[str, Callable[[], None]]] = {"set_forward_context": {}, "layer call": {}, "whole step": {}}
    managers = []
    for name, scene in scenes.items():
        metadata, slots, tensors = scene.metadata(), scene.slots(), scene.tensors()
        flat = [tensor.flatten(1) for tensor in tensors]

        def enter(scene: Scene = scene, metadata: Any = metadata, slots: Any = slots) -> None:
            with scene.context(attn_metadata=metadata, slot_mapping=slots):
                pass

        def step(scene: Scene = scene, metadata: Any = metadata, slots: Any = slots, flat: Any = flat) -> None:
            with scene.context(attn_metadata=metadata, slot_mapping=slots):
                for layer in scene.layers:
                    layer(*flat)

        def call(layer: Any = scene.layers[0], flat: Any = flat, scene: Scene = scene) -> None:
            layer(*flat)

        tasks["set_forward_context"][name] = enter
        tasks["whole step"][name] = step
        tasks["layer call"][name] = call
        managers.append((name, scene, metadata, slots))
    print(f"{'what':<22}{'reference us':>14}{'vllm us':>14}{'ratio':>8}")
    for what, repeats in (("set_forward_context", 200), ("layer call", 200), ("whole step", 10)):
        times: dict[str, list[float]] = {name: [] for name in scenes}
        for _ in range(ROUNDS):
            for name, scene, metadata, slots in managers:
                if what == "layer call":
                    with scene.context(attn_metadata=metadata, slot_mapping=slots):
                        times[name].append(seconds(tasks[what][name], repeats))
                else:
                    times[name].append(seconds(tasks[what][name], repeats))
        ours, theirs = (1e6 * statistics.median(times[name]) for name in ("reference", "vllm"))
        print(f"{what:<22}{ours:>14.2f}{theirs:>14.2f}{ours / theirs:>8.2f}")
    print(f"{NUM_LAYERS} layers in a step; medians of {ROUNDS} rounds, in turn; kernels do nothing")


if __name__ == "__main__":
    main()
