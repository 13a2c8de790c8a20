"""Judge an implementation: run generated cases through the checks, and make verdicts of what they find.

Cases come in chunks, each a Hypothesis run with its own seed, so that chunks can be run in any order, anywhere, with
the same result. What a check finds is kept at once; Hypothesis only looks for smaller cases that show it too.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from harness.case import Case
from harness.checks import CHECKS, Check, Kind
from harness.clauses import Level
from harness.contract import HasSurface, Implementation, Surface, Unsupported
from harness.run import AdapterError, Observation, SubjectError, run_case, unsupported
from harness.run_guard import ours_to_raise
from harness.strategies import cases
from harness.verdict import NOT_REACHED, Status, Verdict, Violation

CHUNK_SIZE = 50
"""Cases in a chunk."""
SHRINK_SECONDS = 10.0
"""Time that a chunk may spend on smaller cases after its first failure."""
RUNS = "every_step_runs"
SURFACE_NAMES = tuple(name for name in (*vars(Surface), *Surface.__annotations__) if not name.startswith("_"))
HARNESS = str(Path(__file__).parent)


@dataclass
class Failure:
    """What a check found, on the smallest case so far."""

    verdict: Verdict

    @property
    def size(self) -> tuple[int, int, int]:
        """Order of smallness: tokens, layers, length of the repr."""
        case = self.verdict.case
        return (0, 0, 0) if case is None else (sum(case.total_lens), case.num_layers, len(repr(case)))


@dataclass
class Findings:
    """What is known of an implementation so far; findings of chunks are merged into one."""

    examples: Counter[str] = field(default_factory=Counter)
    """Check name to the number of cases on which it was run."""
    num_cases: int = 0
    failures: dict[str, Failure] = field(default_factory=dict)
    """Check name to its smallest failure (FAIL, ADVICE or ERROR)."""
    skips: dict[str, str] = field(default_factory=dict)
    """Check name to the reason."""
    seconds: float = 0.0

    def add(self, verdict: Verdict) -> None:
        """Take in one verdict."""
        self.examples[verdict.check] += 1
        if verdict.status is Status.SKIP:
            self.skips[verdict.check] = verdict.message
        elif verdict.status is not Status.PASS:
            self._keep(Failure(verdict))

    def _keep(self, failure: Failure) -> None:
        known = self.failures.get(failure.verdict.check)
        if known is None or failure.size < known.size:
            self.failures[failure.verdict.check] = failure

    def merge(self, other: Findings) -> None:
        """Take in what another chunk found."""
        self.examples += other.examples
        self.num_cases += other.num_cases
        self.skips |= other.skips
        self.seconds += other.seconds
        for failure in other.failures.values():
            self._keep(failure)

    def verdicts(self, selected: Iterable[Check]) -> list[Verdict]:
        """Return one verdict for each selected check."""
        verdicts = []
        for check in selected:
            count = self.examples[check.name]
            failure = self.failures.get(check.name)
            if failure is not None:
                verdict = failure.verdict
                verdicts.append(Verdict(**{**verdict.__dict__, "examples": count}))
            elif check.name in self.skips:
                verdicts.append(_verdict(check, Status.SKIP, self.skips[check.name]))
            elif count:
                verdicts.append(_verdict(check, Status.PASS, examples=count))
            else:
                verdicts.append(_verdict(check, Status.SKIP, NOT_REACHED))
        return verdicts


def _verdict(check: Check, status: Status, message: str = "", **more: Any) -> Verdict:
    return Verdict(check.name, check.clauses, status, message, **more)


def _failed(check: Check, strict: bool) -> Status:
    return Status.ADVICE if check.level is Level.STRICT and not strict else Status.FAIL


def run_check(
    check: Check,
    implementation: Implementation,
    arguments: Sequence[Any],
    case: Case | None,
    prepare: Callable[[], Sequence[Any]] = tuple,
) -> Verdict:
    """Run one check, on `arguments` and on what `prepare` returns, and turn whatever happens into a verdict."""
    try:
        check(*arguments, *prepare())
    except Violation as violation:
        status = _failed(check, implementation.info.strict)
        return _verdict(check, status, violation.message, where=violation.where(), details=violation.details, case=case)
    except Unsupported as reason:
        return _verdict(check, Status.SKIP, str(reason), case=case)
    except AdapterError as error:
        return _verdict(check, Status.ERROR, str(error), case=case)
    except SubjectError as error:
        status = Status.ERROR if _is_ours(error.origin) else _failed(check, implementation.info.strict)
        return _verdict(check, status, str(error), details=_origin(error), case=case)
    except BaseException as error:
        if ours_to_raise(error):
            raise
        return _unexpected(check, implementation, error, case)
    return _verdict(check, Status.PASS, case=case)


def _unexpected(check: Check, implementation: Implementation, error: BaseException, case: Case | None) -> Verdict:
    """Judge an exception that no check provoked: the subject's when it comes out of its code, else our own."""
    frames = traceback.extract_tb(error.__traceback__)
    origin = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    status = Status.ERROR if _is_ours(origin) else _failed(check, implementation.info.strict)
    message = f"raised {type(error).__name__}: {_one_line(error)}"
    return _verdict(check, status, message, details=(f"raised at {origin}",), case=case)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def _is_ours(origin: str) -> bool:
    return origin.startswith(HARNESS) and "faults" not in Path(origin).parts


def _origin(error: SubjectError) -> tuple[str, ...]:
    return (f"raised at {error.origin}",) if error.origin else ()


