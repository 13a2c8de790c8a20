"""The command `proptable`. Exit codes: 0 conforms, 1 does not, 2 the harness or adapter failed, 3 usage."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from harness import __version__
from harness.case import Case, InvalidCaseError, parse_case
from harness.contract import Info
from harness.load import BUILTIN, UsageError, check_name
from harness.session import PROFILES, Result, Session
from harness.verdict import Verdict

USAGE = 3
PLAIN_WIDTH = 140
"""Columns of the report when it goes to a file or a pipe."""
PLAIN_PROGRESS_SECONDS = 15.0
"""Without a terminal a line of progress is printed this often."""

for _stream in (sys.stdout, sys.stderr):
    if isinstance(_stream, io.TextIOWrapper):
        # A terminal that knows only ASCII must not lose a verdict.
        _stream.reconfigure(errors="replace")
out = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
err = Console(stderr=True, highlight=False)


class _Group(click.Group):
    """A group whose bad input is one line and exit code 3."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except click.exceptions.NoArgsIsHelpError as error:
            out.print(Text(error.format_message()))
            code = USAGE
        except click.exceptions.Exit as error:
            code = error.exit_code
        except click.ClickException as error:
            fail(error.format_message())
        except click.Abort:
            fail("interrupted", 2)
        except (UsageError, InvalidCaseError) as error:
            fail(str(error))
        except KeyboardInterrupt:
            fail("interrupted", 2)
        except BrokenPipeError:
            # Whoever read the output has seen enough.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 2
        except OSError as error:
            fail(f"cannot write: {error.strerror}")
        sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int = USAGE) -> None:
    """Print one line and leave."""
    err.print(Text(f"proptable: {' '.join(message.split())}"), soft_wrap=True)
    sys.exit(code)


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = str(value).strip().lower()
        unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
        number = text[:-1] if unit else text
        try:
            seconds = float(number) * (unit or 1.0)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < float("inf"):
            self.fail(f"{value!r} is no duration; write 90s, 10m or 8h", param, ctx)
        return seconds


implementation_option = click.option(
    "-i",
    "--implementation",
    "names",
    metavar="IMPL",
    required=True,
    help=f"{', '.join(BUILTIN)}, or module:attribute of your own.",
)
many_implementations_option = click.option(
    "-i",
    "--implementation",
    "names",
    metavar="IMPL",
    required=True,
    multiple=True,
    help=f"{', '.join(BUILTIN)}, or module:attribute of your own. May be repeated.",
)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="proptable")
def main() -> None:
    """Judge an implementation of vLLM's forward context by the contract."""


@main.command()
@implementation_option
def info(names: str) -> int:
    """Print what an implementation declares, and what will be skipped and why."""
    session = Session(only=("no such check",))
    found: list[Info] = []
    session.on_info = found.append
    session.run(names)
    declared = found[0]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for field, value in (
        ("name", declared.name),
        ("version", declared.version),
        ("device", declared.device),
        ("dtypes", ", ".join(declared.dtypes)),
        ("head_sizes", _any_of(declared.head_sizes)),
        ("block_sizes", _any_of(declared.block_sizes)),
        ("kv_sharing", _yes(declared.kv_sharing)),
        ("batch_invariant", _yes(declared.batch_invariant)),
        ("rounds_scores", _yes(declared.rounds_scores)),
        ("judged by STRICT clauses", _yes(declared.strict)),
        *((f"dialect {point}", side) for point, side in declared.dialects.items()),
        *(("note", note) for note in declared.notes),
    ):
        table.add_row(Text(field, style="dim"), Text(str(value)))
    out.print(table)
    for reason in _skipped(declared):
        out.print(Text(f"skipped: {reason}", style="dim"), soft_wrap=True)
    return 0


def _any_of(values: Sequence[int] | None) -> str:
    return "any" if values is None else ", ".join(map(str, values))


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _skipped(declared: Info) -> list[str]:
    from harness.case import DTYPES
    from harness.strategies import BLOCK_SIZES, HEAD_SIZES

    reasons = [f"cases of dtype {dtype}: not declared" for dtype in DTYPES if dtype not in declared.dtypes]
    for what, sizes, allowed in (
        ("head_size", HEAD_SIZES, declared.head_sizes),
        ("block_size", BLOCK_SIZES, declared.block_sizes),
    ):
        missing = [size for size in sizes if allowed is not None and size not in allowed]
        if missing:
            reasons.append(f"cases of {what} {', '.join(map(str, missing))}: not declared")
    if not declared.kv_sharing:
        reasons.append("cases with layers that share a cache: not declared")
    if not declared.batch_invariant:
        reasons.append("the bitwise part of INV-2: batch_invariant is not declared")
    return reasons


@main.command()
@implementation_option
def smoke(names: str) -> int:
    """Run ten fixed cases: if these fail, the adapter is wrong."""
    from harness.report.terminal import conclusion, print_verdict
    from harness.smoke import smoke_cases
    from harness.verdict import Status

    verdicts: list[Verdict] = []
    session = Session(on_verdicts=verdicts.extend, stop_at_failure=True)
    result = session.run_cases(names, lambda info: list(smoke_cases(info).values()))
    worst = 0
    for title, case in smoke_cases(result.info).items():
        of_case = [verdict for verdict in verdicts if verdict.case == case]
        if result.interrupted and not of_case:
            fail("interrupted", 2)
        code, _ = conclusion(of_case)
        worst = 1 if 1 in (worst, code) else max(worst, code)
        out.print(Text(f"{'ok  ' if code == 0 else 'FAIL'}  {title}", style="green" if code == 0 else "bold red"))
        if code:
            for verdict in of_case:
                if verdict.status in (Status.FAIL, Status.ERROR):
                    print_verdict(out, names, verdict)
            out.print(Text("Later cases build on this one; mend it first."))
            break
    return worst


