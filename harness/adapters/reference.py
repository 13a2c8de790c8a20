"""The project's own reference, with its eager and its Triton backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch

from harness.contract import Info, LayerSpec, ModelSpec, Poison, StepPlan, Unsupported
from reference_impl import ops
from reference_impl.backends.eager import EagerBackend, EagerImpl
from reference_impl.config import CacheConfig, ForwardConfig, set_current_config
from reference_impl.context import get_forward_context, override_forward_context, set_forward_context
from reference_impl.errors import ForwardContextError
from reference_impl.kv_cache.allocate import allocate_kv_caches, get_kv_cache_specs
from reference_impl.kv_cache.bind import bind_kv_caches, clear_kv_caches
from reference_impl.layers.attention import Attention
from reference_impl.metadata import CommonAttentionMetadata, CUDAGraphMode
from reference_impl.registry import get_layers


def common_metadata(plan: StepPlan, device: str) -> CommonAttentionMetadata:
    """Make the step's tensors."""
    return CommonAttentionMetadata(
        query_start_loc=torch.tensor(plan.query_start_loc, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(plan.seq_lens, dtype=torch.int32, device=device),
        block_table=torch.tensor(plan.block_table, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(plan.slot_mapping, dtype=torch.int64, device=device),
        num_actual_tokens=plan.num_actual_tokens,
        max_query_len=max(plan.query_lens),
        max_seq_len=max(plan.seq_lens),
    )


def build_layer(config: ForwardConfig, layer: LayerSpec, **options: Any) -> Attention:
    """Build one layer with `config` current."""
    with set_current_config(config):
        return Attention(
            layer.num_heads,
            layer.head_size,
            layer.scale,
            layer.num_kv_heads,
            prefix=layer.layer_name,
            kv_sharing_target_layer_name=layer.kv_sharing_target_layer_name,
            **options,
        )


class ReferenceModel:
    """Layers of the reference under one config."""

    def __init__(self, config: ForwardConfig, layers: Sequence[LayerSpec], device: str) -> None:
        self.config = config
        self.device = device
        self.layers = {layer.layer_name: build_layer(config, layer) for layer in layers}

    def bind_kv_caches(self, num_blocks: int, poison: Poison) -> None:
        """See `harness.contract.Model`."""
        _, caches = allocate_kv_caches(get_kv_cache_specs(self.config), num_blocks, self.device)
        for cache in caches.values():
            cache.fill_(poison.value)
        bind_kv_caches(self.config, caches)

    @contextmanager
    def forward_context(self, plan: StepPlan) -> Iterator[None]:
        """See `harness.contract.Model`."""
        common = common_metadata(plan, self.device)
        backend = next(iter(self.layers.values())).attn_backend
        metadata = backend.get_builder_cls()().build(common)
        with set_forward_context(
            dict.fromkeys(self.layers, metadata),
            self.config,
            num_tokens=plan.num_tokens,
            slot_mapping=dict.fromkeys(self.layers, common.slot_mapping),
        ):
            yield

    def attend(self, layer_name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `harness.contract.Model`."""
        output: torch.Tensor = self.layers[layer_name](query.flatten(1), key.flatten(1), value.flatten(1))
        return output.view_as(query)

    def kv_views(self, layer_name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """See `harness.contract.Model`."""
        cache = self.layers[layer_name].kv_cache
        return cache[:, 0], cache[:, 1]

    def close(self) -> None:
        """See `harness.contract.Model`."""
        clear_kv_caches(self.config)


class NoUpdateBackend(EagerBackend):
    """OPS-4: says that it has a separate cache write, and has none."""

    forward_includes_kv_cache_update: ClassVar[bool] = False


class _WritesNeverImpl(EagerImpl):
    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        slot_mapping: Any,
        output: Any,
    ) -> None:
        super().forward(layer, query, key, value, kv_cache, attn_metadata, None, output)


class WritesNeverBackend(EagerBackend):
    """OPS-5: says that its forward writes the cache, and does not."""

    @staticmethod
    def get_impl_cls() -> type[EagerImpl]:
        """Return the class that does not write."""
        return _WritesNeverImpl


class ReferenceImplementation:
    """The reference with one of its backends."""

    def __init__(
        self, name: str, backend: str, device: str = "cpu", slow: bool = False, notes: tuple[str, ...] = ()
    ) -> None:
        self.backend = backend
        self.info = Info(name=name, version="0.1.0", device=device, slow=slow, strict=True, notes=notes)

    def new_config(self, spec: ModelSpec, **options: Any) -> ForwardConfig:
        """Return a config with an empty registry."""
        here = "harness.adapters.reference:"
        backends = {
            "default": self.backend,
            "no_update": here + "NoUpdateBackend",
            "writes_never": here + "WritesNeverBackend",
        }
        return ForwardConfig(
            dtype=getattr(torch, spec.dtype),
            cache=CacheConfig(spec.block_size),
            backend=backends[options.get("backend", "default")],
            opaque_attention_op=options.get("opaque", True),
        )

    def build(self, config: ModelSpec, layers: Sequence[LayerSpec]) -> ReferenceModel:
        """See `harness.contract.Implementation`."""
        return ReferenceModel(self.new_config(config), layers, self.info.device)

    def surface(self) -> ReferenceSurface:
        """See `harness.contract.HasSurface`."""
        return ReferenceSurface(self)


class ReferenceSurface:
    """The names of the contract, led to the reference's."""

    not_a_layer = torch.nn.Identity()
    runtime_modes: ClassVar[dict[str, Any]] = dict(CUDAGraphMode.__members__)

    def __init__(self, implementation: ReferenceImplementation) -> None:
        self.implementation = implementation
        self.device = implementation.info.device
        self.new_config: Callable[..., ForwardConfig] = implementation.new_config
        self.build_layer = build_layer
        self.override_forward_context = override_forward_context
        self.get_forward_context = get_forward_context
        self.clear = clear_kv_caches
        self.bind = bind_kv_caches
        self.encode_layer_name = ops.encode_layer_name

    def build_layer_without_config(self, layer: LayerSpec) -> Attention:
        """Build a layer with no config current."""
        return Attention(layer.num_heads, layer.head_size, layer.scale, layer.num_kv_heads, prefix=layer.layer_name)

    def registry(self, config: ForwardConfig) -> dict[str, Any]:
        """Return the registry itself."""
        return config.static_forward_context

    def get_layers(self, config: ForwardConfig, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the attention layers."""
        return get_layers(config, Attention, names)

    def needs_own_cache(self, config: ForwardConfig, layer_name: str) -> bool:
        """Whether the layer has a spec."""
        return layer_name in get_kv_cache_specs(config)

    def page_size_bytes(self, config: ForwardConfig, layer_name: str) -> int:
        """Return the spec's size of one block."""
        return get_kv_cache_specs(config)[layer_name].page_size_bytes

    def group_of(self, config: ForwardConfig, layer_name: str) -> Any:
        """Return the spec of the layer, or of its target: equal specs are one group."""
        layer: Any = config.static_forward_context[layer_name]
        return get_kv_cache_specs(config)[layer.kv_sharing_target_layer_name or layer_name]

    def allocate(self, config: ForwardConfig, num_blocks: int) -> dict[str, torch.Tensor]:
        """Allocate one buffer, and a view for each layer."""
        return allocate_kv_caches(get_kv_cache_specs(config), num_blocks, self.device)[1]

    def kv_cache(self, layer: Attention) -> torch.Tensor:
        """Return the bound view."""
        return layer.kv_cache

    def kv_views(self, config: ForwardConfig, layer_name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logical K and V."""
        layer: Any = config.static_forward_context[layer_name]
        return layer.kv_cache[:, 0], layer.kv_cache[:, 1]

    def attn_metadata(self, config: ForwardConfig, plan: StepPlan, layer_names: Sequence[str]) -> dict[str, Any]:
        """Return one metadata object for all layers: they are one group."""
        layer: Any = config.static_forward_context[layer_names[0]]
        builder = layer.attn_backend.get_builder_cls()()
        return dict.fromkeys(layer_names, builder.build(common_metadata(plan, self.device)))

    def slot_mapping(self, plan: StepPlan) -> torch.Tensor:
        """Return the slot mapping."""
        return torch.tensor(plan.slot_mapping, dtype=torch.int64, device=self.device)

    def set_forward_context(
        self, config: ForwardConfig, attn_metadata: Any, **fields: Any
    ) -> AbstractContextManager[Any]:
        """Set the context."""
        return set_forward_context(attn_metadata, config, **fields)

    def call(
        self, layer: Attention, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the layer."""
        flat = [None if x is None else x.flatten(1) for x in (query, key, value)]
        return layer(*flat).view_as(query)  # type: ignore[no-any-return]

    def forward_includes_kv_cache_update(self, layer: Attention) -> bool:
        """Return the backend's flag."""
        return layer.attn_backend.forward_includes_kv_cache_update

    def op(self, name: str) -> Any:
        """Return the op."""
        if name not in ("unified_kv_cache_update", "unified_attention_with_output"):
            raise Unsupported(f"no op {name}")
        return getattr(torch.ops.proptable, name).default

    def is_own_exception(self, error: BaseException) -> bool:
        """Whether the reference raised it on purpose."""
        return isinstance(error, ForwardContextError)


eager = ReferenceImplementation("reference", "eager")
