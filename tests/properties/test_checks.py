"""Every check passes on both reference backends: no false alarm on a right implementation."""

from __future__ import annotations

import pytest

from harness.adapters.reference import eager
from harness.adapters.reference_triton import triton
from harness.case import Case
from harness.checks import CHECKS, Kind
from harness.run import run_case

IMPLEMENTATIONS = {implementation.info.name: implementation for implementation in (eager, triton)}
CASE = Case(
    steps=((3, 18, 0), (1, 2, 5), (0, 1, 1)), kv_sharing=(-1, -1, 0), padding=2, shuffle_requests=True, dtype="bfloat16"
)


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def implementation(request):
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(scope="module")
def observation(implementation):
    return run_case(implementation, CASE)


@pytest.mark.parametrize("name", CHECKS)
def test_check_passes_on_the_reference(name, implementation, observation):
    check = CHECKS[name]
    arguments = {
        Kind.SURFACE: lambda: (implementation.surface(),),
        Kind.CASE: lambda: (observation,),
        Kind.RELATION: lambda: (implementation, observation),
    }[check.kind]()
    check(*arguments)
