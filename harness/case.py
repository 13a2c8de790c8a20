"""Case: a short sequence of steps on a few layers, as plain ints and strings.

A case has an eval-able repr and a JSON form; every tensor is derived from it. `parse_case` reads both forms and never
evaluates code.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from harness.contract import LayerSpec, ModelSpec

FORMAT_VERSION = 1
DTYPES = ("float32", "float16", "bfloat16")
ALLOCATIONS = ("shuffled", "ascending", "descending")
VALUES = ("normal", "large", "offset")
MAX_HEAD_SIZE = 8192
MAX_BLOCK_SIZE = 1 << 16
MAX_TOKENS = 1 << 20
"""Tokens that a case may hold in all: a case file from a stranger must not exhaust the memory."""


class InvalidCaseError(ValueError):
    """A case that means nothing: what is wrong, in one line."""


@dataclass(frozen=True)
class Case:
    """What is run.

    Raises:
        InvalidCaseError: on construction, when a field is out of range.
    """

    steps: tuple[tuple[int, ...], ...]
    """[num_steps][num_reqs]: query length of each request in each step; 0: not scheduled in that step."""
    kv_sharing: tuple[int, ...] = (-1,)
    """[num_layers]: index of the earlier layer whose cache this one reads; -1: it has its own."""
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    block_size: int = 16
    scale_percent: int = 100
    """Softmax scale, in percent of 1 / sqrt(head_size)."""
    vary_scale: bool = False
    """Whether the layers differ in their scale: every second one has half of it."""
    fused_qkv: bool = False
    """Whether query, key and value are slices of one tensor, as after a fused projection: not contiguous."""
    dtype: str = "float32"
    padding: int = 0
    """Rows of padding (slot -1) at the end of each step."""
    spare_blocks: int = 2
    """Blocks beyond the null block and those that the requests need."""
    allocation: str = "shuffled"
    """Order in which physical blocks are handed out."""
    shuffle_requests: bool = False
    """Whether the order of the requests in the batch changes from step to step."""
    values: str = "normal"
    """normal: N(0, 1); large: N(0, 8^2); offset: N(4, 1)."""
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name))
        if not self.steps or not self.steps[0]:
            raise InvalidCaseError("steps: at least one step with at least one request is needed")
        if len({len(step) for step in self.steps}) != 1:
            raise InvalidCaseError("steps: every step needs one query length for each request")
        if not all(any(step) for step in self.steps):
            raise InvalidCaseError("steps: every step needs a request with a query length above 0")
        if min(min(step) for step in self.steps) < 0:
            raise InvalidCaseError("steps: query lengths must not be negative")
        if sum(map(sum, self.steps)) > MAX_TOKENS:
            raise InvalidCaseError(f"steps: more than {MAX_TOKENS} tokens")
        if not 1 <= len(self.kv_sharing) <= 64:
            raise InvalidCaseError("kv_sharing: 1 to 64 layers are needed")
        for layer, target in enumerate(self.kv_sharing):
            if target != -1 and not (0 <= target < layer and self.kv_sharing[target] == -1):
                raise InvalidCaseError(
                    f"kv_sharing[{layer}]={target}, but should be -1 or an earlier layer with its own cache"
                )
        for name, low, high in (
            ("num_heads", 1, 1024),
            ("num_kv_heads", 1, 1024),
            ("head_size", 1, MAX_HEAD_SIZE),
            ("block_size", 1, MAX_BLOCK_SIZE),
            ("scale_percent", 1, 1000),
            ("padding", 0, 4096),
            ("spare_blocks", 0, 1 << 16),
            ("seed", 0, (1 << 63) - 1),
        ):
            if not low <= getattr(self, name) <= high:
                raise InvalidCaseError(f"{name}={getattr(self, name)}, but should be from {low} to {high}")
        if self.num_heads % self.num_kv_heads:
            raise InvalidCaseError(f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}")
        for name, allowed in (("dtype", DTYPES), ("allocation", ALLOCATIONS), ("values", VALUES)):
            if getattr(self, name) not in allowed:
                raise InvalidCaseError(f"{name}={getattr(self, name)!r}, but should be one of {', '.join(allowed)}")

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.kv_sharing)

    @property
    def num_reqs(self) -> int:
        """Requests, over all steps."""
        return len(self.steps[0])

    @property
    def total_lens(self) -> tuple[int, ...]:
        """[num_reqs]: tokens of each request after the last step."""
        return tuple(map(sum, zip(*self.steps, strict=True)))

    @property
    def scale(self) -> float:
        """Softmax scale of the first layer."""
        return float(self.head_size**-0.5) * self.scale_percent / 100

    def layer_scale(self, layer: int) -> float:
        """Return the softmax scale of one layer."""
        return self.scale / 2 if self.vary_scale and layer % 2 else self.scale

    def layer_name(self, layer: int) -> str:
        """Return the name of layer number `layer`."""
        return f"model.layers.{layer}.self_attn.attn"

    def model_spec(self) -> ModelSpec:
        """Return what `Implementation.build` is given."""
        return ModelSpec(self.dtype, self.block_size)

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Return what `Implementation.build` is given."""
        return tuple(
            LayerSpec(
                self.layer_name(layer),
                self.num_heads,
                self.num_kv_heads,
                self.head_size,
                self.layer_scale(layer),
                None if target == -1 else self.layer_name(target),
            )
            for layer, target in enumerate(self.kv_sharing)
        )

    def __repr__(self) -> str:
        """Return the shortest call that makes this case: fields at their default are left out."""
        arguments = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name == "steps" or getattr(self, field.name) != field.default
        ]
        return f"Case({', '.join(arguments)})"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"version": FORMAT_VERSION, **asdict(self)}


