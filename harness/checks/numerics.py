"""ATT and INV: numerics and invariances."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from harness.bits import as_bits
from harness.case import Case
from harness.checks.base import Kind, check, rerun
from harness.contract import Implementation, Poison, StepPlan
from harness.plan import CasePlan, PlannedStep, plan_case
from harness.run import Observation, bounds_by_position, outputs_by_position
from harness.verdict import Violation


@check(Kind.CASE, "ATT-1")
def every_step_runs(observation: Observation) -> None:
    """Every step of a declared case runs, and gives a tensor of the query's shape, dtype and device."""
    # That there is an observation shows it: the judge turns a SubjectError into a failure of this check.
    assert len(observation.steps) == len(observation.case.steps)


@check(Kind.CASE, "ATT-1")
def output_matches_dense(observation: Observation) -> None:
    """Paged output equals dense float64 attention within the derived error bound."""
    for number, (step, expected) in enumerate(zip(observation.steps, observation.expected(), strict=True)):
        for layer, (record, rows) in enumerate(zip(step.layers, expected, strict=True)):
            want = torch.cat([row.output for row in rows])
            bound = torch.cat([row.bound for row in rows])
            got = record.output[: want.shape[0]].cpu().double()
            # Not `error > bound`: NaN must not pass.
            wrong = ~((got - want).abs() <= bound)
            if wrong.any():
                raise _describe(observation, number, layer, got, want, bound, wrong)


def _describe(
    observation: Observation,
    number: int,
    layer: int,
    got: torch.Tensor,
    want: torch.Tensor,
    bound: torch.Tensor,
    wrong: torch.Tensor,
) -> Violation:
    case, step = observation.case, observation.steps[number]
    ratio = ((got - want).abs() / bound).nan_to_num(nan=float("inf"), posinf=float("inf"))
    token, head, dim = (int(i) for i in torch.unravel_index(ratio.masked_fill(~wrong, 0).argmax(), ratio.shape))
    rows = wrong.any(-1)
    plan, starts = step.planned.plan, step.planned.plan.query_start_loc
    request_of = [r for r, query_len in enumerate(plan.query_lens) for _ in range(query_len)]
    wrong_rows = [r for r in range(plan.num_reqs) if rows[starts[r] : starts[r + 1]].any()]
    right_rows = [r for r in range(plan.num_reqs) if r not in wrong_rows]
    by_request = ", ".join(
        f"request {step.planned.requests[r]}: heads {_true_ranges(rows[starts[r] : starts[r + 1]].any(0))}"
        f" at query {_true_ranges(rows[starts[r] : starts[r + 1]].any(1))}"
        for r in wrong_rows[:4]
    )
    shape = ",".join(map(str, step.layers[layer].query.shape))
    kv_shape = ",".join(map(str, step.layers[layer].key.shape))
    details = [
        f"{int(rows.sum())} of {rows.numel()} (token, head) rows differ: {by_request}"
        + (" ..." if len(wrong_rows) > 4 else ""),
    ]
    if right_rows:
        details.append(f"right: request {_ranges(sorted(step.planned.requests[r] for r in right_rows))}")
    details.append(f"largest error is {ratio.max():.3g} times the bound, at token {token}, head {head}, dim {dim}")
    finite = torch.isfinite(got)
    if not finite.all():
        details.append(f"{int((~finite).sum())} of {got.numel()} values are not finite")
    return Violation(
        f"output[{token}, {head}, {dim}]={got[token, head, dim]:.6g}, but should be {want[token, head, dim]:.6g}"
        f" ± {bound[token, head, dim]:.2g}   [attend(query {case.dtype}[{shape}], key {case.dtype}[{kv_shape}])]",
        step=number,
        layer_name=case.layer_name(layer),
        request=step.planned.requests[request_of[token]],
        head=head,
        details=tuple(details),
        ratio=float(ratio.max()),
    )


def _true_ranges(flags: torch.Tensor) -> str:
    return _ranges(flags.nonzero().flatten().tolist())


