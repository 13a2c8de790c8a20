"""CTX: the forward context."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from harness.bits import same_bits
from harness.checks.base import BASE_CASE, Kind, Scene, check, must_raise, require, same_views
from harness.contract import Phase, Surface, Unsupported

NOT_SET = "Forward context is not set. Please use `set_forward_context` to set the forward context."
FIELDS = (
    "no_compile_layers",
    "attn_metadata",
    "slot_mapping",
    "dp_metadata",
    "cudagraph_runtime_mode",
    "batch_descriptor",
    "ubatch_slices",
    "skip_compiled",
    "is_padding",
    "additional_kwargs",
)


class _InjectedError(Exception):
    """What the checks themselves raise inside a context."""


def _require_none_set(surface: Surface, what: str) -> None:
    must_raise(surface.get_forward_context, f"get_forward_context {what}", Phase.STEP, AssertionError, NOT_SET)


def _is_current(surface: Surface, context: object) -> bool:
    try:
        return surface.get_forward_context() is context
    except AssertionError:
        return False


@contextmanager
def _clean(surface: Surface) -> Iterator[None]:
    """Whatever a check finds, do not let it leak into the next one."""
    with surface.override_forward_context(None):
        yield


@contextmanager
def _new_memory_holds_nan() -> Iterator[None]:
    """Let torch fill what it allocates, so that an output which is not written shows, whatever the memory held."""
    deterministic: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_deterministic_debug_mode("warn")
        deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before[0])
            deterministic.fill_uninitialized_memory = before[1]


@check(Kind.SURFACE, "CTX-1")
def reading_outside_a_context_is_refused(surface: Surface) -> None:
    """get_forward_context outside a context raises, and so does a layer."""
    with _clean(surface):
        _require_none_set(surface, "outside a context")
        scene = Scene(surface)
        must_raise(
            lambda: surface.call(scene.layers[0], *scene.tensors()),
            "a layer called outside a context",
            Phase.STEP,
            AssertionError,
            NOT_SET,
        )


@check(Kind.SURFACE, "CTX-2")
def previous_context_is_restored(surface: Surface) -> None:
    """The previous context is restored on normal exit, on any exception, and when nested; None hides it."""
    config = surface.new_config(BASE_CASE.model_spec())
    with _clean(surface):
        with surface.set_forward_context(config, {}):
            outer = surface.get_forward_context()
            with surface.set_forward_context(config, {}):
                require(surface.get_forward_context() is not outer, "the inner context is the outer one")
            require(_is_current(surface, outer), "after a nested context the outer one is not restored")
            for error in (_InjectedError, KeyboardInterrupt, GeneratorExit):
                try:
                    with surface.set_forward_context(config, {}):
                        raise error
                except error:
                    pass
                require(_is_current(surface, outer), f"after {error.__name__} the outer context is not restored")
            with surface.override_forward_context(None):
                _require_none_set(surface, "under override_forward_context(None)")
            require(_is_current(surface, outer), "after override_forward_context the outer one is not restored")
        _require_none_set(surface, "after the outermost context")


@check(Kind.SURFACE, "CTX-3")
def context_hands_out_the_objects_themselves(surface: Surface) -> None:
    """no_compile_layers is the registry itself; metadata and slot dicts are the objects passed in."""
    scene = Scene(surface)
    metadata, slots = scene.metadata(), scene.slots()
    with _clean(surface), scene.context(attn_metadata=metadata, slot_mapping=slots):
        context = surface.get_forward_context()
        require(
            context.no_compile_layers is surface.registry(scene.config), "no_compile_layers is not the registry itself"
        )
        require(context.attn_metadata is metadata, "attn_metadata is not the object that was passed")
        require(context.slot_mapping is slots, "slot_mapping is not the object that was passed")


@check(Kind.SURFACE, "CTX-4")
def metadata_is_found_in_every_form(surface: Surface) -> None:
    """A dict gives its entry; a list the first dict's; anything else is used as it is; a missing layer is named."""
    scene = Scene(surface, replace(BASE_CASE, kv_sharing=(-1, -1)))
    with _clean(surface):
        want = scene.run()
        metadata = scene.metadata()
        for what, form in (
            ("a list of dicts", [metadata, {}]),
            ("a single object", metadata[scene.names[0]]),
        ):
            got = scene.run(attn_metadata=form)
            require(
                all(map(same_bits, got, want)), f"with attn_metadata as {what} the output differs from that with a dict"
            )
        missing = {scene.names[0]: metadata[scene.names[0]]}
        must_raise(
            lambda: scene.run(attn_metadata=missing),
            "a step with no metadata for a layer",
            Phase.STEP,
            KeyError,
            names=(scene.names[1],),
        )


