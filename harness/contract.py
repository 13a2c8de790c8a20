"""What the author of an adapter reads: the interface between the harness and an implementation under test.

A leaf: it imports nothing of the project, and torch only for the type checker.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

PAD_SLOT_ID = -1
NULL_BLOCK_ID = 0


class Phase(enum.Enum):
    """When something happened: a model is built, caches are bound, steps run."""

    BUILD = "BUILD"
    BIND = "BIND"
    STEP = "STEP"


class Poison(enum.Enum):
    """What a fresh cache is filled with, so that reading what was never written shows (INV-7)."""

    FINITE = 6e4
    """Large, but finite in every dtype that is judged."""
    ZERO = 0.0


class Unsupported(Exception):  # noqa: N818 - a statement about the implementation, not a failure
    """An adapter raises it where the implementation does not have what a check needs: a SKIP with this reason."""


@dataclass(frozen=True)
class Info:
    """What an implementation declares. Declared and failing is a failure; undeclared is a skip with a reason."""

    name: str
    version: str
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    head_sizes: tuple[int, ...] | None = None
    """None: any."""
    block_sizes: tuple[int, ...] | None = None
    """None: any."""
    kv_sharing: bool = True
    batch_invariant: bool = False
    """Whether a request's output keeps every bit when the rest of the batch changes (INV-2)."""
    rounds_scores: bool = False
    """Whether q.k is rounded to the storage dtype before the softmax, which widens the bound."""
    slow: bool = False
    """Whether cases should be small and few: an interpreter, a simulator."""
    strict: bool = False
    """Whether STRICT clauses are judged; otherwise a deviation is advice."""
    dialects: Mapping[str, str] = field(default_factory=dict)
    """DIALECT points and the side that this implementation is on."""
    notes: tuple[str, ...] = ()
    """What a reader of the report should know: "Triton runs in the interpreter"."""


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer."""

    layer_name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    kv_sharing_target_layer_name: str | None = None


@dataclass(frozen=True)
class ModelSpec:
    """What all layers have in common."""

    dtype: str
    """Of q, k, v, the output and the cache: "float32", "float16" or "bfloat16"."""
    block_size: int


@dataclass(frozen=True)
class StepPlan:
    """One step, as plain ints; the adapter makes the tensors."""

    query_lens: tuple[int, ...]
    """[num_reqs]: tokens of each request in this step, at least 1."""
    seq_lens: tuple[int, ...]
    """[num_reqs]: tokens of each request after this step."""
    block_table: tuple[tuple[int, ...], ...]
    """[num_reqs][max_num_blocks]; what lies behind a request's last block is junk, and within range."""
    slot_mapping: tuple[int, ...]
    """[num_tokens]: block_id * block_size + offset; PAD_SLOT_ID for the rows of padding at the end."""
    num_actual_tokens: int
    """Tokens without padding: sum(query_lens)."""

    @property
    def num_reqs(self) -> int:
        """Requests in this step."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """Rows of q, k, v and the output, padding included."""
        return len(self.slot_mapping)

    @property
    def query_start_loc(self) -> tuple[int, ...]:
        """[num_reqs + 1]: where each request's rows begin."""
        starts = [0]
        for query_len in self.query_lens:
            starts.append(starts[-1] + query_len)
        return tuple(starts)


