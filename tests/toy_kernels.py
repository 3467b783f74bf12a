"""Kernels for the tests of the static table: a sound one, and one for each way to fail.

M tokens, N outputs, K inputs: y [M, N] = x [M, K] @ w [N, K]ᵀ.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from qerl_kernels.variants import Variant


@triton.jit
def _product_kernel(
    x_ptr, w_ptr, y_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    m, n, k = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        x = tl.load(x_ptr + m[:, None] * K + start + k[None, :])
        w = tl.load(w_ptr + n[:, None] * K + start + k[None, :])
        acc = tl.dot(x, w.T, acc)
    tl.store(y_ptr + m[:, None] * N + n[None, :], acc.to(tl.bfloat16))


@triton.jit
def _copy_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i))


def _product(name: str, bm: int, bn: int, bk: int, warps: int, stages: int) -> Variant:
    return Variant(
        kernel=name,
        tile=f"{bm}x{bn}x{bk} w{warps} s{stages}",
        function=_product_kernel,
        types={"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16", "N": "i32", "K": "i32"},
        constexprs={"BM": bm, "BN": bn, "BK": bk},
        divisible=frozenset({"N", "K"}),
        num_warps=warps,
        num_stages=stages,
        elements=bn * bk,
    )


def variants() -> Iterator[Variant]:
    yield _product("toy", 16, 64, 64, 4, 3)
    yield _product("toy", 16, 16, 16, 1, 1)
    yield _product("toy_spills", 32, 256, 16, 1, 1)  # 256 accumulators for each thread
    yield _product("toy_large", 16, 64, 64, 4, 30)  # 29 stages of 10 KiB
    yield _product("toy_broken", 16, 48, 64, 4, 3)  # 48 is no power of two
    yield Variant(
        kernel="toy_copy/flat",
        tile="1024 w4",
        function=_copy_kernel,
        types={"x_ptr": "*bf16", "y_ptr": "*bf16"},
        constexprs={"BLOCK": 1024},
        divisible=frozenset(),
        num_warps=4,
        num_stages=3,
        elements=None,
    )
    yield Variant(
        kernel="toy_no_loop",
        tile="1024 w4",
        function=_copy_kernel,
        types={"x_ptr": "*bf16", "y_ptr": "*bf16"},
        constexprs={"BLOCK": 1024},
        divisible=frozenset(),
        num_warps=4,
        num_stages=3,
        elements=1024,
    )
