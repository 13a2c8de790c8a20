"""Compile both Triton kernels for real GPUs, on a machine without one. A process of its own: no interpreter."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from reference_impl.backends.triton import kernels
from reference_impl.backends.triton.backend import INTERPRET, launch_sizes

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {"block_table_ptr": "i32", "seq_lens_ptr": "i32", "query_start_loc_ptr": "i32", "slot_mapping_ptr": "i64"}


def compile_kernel(kernel, constants, dtype, target):
    """Compile one kernel with all its scalars as int32, and return its metadata."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = f"*{POINTERS.get(name, dtype)}"
        else:
            signature[name] = "fp32" if name == "scale_log2" else "i32"
    return triton.compile(ASTSource(kernel, signature, constexprs=constants), target=target)


def main():
    assert not INTERPRET
    for target in TARGETS.values():
        for dtype in ("fp16", "bf16", "fp32"):
            for num_heads, num_kv_heads, head_size in ((8, 8, 64), (32, 4, 128), (6, 2, 80), (48, 1, 64)):
                sizes = launch_sizes(num_heads // num_kv_heads, head_size)
                attention = compile_kernel(kernels.paged_attention_kernel, sizes, dtype, target)
                constants = {"NUM_KV_HEADS": num_kv_heads, "HEAD_SIZE": head_size, "BLOCK_TOKENS": 4}
                constants["BLOCK"] = triton.next_power_of_2(num_kv_heads * head_size)
                compile_kernel(kernels.write_kv_cache_kernel, constants, dtype, target)
                print(target.arch, dtype, num_heads, num_kv_heads, head_size, attention.metadata.shared)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
