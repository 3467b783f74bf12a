"""RMSNorm with noise on its weight, and its gradient: Triton kernels.

A program normalizes whole rows held in registers, so x is read once. A row's sum is taken by a
tree that depends on d alone: its result never depends on other rows, in any mode. Forward runs
PyTorch's own CUDA operations one by one (no multiply is fused into an add, the mean is a sum times
1/d); without noise it can differ from transformers' modules only through the order of that sum.
Speed not yet measured on a GPU. Shape letters: R rows, d features, n rows of noise.
"""
# Launch options (num_warps, enable_fp_fusion) are no parameters of the kernel.
# pyright: reportCallIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_kernels.device import narrow
from qerl_kernels.launch import check
from qerl_kernels.norm_cpu import check_arguments, check_gradient, output_dtype
from qerl_kernels.variants import Variant

MAX_FEATURES = 16384
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Where a row's noise is: nowhere, in the one [d], or in the row of [n, d] that an index names.
_NO_NOISE, _ONE_NOISE, _NOISE_ROWS = 0, 1, 2


@triton.jit
def _scale(w_ptr, z_ptr, index_ptr, row, col, n_rows, d, OFFSET: tl.constexpr, NOISE: tl.constexpr):
    """offset + w + Z in fp32: [1, block], or [rows, block] with one row of noise for each."""
    scale = tl.load(w_ptr + col, mask=col < d, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        scale = scale + OFFSET
    if NOISE == 1:
        scale = scale + tl.load(z_ptr + col, mask=col < d, other=0.0)
    scale = scale[None, :]
    if NOISE == 2:
        index = tl.load(index_ptr + row, mask=row < n_rows, other=0).to(tl.int64)
        live = (row < n_rows)[:, None] & (col < d)[None, :]
        scale = scale + tl.load(z_ptr + index[:, None] * d + col[None, :], mask=live, other=0.0)
    return scale


@triton.jit(do_not_specialize=["n_rows"])
def _rms_norm_kernel(
    x_ptr,
    w_ptr,
    z_ptr,
    index_ptr,
    y_ptr,
    rstd_ptr,
    n_rows,
    d,
    stride_x,
    eps,
    inv_d,
    OFFSET: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    NOISE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    live = (row < n_rows)[:, None] & (col < d)[None, :]
    row64 = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + row64 * stride_x + col[None, :], mask=live, other=0.0)
    wide = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) * inv_d + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < n_rows)
    unit = wide * rstd[:, None]
    if CAST_FIRST and NOISE == 0:
        unit = narrow(unit, x.dtype).to(tl.float32)
    y = unit * _scale(w_ptr, z_ptr, index_ptr, row, col, n_rows, d, OFFSET, NOISE)
    tl.store(y_ptr + row64 * d + col[None, :], narrow(y, y_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["n_rows"])
def _rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    rstd_ptr,
    w_ptr,
    z_ptr,
    index_ptr,
    dx_ptr,
    n_rows,
    d,
    stride_dy,
    stride_x,
    inv_d,
    OFFSET: tl.constexpr,
    NOISE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    live = (row < n_rows)[:, None] & (col < d)[None, :]
    row64 = row.to(tl.int64)[:, None]
    dy = tl.load(dy_ptr + row64 * stride_dy + col[None, :], mask=live, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row64 * stride_x + col[None, :], mask=live, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row, mask=row < n_rows, other=0.0)[:, None]
    g = dy * _scale(w_ptr, z_ptr, index_ptr, row, col, n_rows, d, OFFSET, NOISE)
    unit = x * rstd
    along = tl.sum(g * unit, axis=1)[:, None] * inv_d
    dx = rstd * (g - unit * along)
    tl.store(dx_ptr + row64 * d + col[None, :], narrow(dx, dx_ptr.dtype.element_ty), mask=live)


def _tile(d: int) -> tuple[int, int, int]:
    """(rows, block, warps) of a program: 512 numbers or more, 8 to a thread (16 for 16384)."""
    block = max(128, 1 << (d - 1).bit_length())
    rows = 1 if block >= 512 else 1024 // block
    return rows, block, min(32, rows * block // 256)


def _check_devices(x: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError unless all are where x is, and contiguous."""
    for name, tensor in others.items():
        if tensor is not None:
            check(name, tensor, like=x)


def _check_rows(name: str, rows: Tensor) -> None:
    """Raise ValueError unless `rows` is [R, d], each row without gaps, of a type we compile."""
    check(name, rows, dtype=_FLOATS, shape=(None, None), contiguous=False)
    if rows.shape[1] > MAX_FEATURES:
        raise ValueError(f"{name} must have at most {MAX_FEATURES} features, has {rows.shape[1]}")


def _noise_kind(noise: Tensor | None, row_index: Tensor | None) -> int:
    if noise is None:
        return _NO_NOISE
    return _ONE_NOISE if row_index is None else _NOISE_ROWS


def rms_norm(
    x: Tensor,
    weight: Tensor,
    noise: Tensor | None,
    row_index: Tensor | None,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    """y [R, d] and rstd fp32 [R] of x [R, d], whose rows may lie apart.

    The other arguments are those of `qerl_kernels.ops.rms_norm`. Raises ValueError naming the
    argument for a shape, type, stride or device that does not fit, and for d over MAX_FEATURES.
    """
    _check_rows("x", x)
    check_arguments(x, weight, noise, row_index, offset, cast_first)
    check("weight", weight, dtype=_FLOATS, like=x)
    _check_devices(x, noise=noise, row_index=row_index)
    n_rows, d = x.shape
    y = x.new_empty(n_rows, d, dtype=output_dtype(x, weight, cast_first))
    rstd = x.new_empty(n_rows, dtype=torch.float32)
    if x.numel() == 0:
        return y, rstd
    rows, block, warps = _tile(d)
    # fmt: off
    _rms_norm_kernel[(triton.cdiv(n_rows, rows),)](
        x, weight, noise, row_index, y, rstd, n_rows, d, x.stride(0), eps, 1.0 / d,
        OFFSET=offset, CAST_FIRST=cast_first, NOISE=_noise_kind(noise, row_index),
        ROWS=rows, BLOCK=block, num_warps=warps, enable_fp_fusion=False,
    )
    # fmt: on
    return y, rstd


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    noise: Tensor | None,
    row_index: Tensor | None,
    offset: float,
) -> Tensor:
    """dx [R, d] in x's type from dy and x [R, d], whose rows may lie apart, and rstd fp32 [R].

    dx = rstd · (g − x̂ · mean(g · x̂)) with g = dy · (offset + w + Z) and x̂ = x · rstd, all in
    fp32. Raises ValueError as `rms_norm` does.
    """
    _check_rows("x", x)
    check_arguments(x, weight, noise, row_index, offset)
    check_gradient(dy, x, rstd)
    check("dy", dy, dtype=_FLOATS, like=x, contiguous=False)
    check("weight", weight, dtype=_FLOATS, like=x)
    _check_devices(x, rstd=rstd, noise=noise, row_index=row_index)
    n_rows, d = x.shape
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return dx
    rows, block, warps = _tile(d)
    # fmt: off
    _rms_norm_backward_kernel[(triton.cdiv(n_rows, rows),)](
        dy, x, rstd, weight, noise, row_index, dx, n_rows, d, dy.stride(0), x.stride(0), 1.0 / d,
        OFFSET=offset, NOISE=_noise_kind(noise, row_index),
        ROWS=rows, BLOCK=block, num_warps=warps,
    )
    # fmt: on
    return dx


_FORWARD_TYPES = {
    "x_ptr": "*{t}", "w_ptr": "*{t}", "z_ptr": "*fp32", "index_ptr": "*i32", "y_ptr": "*{t}",
    "rstd_ptr": "*fp32", "n_rows": "i32", "d": "i32", "stride_x": "i32", "eps": "fp32",
    "inv_d": "fp32",
}  # fmt: skip
_BACKWARD_TYPES = {
    "dy_ptr": "*{t}", "x_ptr": "*{t}", "rstd_ptr": "*fp32", "w_ptr": "*{t}", "z_ptr": "*fp32",
    "index_ptr": "*i32", "dx_ptr": "*{t}", "n_rows": "i32", "d": "i32", "stride_dy": "i32",
    "stride_x": "i32", "inv_d": "fp32",
}  # fmt: skip


def variants() -> Iterator[Variant]:
    """Every tile in bf16, with a row of noise for each row: no other mode or type does more."""
    forward = ("rms_norm", _rms_norm_kernel, _FORWARD_TYPES, {"CAST_FIRST": False})
    backward = ("rms_norm_backward", _rms_norm_backward_kernel, _BACKWARD_TYPES, {})
    dtype = "bf16"
    for stem, function, types, flags in (forward, backward):
        for block in (128 << i for i in range(8)):
            rows, block, warps = _tile(block)
            yield Variant(
                kernel=stem,
                tile=f"{rows}x{block} w{warps} {dtype}",
                function=function,
                types={name: kind.format(t=dtype) for name, kind in types.items()},
                constexprs={
                    **flags, "OFFSET": 1.0, "NOISE": _NOISE_ROWS, "ROWS": rows, "BLOCK": block,
                },
                divisible=frozenset({"d", "stride_x", "stride_dy"} & set(types)),
                num_warps=warps,
                num_stages=3,
                elements=None,
            )  # fmt: skip
