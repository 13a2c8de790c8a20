"""The project's own reference with its Triton backend: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported, which is why this module imports it last.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from harness.adapters.reference import ReferenceImplementation
from reference_impl.backends.triton.backend import INTERPRET

triton = ReferenceImplementation(
    "reference-triton",
    "triton",
    "cpu" if INTERPRET else "cuda",
    INTERPRET,
    ("Triton runs in the interpreter, on the CPU",) if INTERPRET else (),
)
