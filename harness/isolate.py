"""Run an implementation in worker processes, so that what it does to its process costs one case.

The parent never imports the implementation. A worker says what it is about to do, and sends each verdict at once; when
it dies or hangs, the parent knows on which case, and starts another.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from harness.case import Case
from harness.contract import Implementation, Info
from harness.load import UsageError, load_implementation
from harness.verdict import Status, Verdict

LOAD_SECONDS = 180.0
"""Time that an implementation may take to be imported."""
CASE_SECONDS = 60.0
"""Time that one case may take with all its checks; beyond it, the implementation hangs."""
HANGS = f"did not answer for {CASE_SECONDS:.0f} s and was killed"
MAX_CRASHES = 5
MAX_HANGS = 2
"""After so many the rest is not run."""


@dataclass(frozen=True)
class Task:
    """A piece of work for a worker."""

    kind: Literal["surface", "chunk", "case"]
    checks: tuple[str, ...]
    seed: int = 0
    num_cases: int = 0
    small: bool = False
    case: Case | None = None


@dataclass
class _Worker:
    process: Any
    connection: Connection
    task: Task | None = None
    at: str | Case | None = None
    """What it is doing: a check's name or a case."""
    since: float = field(default_factory=time.monotonic)
    loaded: bool = False


def _worker_main(name: str, connection: Connection) -> None:
    """Load the implementation, then do tasks until the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What the implementation prints must not get into the report.
    os.dup2(2, 1)
    from harness import judge

    judge.use_one_thread()
    try:
        implementation = load_implementation(name)
    except UsageError as error:
        connection.send(("usage", str(error)))
        return
    connection.send(("loaded", implementation.info))
    try:
        while True:
            task, seconds = connection.recv()
            _do(task, seconds, implementation, connection)
            connection.send(("done", None))
    except EOFError:
        # The parent hung up: there is nothing more to do.
        return
    except OSError:
        # The implementation closed the connection: the parent sees it.
        os._exit(1)


def _do(task: Task, seconds: float, implementation: Implementation, connection: Connection) -> None:
    from harness import judge

    checks = judge.select(task.checks)
    if task.kind == "surface":
        for check in checks:
            connection.send(("at", check.name))
            for verdict in judge.judge_surface(implementation, [check]):
                connection.send(("verdicts", [verdict]))
    elif task.case is not None:
        connection.send(("at", task.case))
        connection.send(("verdicts", judge.judge_case(implementation, task.case, checks)))
    else:
        try:
            judge.judge_chunk(
                implementation,
                checks,
                task.seed,
                task.num_cases,
                small=task.small,
                deadline=time.monotonic() + seconds,
                on_case=lambda case: connection.send(("at", case)),
                on_verdicts=lambda verdicts: connection.send(("verdicts", verdicts)),
            )
        except OSError:
            raise
        except Exception as error:
            # Whatever the implementation did is a verdict by now: this is our own fault.
            message = f"the harness failed: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
            connection.send(("verdicts", [Verdict(judge.RUNS, ("ATT-1",), Status.ERROR, message)]))


class Pool:
    """Workers for one implementation.

    Args:
        name: the implementation, as on the command line.
        jobs: how many workers.
        on_info: called once, with what the implementation declares.
        on_verdicts: called with the verdicts of each case, as they come.
        on_case: called when a case or a SURFACE check begins.
    """

    def __init__(
        self,
        name: str,
        jobs: int,
        *,
        on_info: Callable[[Info], Sequence[Task]],
        on_verdicts: Callable[[list[Verdict]], None],
        on_case: Callable[[str | Case], None] = lambda what: None,
    ) -> None:
        self.name = name
        self.jobs = jobs
        self.on_info = on_info
        self.on_verdicts = on_verdicts
        self.on_case = on_case
        self.crashes = self.hangs = 0
        self.gave_up = False
        """Whether work was left undone after MAX_CRASHES or MAX_HANGS."""
        self.tasks: deque[Task] = deque()
        self._workers: list[_Worker] = []
        self._context = multiprocessing.get_context("spawn")
        self._informed = False
        self._budget = self._deadline = float("inf")

    def run(self, budget: float = float("inf")) -> None:
        """Ask `on_info` for the tasks, and do them all, or those that can begin within `budget` seconds of loading.

        Call `start` before.

        Raises:
            UsageError: the implementation cannot be loaded.
        """
        self._budget = budget
        try:
            while self._workers:
                ready = wait([worker.connection for worker in self._workers], timeout=0.5)
                for worker in list(self._workers):
                    if worker.connection in ready:
                        self._receive(worker)
                    elif time.monotonic() - worker.since > (CASE_SECONDS if worker.loaded else LOAD_SECONDS):
                        self._lost(worker, HANGS)
        finally:
            for worker in self._workers:
                worker.process.kill()

    def start(self) -> None:
        """Start one worker, which loads the implementation."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_worker_main, args=(self.name, theirs), daemon=True)
        process.start()
        theirs.close()
        self._workers.append(_Worker(process, ours))

    def _receive(self, worker: _Worker) -> None:
        try:
            kind, value = worker.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            worker.process.join(5)
            self._lost(worker, _how_it_ended(worker.process.exitcode))
            return
        worker.since = time.monotonic()
        if kind == "usage":
            raise UsageError(value)
        if kind == "loaded":
            worker.loaded = True
            if not self._informed:
                self._informed = True
                self._deadline = time.monotonic() + self._budget
                self.tasks.extend(self.on_info(value))
                for _ in range(min(self.jobs, len(self.tasks)) - 1):
                    self.start()
            self._next_task(worker)
        elif kind == "at":
            worker.at = value
            self.on_case(value)
        elif kind == "verdicts":
            self.on_verdicts(value)
        else:
            self._next_task(worker)

    def _next_task(self, worker: _Worker) -> None:
        left = self._deadline - time.monotonic()
        if not self.tasks or left <= 0:
            worker.connection.close()
            self._workers.remove(worker)
            worker.process.join(5)
            return
        worker.task, worker.at = self.tasks.popleft(), None
        worker.connection.send((worker.task, left))

    def _lost(self, worker: _Worker, how: str) -> None:
        worker.process.kill()
        self._workers.remove(worker)
        if not worker.loaded:
            raise UsageError(f"cannot load {self.name}: the process that imported it {how}")
        hangs = how == HANGS
        self.hangs += hangs
        self.crashes += not hangs
        self.on_verdicts([_crash_verdict(worker.at, how)])
        if worker.task is not None and worker.task.kind == "surface" and isinstance(worker.at, str):
            rest = worker.task.checks[worker.task.checks.index(worker.at) + 1 :]
            if rest:
                self.tasks.appendleft(Task("surface", rest))
        if self.crashes >= MAX_CRASHES or self.hangs >= MAX_HANGS:
            self.gave_up = bool(self.tasks)
            self.tasks.clear()
        elif self.tasks and time.monotonic() < self._deadline:
            self.start()


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        names = {int(known): known.name for known in signal.Signals}
        return f"died of {names.get(-code, f'signal {-code}')}"
    return f"exited with code {code}"


def _crash_verdict(at: str | Case | None, how: str) -> Verdict:
    from harness.checks import CHECKS

    if isinstance(at, str):
        return Verdict(at, CHECKS[at].clauses, Status.FAIL, f"the process of the implementation {how} in this check")
    message = f"the process of the implementation {how}" + ("" if at is None else " on this case")
    return Verdict("every_step_runs", ("ATT-1",), Status.FAIL, message, case=at)