class Model(Protocol):
    """Layers that were built together, and their caches."""

    def bind_kv_caches(self, num_blocks: int, poison: Poison) -> None:
        """Allocate `num_blocks` blocks for each layer, fill them with the poison, bind them. Called once."""

    def forward_context(self, plan: StepPlan) -> AbstractContextManager[Any]:
        """Return the context of one step; `attend` is called inside it, once for each layer in order."""

    def attend(self, layer_name: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Run one layer: write key and value, attend.

        query: [num_tokens, num_heads, head_size]; key, value: [num_tokens, num_kv_heads, head_size].
        Returns [num_tokens, num_heads, head_size], in the dtype of query. Rows of padding may hold anything.
        """

    def kv_views(self, layer_name: str) -> tuple[Tensor, Tensor] | None:
        """Return K and V of the cache, each [num_blocks, block_size, num_kv_heads, head_size]; copies are welcome.

        None: the cache cannot be read; the checks of the cache are skipped.
        """

    def close(self) -> None:
        """Free what `build` and `bind_kv_caches` took."""


class Implementation(Protocol):
    """An implementation under test."""

    @property
    def info(self) -> Info:
        """What it declares."""

    def build(self, config: ModelSpec, layers: Sequence[LayerSpec]) -> Model:
        """Build the layers, in this order."""


@runtime_checkable
class HasSurface(Protocol):
    """An implementation that also has the parts of the contract that a bare kernel lacks: registry, context, ops."""

    def surface(self) -> Surface:
        """Return its surface."""


class Surface(Protocol):
    """The names of the contract, each led to the implementation's own. `config` is whatever `new_config` returned."""

    not_a_layer: Any
    """An object that can stand in the registry, but is no attention layer."""
    runtime_modes: Mapping[str, Any]
    """Graph modes by their names: NONE, PIECEWISE, FULL and at least one that no step can run in."""

    def new_config(self, spec: ModelSpec, **options: Any) -> Any:
        """Return a fresh config with an empty registry.

        Options: `backend`, one of "default", "no_update" (flag False, no `do_kv_cache_update`), "writes_never" (flag
        True, but does not write); `opaque`, whether attention is called through ops. Raise Unsupported for others.
        """

    def build_layer(self, config: Any, layer: LayerSpec, **options: Any) -> Any:
        """Build one layer with `config` current. Option: `attn_type`."""

    def build_layer_without_config(self, layer: LayerSpec) -> Any:
        """Build one layer with no config current."""

    def registry(self, config: Any) -> dict[str, Any]:
        """Return `static_forward_context` itself."""

    def get_layers(self, config: Any, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the attention layers, filtered by name."""

    def needs_own_cache(self, config: Any, layer_name: str) -> bool:
        """Whether the layer has a cache spec of its own."""

    def page_size_bytes(self, config: Any, layer_name: str) -> int:
        """Return the size that the layer's spec gives for one block."""

    def group_of(self, config: Any, layer_name: str) -> Any:
        """Return what identifies the layer's KV cache group."""

    def allocate(self, config: Any, num_blocks: int) -> dict[str, Tensor]:
        """Allocate a cache for each layer with a spec of its own, in the form that `bind` takes."""

    def bind(self, config: Any, kv_caches: Mapping[str, Tensor]) -> None:
        """Bind caches by name, and sharing layers to their targets."""

    def clear(self, config: Any) -> None:
        """Detach all caches."""

    def kv_cache(self, layer: Any) -> Tensor:
        """Return what the layer has bound."""

    def kv_views(self, config: Any, layer_name: str) -> tuple[Tensor, Tensor] | None:
        """As `Model.kv_views`."""

    def attn_metadata(self, config: Any, plan: StepPlan, layer_names: Sequence[str]) -> dict[str, Any]:
        """Return the metadata of one step, by layer name."""

    def slot_mapping(self, plan: StepPlan) -> Tensor:
        """Return the slot mapping tensor of one step."""

    def set_forward_context(self, config: Any, attn_metadata: Any, **fields: Any) -> AbstractContextManager[Any]:
        """Set the context; fields are those of CTX-8, plus num_tokens."""

    def override_forward_context(self, context: Any) -> AbstractContextManager[Any]:
        """Install a context, or None."""

    def get_forward_context(self) -> Any:
        """Return the current context."""

    def call(self, layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None) -> Tensor:
        """Run a layer; shapes as in `Model.attend`."""

    def forward_includes_kv_cache_update(self, layer: Any) -> bool:
        """Whether the layer's backend writes the cache inside its forward."""

    def op(self, name: str) -> Any:
        """Return the op "unified_kv_cache_update" or "unified_attention_with_output" (an OpOverload)."""

    def encode_layer_name(self, layer_name: str) -> Any:
        """Return the name in the form that the ops take."""

    def is_own_exception(self, error: BaseException) -> bool:
        """Whether this error is one that the implementation raises on purpose, with words for a person."""
