"""ERR: faults of the surroundings."""

from __future__ import annotations

from harness.bits import as_bits
from harness.checks.base import Kind, check, rerun
from harness.contract import HasSurface, Implementation, Model, StepPlan
from harness.inputs import make_inputs
from harness.plan import PlannedStep
from harness.run import Observation, outputs_by_position, step_tensors
from harness.verdict import Violation


class _InjectedError(Exception):
    """An error of the surroundings, raised in the middle of a step."""


def _require_no_context(implementation: HasSurface, step: int) -> None:
    try:
        implementation.surface().get_forward_context()
    except AssertionError:
        return
    raise Violation("the forward context of a step that failed is still set after it, but should be gone", step=step)


def first_token(plan: StepPlan) -> StepPlan:
    """Return a step of nothing but the first token of the first request of `plan`."""
    return StepPlan(
        query_lens=(1,),
        seq_lens=(plan.seq_lens[0] - plan.query_lens[0] + 1,),
        block_table=plan.block_table[:1],
        slot_mapping=plan.slot_mapping[:1],
        num_actual_tokens=1,
    )


@check(Kind.RELATION, "ERR-1")
def next_step_is_right_after_an_error(implementation: Implementation, observation: Observation) -> None:
    """An exception in any layer leaves context, registry, bindings and caches usable; the next step is right."""
    case = observation.case
    inputs = make_inputs(case, implementation.info.device)

    def disturb(model: Model, planned: PlannedStep, number: int) -> None:
        # Fail before, between and after the layers' calls, in turn; the step is then run as a whole. The step that
        # fails is another one, of the first token alone: a context that is left behind by it must show.
        calls = number % (case.num_layers + 1)
        try:
            with model.forward_context(first_token(planned.plan)):
                for layer in range(calls):
                    tensors = (tensor[:1] for tensor in step_tensors(case, inputs, planned, layer))
                    model.attend(case.layer_name(layer), *tensors)
                raise _InjectedError
        except _InjectedError:
            pass
        if isinstance(implementation, HasSurface):
            _require_no_context(implementation, number)

    disturbed = rerun(implementation, observation, interrupt=disturb)
    for request, (want, got) in enumerate(
        zip(outputs_by_position(observation), outputs_by_position(disturbed), strict=True)
    ):
        different = as_bits(want) != as_bits(got)
        if different.any():
            layer, position, head, dim = (int(i) for i in different.nonzero()[0])
            raise Violation(
                f"output at position {position}, dim {dim} is {float(got[layer, position, head, dim]):.6g} "
                "after a step that failed, "
                f"but should be {float(want[layer, position, head, dim]):.6g}",
                layer_name=case.layer_name(layer),
                request=request,
                head=head,
            )
