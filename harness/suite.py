"""The suite that a backend's own pytest runs: see `harness.pytest_plugin`."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.session import Result


def test_check(proptable_implementation: str, proptable_check: str, proptable_result: Result) -> None:
    """The implementation keeps the clauses of this check."""
    from rich.console import Console

    from harness.report.terminal import print_verdict
    from harness.verdict import Status

    verdict = next(v for v in proptable_result.verdicts if v.check == proptable_check)
    if verdict.status is Status.SKIP:
        pytest.skip(verdict.message)
    if verdict.status is Status.ADVICE:
        pytest.skip(f"advice: {verdict.message}")
    if verdict.status is not Status.PASS:
        buffer = io.StringIO()
        print_verdict(Console(file=buffer, width=120, color_system=None), proptable_implementation, verdict)
        pytest.fail(buffer.getvalue(), pytrace=False)
