"""Judge the judge: every fault is seen by the check that it names, and every check sees a fault."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.adapters.reference import eager
from harness.case import Case
from harness.checks import CHECKS, Kind
from harness.clauses import CLAUSES
from harness.faults import FAULTS
from harness.run import SubjectError, run_case
from harness.verdict import Violation

CASES = (
    # A prefill, a chunk that begins within a block, decodes, a request that pauses, padding, a sharing layer.
    Case(steps=((3, 18, 0), (1, 2, 5), (0, 1, 1)), kv_sharing=(-1, -1, 0), padding=2, dtype="bfloat16"),
    # Float32 shows small errors; many heads for each KV head, and small blocks.
    Case(steps=((9, 6), (1, 7), (4, 1)), num_heads=8, num_kv_heads=2, block_size=4, padding=1, shuffle_requests=True),
    # Layers that differ, and slices of a fused projection.
    Case(steps=((7, 2), (1, 5)), kv_sharing=(-1, -1), vary_scale=True, fused_qkv=True),
    # A head size that is no power of two, and scores that overflow an exponential function.
    Case(steps=((20, 33), (1, 1)), head_size=20, values="large", kv_sharing=(-1, -1), spare_blocks=4),
    Case(
        steps=((40,), (1,), (7,)),
        dtype="float16",
        scale_percent=50,
        num_heads=2,
        num_kv_heads=1,
        block_size=8,
        allocation="descending",
    ),
)


def examine(check_name, implementation):
    """Run a check as the judge does: on the surface, or on one case after the other."""
    check = CHECKS[check_name]
    if check.kind is Kind.SURFACE:
        check(implementation.surface())
        return
    for case in CASES:
        observation = run_case(implementation, case)
        if check.kind is Kind.CASE:
            check(observation)
        else:
            check(implementation, observation)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen_by_its_check(name):
    fault = FAULTS[name]
    error = SubjectError if fault.check == "every_step_runs" else Violation
    with fault.inject() as broken, pytest.raises(error):
        examine(fault.check, broken)


@pytest.mark.parametrize("name", [name for name, check in CHECKS.items() if check.kind is not Kind.SURFACE])
def test_cases_of_the_faults_pass_on_the_reference(name):
    examine(name, eager)


def test_every_check_sees_a_fault():
    assert set(CHECKS) == {fault.check for fault in FAULTS.values()}


def test_every_fault_breaks_a_clause():
    for fault in FAULTS.values():
        assert fault.clause in CLAUSES
        assert fault.sentence
    assert max(Counter(fault.sentence for fault in FAULTS.values()).values()) == 1


def test_reference_is_whole_again_after_every_fault():
    for fault in FAULTS.values():
        with fault.inject():
            pass
    for name in (
        "output_matches_dense",
        "written_slots_hold_kv",
        "ops_have_the_schema",
        "previous_context_is_restored",
    ):
        examine(name, eager)
