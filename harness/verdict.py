"""Verdict: what one check says of one implementation."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from harness.case import Case

NOT_REACHED = "was not reached"
"""Message of a SKIP: the run ended, or gave up, before the check was run."""


class Status(enum.Enum):
    """PASS and FAIL judge the subject; our own crash is ERROR; what is not declared is SKIP, with a reason."""

    PASS = "PASS"  # noqa: S105
    FAIL = "FAIL"
    ADVICE = "ADVICE"
    """A deviation from a STRICT clause by an implementation that is not judged by it."""
    SKIP = "SKIP"
    ERROR = "ERROR"


class Violation(Exception):  # noqa: N818 - it is evidence, not an accident
    """What a check found wrong, and where.

    Args:
        message: `X=got, but should be want`.
        step: number of the step, from 0.
        layer_name: the layer.
        request: number of the request in the case.
        head: the query head.
        details: more lines for the report.
        ratio: how many times the allowed error.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        layer_name: str | None = None,
        request: int | None = None,
        head: int | None = None,
        details: tuple[str, ...] = (),
        ratio: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.step = step
        self.layer_name = layer_name
        self.request = request
        self.head = head
        self.details = details
        self.ratio = ratio

    def where(self) -> dict[str, Any]:
        """Return the places that are known."""
        places = {"step": self.step, "layer_name": self.layer_name, "request": self.request, "head": self.head}
        return {name: place for name, place in places.items() if place is not None}


@dataclass(frozen=True)
class Verdict:
    """One check's word on one implementation."""

    check: str
    clauses: tuple[str, ...]
    status: Status
    message: str = ""
    """What was found, or the reason of a SKIP or ERROR."""
    where: dict[str, Any] = field(default_factory=dict)
    details: tuple[str, ...] = ()
    case: Case | None = None
    """The case that shows it, when it takes one."""
    not_wrong: tuple[str, ...] = ()
    """Checks that pass on the same case: what is not the reason."""
    only_after: str = ""
    """Options of the run that showed it, when its case passes alone: what it does depends on earlier cases."""
    examples: int = 0
    """Cases on which the check was run."""
