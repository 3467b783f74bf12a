"""`qerl::nvfp4_…`: products with a packed weight, plain or with a LoRA adapter in the same pass.

A weight is three tensors. On the CPU they are the ones on disk (see `layout`); on a GPU codes and
scales are repacked for it first (`repack`). The dtype of the codes tells which: uint8 or int32.
"""

import torch
from torch import Tensor

from qerl_kernels import cpu, layout
from qerl_kernels.launch import cpu_or_interpreter, lazy
from qerl_kernels.ops.library import LIB, define
from qerl_kernels.repack import check_repacked, check_values
from qerl_kernels.repack import repack as repack_weight

_WEIGHT = "Tensor packed, Tensor scale, Tensor global_scale"
define(f"nvfp4_matmul(Tensor x, {_WEIGHT}, Tensor? bias) -> Tensor")
define(f"nvfp4_matmul_t(Tensor dy, {_WEIGHT}, int in_features) -> Tensor")
define(
    f"nvfp4_lora_matmul(Tensor x, {_WEIGHT}, Tensor? bias, Tensor a, Tensor b, float scaling)"
    " -> (Tensor, Tensor)"
)
define(f"nvfp4_lora_matmul_t(Tensor dy, {_WEIGHT}, Tensor v, Tensor a) -> Tensor")

_cuda_matmul = lazy("linear", "matmul")
_cuda_matmul_t = lazy("linear", "matmul_t")
_cuda_narrow = lazy("linear", "narrow")


def _check_weight(packed: Tensor, scale: Tensor, global_scale: Tensor, in_features: int) -> None:
    if packed.dtype == torch.int32:
        check_repacked(packed, scale, in_features)
    else:
        layout.check_weight(packed, scale)
        if in_features != 2 * packed.shape[1]:
            raise ValueError(
                f"the weight (packed {tuple(packed.shape)}) takes {2 * packed.shape[1]} features, "
                f"found {in_features}"
            )
    layout.check_global_scale(global_scale)


def _check_rows(name: str, x: Tensor, width: int) -> None:
    if not x.dtype.is_floating_point or x.shape[-1] != width:
        raise ValueError(
            f"{name} must be a float [*, {width}], found {str(x.dtype)[6:]} {list(x.shape)}"
        )


def _check_factors(x: Tensor, a: Tensor, b: Tensor, n: int) -> None:
    if a.shape != (b.shape[-1], x.shape[-1]) or b.shape != (n, a.shape[0]):
        raise ValueError(
            f"the adapter must be a [R, {x.shape[-1]}] and b [{n}, R], found {list(a.shape)} and "
            f"{list(b.shape)}"
        )
    if not a.shape[0]:
        raise ValueError("the adapter's rank must be at least 1, found 0")
    if a.dtype != x.dtype or b.dtype != x.dtype:
        raise ValueError(
            f"a and b must be {str(x.dtype)[6:]} like x, found {str(a.dtype)[6:]} and "
            f"{str(b.dtype)[6:]}"
        )


def _check_forward(
    x: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None
) -> None:
    _check_weight(packed, scale, global_scale, x.shape[-1])
    _check_rows("x", x, x.shape[-1])
    if bias is not None and bias.shape != packed.shape[:1]:
        raise ValueError(f"bias must be [{packed.shape[0]}], found {tuple(bias.shape)}")


def _matmul_fake(x, packed, scale, global_scale, bias=None):
    _check_forward(x, packed, scale, global_scale, bias)
    return x.new_empty(*x.shape[:-1], packed.shape[0])


def _matmul_t_fake(dy, packed, scale, global_scale, in_features):
    _check_weight(packed, scale, global_scale, in_features)
    _check_rows("dy", dy, packed.shape[0])
    return dy.new_empty(*dy.shape[:-1], in_features)


def _lora_fake(x, packed, scale, global_scale, bias, a, b, scaling):
    y = _matmul_fake(x, packed, scale, global_scale, bias)
    _check_factors(x, a, b, packed.shape[0])
    return y, x.new_empty(*x.shape[:-1], a.shape[0])


def _lora_t_fake(dy, packed, scale, global_scale, v, a):
    _check_gradient_factors(dy, v, a)
    return _matmul_t_fake(dy, packed, scale, global_scale, a.shape[1])


def _cpu_matmul_t(dy, packed, scale, global_scale, in_features):
    _check_weight(packed, scale, global_scale, in_features)
    return cpu.matmul_t_cpu(dy, packed, scale, global_scale)


