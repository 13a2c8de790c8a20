"""The case format: what is written is read back."""

from __future__ import annotations

from hypothesis import given

from harness.case import case_from_json, parse_case
from harness.strategies import cases


@given(cases())
def test_case_round_trips_through_repr_and_json(case):
    assert parse_case(repr(case)) == case
    assert case_from_json(case.to_json()) == case
