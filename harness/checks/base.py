"""What a check is, and the small tools that checks share."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from harness.bits import same_bits
from harness.case import Case
from harness.clauses import CLAUSES, Level
from harness.contract import Implementation, LayerSpec, Phase, Poison, StepPlan, Surface, Unsupported
from harness.inputs import make_inputs
from harness.plan import CasePlan, plan_case
from harness.run import Observation, run_case, step_tensors
from harness.verdict import Violation


class Kind(enum.Enum):
    """What a check is given."""

    CASE = "case"
    """The observation of one case."""
    RELATION = "relation"
    """The implementation and an observation: it runs the case again, changed in a way that must not matter."""
    SURFACE = "surface"
    """The implementation's registry, binding, context and ops."""


@dataclass(frozen=True)
class Check:
    """One property."""

    name: str
    clauses: tuple[str, ...]
    kind: Kind
    level: Level
    function: Callable[..., None]
    """Raises Violation, or Unsupported with a reason."""
    sentence: str

    def __call__(self, *arguments: Any) -> None:
        """Run it. What it found is not hidden by what a broken context raises while it is left."""
        try:
            self.function(*arguments)
        except (Violation, Unsupported):
            raise
        except Exception as error:
            found = error.__context__
            while found is not None and not isinstance(found, Violation):
                found = found.__context__
            if found is None:
                raise
            raise found from None


def check(kind: Kind, *clauses: str, strict: bool = False) -> Callable[[Callable[..., None]], Check]:
    """Make a function a check of these clauses; `strict`: only the STRICT part of them."""

    def register(function: Callable[..., None]) -> Check:
        levels = {CLAUSES[clause].level for clause in clauses}
        level = Level.STRICT if strict or levels == {Level.STRICT} else Level.MUST
        sentence = " ".join((function.__doc__ or "").split())
        return Check(function.__name__, clauses, kind, level, function, sentence)

    return register


def require(condition: bool, message: str, **where: Any) -> None:
    """Raise a Violation unless `condition` holds."""
    if not condition:
        raise Violation(message, **where)


def must_raise(
    call: Callable[[], object],
    what: str,
    phase: Phase,
    types: type[BaseException] | tuple[type[BaseException], ...],
    beginning: str = "",
    names: Sequence[str] = (),
) -> None:
    """Require that `call` raises one of `types`, with a message that begins so and holds the names.

    Raises:
        Violation: it returns, or raises something else.
    """
    wanted = types if isinstance(types, tuple) else (types,)
    type_names = " or ".join(t.__name__ for t in wanted)
    try:
        call()
    except Unsupported:
        raise
    except Exception as error:
        message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        got = f"{type(error).__name__}: {message:.300}"
        require(isinstance(error, wanted), f"{phase.value}: {what} raised {got}, but should raise {type_names}")
        require(
            re.sub(r"\s+", " ", message).startswith(beginning),
            f"{phase.value}: {what} raised {got}, but the message should begin with {beginning!r}",
        )
        for name in names:
            require(name in message, f"{phase.value}: {what} raised {got}, but the message should name {name!r}")
        return
    wanted_text = f": {beginning}" if beginning else ""
    raise Violation(f"{phase.value}: {what} raised nothing, but should raise {type_names}{wanted_text}")


BASE_CASE = Case(steps=((3, 18, 1), (1, 2, 1)), num_heads=4, num_kv_heads=2, head_size=32, padding=1, seed=1)
"""Small, with a prefill, a chunk that begins within a block, decodes, and padding."""


class Scene:
    """A model on a surface, and the steps of a case to run on it."""

    def __init__(self, surface: Surface, case: Case = BASE_CASE, *, bind: bool = True, **options: Any) -> None:
        self.surface = surface
        self.case = case
        self.plan: CasePlan = plan_case(case)
        self.inputs = make_inputs(case)
        self.config = surface.new_config(case.model_spec(), **options)
        self.names = [case.layer_name(layer) for layer in range(case.num_layers)]
        self.layers = [surface.build_layer(self.config, spec) for spec in case.layer_specs()]
        self.caches: dict[str, torch.Tensor] = {}
        if bind:
            self.bind()

    def bind(self) -> None:
        """Allocate and bind; the caches hold zeros, so that unwritten slots are known."""
        self.caches = self.surface.allocate(self.config, self.plan.num_blocks)
        self.surface.bind(self.config, self.caches)
        for cache in self.caches.values():
            cache.zero_()

    def step(self, number: int = 0) -> StepPlan:
        """Return a step's plan."""
        return self.plan.steps[number].plan

    def tensors(self, number: int = 0, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value of a step."""
        return step_tensors(self.case, self.inputs, self.plan.steps[number], layer)

    def metadata(self, number: int = 0) -> dict[str, Any]:
        """Return fresh metadata of a step."""
        return self.surface.attn_metadata(self.config, self.step(number), self.names)

    def slots(self, number: int = 0) -> dict[str, torch.Tensor]:
        """Return a fresh slot mapping of a step, for every layer."""
        slot_mapping = self.surface.slot_mapping(self.step(number))
        return dict.fromkeys(self.names, slot_mapping)

    def context(self, number: int = 0, **changes: Any) -> AbstractContextManager[Any]:
        """Return the context of a step; `changes` replace attn_metadata, slot_mapping or other fields."""
        fields: dict[str, Any] = {"num_tokens": self.step(number).num_tokens}
        if "attn_metadata" not in changes:
            fields["attn_metadata"] = self.metadata(number)
        if "slot_mapping" not in changes:
            fields["slot_mapping"] = self.slots(number)
        fields |= changes
        return self.surface.set_forward_context(self.config, fields.pop("attn_metadata"), **fields)

    def run(self, number: int = 0, **changes: Any) -> list[torch.Tensor]:
        """Run all layers of a step, and return the rows of their outputs that are no padding."""
        actual = self.step(number).num_actual_tokens
        with self.context(number, **changes):
            return [
                self.surface.call(layer, *self.tensors(number, index))[:actual].clone()
                for index, layer in enumerate(self.layers)
            ]

    def views(self, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the logical K and V of a layer's cache."""
        views = self.surface.kv_views(self.config, self.names[layer])
        if views is None:
            raise Unsupported("the cache cannot be read")
        return views[0].clone(), views[1].clone()


def same_views(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether two copies of a cache are equal, bit for bit."""
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def layer_spec(layer: int, target: int | str | None = None, **changes: Any) -> LayerSpec:
    """Return the spec of a layer of BASE_CASE, changed."""
    name = BASE_CASE.layer_name(layer)
    target_name = BASE_CASE.layer_name(target) if isinstance(target, int) else target
    spec: dict[str, Any] = {
        "layer_name": name,
        "num_heads": BASE_CASE.num_heads,
        "num_kv_heads": BASE_CASE.num_kv_heads,
        "head_size": BASE_CASE.head_size,
        "scale": BASE_CASE.scale,
        "kv_sharing_target_layer_name": target_name,
    }
    return LayerSpec(**(spec | changes))


def rerun(implementation: Implementation, observation: Observation, **options: Any) -> Observation:
    """Run an observation's case again; `options` are those of `run_case`."""
    changed: dict[str, Any] = {
        "case": observation.case,
        "plan": observation.plan,
        "poison": Poison.FINITE,
        "watch_cache": False,
    } | options
    return run_case(implementation, **changed)
