"""Weights to NVFP4 and back, in plain PyTorch.

Rounding follows compressed-tensors 0.17 (`calculate_qparams`, `generate_gparam`, `cast_to_fp4`)
step by step in fp32, so that scales and codes come out the same. Shapes: N outputs, K inputs.
"""

import torch

from qerl_kernels import layout


def _thresholds() -> list[float]:
    """Upper edges of the magnitudes 0 … 4: midpoints, ties going to the even code.

    A code is the number of edges strictly below the value; a midpoint that must round up is
    therefore moved one float32 down.
    """
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below = torch.nextafter(edges, torch.zeros(()))
    rounds_up = torch.arange(7) % 2 == 1
    return torch.where(rounds_up, below, edges).tolist()


_EDGES = _thresholds()


def global_scale_for(absmax: torch.Tensor) -> torch.Tensor:
    """The tensor's divisor g = 448 · 6 / absmax, float32 [1]; 1 where absmax is zero or tiny."""
    absmax = absmax.detach().float().reshape(1).clamp_min(torch.finfo(torch.float32).tiny)
    g = layout.E4M3_MAX * layout.E2M1_MAX / absmax
    return torch.nan_to_num(g, nan=1.0, posinf=1.0, neginf=1.0)


def encode(values: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 code of each fp32 value (ties to even, saturating at ±6), uint8."""
    size = values.abs()
    # Counting edges takes a third of the time `torch.bucketize` does (one AVX2 core).
    magnitude = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for edge in _EDGES:
        magnitude += size > edge
    return magnitude | (torch.signbit(values).to(torch.uint8) << 3)


@torch.no_grad()
def quantize_absmax(
    weight: torch.Tensor, global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight [N, K] to NVFP4, each block's largest value landing on ±6.

    Returns packed uint8 [N, K/2], scale float8_e4m3fn [N, K/16] and global_scale float32 [1], a
    divisor: w ≈ v·s/g. Pass `global_scale` to share one among matrices that engines fuse.
    Raises ValueError for a weight that is not a finite 2-D matrix with K a multiple of 16.
    """
    if weight.dim() != 2 or weight.shape[1] % layout.BLOCK:
        raise ValueError(
            f"weight must be [N, K] with K a multiple of {layout.BLOCK}, "
            f"found {tuple(weight.shape)}"
        )
    blocks = weight.float().unflatten(1, (-1, layout.BLOCK))
    absmax = blocks.abs().amax(-1)
    if not torch.isfinite(absmax).all():
        raise ValueError("weight holds a NaN or an infinity: there is no scale for it")
    if global_scale is None:
        global_scale = global_scale_for(absmax.amax())
    scale = (global_scale * (absmax / layout.E2M1_MAX)).clamp(max=layout.E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn)
    # A scale that rounds to zero holds only zero codes; compressed-tensors stores 0.125 for it.
    scale = torch.where(scale.float() == 0, 0.125, scale.float()).to(torch.float8_e4m3fn)
    codes = encode(blocks / (scale.float() / global_scale).unsqueeze(-1))
    return layout.pack(codes.flatten(1)), scale, global_scale.reshape(1).clone()


def unscaled(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes times block scales, v·s [N, K]; six significant bits, so exact in any float dtype.

    Raises ValueError when the two do not belong together or `dtype` is no float.
    """
    layout.check_weight(packed, scale)
    if not dtype.is_floating_point:
        raise ValueError(f"a weight is unpacked to a floating-point dtype, found {dtype}")
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e4m3fn)
    table = torch.tensor(layout.E2M1_VALUES, dtype=dtype, device=packed.device)
    values = table[layout.unpack(packed).int()].unflatten(1, (-1, layout.BLOCK))
    return values.mul_(scale.to(dtype).unsqueeze(-1)).flatten(1)


@torch.no_grad()
def dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weight the codes stand for, v·s/g [N, K], divided in fp32 and rounded once to `dtype`.

    Raises ValueError when the three tensors do not belong together.
    """
    layout.check_weight(packed, scale, global_scale)
    wide = torch.promote_types(dtype, torch.float32)
    return unscaled(packed, scale, wide).div_(global_scale.to(wide)).to(dtype)
