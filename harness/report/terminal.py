"""The report on the terminal: what is wrong first, then what passed, in a few lines."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.case import Case
from harness.plan import plan_case
from harness.report.replay import replay_line
from harness.session import Result
from harness.verdict import NOT_REACHED, Status, Verdict

STYLES = {
    Status.PASS: "green",
    Status.FAIL: "bold red",
    Status.ADVICE: "yellow",
    Status.SKIP: "dim",
    Status.ERROR: "bold magenta",
}
MAX_ROWS = 12
"""Requests in the table of a step; the ones around the wrong one are shown."""


def print_report(console: Console, result: Result, verdicts: Sequence[Verdict] | None = None) -> None:
    """Print everything that is to be said of one implementation, or only these verdicts of it."""
    implementation, info, num_cases, seconds = result.name, result.info, result.num_cases, result.seconds
    verdicts = result.verdicts if verdicts is None else verdicts
    # soft_wrap keeps a replay line in one piece, to be copied.
    console.print(Text(f"{info.name} {info.version} on {info.device}", style="bold"), soft_wrap=True)
    for note in info.notes:
        console.print(Text(f"  note: {printable(note)}", style="dim"), soft_wrap=True)
    for status in (Status.ERROR, Status.FAIL, Status.ADVICE):
        for verdict in verdicts:
            if verdict.status is status:
                print_verdict(console, implementation, verdict)
    _print_families(console, verdicts)
    _print_skips(console, verdicts)
    counts = {status: sum(v.status is status for v in verdicts) for status in Status}
    summary = Text("  ")
    for status, word in (
        (Status.PASS, "passed"),
        (Status.FAIL, "failed"),
        (Status.ERROR, "errors"),
        (Status.ADVICE, "advice"),
        (Status.SKIP, "skipped"),
    ):
        if counts[status] or status is Status.PASS:
            summary.append(f"{counts[status]} {word}  ", style=STYLES[status])
    rate = f", {num_cases / seconds:.1f} cases per second" if seconds > 0 and num_cases else ""
    summary.append(f"{num_cases} cases in {seconds:.1f} s{rate}")
    console.print(summary, soft_wrap=True)
    conforms, why = conclusion(verdicts)
    if result.interrupted:
        conforms, why = max(conforms, 2), f"interrupted; until then: {why}"
    if result.done < result.planned and conforms == 0:
        why += f"; {result.done} of {result.planned} planned cases and checks were run"
    if result.gave_up:
        why += "; the rest was not run, since its process was lost too often"
    console.print(Text(f"  {why}", style="bold green" if conforms == 0 else "bold red"), soft_wrap=True)


def conclusion(verdicts: Sequence[Verdict]) -> tuple[int, str]:
    """Return the exit code and its reason in words."""
    statuses = {verdict.status for verdict in verdicts}
    if Status.FAIL in statuses:
        return 1, "does not conform"
    if Status.ERROR in statuses:
        return 2, "not judged: the harness or the adapter failed"
    if Status.PASS not in statuses:
        return 2, "not judged: every check was skipped"
    not_reached = sum(v.status is Status.SKIP and v.message == NOT_REACHED for v in verdicts)
    words = ["conforms"]
    if Status.ADVICE in statuses:
        words.append("with advice")
    if not_reached:
        words.append(f"as far as it was judged: {not_reached} checks were not reached")
    return 0, ", ".join(words)


def printable(text: str) -> str:
    """Return `text` in one line, without what a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text)


