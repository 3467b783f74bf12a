"""A plain 16-bit product with one tile and one order of summation: for batch-invariant mode only.

cuBLAS picks its kernel by shape, so a row's result can depend on how many rows there are. The
adapter's first products go through here instead when that must not be. Shape letters: M, N, K.
"""
# Launch options (num_warps, num_stages) are no parameters of the kernel.
# pyright: reportCallIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_kernels import launch
from qerl_kernels.device import dot, narrow
from qerl_kernels.variants import Variant

_BM, _BN, _BK, _WARPS, _STAGES = 64, 32, 64, 4, 3


@triton.jit
def _gemm_kernel(
    x_ptr,  # [M, K]
    w_ptr,  # [K, N] by strides
    y_ptr,  # [M, N]
    M,
    N,
    K,
    stride_k,
    stride_n,
    alpha,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        inside = start + k < K
        x = tl.load(
            x_ptr + m[:, None].to(tl.int64) * K + (start + k)[None, :],
            mask=(m[:, None] < M) & inside[None, :],
            other=0.0,
        )
        w = tl.load(
            w_ptr + (start + k)[:, None].to(tl.int64) * stride_k + n[None, :] * stride_n,
            mask=inside[:, None] & (n[None, :] < N),
            other=0.0,
        )
        acc = dot(x, w, acc)
    mask = (m[:, None] < M) & (n[None, :] < N)
    y = narrow(acc * alpha, y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[:, None].to(tl.int64) * N + n[None, :], y, mask=mask)


def gemm(x: Tensor, w: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha · x [M, K] @ w [K, N], in x's dtype (bf16 or fp16); w of any strides.

    A row's result is the same whatever M is. Raises ValueError naming the argument that does not
    fit.
    """
    launch.check("x", x, dtype=(torch.bfloat16, torch.float16), shape=(None, None))
    launch.check_device("w", w, x)
    if w.dtype != x.dtype or w.dim() != 2 or w.shape[0] != x.shape[1]:
        raise ValueError(
            f"w must be {str(x.dtype)[6:]} [{x.shape[1]}, N], found {str(w.dtype)[6:]} "
            f"{list(w.shape)}"
        )
    (m, k), n = x.shape, w.shape[1]
    y = x.new_empty(m, n)
    _gemm_kernel[(triton.cdiv(m, _BM), triton.cdiv(n, _BN))](
        x, w, y, m, n, k, w.stride(0), w.stride(1), alpha,
        BM=_BM, BN=_BN, BK=_BK, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return y


def variants() -> Iterator[Variant]:
    for dtype in ("bf16", "fp16"):
        half = f"*{dtype}"
        yield Variant(
            kernel="gemm",
            tile=f"{_BM}x{_BN}x{_BK} w{_WARPS} s{_STAGES} {dtype}",
            function=_gemm_kernel,
            types={
                "x_ptr": half, "w_ptr": half, "y_ptr": half, "M": "i32", "N": "i32", "K": "i32",
                "stride_k": "i32", "stride_n": "i32", "alpha": "fp32",
            },
            # Rows of a frozen [R, K] factor read as [K, R]: stride 1 along K.
            constexprs={"BM": _BM, "BN": _BN, "BK": _BK},
            divisible=frozenset({"N", "K", "stride_n"}),
            num_warps=_WARPS,
            num_stages=_STAGES,
            elements=_BN * _BK,
        )  # fmt: skip
