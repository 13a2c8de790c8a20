"""Case to StepPlans: which blocks each request gets, and where each token goes.

`dense.py` must not import this module: the oracle shares no paging code with what it judges.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from harness.case import Case
from harness.contract import NULL_BLOCK_ID, PAD_SLOT_ID, StepPlan


@dataclass(frozen=True)
class PlannedStep:
    """A step, and which request of the case each row of its batch is."""

    plan: StepPlan
    requests: tuple[int, ...]
    """[num_reqs of the step]: index of the request in the case."""


@dataclass(frozen=True)
class CasePlan:
    """All steps of a case."""

    steps: tuple[PlannedStep, ...]
    num_blocks: int
    """Blocks that each layer's cache needs, the null block included."""


def plan_case(case: Case) -> CasePlan:
    """Hand out blocks as a scheduler would: when a request needs them, never the null block, never one block twice."""
    rng = random.Random(f"plan {case.seed}")
    needed = sum(-(-total // case.block_size) for total in case.total_lens)
    num_blocks = NULL_BLOCK_ID + 1 + needed + case.spare_blocks
    free = list(range(NULL_BLOCK_ID + 1, num_blocks))
    if case.allocation == "shuffled":
        rng.shuffle(free)
    elif case.allocation == "ascending":
        free.reverse()
    blocks: list[list[int]] = [[] for _ in range(case.num_reqs)]
    seq_lens = [0] * case.num_reqs
    steps = []
    for query_lens in case.steps:
        requests = [request for request, query_len in enumerate(query_lens) if query_len]
        if case.shuffle_requests:
            rng.shuffle(requests)
        for request in requests:
            seq_lens[request] += query_lens[request]
            while len(blocks[request]) * case.block_size < seq_lens[request]:
                blocks[request].append(free.pop())
        steps.append(
            PlannedStep(
                make_step(
                    [query_lens[request] for request in requests],
                    [seq_lens[request] for request in requests],
                    [blocks[request] for request in requests],
                    case.block_size,
                    case.padding,
                    rng,
                    num_blocks,
                ),
                tuple(requests),
            )
        )
    return CasePlan(tuple(steps), num_blocks)


def make_step(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    blocks: Sequence[Sequence[int]],
    block_size: int,
    padding: int,
    rng: random.Random,
    num_blocks: int,
) -> StepPlan:
    """Lay out one step. The tails of the block table hold random blocks, which must not be read (INV-7)."""
    slot_mapping = [
        blocks[request][position // block_size] * block_size + position % block_size
        for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(seq_len - query_len, seq_len)
    ]
    width = max(map(len, blocks)) + 1
    return StepPlan(
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        block_table=tuple((*row, *(rng.randrange(num_blocks) for _ in range(width - len(row)))) for row in blocks),
        slot_mapping=(*slot_mapping, *([PAD_SLOT_ID] * padding)),
        num_actual_tokens=len(slot_mapping),
    )
