"""The three classes that a backend consists of.

A backend class says what is supported, a metadata builder turns the step's common metadata into what the kernels want,
and an implementation runs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from reference_impl.metadata import CommonAttentionMetadata

if TYPE_CHECKING:
    from reference_impl.layers.attention import Attention


class AttentionMetadataBuilder(ABC):
    """Turns `CommonAttentionMetadata` into the backend's own, once per step and group."""

    @abstractmethod
    def build(self, common: CommonAttentionMetadata) -> Any:
        """Return the backend's metadata. `common` is shared with other groups and must not be changed."""


class AttentionImpl(ABC):
    """Runs the kernels of one layer.

    A backend whose `forward_includes_kv_cache_update` is False also has
    `do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)`.
    """

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads

    @abstractmethod
    def forward(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        slot_mapping: torch.Tensor | None,
        output: torch.Tensor,
    ) -> None:
        """Write the attention output of this step into `output`.

        Args:
            layer: the layer that calls.
            query, output: [num_tokens, num_heads, head_size].
            key, value: [num_tokens, num_kv_heads, head_size].
            kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size].
            attn_metadata: what the builder made; None in a profiling run, then `output` becomes zeros (CTX-7).
            slot_mapping: int64 [num_tokens] if this call has to write `key` and `value` first, else None.
            output: overwritten for all real tokens; rows of padding become zeros.
        """


class AttentionBackend(ABC):
    """What a backend supports, and the classes that make it up."""

    forward_includes_kv_cache_update: ClassVar[bool] = True
    """False: the cache is written by an op of its own, through `AttentionImpl.do_kv_cache_update` (OPS-2)."""
    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float16, torch.bfloat16)
    supported_attn_types: ClassVar[tuple[str, ...]] = ("decoder",)

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """Return the name for messages."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return the class that runs the kernels."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Return the class that builds metadata."""

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether heads of this many elements work."""
        return head_size >= 1

    @classmethod
    def supports_block_size(cls, block_size: int) -> bool:
        """Whether blocks of this many tokens work."""
        return block_size >= 1