def select(names: Sequence[str] = ()) -> list[Check]:
    """Return the checks of these names, of these clauses, or all."""
    if not names:
        return list(CHECKS.values())
    return [check for check in CHECKS.values() if check.name in names or set(check.clauses) & set(names)]


def judge_surface(implementation: Implementation, checks: Iterable[Check]) -> Iterable[Verdict]:
    """Run the checks that need no case; one verdict at a time."""
    for check in checks:
        if check.kind is not Kind.SURFACE:
            continue
        if not isinstance(implementation, HasSurface):
            yield _verdict(check, Status.SKIP, "the implementation shows no registry, context and ops (no `surface`)")
            continue
        yield run_check(check, implementation, (), None, lambda: (_surface(implementation),))


def _surface(implementation: HasSurface) -> Surface:
    try:
        surface = implementation.surface()
    except Unsupported:
        raise
    except BaseException as error:
        if ours_to_raise(error):
            raise
        raise AdapterError(f"surface() raised {type(error).__name__}: {_one_line(error)}") from error
    missing = [name for name in SURFACE_NAMES if not hasattr(surface, name)]
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise AdapterError(f"surface() returned {type(surface).__name__}, which has no {names}")
    return surface


def judge_case(implementation: Implementation, case: Case, checks: Sequence[Check]) -> list[Verdict]:
    """Run a case once, and all given checks on it. SURFACE checks are left out."""
    with_case = [check for check in checks if check.kind is not Kind.SURFACE]
    reason = unsupported(implementation.info, case)
    if reason is not None:
        return [_verdict(check, Status.SKIP, reason, case=case) for check in with_case]
    observation: Observation

    def observe() -> None:
        nonlocal observation
        observation = run_case(implementation, case)

    runs = CHECKS[RUNS]
    ran = run_check(Check(**{**runs.__dict__, "function": observe}), implementation, (), case)
    if ran.status is not Status.PASS:
        return [ran]
    verdicts = []
    for check in with_case:
        arguments = (observation,) if check.kind is Kind.CASE else (implementation, observation)
        if check.kind is Kind.CASE and check.clauses[0].startswith(("WRT", "BND", "KVS")) and _blind(observation):
            verdicts.append(_verdict(check, Status.SKIP, "the cache cannot be read (kv_views is None)", case=case))
        else:
            verdicts.append(run_check(check, implementation, arguments, case))
    passed = tuple(v.check for v in verdicts if v.status is Status.PASS)
    return [Verdict(**{**v.__dict__, "not_wrong": passed}) if v.status is Status.FAIL else v for v in verdicts]


def _blind(observation: Observation) -> bool:
    return all(record.cache_before is None for step in observation.steps for record in step.layers)


class _EndOfChunk(KeyboardInterrupt):
    """Ends a Hypothesis run from within; Hypothesis lets nothing but a KeyboardInterrupt through."""


def judge_chunk(
    implementation: Implementation,
    checks: Sequence[Check],
    chunk_seed: int,
    num_cases: int = CHUNK_SIZE,
    *,
    small: bool = False,
    deadline: float = float("inf"),
    on_case: Callable[[Case], None] = lambda case: None,
    on_verdicts: Callable[[list[Verdict]], None] = lambda verdicts: None,
) -> Findings:
    """Run one chunk of generated cases.

    Args:
        implementation: the one under test.
        checks: which checks; of the RELATION ones each case gets one, in turn.
        chunk_seed: decides which cases.
        num_cases: how many.
        small: keep the cases small.
        deadline: value of time.monotonic() after which the chunk ends early.
        on_case: called before each case.
        on_verdicts: called after each case.
    """
    findings = Findings()
    always = [check for check in checks if check.kind is Kind.CASE]
    relations = [check for check in checks if check.kind is Kind.RELATION]
    seen: set[str] = set()
    sticky: set[str] = set()
    first_failure = float("inf")
    classes: dict[str, type[AssertionError]] = {}
    begin = time.monotonic()

    @seed(chunk_seed)
    @settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
    )
    @given(cases(implementation.info, small=small))
    def run(case: Case) -> None:
        nonlocal first_failure
        now = time.monotonic()
        # One case at least: a run that judged nothing is no use to anybody.
        if (seen and now > deadline) or now > first_failure + SHRINK_SECONDS:
            raise _EndOfChunk
        on_case(case)
        seen.add(repr(case))
        chosen = relations[case.seed % len(relations)] if relations else None
        some = [check for check in relations if check is chosen or check.name in sticky]
        failed = []
        verdicts = judge_case(implementation, case, [*always, *some])
        on_verdicts(verdicts)
        for verdict in verdicts:
            findings.add(verdict)
            if verdict.status in (Status.FAIL, Status.ERROR, Status.ADVICE):
                failed.append(verdict.check)
        if failed:
            first_failure = min(first_failure, time.monotonic())
            sticky.update(failed)
            # One class for each check: Hypothesis then shrinks each of them by itself.
            raise classes.setdefault(failed[0], type(failed[0], (AssertionError,), {}))

    try:
        run()
    except _EndOfChunk:
        pass
    except Exception:
        # What Hypothesis has to say of a failure is in `findings` already; anything else is our own fault.
        if not findings.failures:
            raise
    findings.num_cases = len(seen)
    findings.seconds = time.monotonic() - begin
    return findings


def chunk_seeds(seed_: int, num_chunks: int) -> list[int]:
    """Return a seed for each chunk of a run."""
    return [seed_ * 1_000_003 + number for number in range(num_chunks)]


def use_one_thread() -> None:
    """Keep torch to one thread: the tensors are small, and threads only wait for each other."""
    torch.set_num_threads(1)
