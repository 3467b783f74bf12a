"""Triton helpers that kernels share, and the one place that knows of the interpreter.

Triton's interpreter multiplies the raw bit patterns of bfloat16 in `tl.dot`, flushes its
subnormals and knows no inline assembly (facts in benchmarks/LOG.md). `INTERPRET` gates exactly
those three things and is read in this file alone; the kernels themselves are the same either way.
"""

import os

import triton
import triton.language as tl

INTERPRET: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in fp32 on the tensor core; a and b 16-bit of one type, acc fp32.

    For fp32 operands (CPU-sized checks) the product is IEEE fp32, never TF32.
    """
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
