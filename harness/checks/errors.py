"""ERR: faults of the surroundings."""

from __future__ import annotations

from harness.bits import as_bits
from harness.checks.base import Kind, check, rerun
from harness.contract import Implementation, Model
from harness.inputs import make_inputs
from harness.plan import PlannedStep
from harness.run import Observation, outputs_by_position, step_tensors
from harness.verdict import Violation


class _InjectedError(Exception):
    """An error of the surroundings, raised in the middle of a step."""


@check(Kind.RELATION, "ERR-1")
def next_step_is_right_after_an_error(implementation: Implementation, observation: Observation) -> None:
    """An exception in any layer leaves context, registry, bindings and caches usable; the next step is right."""
    case = observation.case
    inputs = make_inputs(case, implementation.info.device)

    def disturb(model: Model, planned: PlannedStep, number: int) -> None:
        # Fail before, between and after the layers' calls, in turn; the step is then run again as a whole.
        calls = number % (case.num_layers + 1)
        try:
            with model.forward_context(planned.plan):
                for layer in range(calls):
                    model.attend(case.layer_name(layer), *step_tensors(case, inputs, planned, layer))
                raise _InjectedError
        except _InjectedError:
            pass

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