def _check_gradient_factors(dy: Tensor, v: Tensor, a: Tensor) -> None:
    if v.shape != (*dy.shape[:-1], a.shape[0]) or v.dtype != dy.dtype or a.dtype != dy.dtype:
        raise ValueError(
            f"v and a must be {str(dy.dtype)[6:]} {[*dy.shape[:-1], a.shape[0]]} and [R, K] like "
            f"dy, found {str(v.dtype)[6:]} {list(v.shape)} and {str(a.dtype)[6:]} {list(a.shape)}"
        )


def _cpu_lora(x, packed, scale, global_scale, bias, a, b, scaling):
    _check_factors(x, a, b, packed.shape[0])
    return cpu.lora_matmul_cpu(x, packed, scale, global_scale, bias, a, b, scaling)


def _cpu_lora_t(dy, packed, scale, global_scale, v, a):
    _check_gradient_factors(dy, v, a)
    _check_weight(packed, scale, global_scale, a.shape[1])
    return cpu.lora_matmul_t_cpu(dy, packed, scale, global_scale, v, a)


def _cuda_lora(x, packed, scale, global_scale, bias, a, b, scaling):
    _check_factors(x, a, b, packed.shape[0])
    u = _cuda_narrow(x, a.t(), scaling)
    return _cuda_matmul(x, packed, scale, global_scale, bias, u, b.contiguous()), u


def _cuda_lora_t(dy, packed, scale, global_scale, v, a):
    _check_gradient_factors(dy, v, a)
    return _cuda_matmul_t(dy, packed, scale, global_scale, a.shape[1], v, a.contiguous())


# Weights ride on attributes, not save_for_backward: the CPU cache knows one by its identity, which
# saved-tensor hooks (activation checkpointing) would replace. No 16-bit weight is ever kept.


def _save_matmul(ctx, inputs, output) -> None:
    ctx.weight, ctx.in_features = inputs[1:4], inputs[0].shape[-1]


def _matmul_backward(ctx, dy: Tensor):
    dx = None
    if ctx.needs_input_grad[0]:
        dx = _op_matmul_t(dy, *ctx.weight, ctx.in_features)
    dbias = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[4] else None
    return dx, None, None, None, dbias


def _save_matmul_t(ctx, inputs, output) -> None:
    ctx.weight = inputs[1:4]


def _matmul_t_backward(ctx, dx: Tensor):
    return _op_matmul(dx, *ctx.weight, None), None, None, None, None


def _save_lora(ctx, inputs, output) -> None:
    x, *weight, _, a, b, scaling = inputs
    ctx.weight, ctx.scaling = weight, scaling
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], a, b)


def _lora_backward(ctx, dy: Tensor, du: Tensor):
    """With y = x Wᵀ + u Bᵀ, u = s x Aᵀ: v = s dy B; dx = dy W + v A, dA = vᵀ x, dB = dyᵀ u."""
    x, u, a, b = ctx.saved_tensors
    if torch.is_grad_enabled():  # differentiated once more: u must carry x and a
        u = _op_narrow(x, a.t(), ctx.scaling)
    rows = dy.reshape(-1, dy.shape[-1])
    v = _op_narrow(dy, b, ctx.scaling)
    dx = dbias = da = db = None
    if ctx.needs_input_grad[0]:
        dx = _op_lora_matmul_t(dy, *ctx.weight, v, a)
    if ctx.needs_input_grad[4]:
        dbias = rows.sum(0)
    if ctx.needs_input_grad[5]:
        da = v.reshape(-1, v.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
    if ctx.needs_input_grad[6]:
        db = rows.t() @ u.reshape(-1, u.shape[-1])
    return dx, None, None, None, dbias, da, db, None


def _save_lora_t(ctx, inputs, output) -> None:
    dy, *weight, v, a = inputs
    ctx.weight = weight
    ctx.save_for_backward(v, a)


def _lora_t_backward(ctx, dx: Tensor):
    v, a = ctx.saved_tensors
    da = v.reshape(-1, v.shape[-1]).t() @ dx.reshape(-1, dx.shape[-1])
    return _op_matmul(dx, *ctx.weight, None), None, None, None, dx @ a.t(), da


# The adapter's first product, an operator so that batch-invariant mode covers the backward too.
define("nvfp4_narrow(Tensor x, Tensor factor, float alpha) -> Tensor")


def _narrow_fake(x: Tensor, factor: Tensor, alpha: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], factor.shape[1])


