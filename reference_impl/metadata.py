"""What the runner knows about one step, as plain tensors (a leaf: imports nothing of the project)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

PAD_SLOT_ID = -1
"""Slot of a token that has none: nothing is written for it (BND-7)."""
NULL_BLOCK_ID = 0
"""Block that belongs to no request (BND-7)."""


class CUDAGraphMode(enum.Enum):
    """Runtime modes of a step: NONE, PIECEWISE and FULL; the others are configurations only (CTX-8)."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    def valid_runtime_modes(self) -> bool:
        """Whether a step can run in this mode."""
        return self in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


@dataclass(frozen=True)
class BatchDescriptor:
    """Key by which a CUDA graph is chosen."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """One step, before any backend has seen it. All tensors lie on the model's device."""

    query_start_loc: torch.Tensor
    """int32 [num_reqs + 1]: where each request's tokens begin in the batch; non-decreasing, starts at 0."""
    seq_lens: torch.Tensor
    """int32 [num_reqs]: tokens of each request after this step (context_len + query_len)."""
    block_table: torch.Tensor
    """int32 [num_reqs, max_num_blocks]: physical block of each logical block; the tail of a row is never read."""
    slot_mapping: torch.Tensor
    """int64 [num_tokens]: block_id * block_size + offset of each token, or PAD_SLOT_ID."""
    num_actual_tokens: int
    """Tokens that are real; rows of q, k, v beyond it are padding."""
    max_query_len: int
    max_seq_len: int

    @property
    def num_reqs(self) -> int:
        """Requests in the batch, those without a token in this step included."""
        return int(self.seq_lens.shape[0])
