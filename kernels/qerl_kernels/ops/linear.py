"""`qerl::nvfp4_matmul` and its transpose: products with a packed weight."""

import torch
from torch import Tensor

from qerl_kernels import layout
from qerl_kernels.cpu import (
    matmul_cpu,
    matmul_cuda,
    matmul_t_cpu,
    matmul_t_cuda,
)
from qerl_kernels.ops.library import LIB, define

define(
    "nvfp4_matmul(Tensor x, Tensor packed, Tensor scale, Tensor global_scale, Tensor? bias)"
    " -> Tensor"
)
define("nvfp4_matmul_t(Tensor dy, Tensor packed, Tensor scale, Tensor global_scale) -> Tensor")


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


LIB.impl("nvfp4_matmul", matmul_cpu, "CPU")
LIB.impl("nvfp4_matmul", matmul_cuda, "CUDA")
LIB.impl("nvfp4_matmul_t", matmul_t_cpu, "CPU")
LIB.impl("nvfp4_matmul_t", matmul_t_cuda, "CUDA")
torch.library.register_fake("qerl::nvfp4_matmul", _matmul_fake, lib=LIB)
torch.library.register_fake("qerl::nvfp4_matmul_t", _matmul_t_fake, lib=LIB)
torch.library.register_autograd(
    "qerl::nvfp4_matmul", _matmul_backward, setup_context=_save_weight, lib=LIB
)
torch.library.register_autograd(
    "qerl::nvfp4_matmul_t", _matmul_t_backward, setup_context=_save_weight, lib=LIB
)
_op_matmul = torch.ops.qerl.nvfp4_matmul.default
_op_matmul_t = torch.ops.qerl.nvfp4_matmul_t.default


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
