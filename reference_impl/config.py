"""ForwardConfig: everything that outlives a step.

`static_forward_context` is a field of the compilation config in vLLM; here it is a field of the one config. Layers find
the config that is current when they are built, as vLLM's do with `set_current_vllm_config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from reference_impl.errors import NoCurrentConfigError

if TYPE_CHECKING:
    from reference_impl.layers.base import RegisteredLayer

SPLITTING_OPS = ("proptable::unified_attention_with_output", "proptable::unified_kv_cache_update")


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache that every layer of a model is built for."""

    block_size: int = 16
    """Tokens in a block."""
    dtype: torch.dtype | None = None
    """Storage dtype of the cache; None: the dtype of the model."""


@dataclass
class ForwardConfig:
    """What a model is built with."""

    dtype: torch.dtype = torch.float32
    cache: CacheConfig = field(default_factory=CacheConfig)
    backend: str = "eager"
    """Name in `reference_impl.backends.BACKENDS`."""
    opaque_attention_op: bool = True
    """False: a platform that calls the two functions directly instead of through the custom ops (OPS-6)."""
    splitting_ops: tuple[str, ...] = SPLITTING_OPS
    data_parallel_rank: int = 0
    static_forward_context: dict[str, RegisteredLayer] = field(default_factory=dict)
    """Map from layer name to layer object (REG-1). The forward context hands out this very dict (CTX-3)."""


_current_config: ContextVar[ForwardConfig | None] = ContextVar("current_config", default=None)


@contextmanager
def set_current_config(config: ForwardConfig) -> Iterator[ForwardConfig]:
    """Make `config` the one with which layers are built, for the duration of the block."""
    token = _current_config.set(config)
    try:
        yield config
    finally:
        _current_config.reset(token)


def get_current_config() -> ForwardConfig:
    """Return the current config.

    Raises:
        NoCurrentConfigError: outside `set_current_config` (REG-5).
    """
    config = _current_config.get()
    if config is None:
        raise NoCurrentConfigError(
            "Current ForwardConfig is not set. Build layers inside `with set_current_config(config):`."
        )
    return config