def print_verdict(console: Console, implementation: str, verdict: Verdict) -> None:
    """Print one finding: what, where, how far off, what is not wrong, the plan, the clause, the replay line."""
    where = dict(verdict.where)
    head = [", ".join(verdict.clauses)]
    if "step" in where and verdict.case is not None:
        head.append(f"step {where['step'] + 1} of {len(verdict.case.steps)}")
    elif "step" in where:
        head.append(f"step {where['step'] + 1}")
    head.extend(str(where[name]) for name in ("layer_name",) if name in where)
    head.extend(f"{name} {where[name]}" for name in ("request", "head") if name in where)
    title = Text()
    title.append(f"{verdict.status.value:<8}", style=STYLES[verdict.status])
    title.append(f"{verdict.check}   ", style="bold")
    title.append(" · ".join(head))
    console.print()
    console.print(title, soft_wrap=True)
    for line in (verdict.message, *verdict.details):
        console.print(Text(f"  {printable(line)}"), soft_wrap=True)
    if verdict.only_after:
        line = "the case passes when it runs alone: what the implementation does depends on earlier cases"
        console.print(Text(f"  {line}"), soft_wrap=True)
    if verdict.not_wrong:
        console.print(
            Text(f"  not wrong: {', '.join(verdict.not_wrong[:6])} pass on this case", style="dim"), soft_wrap=True
        )
    if verdict.case is not None and "step" in where:
        console.print(Padding(_step_table(verdict.case, where["step"], where.get("request")), (0, 0, 0, 2)))
    console.print(Text(f"  replay: {replay_line(implementation, verdict)}"), soft_wrap=True)


def _step_table(case: Case, number: int, wrong: int | None) -> Table:
    step = plan_case(case).steps[number]
    plan = step.plan
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="dim")
    for name in ("request", "context_len", "query_len", "seq_len"):
        table.add_column(name, justify="right", no_wrap=True, overflow="fold")
    table.add_column("block_table", overflow="fold")
    table.add_column("slot_mapping", overflow="fold")
    table.add_column("", no_wrap=True)
    at = step.requests.index(wrong) if wrong in step.requests else 0
    first = max(0, min(at - MAX_ROWS // 2, plan.num_reqs - MAX_ROWS))
    starts = plan.query_start_loc
    for row in range(first, min(first + MAX_ROWS, plan.num_reqs)):
        request, query_len, seq_len = step.requests[row], plan.query_lens[row], plan.seq_lens[row]
        table.add_row(
            str(request),
            str(seq_len - query_len),
            str(query_len),
            str(seq_len),
            _shorten(plan.block_table[row][: -(-seq_len // case.block_size)]),
            _shorten(plan.slot_mapping[starts[row] : starts[row + 1]]),
            Text("<- differs", style="red") if request == wrong else "",
        )
    return table


def _shorten(numbers: Sequence[int]) -> str:
    if len(numbers) <= 6:
        return f"[{', '.join(map(str, numbers))}]"
    return f"[{', '.join(map(str, numbers[:3]))}, ..., {', '.join(map(str, numbers[-2:]))}]"


def _print_families(console: Console, verdicts: Sequence[Verdict]) -> None:
    families: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        families.setdefault(verdict.clauses[0].split("-")[0], []).append(verdict)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="dim")
    table.add_column("clauses")
    table.add_column("checks passed", justify="right")
    table.add_column("examples", justify="right")
    table.add_column("")
    for family, members in families.items():
        passed = sum(v.status is Status.PASS for v in members)
        others = Text(", ").join(
            Text(f"{sum(v.status is status for v in members)} {status.value}", style=STYLES[status])
            for status in (Status.FAIL, Status.ERROR, Status.ADVICE, Status.SKIP)
            if any(v.status is status for v in members)
        )
        examples = sum(v.examples for v in members)
        table.add_row(family, f"{passed} of {len(members)}", f"{examples:,}", others)
    console.print()
    console.print(table)


def _print_skips(console: Console, verdicts: Sequence[Verdict]) -> None:
    reasons: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.status is Status.SKIP:
            reasons.setdefault(verdict.message, []).append(verdict.check)
    for reason, checks in reasons.items():
        names = ", ".join(checks[:3]) + (f" and {len(checks) - 3} more" if len(checks) > 3 else "")
        console.print(Text(f"  skipped: {names}: {printable(reason)}", style="dim"), soft_wrap=True)
