"""Faults of OPS: custom ops and order."""

# The docstring of a fault says what it does.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.library import infer_schema

from harness.adapters.reference import ReferenceSurface
from harness.faults.base import Patch, fault
from harness.faults.registration import ATTENTION
from reference_impl import ops
from reference_impl.backends.eager import EagerImpl, write_kv_cache
from reference_impl.context import get_attention_context, get_forward_context
from reference_impl.layers.attention import Attention

UPDATE, ATTEND = "unified_kv_cache_update", "unified_attention_with_output"


@contextmanager
def op_is(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any] | None) -> Iterator[None]:
    """Show another op of this name on the surface; `NAME` in the schema is the type of a layer name."""
    # The type of a name depends on the version of torch, and only `infer_schema` writes it as `define` reads it.
    inferred = infer_schema(ops.unified_kv_cache_update, mutates_args=())
    layer_name_type = inferred.partition(" layer_name")[0].rpartition(", ")[2]
    own = ReferenceSurface.op
    with torch.library._scoped_library("proptable_faults", "FRAGMENT") as library:
        library.define(name + schema.replace("NAME", layer_name_type))
        for key in ("CPU", "CUDA"):
            library.impl(name, function, dispatch_key=key)
        if fake is not None:
            library._register_fake(name, fake)
        replacement = getattr(torch.ops.proptable_faults, name).default
        with patch.object(
            ReferenceSurface, "op", lambda surface, asked: replacement if asked == name else own(surface, asked)
        ):
            yield


def _attend_and_return(
    query: Any, key: Any, value: Any, output: Any, name: Any, kv_cache_dummy_dep: Any = None
) -> torch.Tensor:
    result = torch.empty_like(query)
    ops.unified_attention_with_output(query, key, value, result, name)
    return result


@fault("ops_have_the_schema", "OPS-1")
def attention_op_returns_its_output() -> Iterable[Patch]:
    """The attention op returns a new tensor instead of mutating output."""
    schema = (
        "(Tensor query, Tensor? key, Tensor? value, Tensor output, NAME layer_name, Tensor? kv_cache_dummy_dep=None)"
        " -> Tensor"
    )
    return [op_is(ATTEND, schema, _attend_and_return, lambda query, *_: torch.empty_like(query))]


@fault("ops_have_the_schema", "OPS-1")
def attention_op_takes_no_dependency() -> Iterable[Patch]:
    """The attention op has no argument for the dummy dependency, so that nothing orders it after the write."""
    schema = "(Tensor query, Tensor? key, Tensor? value, Tensor(a!) output, NAME layer_name) -> ()"
    return [op_is(ATTEND, schema, ops.unified_attention_with_output, lambda *_: None)]


@fault("ops_have_the_schema", "OPS-1")
def update_op_returns_nothing() -> Iterable[Patch]:
    """The update op returns nothing that the attention op could depend on."""

    def update(key: Any, value: Any, layer_name: Any) -> None:
        ops.unified_kv_cache_update(key, value, layer_name)

    return [op_is(UPDATE, "(Tensor key, Tensor value, NAME layer_name) -> ()", update, lambda *_: None)]


ATTEND_SCHEMA = (
    "(Tensor query, Tensor? key, Tensor? value, Tensor(a!) output, NAME layer_name, Tensor? kv_cache_dummy_dep=None)"
    " -> ()"
)


@fault("ops_pass_opcheck", "OPS-1")
def attention_op_scales_its_query() -> Iterable[Patch]:
    """The attention op scales the query in place, which its schema does not say."""

    def attend(query: torch.Tensor, *rest: Any, **options: Any) -> None:
        ops.unified_attention_with_output(query, *rest, **options)
        query.mul_(2)

    return [op_is(ATTEND, ATTEND_SCHEMA, attend, lambda *_, **__: None)]


@fault("ops_pass_opcheck", "OPS-1")
def update_op_returns_the_key() -> Iterable[Patch]:
    """The update op returns its key instead of an empty tensor."""

    def update(key: torch.Tensor, value: torch.Tensor, layer_name: Any) -> torch.Tensor:
        ops.unified_kv_cache_update(key, value, layer_name)
        return key.clone()

    schema = "(Tensor key, Tensor value, NAME layer_name) -> Tensor"
    return [op_is(UPDATE, schema, update, lambda key, *_: torch.empty_like(key))]