def _save_narrow(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.alpha = inputs[2]


def _narrow_backward(ctx, dy: Tensor):
    x, factor = ctx.saved_tensors
    rows = dy.reshape(-1, dy.shape[-1])
    dfactor = (x.reshape(-1, x.shape[-1]).t() @ rows).mul(ctx.alpha)
    return _op_narrow(dy, factor.t(), ctx.alpha), dfactor, None


def _register(name: str, on_cpu, on_cuda, fake, setup, backward) -> None:
    LIB.impl(name, cpu_or_interpreter(on_cpu, on_cuda), "CPU")
    LIB.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"qerl::{name}", fake, lib=LIB)
    torch.library.register_autograd(f"qerl::{name}", backward, setup_context=setup, lib=LIB)


_register(
    "nvfp4_matmul", cpu.matmul_cpu, _cuda_matmul, _matmul_fake, _save_matmul, _matmul_backward
)
_register(
    "nvfp4_matmul_t",
    _cpu_matmul_t,
    _cuda_matmul_t,
    _matmul_t_fake,
    _save_matmul_t,
    _matmul_t_backward,
)
_register("nvfp4_lora_matmul", _cpu_lora, _cuda_lora, _lora_fake, _save_lora, _lora_backward)
_register(
    "nvfp4_lora_matmul_t",
    _cpu_lora_t,
    _cuda_lora_t,
    _lora_t_fake,
    _save_lora_t,
    _lora_t_backward,
)
_register("nvfp4_narrow", cpu.narrow, _cuda_narrow, _narrow_fake, _save_narrow, _narrow_backward)
_op_matmul = torch.ops.qerl.nvfp4_matmul.default
_op_matmul_t = torch.ops.qerl.nvfp4_matmul_t.default
_op_lora_matmul = torch.ops.qerl.nvfp4_lora_matmul.default
_op_lora_matmul_t = torch.ops.qerl.nvfp4_lora_matmul_t.default
_op_narrow = torch.ops.qerl.nvfp4_narrow.default


def repack(
    packed: Tensor, scale: Tensor, global_scale: Tensor, name: str = "weight"
) -> tuple[Tensor, Tensor]:
    """A weight from disk, on its GPU, arranged for that GPU: int32 codes and scales.

    packed uint8 [N, K/2], scale float8_e4m3fn [N, K/16]; returns codes [N, 16·G] and scales
    [N, 2·G], G = ceil(K/128). Checks the values, once: raises ValueError (with `name`) for scales
    that are negative or not finite, and for K that is no multiple of 16.
    """
    lane_order = lazy("dispatch", "lane_order")(packed.device)
    layout.check_weight(packed, scale, global_scale, name=name)
    check_values(scale, global_scale, name)
    cpu.inverse(global_scale)
    return repack_weight(packed, scale, order=lane_order, name=name)


def nvfp4_matmul(
    x: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x [*, K] @ Wᵀ (+ bias [N]) → [*, N] in x's dtype; differentiable in x and bias, W frozen.

    packed, scale, global_scale: the weight, see the module docstring. Products accumulate in
    fp32 (float64 for float64 x). Raises ValueError when shapes or dtypes do not belong together.
    On CPU the unpacked weight stays cached in x's dtype (`cache_bytes`, `verify_cache`,
    `clear_cache`). On a GPU x is bf16 or fp16.
    """
    return _op_matmul(x, packed, scale, global_scale, bias)


def nvfp4_matmul_t(
    dy: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor, in_features: int
) -> Tensor:
    """dy [*, N] @ W → [*, K = in_features]: the gradient of `nvfp4_matmul`, same packed weight."""
    return _op_matmul_t(dy, packed, scale, global_scale, in_features)


def nvfp4_lora_matmul(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
) -> Tensor:
    """x Wᵀ + scaling · x Aᵀ Bᵀ (+ bias) → [*, N] (Hu et al. 2021, eq. 3), one pass over W.

    x [*, K]; a [R, K] and b [N, R] in x's dtype, differentiable like x and bias. Keeps x and the
    rank-R product for the backward, nothing of W. Raises ValueError when tensors do not fit.
    """
    return _op_lora_matmul(x, packed, scale, global_scale, bias, a, b, scaling)[0]
