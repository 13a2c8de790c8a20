"""The harness on the reference: outputs within the bound, over generated multi-step cases."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.adapters.reference import eager
from harness.case import ALLOCATIONS, DTYPES, VALUES, Case, case_from_json, parse_case
from harness.run import run_case


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_reqs = draw(st.integers(1, 4))
    step = st.lists(st.integers(0, 20), min_size=num_reqs, max_size=num_reqs).filter(any).map(tuple)
    num_kv_heads = draw(st.integers(1, 3))
    return Case(
        steps=tuple(draw(st.lists(step, min_size=1, max_size=4))),
        kv_sharing=draw(st.sampled_from([(-1,), (-1, -1, 0), (-1, 0, -1, 2)])),
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_size=draw(st.sampled_from([8, 24])),
        block_size=draw(st.sampled_from([1, 4, 16])),
        dtype=draw(st.sampled_from(DTYPES)),
        padding=draw(st.integers(0, 3)),
        allocation=draw(st.sampled_from(ALLOCATIONS)),
        shuffle_requests=draw(st.booleans()),
        values=draw(st.sampled_from(VALUES)),
        seed=draw(st.integers(0, 1 << 32)),
    )


@given(cases())
@settings(deadline=None, max_examples=50)
def test_output_stays_within_the_bound(case):
    """ATT-1."""
    observation = run_case(eager, case)
    for step, layers in zip(observation.steps, observation.expected(), strict=True):
        for record, rows in zip(step.layers, layers, strict=True):
            want = torch.cat([row.output for row in rows])
            bound = torch.cat([row.bound for row in rows])
            assert ((record.output[: len(want)].double() - want).abs() <= bound).all()


@given(cases())
def test_case_round_trips_through_repr_and_json(case):
    assert parse_case(repr(case)) == case
    assert case_from_json(case.to_json()) == case
