"""What all tests share."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
