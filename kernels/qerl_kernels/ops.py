"""The only door to this package: PyTorch operators `qerl::…` and thin functions in front of them.

Registered with `torch.library` (schema, shapes for meta tensors, autograd), so `torch.compile`
and `opcheck` see them whole. A weight is three tensors (see `layout`): packed uint8 [N, K/2],
scale float8_e4m3fn [N, K/16] and global_scale float32 [1], a divisor: w = v·s/g.
"""

import torch
from torch import Tensor

from qerl_kernels import layout
from qerl_kernels.logprob import linear_logprob_forward
from qerl_kernels.matmul import (
    cache_bytes,
    clear_cache,
    matmul_cpu,
    matmul_cuda,
    matmul_t_cpu,
    matmul_t_cuda,
    verify_cache,
)

__all__ = [
    "cache_bytes", "clear_cache", "linear_logprob", "nvfp4_matmul", "nvfp4_matmul_t",
    "verify_cache",
]  # fmt: skip

# `Library` rather than `custom_op`: no per-call alias check, this is called for every linear layer.
_lib = torch.library.Library("qerl", "FRAGMENT")
_lib.define(
    "nvfp4_matmul(Tensor x, Tensor packed, Tensor scale, Tensor global_scale, Tensor? bias)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_lib.define(
    "nvfp4_matmul_t(Tensor dy, Tensor packed, Tensor scale, Tensor global_scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_lib.define(
    "linear_logprob(Tensor hidden, Tensor weight, Tensor targets, float inv_temperature,"
    " float softcap, int chunk, bool with_jacobian) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _check_product(features: Tensor, width: int, name: str, packed: Tensor) -> None:
    if not features.dtype.is_floating_point or features.shape[-1] != width:
        raise ValueError(
            f"{name} is {features.dtype} with {features.shape[-1]} features, the weight (packed "
            f"{tuple(packed.shape)}) takes {width} floats"
        )


def _matmul_fake(
    x: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    layout.check_weight(packed, scale, global_scale)
    _check_product(x, 2 * packed.shape[1], "x", packed)
    if bias is not None and bias.shape != packed.shape[:1]:
        raise ValueError(f"bias must be [{packed.shape[0]}], found {tuple(bias.shape)}")
    return x.new_empty(*x.shape[:-1], packed.shape[0])


def _matmul_t_fake(dy: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    layout.check_weight(packed, scale, global_scale)
    _check_product(dy, packed.shape[0], "dy", packed)
    return dy.new_empty(*dy.shape[:-1], 2 * packed.shape[1])


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


def _save_weight(ctx, inputs, output) -> None:
    # Attributes, not save_for_backward: the cache knows a weight by its identity, which saved
    # tensor hooks (activation checkpointing) would replace. No 16-bit weight and no x is kept.
    ctx.nvfp4 = inputs[1:4]


def _matmul_backward(ctx, dy: Tensor):
    dx = _op_matmul_t(dy, *ctx.nvfp4) if ctx.needs_input_grad[0] else None
    dbias = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[4] else None
    return dx, None, None, None, dbias


def _matmul_t_backward(ctx, dx: Tensor):
    return _op_matmul(dx, *ctx.nvfp4, None), None, None, None


def _save_jacobian(ctx, inputs, output) -> None:
    ctx.with_jacobian, ctx.dtype = inputs[6], inputs[0].dtype
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(output[2])


def _linear_logprob_backward(ctx, dlogp: Tensor, dentropy: Tensor, djacobian: Tensor):
    if not ctx.with_jacobian:
        raise ValueError("qerl::linear_logprob ran without its Jacobian: there is no gradient")
    (jacobian,) = ctx.saved_tensors
    return (dlogp[:, None] * jacobian).to(ctx.dtype), None, None, None, None, None, None


_lib.impl("nvfp4_matmul", matmul_cpu, "CPU")
_lib.impl("nvfp4_matmul", matmul_cuda, "CUDA")
_lib.impl("nvfp4_matmul_t", matmul_t_cpu, "CPU")
_lib.impl("nvfp4_matmul_t", matmul_t_cuda, "CUDA")
_lib.impl("linear_logprob", linear_logprob_forward, "CPU")
_lib.impl("linear_logprob", linear_logprob_forward, "CUDA")
torch.library.register_fake("qerl::nvfp4_matmul", _matmul_fake, lib=_lib)
torch.library.register_fake("qerl::nvfp4_matmul_t", _matmul_t_fake, lib=_lib)
torch.library.register_fake("qerl::linear_logprob", _linear_logprob_fake, lib=_lib)
torch.library.register_autograd(
    "qerl::nvfp4_matmul", _matmul_backward, setup_context=_save_weight, lib=_lib
)
torch.library.register_autograd(
    "qerl::nvfp4_matmul_t", _matmul_t_backward, setup_context=_save_weight, lib=_lib
)
torch.library.register_autograd(
    "qerl::linear_logprob", _linear_logprob_backward, setup_context=_save_jacobian, lib=_lib
)
_op_matmul = torch.ops.qerl.nvfp4_matmul.default
_op_matmul_t = torch.ops.qerl.nvfp4_matmul_t.default
_op_linear_logprob = torch.ops.qerl.linear_logprob.default


def nvfp4_matmul(
    x: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x [*, K] @ Wᵀ (+ bias [N]) → [*, N] in x's dtype; differentiable in x and bias, W frozen.

    packed, scale, global_scale: the weight, see the module docstring. Products accumulate in
    fp32 (float64 for float64 x). Raises ValueError when shapes or dtypes do not belong together.
    On CPU the unpacked weight stays cached in x's dtype (`cache_bytes`, `verify_cache`,
    `clear_cache`).
    """
    return _op_matmul(x, packed, scale, global_scale, bias)


def nvfp4_matmul_t(dy: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """dy [*, N] @ W → [*, K] in dy's dtype: the gradient of `nvfp4_matmul`, same packed weight."""
    return _op_matmul_t(dy, packed, scale, global_scale)


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