def _ranges(numbers: list[int]) -> str:
    """Write [0, 1, 2, 5] as 0-2, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    shown = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts]
    return ", ".join(shown[:6]) + (" ..." if len(shown) > 6 else "")


def _compare_bits(a: Observation, b: Observation, why: str) -> None:
    """Require that the same rows of two runs are equal, bit for bit."""
    first, second = outputs_by_position(a), outputs_by_position(b)
    for request, (x, y) in enumerate(zip(first, second, strict=True)):
        # x, y: [num_layers, total_len, num_heads, head_size]
        different = as_bits(x) != as_bits(y)
        if different.any():
            layer, position, head, dim = (int(i) for i in different.nonzero()[0])
            raise Violation(
                f"output at position {position}, dim {dim} is {float(x[layer, position, head, dim]):.9g} in the case "
                f"as it is, {float(y[layer, position, head, dim]):.9g} {why}, but should be the same to the bit",
                step=_step_of(a, request, position),
                layer_name=a.case.layer_name(layer),
                request=request,
                head=head,
            )


def _compare_bounds(a: Observation, b: Observation, requests: list[int], why: str) -> None:
    """Require that request requests[i] of `a` and request i of `b` differ by no more than both bounds together."""
    first, second = outputs_by_position(a), outputs_by_position(b)
    first_bounds, second_bounds = bounds_by_position(a), bounds_by_position(b)
    for i, request in enumerate(requests):
        x, y = first[request].cpu().double(), second[i].cpu().double()
        bound = first_bounds[request] + second_bounds[i]
        wrong = ~((x - y).abs() <= bound)
        if wrong.any():
            layer, position, head, dim = (int(k) for k in wrong.nonzero()[0])
            raise Violation(
                f"output at position {position}, dim {dim} is {x[layer, position, head, dim]:.6g} in the case as it is "
                f"and {y[layer, position, head, dim]:.6g} {why}, but should be the same "
                f"± {bound[layer, position, head, dim]:.2g}",
                step=_step_of(a, request, position),
                layer_name=a.case.layer_name(layer),
                request=request,
                head=head,
            )


def _step_of(observation: Observation, request: int, position: int) -> int:
    end = 0
    for number, step in enumerate(observation.case.steps):
        end += step[request]
        if position < end:
            return number
    raise AssertionError("a position beyond the case")


def rename_blocks(plan: CasePlan, block_size: int, seed: int) -> CasePlan:
    """Return the same plan with its physical blocks renamed; the null block keeps its name."""
    names = list(range(1, plan.num_blocks))
    random.Random(f"rename {seed}").shuffle(names)
    new = [0, *names]

    def rename(step: StepPlan) -> StepPlan:
        return replace(
            step,
            block_table=tuple(tuple(new[block] for block in row) for row in step.block_table),
            slot_mapping=tuple(
                slot if slot < 0 else new[slot // block_size] * block_size + slot % block_size
                for slot in step.slot_mapping
            ),
        )

    return CasePlan(tuple(PlannedStep(rename(step.plan), step.requests) for step in plan.steps), plan.num_blocks)


@check(Kind.RELATION, "INV-1")
def output_ignores_block_names(implementation: Implementation, observation: Observation) -> None:
    """Renaming physical blocks changes nothing, bitwise."""
    case = observation.case
    plan = rename_blocks(observation.plan, case.block_size, case.seed)
    _compare_bits(observation, rerun(implementation, observation, plan=plan), "after the blocks were renamed")


@check(Kind.RELATION, "INV-2")
def output_ignores_other_requests(implementation: Implementation, observation: Observation) -> None:
    """Running a request alone changes its output only within the bound; batch-invariant backends: not a bit."""
    case = observation.case
    if case.num_reqs == 1:
        return
    # The values of request 0 depend only on the seed and its number, so that it is the same request alone.
    steps = tuple((step[0],) for step in case.steps if step[0])
    if not steps:
        return
    alone = rerun(implementation, observation, case=replace(case, steps=steps, padding=0), plan=None)
    _compare_bounds(observation, alone, [0], "when request 0 runs alone")
    if implementation.info.batch_invariant:
        x, y = outputs_by_position(observation)[0], outputs_by_position(alone)[0]
        if not torch.equal(as_bits(x), as_bits(y)):
            raise Violation(
                "output of request 0 has other bits when it runs alone, but batch_invariant is declared", request=0
            )


@check(Kind.RELATION, "INV-2")
def output_ignores_request_order(implementation: Implementation, observation: Observation) -> None:
    """Reordering the requests of a batch changes a request's output only within the bound."""
    if observation.case.num_reqs == 1:
        return
    plan = CasePlan(
        tuple(PlannedStep(reverse_requests(step.plan), step.requests[::-1]) for step in observation.plan.steps),
        observation.plan.num_blocks,
    )
    reordered = rerun(implementation, observation, plan=plan)
    _compare_bounds(
        observation, reordered, list(range(observation.case.num_reqs)), "with the requests in reverse order"
    )


def reverse_requests(step: StepPlan) -> StepPlan:
    """Return the step with its requests in reverse order; the padding stays at the end."""
    starts = step.query_start_loc
    slots = [step.slot_mapping[starts[r] : starts[r + 1]] for r in range(step.num_reqs)]
    return StepPlan(
        query_lens=step.query_lens[::-1],
        seq_lens=step.seq_lens[::-1],
        block_table=step.block_table[::-1],
        slot_mapping=tuple(slot for row in slots[::-1] for slot in row) + step.slot_mapping[step.num_actual_tokens :],
        num_actual_tokens=step.num_actual_tokens,
    )


MAX_CHUNKS = {False: 64, True: 8}
"""Steps into which a case is cut at the most, by `Info.slow`; a longer case gets chunks of more than one token."""


@check(Kind.RELATION, "INV-3")
def output_ignores_chunking(implementation: Implementation, observation: Observation) -> None:
    """One prefill equals chunks equals token by token; split at any point."""
    case = observation.case
    totals = case.total_lens
    longest = max(totals)
    half = tuple(total // 2 for total in totals)
    ways: dict[str, tuple[tuple[int, ...], ...]] = {
        "in one prefill": (totals,),
        "in two chunks": (half, tuple(total - first for total, first in zip(totals, half, strict=True))),
    }
    chunk = -(-longest // MAX_CHUNKS[implementation.info.slow])
    ways["token by token" if chunk == 1 else f"in chunks of {chunk}"] = tuple(
        tuple(min(chunk, max(0, total - start)) for total in totals) for start in range(0, longest, chunk)
    )
    for why, steps in ways.items():
        kept = tuple(step for step in steps if any(step))
        if kept == case.steps:
            continue
        chunked: Case = replace(case, steps=kept)
        other = rerun(implementation, observation, case=chunked, plan=plan_case(chunked))
        _compare_bounds(observation, other, list(range(case.num_reqs)), why)


@check(Kind.RELATION, "INV-7")
def output_ignores_unused_cache(implementation: Implementation, observation: Observation) -> None:
    """Finite garbage in unused slots and blocks changes nothing, bitwise."""
    zeros = rerun(implementation, observation, poison=Poison.ZERO)
    _compare_bits(observation, zeros, "when the unused cache holds zeros instead of 6e4")
