"""RMSNorm with noise on its weight: what its arguments must be, and the CPU path.

The CPU path runs transformers' own operations in transformers' own order, so that without noise
it returns the same bits. Shape letters: R rows (the leading dimensions of x, flattened), d
features, n rows of noise.
"""

import torch
from torch import Tensor


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_arguments(
    x: Tensor,
    weight: Tensor,
    noise: Tensor | None,
    row_index: Tensor | None,
    offset: float,
    cast_first: bool = False,
) -> None:
    """Raise ValueError unless shapes and dtypes fit together. Reads no data."""
    if not x.dtype.is_floating_point or x.dim() == 0:
        raise ValueError(f"x must be floats [*, d], found {_kind(x)}")
    d = x.shape[-1]
    if not weight.dtype.is_floating_point or weight.shape != (d,):
        raise ValueError(f"weight must be floats [{d}], found {_kind(weight)}")
    if cast_first and offset and noise is None:
        raise ValueError(f"offset must be 0 when cast_first is true, found {offset}")
    if row_index is None:
        if noise is not None and (noise.dtype != torch.float32 or noise.shape != (d,)):
            raise ValueError(f"noise must be float32 [{d}] without row_index, found {_kind(noise)}")
        return
    rows = x.shape[:-1].numel()
    if row_index.dtype != torch.int32 or row_index.shape != (rows,):
        raise ValueError(f"row_index must be int32 [{rows}], found {_kind(row_index)}")
    if noise is None:
        raise ValueError("row_index selects rows of noise: noise must be given")
    if noise.dtype != torch.float32 or noise.dim() != 2 or noise.shape[1] != d:
        raise ValueError(f"noise must be float32 [n, {d}] with row_index, found {_kind(noise)}")


def check_gradient(dy: Tensor, x: Tensor, rstd: Tensor) -> None:
    """Raise ValueError unless dy has x's shape and rstd one number for each of its rows."""
    if not dy.dtype.is_floating_point or dy.shape != x.shape:
        raise ValueError(f"dy must be floats {list(x.shape)}, found {_kind(dy)}")
    if rstd.dtype != wide_dtype(x) or rstd.shape != x.shape[:-1]:
        raise ValueError(
            f"rstd must be {str(wide_dtype(x))[6:]} {list(x.shape[:-1])}, found {_kind(rstd)}"
        )


def wide_dtype(x: Tensor) -> torch.dtype:
    """What x is computed in: float32, or float64 for float64 x."""
    return torch.promote_types(x.dtype, torch.float32)


def output_dtype(x: Tensor, weight: Tensor, cast_first: bool) -> torch.dtype:
    """The wider of the two types where the weight is applied after the cast, otherwise x's."""
    return torch.promote_types(x.dtype, weight.dtype) if cast_first else x.dtype


def _scale(
    x: Tensor, weight: Tensor, noise: Tensor | None, row_index: Tensor | None, offset: float
) -> Tensor:
    """offset + w + Z, [d] or [*, d], in the type x is computed in."""
    scale = weight.to(wide_dtype(x))
    if offset:
        scale = scale + offset
    if noise is None:
        return scale
    return scale + (noise if row_index is None else noise[row_index].view(x.shape))


def rms_norm_cpu(
    x: Tensor,
    weight: Tensor,
    noise: Tensor | None,
    row_index: Tensor | None,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    """y [*, d] and 1/rms(x) [*]; see `qerl_kernels.ops.rms_norm`."""
    check_arguments(x, weight, noise, row_index, offset, cast_first)
    wide = x.to(wide_dtype(x))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    unit = wide * rstd
    if cast_first and noise is None:
        y = weight * unit.to(x.dtype)
    else:
        y = unit * _scale(x, weight, noise, row_index, offset)
        y = y.to(output_dtype(x, weight, cast_first))
    return y.contiguous(), rstd.squeeze(-1).contiguous()


def rms_norm_backward_cpu(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    noise: Tensor | None,
    row_index: Tensor | None,
    offset: float,
) -> Tensor:
    """dx [*, d] in x's type from dy [*, d], x and the rstd [*] that forward returned."""
    check_arguments(x, weight, noise, row_index, offset)
    check_gradient(dy, x, rstd)
    rstd = rstd.unsqueeze(-1)
    unit = x * rstd
    g = dy * _scale(x, weight, noise, row_index, offset)
    dx = rstd * (g - unit * (g * unit).mean(-1, keepdim=True))
    return dx.to(x.dtype).contiguous()
