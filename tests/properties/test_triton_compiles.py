"""The Triton kernels compile for real GPUs as they would be launched, and fit into the shared memory of each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SHARED_MEMORY = {"80": 166_912, "90": 232_448, "gfx942": 65_536}
"""Bytes that one program may use."""


def test_kernels_compile_and_fit(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parent.parent.parent
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "cross_compile.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3 * 3 * 4
    for target, *_, shared in lines:
        assert int(shared) <= SHARED_MEMORY[target]
