"""A whole run on one implementation: which tasks, and what they found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from harness.case import Case
from harness.contract import Implementation, Info
from harness.isolate import Pool, Task
from harness.verdict import Status, Verdict

PROFILES = {"quick": (200, 20), "default": (1100, 100), "nightly": (20_000, 2_000)}
"""Profile to the number of cases: for most implementations, and for those that declare that they are slow."""


MAX_CONFIRMED = 5
"""Cases of failures that are run again, alone."""


@dataclass
class Result:
    """What is known of one implementation."""

    name: str
    info: Info
    verdicts: list[Verdict]
    num_cases: int
    seconds: float
    interrupted: bool = False
    done: int = 0
    planned: int = 0
    """Cases and SURFACE checks that were begun, and that were planned: fewer when the budget ended the run."""
    gave_up: bool = False
    """Whether the run stopped because the implementation's process died too often."""

    @property
    def complete(self) -> bool:
        """Whether all was run that was to be run."""
        return not (self.interrupted or self.gave_up or self.done < self.planned)


@dataclass
class Session:
    """Settings of a run.

    Args:
        profile: one of PROFILES.
        seed: decides which cases are generated.
        budget: seconds after which no case is begun.
        jobs: worker processes.
        only: names of checks or clauses; empty: all.
        stop_at_failure: begin nothing more after the first failure.
        on_progress: called with the number of things done and the number in all.
    """

    profile: str = "default"
    seed: int = 0
    budget: float = float("inf")
    jobs: int = 1
    only: Sequence[str] = ()
    stop_at_failure: bool = False
    on_progress: Callable[[int, int], None] = lambda done, total: None
    on_info: Callable[[Info], None] = lambda info: None
    on_verdicts: Callable[[list[Verdict]], None] = lambda verdicts: None
    _total: int = field(default=0, init=False)

    def tasks(self, info: Info) -> list[Task]:
        """Return what there is to do."""
        from harness.checks import Kind
        from harness.judge import CHUNK_SIZE, chunk_seeds, select

        checks = select(self.only)
        surface = tuple(check.name for check in checks if check.kind is Kind.SURFACE)
        others = tuple(check.name for check in checks if check.kind is not Kind.SURFACE)
        tasks = []
        self._total = len(surface)
        if others:
            num_cases = PROFILES[self.profile][info.slow]
            size = min(CHUNK_SIZE, num_cases, 10 if info.slow else CHUNK_SIZE)
            for chunk_seed in chunk_seeds(self.seed, -(-num_cases // size)):
                tasks.append(Task("chunk", others, chunk_seed, size, info.slow))
                self._total += size
        if surface:
            # After the first chunk: a short budget should see a few cases, and the surface.
            tasks.insert(1, Task("surface", surface))
        return tasks

    def run(self, name: str) -> Result:
        """Judge the implementation `name` in worker processes.

        Raises:
            UsageError: it cannot be loaded.
        """
        return self._run(name, self.tasks)

    def run_cases(self, name: str, cases: Callable[[Info], Sequence[Case]]) -> Result:
        """Judge it on these cases alone, which may depend on what it declares.

        Raises:
            UsageError: it cannot be loaded.
        """
        from harness.checks import Kind
        from harness.judge import select

        def tasks(info: Info) -> list[Task]:
            checks = tuple(check.name for check in select(self.only) if check.kind is not Kind.SURFACE)
            return [Task("case", checks, case=case) for case in cases(info)]

        return self._run(name, tasks)

    def confirm(self, result: Result) -> None:
        """Run the case of each failure alone, in a fresh process, and say so where it then passes."""
        failed = [v for v in result.verdicts if v.status is Status.FAIL and v.case is not None]
        if not failed:
            return
        seen: list[Verdict] = []
        again = Session(only=tuple(v.check for v in failed), on_verdicts=seen.extend)
        # Each in a process of its own: a case must not find what another one has left.
        for case in list(dict.fromkeys(v.case for v in failed if v.case is not None))[:MAX_CONFIRMED]:
            again.run_cases(result.name, lambda info, case=case: [case])  # type: ignore[misc]
        for verdict in failed:
            alone = [v for v in seen if v.case == verdict.case and v.check in (verdict.check, "every_step_runs")]
            if alone and all(v.status is Status.PASS for v in alone):
                place = result.verdicts.index(verdict)
                result.verdicts[place] = replace(verdict, only_after=f"--profile {self.profile} --seed {self.seed}")

    def _run(self, name: str, tasks: Callable[[Info], list[Task]]) -> Result:
        infos: list[Info] = []
        seen: set[str] = set()
        done = 0
        begin = time.monotonic()

        def on_info(info: Info) -> list[Task]:
            nonlocal begin
            begin = time.monotonic()
            infos.append(info)
            self.on_info(info)
            return tasks(info)

        def on_case(what: str | Case) -> None:
            nonlocal done
            done += 1
            if isinstance(what, Case):
                seen.add(repr(what))
            self.on_progress(done, self._total)

        def on_verdicts(verdicts: list[Verdict]) -> None:
            self.on_verdicts(verdicts)
            if self.stop_at_failure and any(v.status in (Status.FAIL, Status.ERROR) for v in verdicts):
                pool.tasks.clear()
            for verdict in verdicts:
                findings.add(verdict)

        pool = Pool(name, self.jobs, on_info=on_info, on_verdicts=on_verdicts, on_case=on_case)
        pool.start()
        # Imports torch, while the worker does the same.
        from harness.judge import Findings, select

        findings = Findings()
        interrupted = False
        try:
            pool.run(self.budget)
        except KeyboardInterrupt:
            if not infos:
                raise
            interrupted = True
        verdicts = findings.verdicts(select(self.only))
        seconds = time.monotonic() - begin
        return Result(name, infos[0], verdicts, len(seen), seconds, interrupted, done, self._total, pool.gave_up)


def judge_in_process(
    implementation: Implementation, num_cases: int = 200, seed: int = 0, only: Sequence[str] = ()
) -> list[Verdict]:
    """Judge an implementation in this process: for debuggers, and for a user's own pytest."""
    from harness.judge import CHUNK_SIZE, Findings, chunk_seeds, judge_chunk, judge_surface, select

    checks = select(only)
    findings = Findings()
    for verdict in judge_surface(implementation, checks):
        findings.add(verdict)
    size = min(CHUNK_SIZE, num_cases)
    for chunk_seed in chunk_seeds(seed, -(-num_cases // size)):
        findings.merge(judge_chunk(implementation, checks, chunk_seed, size, small=implementation.info.slow))
    return findings.verdicts(checks)
