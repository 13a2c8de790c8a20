"""Run a case on an implementation, and note all that the checks look at."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.bits import same_bits
from harness.case import Case
from harness.contract import Implementation, Info, Model, Phase, Poison
from harness.dense import Expected, Row, dense_attention
from harness.inputs import PADDING_VALUE, Inputs, make_inputs
from harness.plan import CasePlan, PlannedStep, plan_case
from harness.run_guard import ours_to_raise
from harness.tolerance import Bound

MODEL_METHODS = ("bind_kv_caches", "forward_context", "attend", "kv_views", "close")
Views = tuple[torch.Tensor, torch.Tensor]


class SubjectError(Exception):
    """The implementation under test raised, or returned what cannot be judged: in which phase, where, and what."""

    def __init__(self, phase: Phase, where: str, error: BaseException | str) -> None:
        self.phase = phase
        self.where = where
        self.what = error if isinstance(error, str) else f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        self.origin = "" if isinstance(error, str) else _innermost_frame(error)
        super().__init__(f"{phase.value} {where}: {self.what}")


class AdapterError(Exception):
    """The adapter does not keep `harness.contract`: an ERROR, never a verdict on the subject."""


def _innermost_frame(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


@dataclass
class LayerRecord:
    """One layer in one step."""

    query: torch.Tensor
    """[num_tokens, num_heads, head_size]: as it was handed over (a copy)."""
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    """[num_tokens, num_heads, head_size]: a copy, made at the end of the step, of what came back."""
    inputs_changed: tuple[str, ...] = ()
    """Which of query, key, value differ after the call."""
    cache_before: Views | None = None
    """Of the cache that this layer reads, before and after its call; None when it cannot be read."""
    cache_after: Views | None = None


@dataclass
class StepRecord:
    """One step."""

    planned: PlannedStep
    layers: list[LayerRecord] = field(default_factory=list)


@dataclass
class Observation:
    """All that was seen of one case."""

    case: Case
    info: Info
    plan: CasePlan
    inputs: Inputs
    steps: list[StepRecord] = field(default_factory=list)
    _expected: list[list[list[Expected]]] | None = None

    def expected(self) -> list[list[list[Expected]]]:
        """Return what the oracle says, [num_steps][num_layers][num_reqs of the step]; computed once."""
        if self._expected is None:
            self._expected = expect(self.case, self.info, self.plan, self.inputs)
        return self._expected


def expect(case: Case, info: Info, plan: CasePlan, inputs: Inputs) -> list[list[list[Expected]]]:
    """Ask the oracle for every row of a case."""
    rows = []
    for step in plan.steps:
        for layer, target in enumerate(case.kv_sharing):
            owner = layer if target == -1 else target
            for request, query_len, seq_len in zip(
                step.requests, step.plan.query_lens, step.plan.seq_lens, strict=True
            ):
                rows.append(
                    Row(
                        inputs.query[request][layer, seq_len - query_len : seq_len],
                        inputs.key[request][owner, :seq_len],
                        inputs.value[request][owner, :seq_len],
                        case.layer_scale(layer),
                    )
                )
    bound = Bound(getattr(torch, case.dtype), info.rounds_scores)
    flat = iter(dense_attention([_on_cpu(row) for row in rows], bound))
    return [[[next(flat) for _ in step.requests] for _ in case.kv_sharing] for step in plan.steps]


def _on_cpu(row: Row) -> Row:
    return Row(row.query.cpu(), row.key.cpu(), row.value.cpu(), row.scale)


def unsupported(info: Info, case: Case) -> str | None:
    """Return why an implementation that declares `info` is not judged by `case`; None when it is."""
    if case.dtype not in info.dtypes:
        return f"dtype {case.dtype} is not declared"
    if info.head_sizes is not None and case.head_size not in info.head_sizes:
        return f"head_size {case.head_size} is not declared"
    if info.block_sizes is not None and case.block_size not in info.block_sizes:
        return f"block_size {case.block_size} is not declared"
    if not info.kv_sharing and any(target != -1 for target in case.kv_sharing):
        return "kv_sharing is not declared"
    return None


Interruption = Callable[[Model, PlannedStep, int], None]
"""Called before each step with the model, the step and its number; it may disturb the model (ERR-1)."""


def run_case(
    implementation: Implementation,
    case: Case,
    *,
    plan: CasePlan | None = None,
    poison: Poison = Poison.FINITE,
    watch_cache: bool = True,
    interrupt: Interruption | None = None,
) -> Observation:
    """Build, bind, and run every step of `case`.

    Args:
        implementation: the one under test.
        case: what to run.
        plan: another layout of the same case, for the invariances.
        poison: what the caches hold at first.
        watch_cache: whether to copy the caches before and after each layer.
        interrupt: see `Interruption`.

    Raises:
        SubjectError: the implementation raised, or returned something else than a tensor of the right shape and dtype.
    """
    info = implementation.info
    plan = plan or plan_case(case)
    inputs = make_inputs(case, info.device)
    observation = Observation(case, info, plan, inputs)
    with torch.random.fork_rng(devices=[]):
        # An implementation that looks at torch's generator sees another state in each case, and the same in a replay.
        torch.manual_seed(case.seed)
        _run_steps(implementation, observation, poison, watch_cache, interrupt)
    return observation


def _run_steps(
    implementation: Implementation,
    observation: Observation,
    poison: Poison,
    watch_cache: bool,
    interrupt: Interruption | None,
) -> None:
    case, plan, inputs = observation.case, observation.plan, observation.inputs
    model: Model = _subject(Phase.BUILD, "build", implementation.build, case.model_spec(), case.layer_specs())
    missing = [name for name in MODEL_METHODS if not callable(getattr(model, name, None))]
    if missing:
        raise AdapterError(f"build returned {type(model).__name__}, which has no method {', '.join(missing)}")
    try:
        _subject(Phase.BIND, "bind_kv_caches", model.bind_kv_caches, plan.num_blocks, poison)
        for number, planned in enumerate(plan.steps):
            if interrupt is not None:
                interrupt(model, planned, number)
            record = StepRecord(planned)
            observation.steps.append(record)
            _run_step(model, case, inputs, record, number, plan.num_blocks if watch_cache else None)
    except BaseException:
        # What went wrong first is what counts.
        with suppress(Exception):
            model.close()
        raise
    _subject(Phase.STEP, "close", model.close)


def _subject(phase: Phase, where: str, function: Callable[..., Any], *arguments: object) -> Any:
    try:
        return function(*arguments)
    except BaseException as error:
        if ours_to_raise(error):
            raise
        raise SubjectError(phase, where, error) from error


def step_tensors(
    case: Case, inputs: Inputs, planned: PlannedStep, layer: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value of one layer in one step, with the rows of padding at the end."""
    spans = [
        (request, seq_len - query_len, seq_len)
        for request, query_len, seq_len in zip(
            planned.requests, planned.plan.query_lens, planned.plan.seq_lens, strict=True
        )
    ]
    tensors = []
    for by_request in (inputs.query, inputs.key, inputs.value):
        rows = torch.cat([by_request[request][layer, start:end] for request, start, end in spans])
        padding = rows.new_full((case.padding, *rows.shape[1:]), PADDING_VALUE)
        tensors.append(torch.cat([rows, padding]))
    if case.fused_qkv:
        fused = torch.cat(tensors, dim=1)
        query, key, value = torch.split(fused, [tensor.shape[1] for tensor in tensors], dim=1)
        return query, key, value
    return tensors[0], tensors[1], tensors[2]


