"""The real vLLM: what the adapter must be right about, and that a fault in front of the real vLLM is seen."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; `nox -s peers` installs it")

import torch

from harness.adapters.vllm import vllm
from harness.case import Case
from harness.checks import CHECKS
from harness.judge import judge_case
from harness.run import outputs_by_position, run_case
from harness.verdict import Status

pytestmark = pytest.mark.peer
CASE = Case(
    steps=((3, 18, 0), (1, 2, 33), (0, 1, 1)), kv_sharing=(-1, -1, 0), head_size=64, padding=2, shuffle_requests=True
)


def failing(implementation, case=CASE):
    return {v.check for v in judge_case(implementation, case, list(CHECKS.values())) if v.status is not Status.PASS}


@pytest.mark.parametrize("head_size", vllm.info.head_sizes)
@pytest.mark.parametrize("block_size", vllm.info.block_sizes)
@pytest.mark.parametrize("dtype", vllm.info.dtypes)
def test_declared_size_is_right(head_size, block_size, dtype):
    case = Case(steps=((20, 3), (1, 2)), kv_sharing=(-1, 0), head_size=head_size, block_size=block_size, dtype=dtype)
    assert not failing(vllm, case)


class Broken:
    """The real vLLM with a changed plan or changed tensors."""

    def __init__(self, change_plan=lambda plan: plan, change_tensors=lambda *tensors: tensors):
        self.info = vllm.info
        self.change_plan = change_plan
        self.change_tensors = change_tensors

    def build(self, config, layers):
        model = vllm.build(config, layers)
        context, attend = model.forward_context, model.attend
        model.forward_context = lambda plan: context(self.change_plan(plan))
        model.attend = lambda name, *tensors: attend(name, *self.change_tensors(*tensors))
        return model


def test_slots_in_the_wrong_order_are_seen():
    from dataclasses import replace

    def flip(plan):
        actual = plan.num_actual_tokens
        return replace(plan, slot_mapping=plan.slot_mapping[:actual][::-1] + plan.slot_mapping[actual:])

    assert {"output_matches_dense", "written_slots_hold_kv"} <= failing(Broken(change_plan=flip))


def test_exchanged_heads_are_seen():
    broken = Broken(change_tensors=lambda query, key, value: (query.flip(1), key, value))
    assert "output_matches_dense" in failing(broken)


def test_key_for_value_is_seen():
    broken = Broken(change_tensors=lambda query, key, value: (query, key, key.clone()))
    assert {"output_matches_dense", "written_slots_hold_kv"} <= failing(broken)


def test_many_models_leave_nothing_behind():
    def live():
        gc.collect()
        return len(gc.get_objects())

    small = Case(steps=((2,),), head_size=32)
    for _ in range(20):
        run_case(vllm, small)
    before = live()
    for _ in range(200):
        run_case(vllm, small)
    assert live() - before < 2000


def test_same_case_gives_the_same_bits():
    first, second = (outputs_by_position(run_case(vllm, CASE)) for _ in range(2))
    assert all(map(torch.equal, first, second))
