"""The Triton backend: a separate cache-write op (`forward_includes_kv_cache_update` is False), one attention kernel."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, ClassVar

import torch
import triton

from reference_impl.backends.base import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from reference_impl.backends.triton.kernels import paged_attention_kernel, write_kv_cache_kernel
from reference_impl.metadata import CommonAttentionMetadata

if TYPE_CHECKING:
    from reference_impl.layers.attention import Attention

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether triton was imported as an interpreter; it cannot change afterwards."""


def launch_sizes(group_size: int, head_size: int) -> dict[str, int]:
    """Return the constexprs of the attention kernel."""
    # tl.dot needs 16 rows. The interpreter's cost follows the number of programs and trips: large tiles there.
    block_m = max(256 if INTERPRET else 16, triton.next_power_of_2(group_size))
    return {
        "GROUP_SIZE": group_size,
        "HEAD_SIZE": head_size,
        "HEAD_SIZE_PADDED": max(16, triton.next_power_of_2(head_size)),
        "BLOCK_Q": block_m // group_size,
        "BLOCK_M": block_m,
        "BLOCK_N": 256 if INTERPRET else 32,
        "INTERPRET": INTERPRET,
    }


class TritonMetadataBuilder(AttentionMetadataBuilder):
    """The kernels read the common metadata as it is; nothing is copied to the host."""

    def build(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return `common`."""
        return common


class TritonImpl(AttentionImpl):
    """Launches the kernels."""

    def do_kv_cache_update(
        self,
        layer: Attention,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write each token's K and V into its slot.

        Args:
            layer: the layer that calls.
            key, value: [num_tokens, num_kv_heads, head_size].
            kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size].
            slot_mapping: int64 [num_tokens]; PAD_SLOT_ID writes nothing.
        """
        num_tokens = slot_mapping.shape[0]
        if num_tokens == 0:
            return
        block_tokens = 128 if INTERPRET else 4
        write_kv_cache_kernel[(triton.cdiv(num_tokens, block_tokens),)](
            key,
            value,
            kv_cache,
            slot_mapping,
            *key.stride()[:2],
            *value.stride()[:2],
            *kv_cache.stride()[:4],
            kv_cache.shape[2],
            num_tokens,
            NUM_KV_HEADS=self.num_kv_heads,
            HEAD_SIZE=self.head_size,
            BLOCK_TOKENS=block_tokens,
            BLOCK=triton.next_power_of_2(self.num_kv_heads * self.head_size),
        )

    def forward(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: CommonAttentionMetadata | None,
        slot_mapping: torch.Tensor | None,
        output: torch.Tensor,
    ) -> None:
        """Attend over the cache, which the update op has written. See `AttentionImpl.forward`."""
        # query, output: [num_tokens, num_heads, head_size]
        if attn_metadata is None:
            output.zero_()
            return
        num_reqs = attn_metadata.num_reqs
        # Rows of padding belong to no request, so no program writes them.
        output[attn_metadata.num_actual_tokens :].zero_()
        if attn_metadata.num_actual_tokens == 0 or num_reqs == 0:
            return
        sizes = launch_sizes(self.num_heads // self.num_kv_heads, self.head_size)
        # An upper bound that needs no host copy of the lengths: request r has query_len // block_q + 1 tiles.
        num_tiles = attn_metadata.num_actual_tokens // sizes["BLOCK_Q"] + num_reqs
        paged_attention_kernel[(num_tiles, self.num_kv_heads)](
            output,
            query,
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            num_reqs,
            self.scale * math.log2(math.e),
            *output.stride()[:2],
            *query.stride()[:2],
            *kv_cache.stride()[:4],
            attn_metadata.block_table.stride(0),
            kv_cache.shape[2],
            **sizes,
        )


class TritonBackend(AttentionBackend):
    """Any head size, block size and group size; float32, float16 and bfloat16; causal."""

    forward_includes_kv_cache_update: ClassVar[bool] = False

    @staticmethod
    def get_name() -> str:
        """Return the name for messages."""
        return "TRITON"

    @staticmethod
    def get_impl_cls() -> type[TritonImpl]:
        """Return the class that runs the kernels."""
        return TritonImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMetadataBuilder]:
        """Return the class that builds metadata."""
        return TritonMetadataBuilder