def copy_views(model: Model, case: Case, layer_name: str, num_blocks: int | None) -> Views | None:
    """Return copies of a layer's logical K and V; None when nobody asks (`num_blocks` is None), or they cannot be read.

    Raises:
        AdapterError: `kv_views` raised, or returned something else than two tensors of the right shape and dtype.
    """
    if num_blocks is None:
        return None
    try:
        views = model.kv_views(layer_name)
        if views is None:
            return None
        copies = tuple(view.detach().clone() for view in views)
    except Exception as error:
        raise AdapterError(f"kv_views({layer_name!r}) failed: {type(error).__name__}: {error!s:.200}") from error
    shape, dtype = (num_blocks, case.block_size, case.num_kv_heads, case.head_size), getattr(torch, case.dtype)
    got = [f"{str(view.dtype).removeprefix('torch.')}{list(view.shape)} on {view.device.type}" for view in copies]
    if len(copies) != 2 or any(view.shape != shape or view.dtype != dtype or view.is_meta for view in copies):
        raise AdapterError(
            f"kv_views({layer_name!r}) is {', '.join(got)}, but should be two of {case.dtype}{list(shape)}"
        )
    return copies[0], copies[1]


def _run_step(
    model: Model, case: Case, inputs: Inputs, record: StepRecord, number: int, num_blocks: int | None
) -> None:
    where = f"step {number + 1}"
    try:
        with model.forward_context(record.planned.plan):
            for layer in range(case.num_layers):
                name = case.layer_name(layer)
                record.layers.append(
                    _run_layer(model, case, inputs, record.planned, layer, f"{where}, {name}", num_blocks)
                )
    except SubjectError:
        raise
    except BaseException as error:
        if ours_to_raise(error):
            raise
        raise SubjectError(Phase.STEP, f"{where}, forward_context", error) from error
    if len(record.layers) != case.num_layers:
        # The exception of a layer went through the context manager, which must not swallow it.
        raise SubjectError(
            Phase.STEP, f"{where}, {case.layer_name(len(record.layers))}", "raised, and forward_context hid it"
        )
    for layer_record in record.layers:
        # Not earlier: a layer must not overwrite what another one has returned.
        layer_record.output = layer_record.output.clone()