@fault("ops_pass_opcheck", "OPS-1", backend="triton")
def update_op_fake_is_wrong() -> Iterable[Patch]:
    """The update op's fake says that it returns one element, but it returns none."""
    schema = "(Tensor key, Tensor value, NAME layer_name) -> Tensor"
    return [op_is(UPDATE, schema, ops.unified_kv_cache_update, lambda key, *_: key.new_empty(1))]


@fault("ops_pass_opcheck", "OPS-1", backend="triton")
def update_op_has_no_fake() -> Iterable[Patch]:
    """The update op has no fake, so that it cannot be traced."""
    schema = "(Tensor key, Tensor value, NAME layer_name) -> Tensor"
    return [op_is(UPDATE, schema, ops.unified_kv_cache_update, None)]


@fault("layer_without_key_and_value_only_reads", "OPS-2")
def no_key_means_zeros() -> Iterable[Patch]:
    """A call without key and value gives zeros instead of what the cache holds."""
    forward: Any = EagerImpl.forward

    def attend(impl: EagerImpl, layer: Any, query: Any, key: Any, *rest: Any) -> None:
        forward(impl, layer, query, key, *rest)
        if key is None:
            rest[-1].zero_()

    return [patch.object(EagerImpl, "forward", attend)]


@fault("layer_without_key_and_value_only_reads", "OPS-2")
def no_key_is_written_as_zeros() -> Iterable[Patch]:
    """A call without key and value writes zeros into the step's slots, after it has attended."""
    forward: Any = EagerImpl.forward

    def attend(impl: EagerImpl, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, *rest: Any) -> None:
        forward(impl, layer, query, key, value, kv_cache, *rest)
        slots = rest[1]
        if key is None and slots is not None:
            zeros = query.new_zeros(query.shape[0], impl.num_kv_heads, impl.head_size)
            write_kv_cache(zeros, zeros, kv_cache, slots)

    return [patch.object(EagerImpl, "forward", attend)]


@fault("write_happens_before_read_when_compiled", "OPS-3", backend="triton")
def dummy_dependency_dropped() -> Iterable[Patch]:
    """What the update op returns is not passed to the attention op, so that the compiler may drop the write."""
    forward = Attention.forward

    def attend(layer: Attention, query: Any, key: Any, value: Any) -> torch.Tensor:
        if key is not None and layer.kv_sharing_target_layer_name is None:
            shape = (-1, layer.num_kv_heads, layer.head_size)
            name = ops.encode_layer_name(layer.layer_name)
            torch.ops.proptable.unified_kv_cache_update(key.view(shape), value.view(shape), name)
        return forward(layer, query, None, None)

    return [patch.object(Attention, "forward", attend)]


@fault("write_happens_before_read_when_compiled", "OPS-3", backend="triton")
def write_after_read() -> Iterable[Patch]:
    """The attention op runs first, and the update op depends on nothing."""
    forward = Attention.forward

    def attend(layer: Attention, query: Any, key: Any, value: Any) -> torch.Tensor:
        output = forward(layer, query, None, None)
        if torch.compiler.is_compiling() and layer.kv_sharing_target_layer_name is None:
            shape = (-1, layer.num_kv_heads, layer.head_size)
            name = ops.encode_layer_name(layer.layer_name)
            dummy = torch.ops.proptable.unified_kv_cache_update(key.view(shape), value.view(shape), name)
            return torch.cat([output.flatten(), dummy.flatten()]).view_as(output)
        return output if torch.compiler.is_compiling() else forward(layer, query, key, value)

    return [patch.object(Attention, "forward", attend)]


