"""JSON lines: one for the run, one for each verdict. `schema.json` beside this file is the schema of a line."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from harness.contract import Info
from harness.report.replay import replay_line
from harness.verdict import Verdict

SCHEMA: dict[str, Any] = json.loads((Path(__file__).parent / "schema.json").read_text())


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("proptable", "torch", "triton", "hypothesis"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def run_line(implementation: str, info: Info, seed: int, profile: str, complete: bool) -> dict[str, Any]:
    """Return the line that opens an implementation's verdicts."""
    return {
        "type": "run",
        "implementation": implementation,
        "name": info.name,
        "version": info.version,
        "device": info.device,
        "seed": seed,
        "profile": profile,
        "complete": complete,
        "versions": versions(),
        "notes": list(info.notes),
    }


def verdict_line(implementation: str, verdict: Verdict) -> dict[str, Any]:
    """Return the line of one verdict."""
    return {
        "type": "verdict",
        "implementation": implementation,
        "check": verdict.check,
        "clauses": list(verdict.clauses),
        "status": verdict.status.value,
        "message": verdict.message,
        "where": verdict.where,
        "details": list(verdict.details),
        "not_wrong": list(verdict.not_wrong),
        "examples": verdict.examples,
        "case": verdict.case.to_json() if verdict.case else None,
        "replay": replay_line(implementation, verdict) if verdict.message else None,
    }


def write_line(file: TextIO, line: dict[str, Any]) -> None:
    """Append one line, and hand it to the operating system at once."""
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    file.flush()
