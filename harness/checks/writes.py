"""WRT: what is written to the cache, and what is not."""

from __future__ import annotations

import torch

from harness.bits import as_bits
from harness.checks.base import Kind, check
from harness.run import LayerRecord, Observation, StepRecord
from harness.verdict import Violation


def _own_records(observation: Observation) -> list[tuple[int, int, StepRecord, LayerRecord]]:
    """Return (step, layer) of the layers with a cache of their own that can be read."""
    return [
        (number, layer, step, record)
        for number, step in enumerate(observation.steps)
        for layer, record in enumerate(step.layers)
        if observation.case.kv_sharing[layer] == -1 and record.cache_before is not None
    ]


def _flat(view: torch.Tensor) -> torch.Tensor:
    """[num_blocks, block_size, num_kv_heads, head_size] to [num_slots, num_kv_heads, head_size]."""
    return view.flatten(0, 1)


def _request_at(step: StepRecord, token: int) -> int:
    starts = step.planned.plan.query_start_loc
    row = next(r for r in range(step.planned.plan.num_reqs) if token < starts[r + 1])
    return step.planned.requests[row]


@check(Kind.CASE, "WRT-1")
def written_slots_hold_kv(observation: Observation) -> None:
    """After a step, every slot in the mapping holds its k and v."""
    for number, layer, step, record in _own_records(observation):
        plan = step.planned.plan
        slots = torch.tensor(plan.slot_mapping[: plan.num_actual_tokens])
        assert record.cache_after is not None
        for what, view, given in zip(("K", "V"), record.cache_after, (record.key, record.value), strict=True):
            got, want = _flat(view)[slots], given[: plan.num_actual_tokens].to(view.dtype)
            wrong = as_bits(got) != as_bits(want)
            if wrong.any():
                token, head, dim = (int(i) for i in wrong.nonzero()[0])
                slot = int(slots[token])
                block_size = observation.case.block_size
                tokens = wrong.flatten(1).any(1)
                raise Violation(
                    f"{what} in slot {slot} (block {slot // block_size}, offset {slot % block_size}), "
                    f"KV head {head}, dim {dim} is {float(got[token, head, dim]):.6g}, "
                    f"but should be {float(want[token, head, dim]):.6g}",
                    step=number,
                    layer_name=observation.case.layer_name(layer),
                    request=_request_at(step, token),
                    details=(f"{int(tokens.sum())} of {plan.num_actual_tokens} tokens are wrong in the cache",),
                )


@check(Kind.CASE, "WRT-2")
def other_slots_untouched(observation: Observation) -> None:
    """Every other byte of the cache is unchanged; rows of padding write nothing."""
    for number, layer, step, record in _own_records(observation):
        assert record.cache_before is not None
        assert record.cache_after is not None
        plan = step.planned.plan
        written = torch.tensor(plan.slot_mapping[: plan.num_actual_tokens])
        for what, before, after in zip(("K", "V"), record.cache_before, record.cache_after, strict=True):
            changed = (as_bits(_flat(before)) != as_bits(_flat(after))).flatten(1).any(1)
            changed[written] = False
            _refuse_change(observation, changed, f"{what} changed", number, layer, "that is not in the slot mapping")
    _refuse_changes_between_calls(observation)


def _refuse_changes_between_calls(observation: Observation) -> None:
    """A layer's cache must not change while another layer, or nobody, runs."""
    last: dict[int, tuple[int, LayerRecord]] = {}
    for number, layer, _, record in _own_records(observation):
        if layer in last:
            _, earlier = last[layer]
            assert earlier.cache_after is not None
            assert record.cache_before is not None
            for what, then, now in zip(("K", "V"), earlier.cache_after, record.cache_before, strict=True):
                changed = (as_bits(_flat(then)) != as_bits(_flat(now))).flatten(1).any(1)
                _refuse_change(observation, changed, f"{what} changed", number, layer, "since the layer's last call")
        last[layer] = (number, record)


def _refuse_change(
    observation: Observation, changed: torch.Tensor, what: str, number: int, layer: int, where: str
) -> None:
    if changed.any():
        slots = changed.nonzero().flatten().tolist()
        block_size = observation.case.block_size
        raise Violation(
            f"{what} in slot {slots[0]} (block {slots[0] // block_size}, offset {slots[0] % block_size}) {where}, "
            "but should be untouched",
            step=number,
            layer_name=observation.case.layer_name(layer),
            details=(
                f"{len(slots)} slots changed: {', '.join(map(str, slots[:8]))}{' ...' if len(slots) > 8 else ''}",
            ),
        )
