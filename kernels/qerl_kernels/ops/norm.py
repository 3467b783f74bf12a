"""`qerl::rms_norm`: RMSNorm whose weight can carry noise."""

import torch
from torch import Tensor

from qerl_kernels import launch
from qerl_kernels.norm_cpu import (
    check_arguments,
    check_gradient,
    output_dtype,
    rms_norm_backward_cpu,
    rms_norm_cpu,
    wide_dtype,
)
from qerl_kernels.ops.library import LIB, define

define(
    "rms_norm(Tensor x, Tensor weight, Tensor? noise, Tensor? row_index, float eps, float offset,"
    " bool cast_first) -> (Tensor y, Tensor rstd)"
)
define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor rstd, Tensor weight, Tensor? noise,"
    " Tensor? row_index, float offset) -> Tensor"
)
_forward_rows = launch.lazy("norm", "rms_norm")
_backward_rows = launch.lazy("norm", "rms_norm_backward")


def _rows(x: Tensor) -> Tensor:
    """x [*, d] as [R, d] with its features side by side; copied only where it must be."""
    rows = x.reshape(-1, x.shape[-1])
    # A gradient can be one number spread over all features, with stride 0.
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _rms_norm_cuda(
    x: Tensor,
    weight: Tensor,
    noise: Tensor | None,
    row_index: Tensor | None,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    y, rstd = _forward_rows(_rows(x), weight, noise, row_index, eps, offset, cast_first)
    return y.view(x.shape), rstd.view(x.shape[:-1])


def _rms_norm_backward_cuda(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    noise: Tensor | None,
    row_index: Tensor | None,
    offset: float,
) -> Tensor:
    flat = (_rows(dy), _rows(x), rstd.reshape(-1))
    return _backward_rows(*flat, weight, noise, row_index, offset).view(x.shape)


def _rms_norm_fake(
    x: Tensor,
    weight: Tensor,
    noise: Tensor | None,
    row_index: Tensor | None,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    check_arguments(x, weight, noise, row_index, offset, cast_first)
    y = x.new_empty(x.shape, dtype=output_dtype(x, weight, cast_first))
    return y, x.new_empty(x.shape[:-1], dtype=wide_dtype(x))


def _rms_norm_backward_fake(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    noise: Tensor | None,
    row_index: Tensor | None,
    offset: float,
) -> Tensor:
    check_arguments(x, weight, noise, row_index, offset)
    check_gradient(dy, x, rstd)
    return x.new_empty(x.shape)


def _save_input(ctx, inputs, output) -> None:
    x, weight, noise, row_index, _, offset, _ = inputs
    for name, tensor in (("weight", weight), ("noise", noise)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{name} must not require grad: qerl::rms_norm is differentiable in x")
    ctx.mark_non_differentiable(output[1])
    ctx.offset = offset
    ctx.save_for_backward(x, output[1], weight, noise, row_index)


def _rms_norm_backward(ctx, dy: Tensor, drstd: Tensor):
    dx = torch.ops.qerl.rms_norm_backward.default(dy, *ctx.saved_tensors, ctx.offset)
    return dx, None, None, None, None, None, None


def _no_second_derivative(ctx, ddx: Tensor):
    raise ValueError("qerl::rms_norm has no second derivative")


LIB.impl("rms_norm", launch.cpu_or_interpreter(rms_norm_cpu, _rms_norm_cuda), "CPU")
LIB.impl("rms_norm", _rms_norm_cuda, "CUDA")
LIB.impl(
    "rms_norm_backward",
    launch.cpu_or_interpreter(rms_norm_backward_cpu, _rms_norm_backward_cuda),
    "CPU",
)
LIB.impl("rms_norm_backward", _rms_norm_backward_cuda, "CUDA")
torch.library.register_fake("qerl::rms_norm", _rms_norm_fake, lib=LIB)
torch.library.register_fake("qerl::rms_norm_backward", _rms_norm_backward_fake, lib=LIB)
torch.library.register_autograd(
    "qerl::rms_norm", _rms_norm_backward, setup_context=_save_input, lib=LIB
)
torch.library.register_autograd("qerl::rms_norm_backward", _no_second_derivative, lib=LIB)
_op_rms_norm = torch.ops.qerl.rms_norm.default


def rms_norm(
    x: Tensor,
    weight: Tensor,
    noise: Tensor | None = None,
    row_index: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_first: bool = True,
) -> Tensor:
    """(offset + w + Z) · x̂ with x̂ = x / sqrt(mean(x²) + eps) over the last dimension: [*, d].

    x [*, d] bfloat16, float16 or float32 (float64 on CPU); weight w float [d], frozen; noise Z
    float32 [d], or [n, d] together with row_index, int32 [R]: which of the n each of the R rows
    of x takes (must be in 0..n-1, which a GPU does not check).

    cast_first: Llama, Mistral, Qwen2 and Qwen3 (offset 0): x̂ is rounded to x's type, then
    multiplied by w; y has the wider of the two types. Otherwise Gemma and Qwen3.5 (offset 1):
    one rounding, to x's type. Without noise y has the bits of transformers' modules on CPU; the
    kernel can differ only by the order in which mean(x²) is summed. With noise everything is in
    fp32 and rounded once, to the same type of y. Differentiable in x, from x and one fp32 number
    a row kept: rms norm of Zhang and Sennrich, arXiv:1910.07467; noise of QeRL, arXiv:2510.11696.
    Raises ValueError when shapes or dtypes do not belong together, for cast_first with an offset
    and no noise (no model computes that), when weight or noise requires grad, on a second
    derivative, and on a GPU for d over 16384.
    """
    return _op_rms_norm(x, weight, noise, row_index, eps, offset, cast_first)[0]


def runs_kernel(x: Tensor) -> bool:
    """Whether `rms_norm` of x is the Triton kernel: on a GPU, or inside `interpreting`."""
    return x.is_cuda or launch.is_interpreting()
