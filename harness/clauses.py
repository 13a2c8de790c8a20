"""The clauses of the contract as data. Ids are stable and never renumbered."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """Who is judged by a clause."""

    MUST = "MUST"
    """Everyone."""
    DECLARED = "MUST, if declared"
    """Whoever declares the feature."""
    STRICT = "STRICT"
    """The reference; for others a deviation is advice."""
    DIALECT = "DIALECT"
    """Whoever declares this side of it."""
    GRADED = "graded"
    """The report says how far it goes."""


@dataclass(frozen=True)
class Clause:
    """One clause."""

    id: str
    level: Level
    sentence: str


_ROWS = (
    (
        "REG-1",
        "MUST",
        "A layer built with a prefix is found in `static_forward_context` under that prefix, as that very object.",
    ),
    (
        "REG-2",
        "MUST",
        "A second layer with the same prefix raises `ValueError: Duplicate layer name: {prefix}` at BUILD; the first object stays.",
    ),
    (
        "REG-3",
        "MUST",
        "Attention, MLA attention, the MoE runner, Mamba mixers and LoRA linears all register. `get_layers(type, names=None)` filters by type and keeps registration order.",
    ),
    (
        "REG-4",
        "STRICT",
        "A construction that raises leaves the registry as it was. (Observed: a layer refused for its KV-sharing target stays registered.)",
    ),
    ("REG-5", "MUST", "Building a layer with no current config raises and says how to set one."),
    ("REG-6", "STRICT", 'An empty prefix is refused. (Observed: accepted as the key "".)'),
    (
        "REG-7",
        "MUST",
        "`num_heads` not divisible by `num_kv_heads`, or a head size, dtype, block size or feature that the backend does not declare, is refused at BUILD with the reason.",
    ),
    ("KVS-1", "MUST", "target = itself: `cannot be the same as the current layer.`"),
    ("KVS-2", "MUST", "target not registered and its index is not smaller: `must come before the current layer.`"),
    (
        "KVS-3",
        "MUST",
        "target not registered although its index is smaller: `is not a valid Attention layer in the model.`",
    ),
    (
        "KVS-4",
        "MUST",
        "target of another attention type: `must be the same type as the current layer ({type}).`; a target that is no attention layer is refused with a clear error, not an AttributeError.",
    ),
    ("KVS-5", "MUST", "A sharing layer never writes the cache; it reads, in the same step, what its target wrote."),
    (
        "KVS-6",
        "MUST",
        "A sharing layer has no cache spec of its own, joins its target's group, and its `kv_cache` aliases its target's storage.",
    ),
    ("KVS-7", "STRICT", "Unequal head size, KV heads or cache dtype are refused. (Observed: accepted.)"),
    (
        "KVS-8",
        "STRICT",
        "A target that itself shares is refused at BUILD. (Observed: `KeyError` later, when groups are built.)",
    ),
    (
        "BND-1",
        "MUST",
        "Before binding, `kv_cache` is an empty placeholder; a step that needs the cache then fails, naming the layer.",
    ),
    (
        "BND-2",
        "MUST",
        "One backing buffer; each layer gets a view; live bytes of two layers in one group never overlap; sizes come from the specs (`page_size_bytes`).",
    ),
    (
        "BND-3",
        "MUST",
        "Bound once; the same storage and address for the life of the model, through any number of steps and replays. STRICT: a second binding is refused unless the caches were cleared.",
    ),
    ("BND-4", "MUST", "Bound by layer name, never by list position or call order."),
    (
        "BND-5",
        "MUST",
        "`bind_kv_cache` may be overridden: Mamba splits its raw page into conv and ssm state views that alias it.",
    ),
    (
        "BND-6",
        "MUST",
        "A cache for an unknown layer raises `KeyError` with the name; a layer that has a spec and gets no cache is refused at BIND.",
    ),
    ("BND-7", "MUST", "Block 0 is the null block; the pad slot is -1; slot = block_id * block_size + offset."),
    (
        "BND-8",
        "MUST",
        "Logical view `[num_blocks, block_size, num_kv_heads, head_size]` for K and V, in NHD or HND stride order, also non-contiguous. A layout is never guessed from a shape (num_kv_heads = 2, or block_size = num_kv_heads).",
    ),
    (
        "BND-9",
        "MUST",
        "Groups: full, sliding-window, chunked-local, MLA, Mamba, cross, encoder-only (no cache). Layers of one spec share a group; groups may overlay the same bytes with different block ids. A layer may choose a block size other than the configured one.",
    ),
    (
        "BND-10",
        "MUST",
        "ReplaySSM-style trackers: one shared set per cache group, bound in model-layer order; unequal capacity is refused.",
    ),
    ("BND-11", "MUST", "Clearing detaches every view, so that the buffer can be freed."),
    (
        "CTX-1",
        "MUST",
        "`get_forward_context()` outside: `AssertionError: Forward context is not set. Please use `set_forward_context` to set the forward context.`",
    ),
    (
        "CTX-2",
        "MUST",
        "The previous context is restored on normal exit, on any exception, and when nested; `override_forward_context(None)` hides and then restores.",
    ),
    (
        "CTX-3",
        "MUST",
        "`no_compile_layers` is the registry itself, not a copy; metadata and slot dicts are the objects passed in.",
    ),
    (
        "CTX-4",
        "MUST",
        "Metadata: a dict gives `[layer_name]`; a list of dicts gives `[0][layer_name]`; anything else is used as it is. A missing layer raises `KeyError` with its name.",
    ),
    (
        "CTX-5",
        "MUST",
        "`slot_mapping` that is not a dict inside the op: `AssertionError: Expected slot_mapping to be a dict, got {type}`.",
    ),
    ("CTX-6", "MUST", "Slot mapping None, empty, or without the layer: nothing is written, attention still runs."),
    (
        "CTX-7",
        "MUST",
        "Metadata None (profiling): no crash; STRICT: output zeros. The cache is still written when slots are given.",
    ),
    (
        "CTX-8",
        "MUST",
        "Fields: no_compile_layers, attn_metadata, slot_mapping, dp_metadata, cudagraph_runtime_mode, batch_descriptor, ubatch_slices, skip_compiled, is_padding, additional_kwargs. Runtime mode must be NONE, PIECEWISE or FULL, else `AssertionError: Invalid cudagraph runtime mode: {mode}` and the context is unchanged. A descriptor is made from num_tokens when the mode is not NONE.",
    ),
    (
        "CTX-9",
        "STRICT",
        "Contexts left out of order (threads, tasks, generators) are detected and reported; the context never leaks. (Observed: leaks, and threads read each other's.)",
    ),
    ("CTX-10", "MUST", "Data parallel: `num_tokens_across_dp[rank] == num_tokens`; asserted on entry."),
    (
        "CTX-11",
        "MUST",
        "Microbatches: each has its own context with its own metadata; results equal the unsplit batch.",
    ),
    (
        "CTX-12",
        "MUST",
        "Batch-size logging: with the interval >= 0 and metadata given, exit synchronizes the device and records (num_tokens, ms); with it < 0 there is no synchronize. FULL replays record nothing.",
    ),
    (
        "CTX-13",
        "MUST",
        "Look-up is by name: a model called twice in one context, or in another order, gets the same entries.",
    ),
    (
        "OPS-1",
        "MUST",
        "`unified_kv_cache_update(key, value, layer_name) -> Tensor` (empty) and `unified_attention_with_output(query, key, value, output, layer_name, ..., kv_cache_dummy_dep=None) -> ()`, mutating `output`; registered once, at import, with fakes; `torch.library.opcheck` passes.",
    ),
    (
        "OPS-2",
        "MUST",
        "The update op runs only if the backend's `forward_includes_kv_cache_update` is False, the layer shares no cache, and key and value are given. The base default is True.",
    ),
    (
        "OPS-3",
        "MUST",
        "The write happens before the read of the same step, in eager, `aot_eager` and inductor; removing the dummy dependency must be caught.",
    ),
    (
        "OPS-4",
        "MUST",
        "Flag False without `do_kv_cache_update`: `AssertionError: {Impl} does not support kv cache update` at STEP. STRICT: refused at BUILD.",
    ),
    (
        "OPS-5",
        "MUST",
        "Flag left at True by a backend that does not write: nothing raises, so only the cache checks can see it. They must.",
    ),
    ("OPS-6", "MUST", "Platforms without opaque ops call the functions directly, with the same results."),
    ("OPS-7", "MUST", "Inputs q, k, v, metadata and slots are unchanged after a step, bitwise."),
    (
        "ATT-1",
        "MUST",
        "Paged output equals dense float64 attention within the derived error bound, for any mix of prefill, chunked prefill and decode, GQA/MQA, any block table.",
    ),
    (
        "ATT-2..9",
        "MUST, if declared",
        "sliding window, logits soft cap, ALiBi, sinks, non-causal, encoder-only and cross attention, chunked local, head_size_v != head_size.",
    ),
    ("ATT-10", "MUST, if declared", "MLA (latent cache)."),
    (
        "ATT-11",
        "MUST, if declared",
        "fp8 (e4m3, e5m2) and int8 KV cache with k/v scales, judged against a quantised oracle; write and read agree on the format.",
    ),
    (
        "ATT-12",
        "MUST",
        "Exactly the visible tokens are attended: the visible set read out by exact probes equals the mask.",
    ),
    (
        "ATT-13",
        "MUST",
        "Zero-length requests and padded rows change no other row; an empty row gives zeros or is left alone (DIALECT).",
    ),
    (
        "ATT-14",
        "DIALECT",
        "window of W means W or W+1 keys; ALiBi with sinks is relative to the query or to the context; rounding of fp8 writes.",
    ),
    ("WRT-1", "MUST", "After a step, every slot in the mapping holds its k and v (cast to the cache dtype)."),
    (
        "WRT-2",
        "MUST",
        "Every other byte of every cache is unchanged; -1 writes nothing, also not in the last slot; padded rows write nothing.",
    ),
    ("WRT-3", "MUST", "Warm-up, dummy, profiling and capture runs change no byte of a live block."),
    ("INV-1", "MUST", "Renaming physical blocks changes nothing, bitwise."),
    (
        "INV-2",
        "MUST",
        "Reordering requests, or adding others to the batch, changes a request's output only within the bound; `batch_invariant` backends: not a bit.",
    ),
    ("INV-3", "MUST", "One prefill = chunks = token by token; split at any point."),
    ("INV-4", "MUST", "Two requests sharing prefix blocks = two that do not."),
    ("INV-5", "MUST", "Another block size or layout gives the same result within the bound."),
    (
        "INV-6",
        "MUST",
        "Adding c to all keys of a head (softmax shift), scaling V, V linear, window >= length = no window, GQA = repeated heads, uniform weights at q = 0.",
    ),
    (
        "INV-7",
        "graded",
        "Poison in what must not be read, graded: finite garbage in unused slots, blocks, table tails, padded rows, workspaces (MUST); NaN/Inf in other blocks (MUST); NaN in the tail of a live block or in pre-window tokens of a live block (graded, reported).",
    ),
    (
        "CMP-1",
        "MUST",
        "Under `torch.compile` each attention call is one opaque node; the graph splits at the ops named in `splitting_ops`; N layers give 2N+1 pieces.",
    ),
    (
        "CMP-2",
        "MUST",
        "With `LayerName` (opaque type, torch >= 2.11) the pieces of N equal layers share one compiled artifact; with plain strings they do not. Counted, not timed.",
    ),
    (
        "CMP-3",
        "MUST",
        "Compiled equals eager, outputs and cache bytes, for batch shapes not seen at compile time; no recompile for a new layer, step or batch.",
    ),
    ("GRA-1", "MUST", "FULL: a replay reads no forward context and runs no Python of the model."),
    (
        "GRA-2",
        "MUST",
        "Replay with new lengths, tables, slots and inputs equals eager, for sizes in any order, also after eager steps in between.",
    ),
    ("GRA-3", "MUST", "Captured tensors keep their addresses and stay alive."),
    (
        "GRA-4",
        "MUST",
        "PIECEWISE: pieces replay, attention runs eagerly with any batch shape, the context is read each step.",
    ),
    (
        "GRA-5",
        "MUST",
        "Dispatch: padded to the next capture size; no graph above the largest, before capture, or for a descriptor that does not fit; a prefill is never sent to a decode graph because of its shape alone.",
    ),
    ("GRA-6", "MUST", "Padded lanes: seq_len 0, slot -1; they write nothing and change no real row."),
    (
        "ERR-1",
        "MUST",
        "An exception in any layer leaves context, registry, bindings and the caches of other requests usable; the next step is right.",
    ),
    (
        "ERR-2",
        "STRICT",
        "Malformed metadata (wrong dtype or device, non-contiguous where that is not supported, lengths that disagree, block or slot out of range, duplicate slots in one step) is refused with an error that names the field, in debug mode at least, before any byte is written. (Observed on real backends: silent corruption and segmentation faults.)",
    ),
)


def _clauses() -> dict[str, Clause]:
    clauses = {}
    for clause_id, level, sentence in _ROWS:
        family, _, numbers = clause_id.partition("-")
        first, _, last = numbers.partition("..")
        for number in range(int(first), int(last or first) + 1):
            clauses[f"{family}-{number}"] = Clause(f"{family}-{number}", Level(level), sentence)
    return clauses


CLAUSES = _clauses()
"""Clause id to clause, in the order of the contract."""