def _run_layer(
    model: Model, case: Case, inputs: Inputs, planned: PlannedStep, layer: int, where: str, num_blocks: int | None
) -> LayerRecord:
    name = case.layer_name(layer)
    given = step_tensors(case, inputs, planned, layer)
    query, key, value = (tensor.clone() for tensor in given)
    before = copy_views(model, case, name, num_blocks)
    output = _subject(Phase.STEP, where, model.attend, name, *given)
    check_output(output, given[0], where)
    changed = tuple(
        what
        for what, now, then in zip(("query", "key", "value"), given, (query, key, value), strict=True)
        if not same_bits(now, then)
    )
    after = copy_views(model, case, name, num_blocks)
    return LayerRecord(query, key, value, output.detach(), changed, before, after)


def check_output(output: object, query: torch.Tensor, where: str) -> None:
    """Refuse what cannot be compared.

    Raises:
        SubjectError: not a tensor, or another shape, dtype or device than the query.
    """
    if not isinstance(output, torch.Tensor):
        raise SubjectError(Phase.STEP, where, f"attend returned {type(output).__name__}, but should return a tensor")
    for what in ("shape", "dtype", "device"):
        got, want = getattr(output, what), getattr(query, what)
        if got != want:
            got, want = (tuple(x) if what == "shape" else x for x in (got, want))
            raise SubjectError(Phase.STEP, where, f"output.{what}={got}, but should be {want}")


def outputs_by_position(observation: Observation) -> list[torch.Tensor]:
    """Put a case's outputs in order of position: [num_reqs] of [num_layers, total_len, num_heads, head_size]."""
    case = observation.case
    outputs = [torch.empty_like(query) for query in observation.inputs.query]
    for step in observation.steps:
        for layer, record in enumerate(step.layers):
            start = 0
            plan = step.planned.plan
            for request, query_len, seq_len in zip(step.planned.requests, plan.query_lens, plan.seq_lens, strict=True):
                outputs[request][layer, seq_len - query_len : seq_len] = record.output[start : start + query_len]
                start += query_len
    assert len(outputs) == case.num_reqs
    return outputs


def bounds_by_position(observation: Observation) -> list[torch.Tensor]:
    """Put the bounds in the order of `outputs_by_position`."""
    bounds = [torch.zeros(query.shape, dtype=torch.float64) for query in observation.inputs.query]
    for step, expected in zip(observation.plan.steps, observation.expected(), strict=True):
        for layer, rows in enumerate(expected):
            for request, row, seq_len in zip(step.requests, rows, step.plan.seq_lens, strict=True):
                bounds[request][layer, seq_len - row.bound.shape[0] : seq_len] = row.bound
    return bounds