@main.command()
@many_implementations_option
@click.option(
    "--profile", type=click.Choice(list(PROFILES)), default="default", show_default=True, help="How many cases."
)
@click.option("--budget", type=_Duration(), default=float("inf"), help="Begin no case after this time: 90s, 10m, 8h.")
@click.option(
    "--seed", type=click.IntRange(0, (1 << 32) - 1), default=0, show_default=True, help="Decides which cases."
)
@click.option("--jobs", type=click.IntRange(1, 256), default=1, show_default=True, help="Worker processes.")
@click.option("--check", "only", multiple=True, metavar="CHECK|CLAUSE", help="Only this check; may be repeated.")
@click.option("--out", "folder", type=click.Path(file_okay=False, path_type=Path), help="Write report.jsonl here.")
def check(
    names: tuple[str, ...],
    profile: str,
    budget: float,
    seed: int,
    jobs: int,
    only: tuple[str, ...],
    folder: Path | None,
) -> int:
    """Judge implementations on generated cases, and print the report."""
    from harness.report.jsonl import run_line, verdict_line, write_line
    from harness.report.terminal import print_report

    _check_names(only)
    for name in names:
        check_name(name)
    codes = []
    with _report_file(folder) as file:
        for name in names:
            session = Session(profile, seed, budget, jobs, only)
            result = _with_progress(session, name)
            if not (result.interrupted or result.gave_up):
                session.confirm(result)
            print_report(out, result)
            out.print()
            if file is not None:
                write_line(file, run_line(name, result.info, seed, profile, result.complete))
                for verdict in result.verdicts:
                    write_line(file, verdict_line(name, verdict))
            codes.append(_exit_code(result, result.verdicts))
            if result.interrupted:
                err.print("interrupted: this is what was found until then")
                break
    return 1 if 1 in codes else max(codes)


def _exit_code(result: Result, verdicts: Sequence[Verdict]) -> int:
    from harness.report.terminal import conclusion

    code, _ = conclusion(verdicts)
    return code if code == 1 or not result.interrupted else 2


def _check_names(only: Sequence[str]) -> None:
    from harness.checks import CHECKS
    from harness.clauses import CLAUSES

    for name in only:
        if name not in CHECKS and name not in CLAUSES:
            raise UsageError(f"no check or clause {name!r}; `proptable list checks` lists them")
        if name not in CHECKS and not any(name in check.clauses for check in CHECKS.values()):
            raise UsageError(f"clause {name} has no check yet")


@contextmanager
def _report_file(folder: Path | None) -> Iterator[Any]:
    if folder is None:
        yield None
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "report.jsonl").open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from None
    with file:
        yield file


def _with_progress(session: Session, name: str) -> Result:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    last = time.monotonic()
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        row = progress.add_task(f"{name}: loading", total=None)

        def on_progress(done: int, total: int) -> None:
            nonlocal last
            # Looking for a smaller case takes more runs than were planned.
            progress.update(row, description=name, completed=done, total=max(done, total))
            if not err.is_terminal and time.monotonic() - last > PLAIN_PROGRESS_SECONDS:
                last = time.monotonic()
                err.print(f"{name}: {done} of {max(done, total)}")

        session.on_progress = on_progress
        return session.run(name)


@main.command()
@implementation_option
@click.argument("case_text", metavar="CASE.json|'Case(...)'")
@click.option("--check", "only", multiple=True, metavar="CHECK|CLAUSE", help="Only this check; may be repeated.")
def replay(names: str, case_text: str, only: tuple[str, ...]) -> int:
    """Run one case again, with all checks that take a case."""
    from harness.report.terminal import print_report
    from harness.verdict import NOT_REACHED

    _check_names(only)
    case = _read_case(case_text)
    result = Session(only=only).run_cases(names, lambda info: [case])
    shown = [verdict for verdict in result.verdicts if verdict.message != NOT_REACHED]
    print_report(out, result, shown)
    return _exit_code(result, shown)


def _read_case(text: str) -> Case:
    if text.lstrip().startswith(("Case(", "{")):
        return parse_case(text)
    path = Path(text)
    if not text or not path.is_file():
        raise UsageError(f"cannot read {text or 'a case without a name'}: no such file")
    try:
        if path.stat().st_size > 1 << 20:
            raise UsageError(f"{text}: a case file of more than 1 MiB")
        return parse_case(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {text}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{text}: not UTF-8 text") from None
    except ValueError as error:
        raise UsageError(f"{text}: {error}") from None


@main.command()
@click.argument("name", metavar="CLAUSE|CHECK|FAULT")
def explain(name: str) -> int:
    """Say what a clause, check or fault means, where the reference keeps it, and which real bugs broke it."""
    from harness.explain import explain as describe

    lines = describe(name)
    if lines is None:
        raise UsageError(f"no clause, check or fault {name!r}; `proptable list` lists them")
    for line in lines:
        out.print(Text(line))
    return 0


@main.command("list")
@click.argument("what", type=click.Choice(["checks", "faults", "clauses", "implementations"]))
def list_(what: str) -> int:
    """List the checks, faults, clauses or built-in implementations."""
    from harness.explain import rows

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in rows(what):
        table.add_row(*map(Text, row))
    out.print(table)
    return 0