@fault("missing_cache_update_is_refused", "OPS-4")
def missing_cache_update_is_skipped() -> Iterable[Patch]:
    """A backend that has no cache update is built, and its steps write nothing."""

    def update(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        pass

    return [patch.object(EagerImpl, "do_kv_cache_update", update, create=True)]


@fault("missing_cache_update_is_refused_at_build", "OPS-4")
def missing_cache_update_found_in_a_step() -> Iterable[Patch]:
    """A backend that has no cache update is refused only when a step needs it."""

    def has(thing: object, name: str) -> bool:
        return name == "do_kv_cache_update" or hasattr(thing, name)

    return [patch(f"{ATTENTION}.hasattr", has, create=True)]


@fault("backend_that_never_writes_is_seen_in_the_cache", "OPS-5")
def layer_writes_for_its_backend() -> Iterable[Patch]:
    """The layer writes the cache itself, whatever its backend says."""
    forward = Attention.forward

    def write(layer: Attention, query: Any, key: Any, value: Any) -> torch.Tensor:
        _, _, kv_cache, slots = get_attention_context(layer.layer_name)
        if key is not None and slots is not None and layer.kv_sharing_target_layer_name is None and kv_cache.numel():
            shape = (-1, layer.num_kv_heads, layer.head_size)
            write_kv_cache(key.view(shape), value.view(shape), kv_cache, slots)
        return forward(layer, query, key, value)

    return [patch.object(Attention, "forward", write)]


@fault("direct_calls_give_the_same_results", "OPS-6")
def direct_call_does_not_write() -> Iterable[Patch]:
    """The function that is called directly attends and writes nothing."""

    def attend(*arguments: Any, **options: Any) -> None:
        with patch.object(get_forward_context(), "slot_mapping", {}):
            attend_with_output(*arguments, **options)

    attend_with_output = ops.unified_attention_with_output
    return [patch.object(ops, ATTEND, attend)]


@fault("direct_calls_give_the_same_results", "OPS-6")
def direct_call_ignores_sharing() -> Iterable[Patch]:
    """Called directly, a sharing layer writes its keys and values into its target's cache."""
    own: Any = vars(Attention)["impl_writes_kv_cache"]
    writes = property(lambda layer: layer.use_direct_call or own.fget(layer))
    return [patch.object(Attention, "impl_writes_kv_cache", writes)]


@fault("inputs_are_unchanged", "OPS-7")
def query_scaled_in_place() -> Iterable[Patch]:
    """The query is multiplied by the scale in place."""
    attend = EagerImpl._attend

    def scale(impl: EagerImpl, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        result = attend(impl, query, *rest)
        query.mul_(impl.scale)
        return result

    return [patch.object(EagerImpl, "_attend", scale)]


@fault("inputs_are_unchanged", "OPS-7")
def padding_of_keys_zeroed() -> Iterable[Patch]:
    """The rows of padding in the key are zeroed in place."""

    def write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        key[slot_mapping == -1] = 0
        write_kv_cache(key, value, kv_cache, slot_mapping)

    return [patch("reference_impl.backends.eager.write_kv_cache", write)]


@fault("metadata_and_slots_are_unchanged", "OPS-7")
def slots_clamped_in_place() -> Iterable[Patch]:
    """The slot mapping's -1 become 0 in the caller's tensor, after the write."""

    def write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        write_kv_cache(key, value, kv_cache, slot_mapping)
        slot_mapping.clamp_(min=0)

    return [patch("reference_impl.backends.eager.write_kv_cache", write)]


@fault("metadata_and_slots_are_unchanged", "OPS-7")
def table_tail_cleared_in_place() -> Iterable[Patch]:
    """What lies behind a request's last block is set to 0 in the caller's block table."""
    gather = EagerImpl._gather

    def clear(kv_cache: torch.Tensor, block_row: torch.Tensor, seq_len: int) -> Any:
        result = gather(kv_cache, block_row, seq_len)
        block_row[-(-seq_len // kv_cache.shape[2]) :] = 0
        return result

    return [patch.object(EagerImpl, "_gather", staticmethod(clear))]


@fault("metadata_and_slots_are_unchanged", "OPS-7")
def lengths_counted_in_place() -> Iterable[Patch]:
    """The last layer adds the step's tokens to the metadata's lengths, for a next step that never comes."""
    forward: Any = EagerImpl.forward

    def count(impl: EagerImpl, layer: Any, *arguments: Any) -> None:
        forward(impl, layer, *arguments)
        metadata = arguments[4]
        if metadata is not None and layer.layer_name == next(reversed(get_forward_context().no_compile_layers)):
            metadata.seq_lens[:] = [seq_len + 1 for seq_len in metadata.seq_lens]

    return [patch.object(EagerImpl, "forward", count)]
