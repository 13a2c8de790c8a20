"""What a clause, check or fault means, in words."""

from __future__ import annotations

from harness.checks import CHECKS
from harness.clauses import CLAUSES
from harness.load import BUILTIN

REFERENCE = {
    "REG": "reference_impl/registry.py and layers/attention.py (step 1)",
    "KVS": "reference_impl/registry.py: check_kv_sharing_target (step 1)",
    "BND": "reference_impl/kv_cache/: spec.py, allocate.py, bind.py (step 2)",
    "CTX": "reference_impl/context.py (steps 3 and 5)",
    "OPS": "reference_impl/ops.py and layers/attention.py (steps 4 and 6)",
    "ATT": "reference_impl/backends/: eager.py, triton/",
    "WRT": "reference_impl/backends/: eager.py: write_kv_cache, triton/kernels.py: write_kv_cache_kernel",
    "INV": "reference_impl/backends/",
    "ERR": "reference_impl/context.py: override_forward_context",
}
"""Clause family to the place in the reference that keeps it."""

KNOWN_BUGS = {
    "duplicate_prefix_is_refused": ("vllm-project/vllm-ascend#4603: sub-layers built with an empty prefix collide",),
    "binding_is_by_name": (
        "vllm-project/tpu-inference#3512: caches listed by type were taken for a list by layer number",
        "vllm-project/vllm-ascend#11470: of two layers with one index only the first got its cache",
    ),
    "sharing_layer_aliases_its_target": ("ovg-project/kvcached#417: every layer was thought to own a KV tensor",),
    "context_has_all_fields": (
        "vllm-project/vllm-ascend#1554: some runners never set the plugin's own fields of the context",
        "vllm-project/vllm-ascend#6509: a field was set in one mode and read in another",
    ),
    "write_happens_before_read_when_compiled": (
        "vllm-project/vllm#33945: a fused replacement dropped the dummy dependency, and the cache write was deleted",
    ),
    "metadata_and_slots_are_unchanged": (
        "vllm-project/vllm#27650: a builder edited query_start_loc in place, and the next group saw it",
    ),
    "output_matches_dense": (
        "vllm-project/vllm#23424: more than 16 query heads to a KV head gave tiles of zero rows",
        "pytorch/pytorch#159247: the tail of the last block was not masked",
        "vllm-project/vllm-ascend#6558: the result was returned, but not written to the output",
        "vllm-project/vllm#47671: block number times stride overflowed 32 bits",
    ),
    "output_ignores_block_names": (
        "vllm-project/vllm-gaudi#1546: rows 0 to n-1 were read instead of the listed blocks",
    ),
    "output_ignores_other_requests": ("flashinfer-ai/flashinfer#942: entries of a page outside the request were read",),
    "output_ignores_request_order": ("vllm-project/vllm#14253: a mixed batch was split in the wrong place",),
    "output_ignores_unused_cache": (
        "vllm-project/vllm#47305: the tail of the last partial block was loaded and masked only in the scores",
        "vllm-project/vllm#42494: block ids behind the end of a sequence were read",
    ),
    "other_slots_untouched": (
        "vllm-project/vllm#43810: slot -1 was used as an index from the end",
        "tenstorrent/vllm-tt-plugin#103: the stale tail of a block-table row let another request be overwritten",
    ),
    "null_block_is_never_written": ("vllm-project/vllm#43810: rows of padding were written to a real slot",),
    "written_slots_hold_kv": (
        "vllm-project/vllm#54338: bits of one dtype were stored as another",
        "huggingface/text-generation-inference#2711: the next slots were taken to be consecutive",
    ),
    "inputs_are_unchanged": ("vllm-project/vllm#48003: a shared buffer was changed in place",),
}
"""Check to real bugs that it catches, in our own words."""


def explain(name: str) -> list[str] | None:
    """Return the lines that explain `name`; None when nothing has this name."""
    from harness.faults import FAULTS

    if name in CLAUSES:
        clause = CLAUSES[name]
        checks = [check for check in CHECKS.values() if name in check.clauses]
        return [
            f"{clause.id} ({clause.level.value})",
            clause.sentence,
            "",
            f"reference: {REFERENCE.get(name.split('-')[0], 'not yet in the reference')}",
            *([f"checks: {', '.join(check.name for check in checks)}"] if checks else ["checks: none yet"]),
            *(line for check in checks for line in _bugs(check.name)),
        ]
    if name in CHECKS:
        check = CHECKS[name]
        faults = [fault.name for fault in FAULTS.values() if fault.check == name]
        return [
            f"{check.name} ({', '.join(check.clauses)}, {check.level.value}; on {_KINDS[check.kind.value]})",
            check.sentence,
            "",
            *(f"{clause}: {CLAUSES[clause].sentence}" for clause in check.clauses),
            f"reference: {REFERENCE[check.clauses[0].split('-')[0]]}",
            f"faults that it catches: {', '.join(faults)}",
            *_bugs(name),
        ]
    if name in FAULTS:
        fault = FAULTS[name]
        return [f"{fault.name} ({fault.clause})", fault.sentence, "", f"caught by: {fault.check}", *_bugs(fault.check)]
    return None


_KINDS = {
    "case": "the observation of one case",
    "relation": "a case that is run again, changed in a way that must not matter",
    "surface": "registry, binding, context and ops",
}


def _bugs(check: str) -> list[str]:
    return [f"real bug: {bug}" for bug in KNOWN_BUGS.get(check, ())]


def rows(what: str) -> list[tuple[str, ...]]:
    """Return the rows of a list."""
    from harness.faults import FAULTS

    if what == "checks":
        return [(c.name, ", ".join(c.clauses), c.level.value, c.sentence) for c in CHECKS.values()]
    if what == "clauses":
        return [(c.id, c.level.value, c.sentence) for c in CLAUSES.values()]
    if what == "faults":
        return [(f.name, f.clause, f.check, f.sentence) for f in FAULTS.values()]
    return [(name, path) for name, path in BUILTIN.items()]