@check(Kind.SURFACE, "CTX-5")
def slot_mapping_must_be_a_dict(surface: Surface) -> None:
    """A slot mapping that is not a dict inside the op raises."""
    scene = Scene(surface)
    slots = scene.slots()
    with _clean(surface):
        must_raise(
            lambda: scene.run(slot_mapping=[slots]),
            "a step with a list as slot_mapping",
            Phase.STEP,
            AssertionError,
            "Expected slot_mapping to be a dict, got ",
        )


@check(Kind.SURFACE, "CTX-6")
def without_slots_nothing_is_written(surface: Surface) -> None:
    """Slot mapping None, empty, or without the layer: nothing is written, attention still runs."""
    scene = Scene(surface)
    with _clean(surface):
        want = scene.run()
        written = scene.views()
        other = {"model.layers.9.self_attn.attn": next(iter(scene.slots().values()))}
        for what, slots in (("None", None), ("empty", {}), ("without the layer", other)):
            got = scene.run(slot_mapping=slots)
            require(same_views(scene.views(), written), f"with slot_mapping {what} the cache was written")
            require(
                all(map(same_bits, got, want)), f"with slot_mapping {what} the output is not that of the cache as it is"
            )
        surface.kv_cache(scene.layers[0]).zero_()
        blank = scene.views()
        for what, slots in (("None", None), ("empty", {}), ("without the layer", other)):
            scene.run(slot_mapping=slots)
            require(same_views(scene.views(), blank), f"with slot_mapping {what} the cache was written")


@check(Kind.SURFACE, "CTX-7")
def profiling_run_does_not_crash_and_still_writes(surface: Surface) -> None:
    """Metadata None: no crash, and the cache is still written when slots are given."""
    scene = Scene(surface)
    with _clean(surface):
        scene.run()
        want = scene.views()
        surface.kv_cache(scene.layers[0]).zero_()
        blank = scene.views()
        scene.run(attn_metadata=None, slot_mapping=None)
        require(same_views(scene.views(), blank), "a profiling run without slots wrote the cache")
        scene.run(attn_metadata=None)
        require(same_views(scene.views(), want), "a profiling run with slots did not write the cache as a step does")


@check(Kind.SURFACE, "CTX-7", strict=True)
def profiling_run_gives_zeros(surface: Surface) -> None:
    """Metadata None: the output is zeros."""
    scene = Scene(surface)
    with _clean(surface), _new_memory_holds_nan():
        output = scene.run(attn_metadata=None)[0]
        require(not output.any(), f"output in a profiling run has {int((output != 0).sum())} values that are not 0")


@check(Kind.SURFACE, "CTX-8")
def context_has_all_fields(surface: Surface) -> None:
    """The context has every field of the contract, and the values that were given."""
    config = surface.new_config(BASE_CASE.model_spec())
    padding = torch.tensor([False, True])
    with _clean(surface):
        with surface.set_forward_context(config, {}):
            context = surface.get_forward_context()
            missing = [name for name in FIELDS if not hasattr(context, name)]
            require(not missing, f"the forward context has no field {', '.join(missing)}")
            require(
                context.cudagraph_runtime_mode == surface.runtime_modes["NONE"], "the default runtime mode is not NONE"
            )
            require(context.batch_descriptor is None, "there is a batch_descriptor although the mode is NONE")
        for mode in ("PIECEWISE", "FULL"):
            with surface.set_forward_context(
                config,
                {},
                num_tokens=2,
                cudagraph_runtime_mode=surface.runtime_modes[mode],
                skip_compiled=True,
                is_padding=padding,
            ):
                context = surface.get_forward_context()
                got = context.cudagraph_runtime_mode
                require(got == surface.runtime_modes[mode], f"cudagraph_runtime_mode={got}, but should be {mode}")
                tokens = getattr(context.batch_descriptor, "num_tokens", None)
                require(tokens == 2, f"batch_descriptor.num_tokens={tokens} in mode {mode}, but should be 2")
                require(context.skip_compiled is True, f"skip_compiled={context.skip_compiled}, but should be True")
                require(context.is_padding is padding, "is_padding is not the tensor that was passed")
                descriptor = context.batch_descriptor
            slices = object()
            with surface.set_forward_context(
                config, {}, num_tokens=7, batch_descriptor=descriptor, ubatch_slices=slices
            ):
                context = surface.get_forward_context()
                require(context.batch_descriptor is descriptor, "batch_descriptor is not the one that was passed")
                require(context.ubatch_slices is slices, "ubatch_slices is not the object that was passed")
                with surface.set_forward_context(config, {}):
                    shared = surface.get_forward_context().additional_kwargs is context.additional_kwargs
                require(
                    not shared, "two contexts have the same additional_kwargs: what one is given leaks into the other"
                )


