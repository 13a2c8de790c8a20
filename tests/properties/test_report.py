"""Reports: the JSON lines keep their schema, and the replay line reproduces the failure."""

from __future__ import annotations

import io
import json
import shlex

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from harness.case import Case, parse_case
from harness.contract import Info
from harness.report.jsonl import SCHEMA, run_line, verdict_line
from harness.report.replay import replay_line
from harness.report.terminal import conclusion, print_report
from harness.session import Result
from harness.strategies import cases
from harness.verdict import Status, Verdict

texts = st.text(max_size=30)
verdicts = st.builds(
    Verdict,
    check=st.just("output_matches_dense"),
    clauses=st.just(("ATT-1",)),
    status=st.sampled_from(Status),
    message=texts,
    where=st.fixed_dictionaries({}, optional={"step": st.just(0), "request": st.integers(0, 9), "layer_name": texts}),
    details=st.lists(texts, max_size=2).map(tuple),
    case=st.none() | cases(),
    not_wrong=st.just(("written_slots_hold_kv",)),
    examples=st.integers(0, 9),
)


@given(verdicts)
def test_verdict_line_keeps_the_schema(verdict):
    line = json.loads(json.dumps(verdict_line("mypkg:impl", verdict)))
    jsonschema.validate(line, SCHEMA)


def test_run_line_keeps_the_schema():
    jsonschema.validate(run_line("mypkg:impl", Info("x", "1"), 0, "quick", True), SCHEMA)


def test_line_outside_the_schema_is_refused():
    with pytest.raises(jsonschema.ValidationError, match="MAYBE"):
        jsonschema.validate({"type": "verdict", "status": "MAYBE"}, SCHEMA)


@given(verdicts)
def test_terminal_report_prints_whatever_an_implementation_says(verdict):
    buffer = io.StringIO()
    console = Console(file=buffer, width=120, color_system=None)
    print_report(console, Result("mypkg:impl", Info("[red]x[/red]", "[/]"), [verdict], 1, 1.0))
    assert "[red]x[/red] [/]" in buffer.getvalue()
    assert "\x1b" not in buffer.getvalue()


@given(cases())
def test_replay_line_holds_the_case(case):
    line = replay_line("mypkg:impl", Verdict("output_matches_dense", ("ATT-1",), Status.FAIL, "x", case=case))
    assert parse_case(shlex.split(line)[-1]) == case


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ([Status.PASS, Status.ADVICE, Status.SKIP], 0),
        ([Status.PASS, Status.FAIL, Status.ERROR], 1),
        ([Status.PASS, Status.ERROR], 2),
        ([Status.SKIP], 2),
        ([], 2),
    ],
)
def test_exit_code_says_who_failed(statuses, code):
    assert conclusion([Verdict("x", ("ATT-1",), status, case=Case(steps=((1,),))) for status in statuses])[0] == code
