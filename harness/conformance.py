"""One line for a user's own pytest: `run_conformance_test(my_implementation)`."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console

from harness.contract import Implementation
from harness.report.terminal import conclusion, print_verdict
from harness.session import judge_in_process
from harness.verdict import Status


def run_conformance_test(
    implementation: Implementation, *, num_cases: int = 200, seed: int = 0, only: Sequence[str] = ()
) -> None:
    """Judge `implementation` in this process.

    Args:
        implementation: the one under test.
        num_cases: generated cases.
        seed: decides which.
        only: names of checks or clauses; empty: all.

    Raises:
        AssertionError: it does not conform, or could not be judged; the message is the report.
    """
    verdicts = judge_in_process(implementation, num_cases, seed, only)
    code, why = conclusion(verdicts)
    if code:
        buffer = io.StringIO()
        console = Console(file=buffer, width=120, color_system=None)
        for verdict in verdicts:
            if verdict.status in (Status.FAIL, Status.ERROR):
                print_verdict(console, implementation.info.name, verdict)
        raise AssertionError(f"{implementation.info.name} {why}\n{buffer.getvalue()}")