@check(Kind.SURFACE, "CTX-8")
def invalid_runtime_mode_is_refused(surface: Surface) -> None:
    """A mode that no step can run in raises, and the context is unchanged."""
    config = surface.new_config(BASE_CASE.model_spec())

    def enter(mode: Any) -> None:
        with surface.set_forward_context(config, {}, cudagraph_runtime_mode=mode, num_tokens=1):
            pass

    with _clean(surface), surface.set_forward_context(config, {}):
        outer = surface.get_forward_context()
        invalid = [name for name in surface.runtime_modes if name not in ("NONE", "PIECEWISE", "FULL")]
        for name in invalid:
            must_raise(
                lambda name=name: enter(surface.runtime_modes[name]),  # type: ignore[misc]
                f"runtime mode {name}",
                Phase.STEP,
                AssertionError,
                "Invalid cudagraph runtime mode: ",
            )
            require(_is_current(surface, outer), f"after the refused mode {name} the context has changed")


@check(Kind.SURFACE, "CTX-9")
def context_left_out_of_order_is_reported(surface: Surface) -> None:
    """A context left before one that was entered later is reported, and does not leak."""
    config = surface.new_config(BASE_CASE.model_spec())
    with _clean(surface):
        first, second = (surface.set_forward_context(config, {}) for _ in range(2))
        first.__enter__()
        second.__enter__()
        reported = False
        for manager in (first, second):
            try:
                manager.__exit__(None, None, None)
            except Exception:
                reported = True
        leaked = True
        try:
            surface.get_forward_context()
        except AssertionError:
            leaked = False
        require(not leaked, "a context that was left out of order is still set after all were left")
        require(reported, "leaving contexts out of order raised nothing, but should be reported")


@check(Kind.SURFACE, "CTX-9")
def threads_have_contexts_of_their_own(surface: Surface) -> None:
    """A thread never reads the context of another."""
    config = surface.new_config(BASE_CASE.model_spec())
    seen: list[object] = []

    def read() -> None:
        try:
            seen.append(surface.get_forward_context())
        except AssertionError:
            seen.append(None)

    with _clean(surface), surface.set_forward_context(config, {}):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    if not seen:
        raise Unsupported("the reading thread died")
    require(seen == [None], "another thread reads the context that this one has set")


@check(Kind.SURFACE, "CTX-9")
def suspended_generator_does_not_leak_its_context(surface: Surface) -> None:
    """A generator that is suspended inside a context and closed later is reported or harmless."""
    config = surface.new_config(BASE_CASE.model_spec())

    def inside() -> Generator[None, None, None]:
        with surface.set_forward_context(config, {}):
            yield

    with _clean(surface):
        generator = inside()
        next(generator)
        with surface.set_forward_context(config, {}):
            mine = surface.get_forward_context()
            must_raise(generator.close, "closing a generator inside a later context", Phase.STEP, Exception)
            require(_is_current(surface, mine), "closing a generator took away the context of its caller")
        _require_none_set(surface, "after a generator inside a context was closed")


@check(Kind.SURFACE, "CTX-13")
def lookup_is_by_name(surface: Surface) -> None:
    """A model called twice in one context, or in another order, gets the same entries."""
    scene = Scene(surface, replace(BASE_CASE, kv_sharing=(-1, -1, -1)))
    with _clean(surface):
        scene.run(0)
        # A decode, so that a layer that is mistaken for another one reads a history that is not its own.
        want = scene.run(1)
        actual = scene.step(1).num_actual_tokens
        with scene.context(1):
            for order in ((0, 1, 2), (2, 0, 1), (1, 1, 0)):
                for layer in order:
                    got = surface.call(scene.layers[layer], *scene.tensors(1, layer))[:actual]
                    require(
                        same_bits(got, want[layer]),
                        f"called in the order {order} in one context, the output differs from that of the first pass",
                        layer_name=scene.names[layer],
                    )
