"""The one line that replays a failure."""

from __future__ import annotations

import shlex

from harness.verdict import Verdict


def replay_line(implementation: str, verdict: Verdict) -> str:
    """Return a shell command that runs just this check again."""
    if verdict.case is None or verdict.only_after:
        options = f" {verdict.only_after}" if verdict.only_after else ""
        return f"proptable check -i {shlex.quote(implementation)} --check {verdict.check}{options}"
    return f"proptable replay -i {shlex.quote(implementation)} {shlex.quote(repr(verdict.case))}"
