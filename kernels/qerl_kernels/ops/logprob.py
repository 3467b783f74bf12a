"""`qerl::linear_logprob`: log-probabilities of chosen tokens without the logits."""

import torch
from torch import Tensor

from qerl_kernels.logprob import linear_logprob_forward
from qerl_kernels.ops.library import LIB, define

define(
    "linear_logprob(Tensor hidden, Tensor weight, Tensor targets, float inv_temperature,"
    " float softcap, int chunk, bool with_jacobian) -> (Tensor, Tensor, Tensor)"
)


def _linear_logprob_fake(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inv_temperature: float,
    softcap: float,
    chunk: int,
    with_jacobian: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logp = hidden.new_empty(hidden.shape[0], dtype=dtype)
    rows = hidden.shape[0] if with_jacobian else 0
    return logp, torch.empty_like(logp), hidden.new_empty(rows, hidden.shape[1], dtype=dtype)


def _save_jacobian(ctx, inputs, output) -> None:
    ctx.with_jacobian, ctx.dtype = inputs[6], inputs[0].dtype
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(output[2])


def _linear_logprob_backward(ctx, dlogp: Tensor, dentropy: Tensor, djacobian: Tensor):
    if not ctx.with_jacobian:
        raise ValueError("qerl::linear_logprob ran without its Jacobian: there is no gradient")
    (jacobian,) = ctx.saved_tensors
    return (dlogp[:, None] * jacobian).to(ctx.dtype), None, None, None, None, None, None


LIB.impl("linear_logprob", linear_logprob_forward, "CPU")
LIB.impl("linear_logprob", linear_logprob_forward, "CUDA")
torch.library.register_fake("qerl::linear_logprob", _linear_logprob_fake, lib=LIB)
torch.library.register_autograd(
    "qerl::linear_logprob", _linear_logprob_backward, setup_context=_save_jacobian, lib=LIB
)
_op_linear_logprob = torch.ops.qerl.linear_logprob.default


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inv_temperature: float = 1.0,
    softcap: float = 0.0,
    chunk: int = 256,
) -> tuple[Tensor, Tensor]:
    """Log-probability (nats) of each target and entropy of its distribution, fp32 [T] each.

    The distribution is softmax(softcap · tanh(hidden @ weightᵀ / softcap) · inv_temperature), no
    capping for softcap = 0. hidden [T, H], weight [V, H] (frozen), targets int64 [T]. Logits
    exist for `chunk` tokens at a time. Only logp is differentiable, and only in `hidden`; that
    costs one more product in forward and [T, H] fp32 kept, and backward is an elementwise product.
    Raises ValueError for shapes or dtypes that do not fit together. float64 hidden gives float64.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "hidden must be [T, H] and weight [V, H], found "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if targets.dtype != torch.int64 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"targets must be int64 [{hidden.shape[0]}], found {targets.dtype} "
            f"{tuple(targets.shape)}"
        )
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, found {chunk}")
    with_jacobian = torch.is_grad_enabled() and hidden.requires_grad
    logp, entropy, _ = _op_linear_logprob(
        hidden, weight, targets, inv_temperature, softcap, chunk, with_jacobian
    )
    return logp, entropy
