"""The plain backend: torch operations, one request after the other, float32 arithmetic.

It writes the cache inside `forward` (`forward_includes_kv_cache_update` is True).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from reference_impl.backends.base import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from reference_impl.metadata import PAD_SLOT_ID, CommonAttentionMetadata

if TYPE_CHECKING:
    from reference_impl.layers.attention import Attention


def write_kv_cache(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write each token's K and V into its slot; PAD_SLOT_ID writes nothing (WRT-1, WRT-2)."""
    # key, value: [num_tokens, num_kv_heads, head_size]; kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size]
    tokens = torch.nonzero(slot_mapping != PAD_SLOT_ID).flatten()
    slots = slot_mapping[tokens]
    block_size = kv_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    kv_cache[blocks, 0, offsets] = key[tokens].to(kv_cache.dtype)
    kv_cache[blocks, 1, offsets] = value[tokens].to(kv_cache.dtype)


@dataclass(frozen=True)
class EagerMetadata:
    """The common metadata, with the lengths as Python ints: this backend loops over requests on the host."""

    query_start_loc: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    """[num_reqs, max_num_blocks]."""


class EagerMetadataBuilder(AttentionMetadataBuilder):
    """Reads the lengths back to the host."""

    def build(self, common: CommonAttentionMetadata) -> EagerMetadata:
        """Return the metadata of this step."""
        return EagerMetadata(common.query_start_loc.tolist(), common.seq_lens.tolist(), common.block_table)


class EagerImpl(AttentionImpl):
    """Gathers each request's blocks and attends in float32."""

    def forward(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: EagerMetadata | None,
        slot_mapping: torch.Tensor | None,
        output: torch.Tensor,
    ) -> None:
        """Write the cache if `slot_mapping` is given, then attend. See `AttentionImpl.forward`."""
        # query, output: [num_tokens, num_heads, head_size]
        if slot_mapping is not None and key is not None and value is not None:
            write_kv_cache(key, value, kv_cache, slot_mapping)
        output.zero_()
        if attn_metadata is None:
            return
        starts = attn_metadata.query_start_loc
        for request, seq_len in enumerate(attn_metadata.seq_lens):
            start, end = starts[request], starts[request + 1]
            if end > start and seq_len > 0:
                keys, values = self._gather(kv_cache, attn_metadata.block_table[request], seq_len)
                output[start:end] = self._attend(query[start:end], keys, values).to(output.dtype)

    @staticmethod
    def _gather(kv_cache: torch.Tensor, block_row: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one request, float32 [num_kv_heads, seq_len, head_size]."""
        block_size = kv_cache.shape[2]
        pages = kv_cache[block_row[: -(-seq_len // block_size)].long()]
        keys, values = pages.unbind(1)
        # Cut before anything is computed: what lies behind seq_len may be NaN, and 0 * NaN is NaN (INV-7).
        return (
            keys.flatten(0, 1)[:seq_len].float().transpose(0, 1),
            values.flatten(0, 1)[:seq_len].float().transpose(0, 1),
        )

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attend causally; the last query sees all keys. Returns float32 [query_len, num_heads, head_size]."""
        # query: [query_len, num_heads, head_size]; keys, values: [num_kv_heads, seq_len, head_size]
        query_len, seq_len = query.shape[0], keys.shape[1]
        grouped = query.float().view(query_len, self.num_kv_heads, -1, self.head_size).permute(1, 2, 0, 3)
        scores = self.scale * (grouped @ keys.unsqueeze(1).transpose(-1, -2))
        positions = torch.arange(seq_len, device=query.device)
        visible = positions[None, :] <= positions[seq_len - query_len :, None]
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
        return (weights @ values.unsqueeze(1)).permute(2, 0, 1, 3).reshape(query_len, self.num_heads, self.head_size)


class EagerBackend(AttentionBackend):
    """Any head size, block size and group size; float32, float16 and bfloat16."""

    @staticmethod
    def get_name() -> str:
        """Return the name for messages."""
        return "EAGER"

    @staticmethod
    def get_impl_cls() -> type[EagerImpl]:
        """Return the class that runs the kernels."""
        return EagerImpl

    @staticmethod
    def get_builder_cls() -> type[EagerMetadataBuilder]:
        """Return the class that builds metadata."""
        return EagerMetadataBuilder
