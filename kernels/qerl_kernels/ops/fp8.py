"""`qerl::fp8_matmul` and its transpose: products with an E4M3 weight, activations in 16 bits."""

import torch
from torch import Tensor

from qerl_kernels.fp8_cpu import (
    check_bias,
    check_features,
    check_fp8_weight,
    check_weight,
    fp8_matmul_cpu,
    fp8_matmul_t_cpu,
)
from qerl_kernels.launch import cpu_or_interpreter, lazy
from qerl_kernels.ops.library import LIB, define

__all__ = ["check_fp8_weight", "fp8_matmul", "fp8_matmul_t"]

define("fp8_matmul(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor")
define("fp8_matmul_t(Tensor dy, Tensor weight, Tensor scale) -> Tensor")
_launch = lazy("fp8", "fp8_matmul")
_launch_t = lazy("fp8", "fp8_matmul_t")


def _rows(features: Tensor) -> Tensor:
    """[*, width] as [M, width] without gaps; copied only where it must be."""
    return features.reshape(-1, features.shape[-1]).contiguous()


def _matmul_cuda(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    check_features("x", x, weight.shape[-1], weight)
    return _launch(_rows(x), weight, scale, bias).view(*x.shape[:-1], weight.shape[0])


def _matmul_t_cuda(dy: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    check_features("dy", dy, weight.shape[0], weight)
    return _launch_t(_rows(dy), weight, scale).view(*dy.shape[:-1], weight.shape[1])


def _matmul_fake(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    check_weight(weight, scale)
    check_features("x", x, weight.shape[1], weight)
    check_bias(bias, x, weight)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _matmul_t_fake(dy: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    check_weight(weight, scale)
    check_features("dy", dy, weight.shape[0], weight)
    return dy.new_empty(*dy.shape[:-1], weight.shape[1])


def _save_weight(ctx, inputs, output) -> None:
    _, weight, scale, *_ = inputs
    for name, tensor in (("weight", weight), ("scale", scale)):
        if tensor.requires_grad:
            raise ValueError(f"{name} must not require grad: the FP8 weight is frozen")
    ctx.save_for_backward(weight, scale)


def _matmul_backward(ctx, dy: Tensor):
    dx = _op_matmul_t(dy, *ctx.saved_tensors) if ctx.needs_input_grad[0] else None
    dbias = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[3] else None
    return dx, None, None, dbias


def _matmul_t_backward(ctx, ddx: Tensor):
    return _op_matmul(ddx, *ctx.saved_tensors, None), None, None


LIB.impl("fp8_matmul", cpu_or_interpreter(fp8_matmul_cpu, _matmul_cuda), "CPU")
LIB.impl("fp8_matmul", _matmul_cuda, "CUDA")
LIB.impl("fp8_matmul_t", cpu_or_interpreter(fp8_matmul_t_cpu, _matmul_t_cuda), "CPU")
LIB.impl("fp8_matmul_t", _matmul_t_cuda, "CUDA")
torch.library.register_fake("qerl::fp8_matmul", _matmul_fake, lib=LIB)
torch.library.register_fake("qerl::fp8_matmul_t", _matmul_t_fake, lib=LIB)
torch.library.register_autograd(
    "qerl::fp8_matmul", _matmul_backward, setup_context=_save_weight, lib=LIB
)
torch.library.register_autograd(
    "qerl::fp8_matmul_t", _matmul_t_backward, setup_context=_save_weight, lib=LIB
)
_op_matmul = torch.ops.qerl.fp8_matmul.default
_op_matmul_t = torch.ops.qerl.fp8_matmul_t.default


def fp8_matmul(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [*, K] @ Wᵀ (+ bias [N]) → [*, N] in x's dtype; differentiable in x and bias, W frozen.

    weight float8_e4m3fn [N, K] or its bytes as uint8, K a multiple of 16; scale float32 [1], or
    [N] or [N, 1] for each output, a multiplier: w = v · scale. x and bias bfloat16 or float16, on
    CPU also float32 and float64. Keeps nothing for backward but the weight.

    Products are of exact values and sums in fp32 (float64 for float64 x), the scale is applied to
    the sum: within fp32 accumulation and one output rounding of the exact result. On a GPU, past
    the tiles' largest M, v · scale is rounded to x's type first (once each: at most
    u·Σ|x·w| more, u = 2⁻⁸ for bfloat16, 2⁻¹¹ for float16) and cuBLAS multiplies; never in
    batch-invariant mode.
    Raises ValueError when shapes or dtypes do not belong together and when weight or scale
    requires grad. A NaN byte counts as ±480: `check_fp8_weight` refuses it at load time.
    """
    return _op_matmul(x, weight, scale, bias)


def fp8_matmul_t(dy: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """dy [*, N] @ W → [*, K] in dy's dtype: the gradient of `fp8_matmul`, same bytes.

    A scale for the whole tensor is applied to the fp32 sum, as exact as the forward product. One
    for each output lies along the sum: on a GPU dy · (scale / max scale) is rounded to dy's type
    once, which adds at most u·Σ|dy·w| (and for float16 2⁻²⁵·max scale·Σ|v|, its smallest step).
    Raises ValueError as `fp8_matmul` does.
    """
    return _op_matmul_t(dy, weight, scale)
