# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels for GPUs that need not be there: `python compiling.py 90 100`.

A process of its own, for the tests make the kernels for Triton's interpreter.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dflash.kernels import confirm, context_keys, fill_block

BLOCK = {"BLOCK_SIZE": 16, "COLUMNS": 16}
HEADS = {"NUM_HEADS": 8, "HEAD_DIM": 128, "ROTARY_DIM": 128, "HEADS": 8, "CHANNELS": 128}
TYPES = {
    **dict.fromkeys(("req_to_token", "num_committed"), "*i32"),
    **dict.fromkeys(("keys", "weight", "turned"), "*bf16"),
    **dict.fromkeys(("num_rows",), "i32"),
    "cos_sin": "*fp32",
    "eps": "fp32",
}
CASES: list[tuple[Any, dict[str, Any]]] = [
    (fill_block._fill_block_kernel, BLOCK),
    (confirm._confirm_kernel, BLOCK),
    (context_keys._context_keys_kernel, {**HEADS, "IS_NEOX": True}),
    (context_keys._context_keys_kernel, {**HEADS, "IS_NEOX": False, "HEAD_DIM": 96}),
]


def type_of(name: str, constants: dict[str, Any]) -> str:
    """Return an argument's type; what is not listed is a pointer to int64, strides are int32."""
    if name in constants:
        return "constexpr"
    return TYPES.get(name, "i32" if name.endswith("stride") else "*i64")


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        for kernel, constants in CASES:
            signature = {name: type_of(name, constants) for name in kernel.arg_names}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            assert compiled.asm["cubin"]
            print(f"sm_{capability} {kernel.__name__}")
