"""`qerl::linear_logprob`: log-probabilities of chosen tokens without the logits."""

import torch
from torch import Tensor

from qerl_kernels.launch import cpu_or_interpreter, lazy
from qerl_kernels.logprob import check_arguments, linear_logprob_forward
from qerl_kernels.ops.library import LIB, define

define(
    "linear_logprob(Tensor hidden, Tensor weight, Tensor targets, float logit_scale, float softcap,"
    " float inv_temperature, int top_k, int? chunk, bool with_jacobian)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


def _linear_logprob_fake(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    logit_scale: float,
    softcap: float,
    inv_temperature: float,
    top_k: int,
    chunk: int | None,
    with_jacobian: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_arguments(hidden, weight, targets, softcap, top_k, chunk)
    n_tokens, n_hidden = hidden.shape
    logp = hidden.new_empty(n_tokens, dtype=torch.promote_types(hidden.dtype, torch.float32))
    mass = logp.new_empty(n_tokens if top_k else 0)
    jacobian = logp.new_empty(n_tokens if with_jacobian else 0, n_hidden)
    return logp, torch.empty_like(logp), mass, jacobian


def _save_jacobian(ctx, inputs, output) -> None:
    ctx.with_jacobian, ctx.dtype = inputs[-1], inputs[0].dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(output[3])


def _linear_logprob_backward(ctx, dlogp: Tensor, *unused):
    if not ctx.with_jacobian:
        raise ValueError("qerl::linear_logprob ran without its Jacobian: there is no gradient")
    (jacobian,) = ctx.saved_tensors
    return (dlogp[:, None] * jacobian).to(ctx.dtype), *[None] * 8


_cuda = lazy("logprob_triton", "linear_logprob")
LIB.impl("linear_logprob", cpu_or_interpreter(linear_logprob_forward, _cuda), "CPU")
LIB.impl("linear_logprob", _cuda, "CUDA")
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
    chunk: int | None = None,
    *,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probability (nats) of each target and entropy of its distribution, fp32 [T] each.

    The distribution is softmax(z · inv_temperature), z = softcap · tanh(x · logit_scale / softcap)
    and x = hidden @ weightᵀ; for softcap = 0, z = x · logit_scale. hidden [T, H], weight [V, H]
    (frozen), targets int64 [T]. float64 hidden states give float64, on the CPU. Tokens and
    vocabulary go in tiles, so extra memory does not grow with T·V; `chunk` is the most tokens at a
    time, the device's own choice by default.

    Only logp is differentiable, and only in `hidden`. A token's log-probability is one number, so
    its Jacobian is one row of H: forward computes it, at the cost of one more product and [T, H]
    fp32 kept, and backward is an elementwise product. Recomputing the logits in backward would keep
    half of that and cost a third product.

    Raises ValueError for shapes or dtypes that do not fit together. A target outside the
    vocabulary raises it too on the CPU; a GPU, which cannot look without stalling, gives NaN.
    """
    logp, entropy, _ = linear_logprob_topk(
        hidden, weight, targets, 0, inv_temperature, softcap, chunk, logit_scale=logit_scale
    )
    return logp, entropy


def linear_logprob_topk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    top_k: int,
    inv_temperature: float = 1.0,
    softcap: float = 0.0,
    chunk: int | None = None,
    *,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`linear_logprob` and the probability mass of the `top_k` most likely tokens, fp32 [T].

    The mass carries no gradient; of equally likely tokens any may count. top_k is 0 (and then the
    mass is [0]) to V. Raises ValueError as `linear_logprob` does.
    """
    if torch.is_grad_enabled() and weight.requires_grad:
        raise ValueError("weight must be frozen: the log-probability has no gradient for the head")
    with_jacobian = torch.is_grad_enabled() and hidden.requires_grad
    logp, entropy, mass, _ = _op_linear_logprob(
        hidden, weight, targets, logit_scale, softcap, inv_temperature, top_k, chunk, with_jacobian
    )
    return logp, entropy, mass
