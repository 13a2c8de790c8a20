"""Steps 1 and 4: the attention layer registers itself, and calls the custom ops with its name."""

from __future__ import annotations

import torch

from reference_impl import ops
from reference_impl.backends import get_backend
from reference_impl.config import get_current_config
from reference_impl.errors import KVCacheUpdateUnsupportedError, UnsupportedLayerError
from reference_impl.kv_cache.spec import FullAttentionSpec
from reference_impl.layers.base import AttentionLayerBase
from reference_impl.registry import check_kv_sharing_target, check_prefix, register_layer

DECODER = "decoder"
"""The attention type of a causal layer with a KV cache."""


class Attention(AttentionLayerBase):
    """Causal self-attention over a paged KV cache.

    Args:
        num_heads: query heads.
        head_size: elements of one head.
        scale: factor on q.k before the softmax.
        num_kv_heads: heads of K and V; `num_heads` by default, and a divisor of it.
        prefix: the layer's unique name, such as "model.layers.0.self_attn.attn".
        attn_type: only "decoder" so far.
        kv_sharing_target_layer_name: an earlier layer whose cache this one reads; it writes none itself (KVS-5).

    Raises:
        NoCurrentConfigError, EmptyLayerNameError, DuplicateLayerNameError, KVSharingTargetError: see `registry`.
        UnsupportedLayerError: the backend does not declare what is asked (REG-7).
        KVCacheUpdateUnsupportedError: the backend says that it has a separate cache write, and has none (OPS-4).
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        *,
        prefix: str,
        attn_type: str = DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        super().__init__()
        config = get_current_config()
        check_prefix(config, prefix)
        self.layer_name = prefix
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size
        self.scale = scale
        self.attn_type = attn_type
        self.block_size = config.cache.block_size
        self.dtype = config.dtype
        self.kv_cache_dtype = config.cache.dtype or config.dtype
        self.use_direct_call = not config.opaque_attention_op
        self.attn_backend = get_backend(config.backend)
        self._check_supported()
        if kv_sharing_target_layer_name is not None:
            check_kv_sharing_target(config, self, prefix, kv_sharing_target_layer_name)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.impl = self.attn_backend.get_impl_cls()(num_heads, head_size, scale, self.num_kv_heads)
        if not self.attn_backend.forward_includes_kv_cache_update and not hasattr(self.impl, "do_kv_cache_update"):
            raise KVCacheUpdateUnsupportedError(f"{type(self.impl).__name__} does not support kv cache update")
        self.kv_cache = torch.empty(0)
        register_layer(config, prefix, self)

    def _check_supported(self) -> None:
        where = f"layer {self.layer_name}: "
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise UnsupportedLayerError(
                f"{where}num_heads ({self.num_heads}) is not divisible by num_kv_heads ({self.num_kv_heads})"
            )
        backend = self.attn_backend
        for what, value, supported in (
            ("head_size", self.head_size, backend.supports_head_size(self.head_size)),
            ("dtype", self.dtype, self.dtype in backend.supported_dtypes),
            ("KV cache dtype", self.kv_cache_dtype, self.kv_cache_dtype == self.dtype),
            ("block_size", self.block_size, backend.supports_block_size(self.block_size)),
            ("attn_type", self.attn_type, self.attn_type in backend.supported_attn_types),
        ):
            if not supported:
                raise UnsupportedLayerError(f"{where}backend {backend.get_name()} does not support {what} {value}")

    @property
    def impl_writes_kv_cache(self) -> bool:
        """Whether the attention op itself has to write this layer's keys and values (OPS-2, KVS-5)."""
        return self.attn_backend.forward_includes_kv_cache_update and self.kv_sharing_target_layer_name is None

    def get_kv_cache_spec(self) -> FullAttentionSpec | None:
        """Return the spec of this layer's own cache; None for a layer that shares another's (KVS-6)."""
        if self.kv_sharing_target_layer_name is not None:
            return None
        return FullAttentionSpec(self.block_size, self.num_kv_heads, self.head_size, self.kv_cache_dtype)

    def forward(self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor:
        """Attend.

        Args:
            query: [num_tokens, num_heads * head_size].
            key, value: [num_tokens, num_kv_heads * head_size].

        Returns:
            [num_tokens, num_heads * head_size], in the dtype of `query`.
        """
        # query: [num_tokens, num_heads * head_size]; key, value: [num_tokens, num_kv_heads * head_size]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        q = query.view(-1, self.num_heads, self.head_size)
        k = key.view(-1, self.num_kv_heads, self.head_size) if key is not None else None
        v = value.view(-1, self.num_kv_heads, self.head_size) if value is not None else None
        out = output.view(-1, self.num_heads, self.head_size)
        update, attend = (
            (ops.unified_kv_cache_update, ops.unified_attention_with_output)
            if self.use_direct_call
            else (torch.ops.proptable.unified_kv_cache_update, torch.ops.proptable.unified_attention_with_output)
        )
        name = ops.encode_layer_name(self.layer_name)
        dummy_dep = None
        if (
            not self.attn_backend.forward_includes_kv_cache_update
            and self.kv_sharing_target_layer_name is None
            and k is not None
            and v is not None
        ):
            dummy_dep = update(k, v, name)
        attend(q, k, v, out, name, kv_cache_dummy_dep=dummy_dep)
        return output