def _check_type(name: str, value: Any) -> None:
    want = Case.__annotations__[name]
    valid: dict[str, Callable[[Any], bool]] = {
        "int": lambda v: type(v) is int,
        "bool": lambda v: type(v) is bool,
        "str": lambda v: type(v) is str,
        "tuple[int, ...]": lambda v: type(v) is tuple and all(type(x) is int for x in v),
        "tuple[tuple[int, ...], ...]": lambda v: (
            type(v) is tuple and all(type(x) is tuple and all(type(y) is int for y in x) for x in v)
        ),
    }
    if not valid[want](value):
        raise InvalidCaseError(f"{name}={value!r:.80}, but should be {want}")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def case_from_json(data: object) -> Case:
    """Make a case from its JSON form.

    Raises:
        InvalidCaseError: it is not one.
    """
    if not isinstance(data, Mapping):
        raise InvalidCaseError(f"a case is a JSON object, not {type(data).__name__}")
    arguments = dict(data)
    version = arguments.pop("version", FORMAT_VERSION)
    if type(version) is not int or version != FORMAT_VERSION:
        raise InvalidCaseError(f"version={version!r}, but this release reads version {FORMAT_VERSION}")
    return _make(arguments)


def _make(arguments: Mapping[str, Any]) -> Case:
    known = {field.name for field in fields(Case)}
    for name in arguments:
        if name not in known:
            raise InvalidCaseError(f"unknown field {name!r:.80}; a case has {', '.join(sorted(known))}")
    if "steps" not in arguments:
        raise InvalidCaseError("steps is missing")
    return Case(**{name: _tuples(value) for name, value in arguments.items()})


def parse_case(text: str) -> Case:
    """Read a case from `Case(...)` or from JSON. Only literals are read; nothing is evaluated.

    Raises:
        InvalidCaseError: it is neither.
    """
    text = text.strip()
    if len(text) > 1 << 20:
        raise InvalidCaseError("a case of more than 1 MiB")
    if not text.startswith("Case("):
        try:
            return case_from_json(json.loads(text))
        except InvalidCaseError:
            raise
        except (ValueError, RecursionError) as error:
            raise InvalidCaseError(f"neither Case(...) nor JSON: {error}") from None
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise InvalidCaseError("Case(...) takes keyword arguments only")
        arguments = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in call.keywords}
    except InvalidCaseError:
        raise
    except SyntaxError as error:
        raise InvalidCaseError(f"Case(...) is no valid expression: {error.msg}") from None
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise InvalidCaseError("Case(...) may hold literals only") from None
    return _make(arguments)
