"""OPS: custom ops and order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from harness.bits import as_bits, same_bits
from harness.checks.base import BASE_CASE, Kind, Scene, check, must_raise, require, same_views
from harness.contract import Phase, Surface
from harness.run import Observation
from harness.verdict import Violation

UPDATE, ATTEND = "unified_kv_cache_update", "unified_attention_with_output"


@check(Kind.SURFACE, "OPS-1")
def ops_have_the_schema(surface: Surface) -> None:
    """The update op returns a tensor; the attention op returns nothing and mutates only output."""
    update, attend = surface.op(UPDATE)._schema, surface.op(ATTEND)._schema
    got = [argument.name for argument in update.arguments]
    require(got[:3] == ["key", "value", "layer_name"], f"{UPDATE} takes {got}, but should take key, value, layer_name")
    require(
        [str(r.type) for r in update.returns] == ["Tensor"],
        f"{UPDATE} returns {[str(r.type) for r in update.returns]}, but should return one Tensor",
    )
    got = [argument.name for argument in attend.arguments]
    want = ["query", "key", "value", "output", "layer_name"]
    require(got[:5] == want, f"{ATTEND} takes {got}, but should begin with {want}")
    mutated = {argument.name for argument in update.arguments if argument.alias_info and argument.alias_info.is_write}
    require(not mutated, f"{UPDATE} declares that it mutates {sorted(mutated)}, but its inputs must not change")
    require("kv_cache_dummy_dep" in got, f"{ATTEND} has no argument kv_cache_dummy_dep")
    require(not attend.returns, f"{ATTEND} returns {len(attend.returns)} values, but should return none")
    mutated = {argument.name for argument in attend.arguments if argument.alias_info and argument.alias_info.is_write}
    require("output" in mutated, f"{ATTEND} declares that it mutates {sorted(mutated)}, but should declare output")
    require(
        not mutated & {"query", "key", "value", "kv_cache_dummy_dep"},
        f"{ATTEND} declares that it mutates {sorted(mutated)}, but its inputs must not change",
    )


@check(Kind.SURFACE, "OPS-1")
def ops_pass_opcheck(surface: Surface) -> None:
    """torch.library.opcheck passes for both ops, and the update op returns an empty tensor."""
    scene = Scene(surface)
    query, key, value = scene.tensors()
    name = surface.encode_layer_name(scene.names[0])
    utilities = ("test_schema", "test_faketensor")
    with scene.context():
        update = (UPDATE, (key, value, name))
        attend = (ATTEND, (query, key, value, torch.zeros_like(query), name))
        if surface.forward_includes_kv_cache_update(scene.layers[0]):
            # The update op is not for this backend: it may only be called without slots.
            with scene.context(slot_mapping=None):
                dummy = surface.op(UPDATE)(key, value, name)
            calls: tuple[tuple[str, tuple[Any, ...]], ...] = (attend,)
        else:
            dummy = surface.op(UPDATE)(key, value, name)
            calls = (update, attend)
        require(
            isinstance(dummy, torch.Tensor) and dummy.numel() == 0,
            f"{UPDATE} returned {dummy!r:.80}, but should return an empty tensor",
        )
        for op, arguments in calls:
            try:
                torch.library.opcheck(surface.op(op), arguments, test_utils=utilities)
            except Exception as error:
                raise Violation(
                    f"torch.library.opcheck of {op} failed: {type(error).__name__}: {error!s:.300}"
                ) from error


@check(Kind.SURFACE, "OPS-2")
def layer_without_key_and_value_only_reads(surface: Surface) -> None:
    """Key and value None: nothing is written, and attention reads the cache as it is."""
    scene = Scene(surface)
    want = scene.run()[0]
    written = scene.views()
    with scene.context():
        query = scene.tensors()[0]
        got = surface.call(scene.layers[0], query, None, None)[: want.shape[0]]
    require(same_views(scene.views(), written), "a call without key and value wrote the cache")
    require(same_bits(got, want), "a call without key and value gives another output than the cache that it reads")


@contextmanager
def _no_compile_caches() -> Iterator[None]:
    # The caches on disk ignore a changed registration of an op: what they give is not to be believed.
    name = "TORCHINDUCTOR_FORCE_DISABLE_CACHES"
    before = os.environ.get(name)
    os.environ[name] = "1"
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@check(Kind.SURFACE, "OPS-3")
def write_happens_before_read_when_compiled(surface: Surface) -> None:
    """Under aot_eager the cache is written, and before it is read: outputs and cache bytes equal those of eager."""
    case = replace(BASE_CASE, kv_sharing=(-1, 0))
    eager, compiled = Scene(surface, case), Scene(surface, case)
    want, want_views = eager.run(), eager.views()
    surface_call = surface.call

    def model(tensors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        return [surface_call(layer, *given) for layer, given in zip(compiled.layers, tensors, strict=True)]

    with _no_compile_caches():
        function = torch.compile(model, backend="aot_eager")
        tensors = [compiled.tensors(0, layer) for layer in range(case.num_layers)]
        with compiled.context():
            got = [output[: want[0].shape[0]] for output in function(tensors)]
    require(same_views(compiled.views(), want_views), "compiled with aot_eager, the cache differs from that of eager")
    for layer, (a, b) in enumerate(zip(got, want, strict=True)):
        require(
            torch.allclose(a, b, rtol=1e-5, atol=1e-5),
            f"compiled with aot_eager, the output differs from eager's by {(a - b).abs().max():.3g}",
            layer_name=compiled.names[layer],
        )


@check(Kind.SURFACE, "OPS-4")
def missing_cache_update_is_refused(surface: Surface) -> None:
    """Flag False without do_kv_cache_update: AssertionError at STEP, if not refused earlier."""
    try:
        config = surface.new_config(BASE_CASE.model_spec(), backend="no_update")
        surface.build_layer(config, BASE_CASE.layer_specs()[0])
    except AssertionError as error:
        require(
            "does not support kv cache update" in str(error), f"BUILD: refused with {error!s:.200}, but should say why"
        )
        return
    scene = Scene(surface, backend="no_update")
    try:
        scene.run()
    except AssertionError as error:
        require(
            "does not support kv cache update" in str(error),
            f"STEP: raised {error!s:.200}, but should say: {{Impl}} does not support kv cache update",
        )
        return
    raise Violation("STEP: a backend without do_kv_cache_update raised nothing, but should raise AssertionError")


@check(Kind.SURFACE, "OPS-4", strict=True)
def missing_cache_update_is_refused_at_build(surface: Surface) -> None:
    """Flag False without do_kv_cache_update is refused at BUILD."""
    config = surface.new_config(BASE_CASE.model_spec(), backend="no_update")
    must_raise(
        lambda: surface.build_layer(config, BASE_CASE.layer_specs()[0]),
        "a layer whose backend has no do_kv_cache_update",
        Phase.BUILD,
        AssertionError,
        names=("does not support kv cache update",),
    )


@check(Kind.SURFACE, "OPS-5")
def backend_that_never_writes_is_seen_in_the_cache(surface: Surface) -> None:
    """Flag left at True by a backend that does not write: nothing raises, and the cache shows it."""
    scene = Scene(surface, backend="writes_never")
    before = scene.views()
    scene.run()
    require(
        same_views(scene.views(), before),
        "a backend that never writes has written the cache: somebody else writes for it",
    )


@check(Kind.SURFACE, "OPS-6")
def direct_calls_give_the_same_results(surface: Surface) -> None:
    """Without opaque ops the functions are called directly, with the same outputs and cache."""
    case = replace(BASE_CASE, kv_sharing=(-1, 0))
    through_ops, direct = Scene(surface, case), Scene(surface, case, opaque=False)
    for number in range(2):
        want, got = through_ops.run(number), direct.run(number)
        require(
            all(map(same_bits, got, want)), "called directly, the output differs from that through the ops", step=number
        )
        require(same_views(direct.views(), through_ops.views()), "called directly, the cache differs", step=number)


@check(Kind.CASE, "OPS-7")
def inputs_are_unchanged(observation: Observation) -> None:
    """Query, key and value are unchanged after a step, bit for bit."""
    for number, step in enumerate(observation.steps):
        for layer, record in enumerate(step.layers):
            if record.inputs_changed:
                raise Violation(
                    f"{' and '.join(record.inputs_changed)} changed by the call, but should be left as given",
                    step=number,
                    layer_name=observation.case.layer_name(layer),
                )


def _tensors(value: Any, path: str, found: dict[str, torch.Tensor], depth: int = 0) -> None:
    if isinstance(value, torch.Tensor):
        found[path] = value
    elif isinstance(value, int):
        found[path] = torch.tensor(value)
    elif depth < 5 and isinstance(value, dict):
        for key, item in value.items():
            _tensors(item, f"{path}[{key!r}]", found, depth + 1)
    elif depth < 5 and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _tensors(item, f"{path}[{index}]", found, depth + 1)
    elif depth < 5 and is_dataclass(value):
        for field in fields(value):
            _tensors(getattr(value, field.name, None), f"{path}.{field.name}", found, depth + 1)


@check(Kind.SURFACE, "OPS-7")
def metadata_and_slots_are_unchanged(surface: Surface) -> None:
    """Metadata and slot mapping are unchanged after a step, bit for bit."""
    scene = Scene(surface, replace(BASE_CASE, kv_sharing=(-1, 0)))
    for number in range(2):
        metadata, slots = scene.metadata(number), scene.slots(number)
        found: dict[str, torch.Tensor] = {}
        _tensors(metadata, "attn_metadata", found)
        _tensors(slots, "slot_mapping", found)
        before = {path: as_bits(tensor).clone() for path, tensor in found.items()}
        scene.run(number, attn_metadata=metadata, slot_mapping=slots)
        after: dict[str, torch.Tensor] = {}
        _tensors(metadata, "attn_metadata", after)
        _tensors(slots, "slot_mapping", after)
        # What a backend adds for itself is no change of what was given.
        for path, bits in before.items():
            require(
                path in after and torch.equal(as_bits(after[path]), bits),
                f"{path} changed in the step, but should be left as given",
                step=number,
            )
