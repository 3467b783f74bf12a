"""The CUDA side of the linear operators: fused kernel or one unpacked layer and cuBLAS.

Everything takes [*, features] and a repacked weight. On the cuBLAS path the adapter's product is
added to an output that was already rounded (one 16-bit rounding more than fused), and 2⁸/g rides
on cuBLAS's fp32 epilogue. Shape letters: M tokens, N outputs, K inputs, R adapter rank.
"""

import torch
from torch import Tensor

from qerl_kernels import dispatch, launch
from qerl_kernels.backward import check_backward, nvfp4_matmul_t
from qerl_kernels.cpu import inverse
from qerl_kernels.gemm import gemm
from qerl_kernels.matmul import check_forward, nvfp4_matmul
from qerl_kernels.ptx import SCALE_SHIFT
from qerl_kernels.unpack import unpack


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def unpacked(
    x: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor, in_features: int
) -> tuple[Tensor, float]:
    """The layer in x's type in K order and the number its products are to be multiplied with."""
    weight = unpack(codes, scales, in_features, x.dtype)
    return weight, 2.0**SCALE_SHIFT * inverse(global_scale)


def matmul(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    u: Tensor | None = None,
    b: Tensor | None = None,
) -> Tensor:
    """x [*, K] @ Wᵀ (+ u [*, R] @ b [N, R]ᵀ) (+ bias) → [*, N]."""
    rows = _rows(x)
    u = None if u is None else _rows(u)
    if dispatch.is_large("forward", rows.shape[0], x.device):
        check_forward(rows, codes, scales, global_scale, bias, u, b)
        weight, alpha = unpacked(rows, codes, scales, global_scale, rows.shape[1])
        first = rows.new_empty(1) if bias is None else bias
        y = torch.addmm(first, rows, weight.t(), beta=float(bias is not None), alpha=alpha)
        if u is not None and b is not None:
            y.addmm_(u, b.t())
    else:
        y = nvfp4_matmul(rows, codes, scales, global_scale, bias, u, b)
    return y.view(*x.shape[:-1], codes.shape[0])


def matmul_t(
    dy: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    in_features: int,
    v: Tensor | None = None,
    a: Tensor | None = None,
) -> Tensor:
    """dy [*, N] @ W (+ v [*, R] @ a [R, K]) → [*, K]."""
    rows = _rows(dy)
    v = None if v is None else _rows(v)
    if dispatch.is_large("backward", rows.shape[0], dy.device):
        check_backward(rows, codes, scales, global_scale, in_features, v, a)
        weight, alpha = unpacked(rows, codes, scales, global_scale, in_features)
        dx = torch.addmm(rows.new_empty(1), rows, weight, beta=0, alpha=alpha)
        if v is not None and a is not None:
            dx.addmm_(v, a)
    else:
        dx = nvfp4_matmul_t(rows, codes, scales, global_scale, in_features, v, a)
    return dx.view(*dy.shape[:-1], in_features)


def narrow(x: Tensor, factor: Tensor, alpha: float) -> Tensor:
    """alpha · x [*, C] @ factor [C, R]: an adapter's first product, through one tile if it must."""
    if launch.is_batch_invariant():
        return gemm(_rows(x), factor, alpha).view(*x.shape[:-1], factor.shape[1])
    return (x @ factor).mul_(alpha)
