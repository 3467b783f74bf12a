"""Weights to NVFP4 with the block scales chosen rather than computed. Pure PyTorch.

A block of 16 weights is s·v/g with v in E2M1, s in E4M3 and g the tensor's divisor. The largest
weight on ±6 (absmax) is the usual s; a neighbour of it often has a smaller squared error, and the
result is the same format. Scales stay within the normal numbers of E4M3, 2⁻⁶ … 448, because
inference kernels flush smaller ones to zero. Shapes: N outputs, K inputs, B blocks.

Left out: searching g as well (with 119 scales a block to choose from it changes next to nothing),
and scales chosen together with their neighbours (GPTQ on these scales does more, see `gptq`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Search = Literal["absmax", "four-over-six", "sweep"]
SEARCHES: tuple[Search, ...] = ("absmax", "four-over-six", "sweep")

# Bytes of E4M3's normal numbers; neighbouring bytes are neighbouring scales.
FIRST_CODE, LAST_CODE = 8, 126  # 2⁻⁶, 448
# A scale so large that the block reaches at most 3.5 is never better than its half, whose grid
# holds every point that such a block uses; seven bytes up from absmax is past that (6/3.5 < 2^⅞).
STEPS_UP = 7
# Weights a thread works on at a time, a few buffers of 2 MB. A sweep then takes about 80 ns a
# weight on one AVX2 core, 110 with importance; in pieces of 2¹⁶ it is 110 and 200.
CHUNK = 1 << 19


class Packed(NamedTuple):
    """One weight [N, K] as stored: w ≈ v·scale/global_scale.

    packed: uint8 [N, K/2], even k in the low nibble. scale: float8_e4m3fn [N, K/16].
    global_scale: float32 [1], a divisor.
    """

    packed: Tensor
    scale: Tensor
    global_scale: Tensor


def quantize_weight(
    weight: Tensor,
    search: Search,
    global_scale: Tensor | None = None,
    importance: Tensor | None = None,
) -> Packed:
    """Round a weight [N, K] of any float type to NVFP4, on its own device.

    search: how a block's scale is chosen. absmax: the largest weight on ±6; compressed-tensors'
    rounding, but for scales below 2⁻⁶. four-over-six: that, or the largest on ±4, whichever has the
    smaller squared error (Cook et al. 2025). sweep: the E4M3 number with the smallest of all.
    global_scale: the divisor to use, float32 [1]; by default 2688/max|w|, so the largest scale is
    about 448. importance: E[x²] [K] of the layer's inputs; it weights each column's squared error
    (absmax does not look at it). Needs the result and a few MB beside the weight.
    Raises ValueError for a weight that is not a finite [N, K] with K a multiple of 16, for
    importance that is not K finite numbers ≥ 0, and for an unknown search.
    """
    import torch

    with torch.no_grad():
        g = divisor_for(weight) if global_scale is None else global_scale.reshape(1).float()
        return round_to(weight, search_scales(weight, search, g, importance), g)


def divisor_for(*weights: Tensor) -> Tensor:
    """The divisor of weights that share one: 2688 / (largest |w| of them all), float32 [1].

    Raises ValueError for a NaN or an infinity.
    """
    import torch

    from qerl_kernels.quantize import global_scale_for

    ends = [torch.stack(weight.detach().aminmax()).abs().amax().float() for weight in weights]
    peak = torch.stack(ends).amax()
    if not torch.isfinite(peak):
        raise ValueError("weight holds a NaN or an infinity: there is no scale for it")
    return global_scale_for(peak)


def search_scales(
    weight: Tensor, search: Search, global_scale: Tensor, importance: Tensor | None = None
) -> Tensor:
    """The block scales float8_e4m3fn [N, K/16] that `quantize_weight` would use.

    Raises ValueError as `quantize_weight` does.
    """
    import torch

    _check(weight, search, importance)
    blocks = weight.shape[1] // 16
    columns = None if importance is None else _column_weights(importance, weight.device)
    codes = torch.empty(weight.shape[0], blocks, dtype=torch.uint8, device=weight.device)
    for rows in _chunks(weight):
        size = (weight[rows].float() * global_scale).abs_().reshape(-1, 16)
        if not torch.isfinite(size).all():
            raise ValueError("weight holds a NaN or an infinity: there is no scale for it")
        chosen = _absmax_codes(size)
        at = None if columns is None else columns.repeat(size.shape[0] // blocks, 1)
        if search == "four-over-six":
            chosen = _four_over_six(size, chosen, at)
        elif search == "sweep":
            chosen = _sweep(size, chosen, at)
        codes[rows] = chosen.to(torch.uint8).view(-1, blocks)
    return codes.view(torch.float8_e4m3fn)


def round_to(weight: Tensor, scale: Tensor, global_scale: Tensor) -> Packed:
    """The nearest codes under given scales [N, K/16] and divisor (ties to even, ±6 at most)."""
    import torch

    from qerl_kernels import layout, quantize

    packed = torch.empty(
        weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8, device=weight.device
    )
    for rows in _chunks(weight):
        blocks = weight[rows].float().unflatten(1, (-1, 16))
        steps = (scale[rows].float() / global_scale).unsqueeze(-1)
        packed[rows] = layout.pack(quantize.encode(blocks / steps).flatten(1))
    return Packed(packed, scale, global_scale.reshape(1).clone())


def _check(weight: Tensor, search: str, importance: Tensor | None) -> None:
    import torch

    if search not in SEARCHES:
        raise ValueError(f"search must be one of {', '.join(SEARCHES)}, found {search!r}")
    if weight.dim() != 2 or weight.shape[1] % 16:
        raise ValueError(
            f"weight must be [N, K] with K a multiple of 16, found {tuple(weight.shape)}"
        )
    if importance is None:
        return
    if importance.shape != weight.shape[1:]:
        raise ValueError(
            f"importance must be [{weight.shape[1]}], one number a column, "
            f"found {tuple(importance.shape)}"
        )
    if not torch.isfinite(importance).all() or (importance < 0).any():
        raise ValueError("importance must be finite and not negative: it is a mean of squares")


def _chunks(weight: Tensor) -> Iterator[slice]:
    import torch

    threads = torch.get_num_threads() if weight.device.type == "cpu" else 256
    step = max(1, CHUNK * threads // weight.shape[1])
    return (slice(i, i + step) for i in range(0, weight.shape[0], step))


def _column_weights(importance: Tensor, device: torch.device) -> Tensor:
    """[K/16, 16], scaled to mean 1 so that fp32 sums of squares neither overflow nor vanish."""
    wide = importance.double()
    return (wide / wide.mean().clamp_min(1e-300)).float().to(device).view(-1, 16)


def _values(codes: Tensor) -> Tensor:
    """Float32 values of E4M3 bytes."""
    import torch

    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()


def _absmax_codes(size: Tensor) -> Tensor:
    """int32 [B]: E4M3 bytes that put the largest of |w|·g on 6; 0.125 for a block of zeros."""
    import torch

    peak = size.amax(-1)
    codes = _nearest_codes(peak / 6)
    return torch.where(peak == 0, 32, codes)  # the scale compressed-tensors stores for nothing


def _nearest_codes(scale: Tensor) -> Tensor:
    import torch

    codes = scale.clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8).int()
    return codes.clamp_(min=FIRST_CODE)


def _round_e2m1(value: Tensor) -> Tensor:
    """The nearest E2M1 number of each value ≥ 0, ties to even, at most 6.

    Adding and taking away 1.5·2²³ grid steps rounds to a multiple of the step; the step is half
    the value's power of two, and a half below 1. A third of the time of looking codes up.
    """
    import torch

    value = value.clamp(max=6.0)
    power = value.clamp(min=1.0).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32)
    shift = power.mul_(0.75 * 2**23)
    return value.add_(shift).sub_(shift)


def _errors(size: Tensor, codes: Tensor, weights: Tensor | None) -> Tensor:
    """Squared error [B], in units of 1/g², of blocks |w|·g [B, 16] under scales `codes` [B]."""
    scale = _values(codes)
    value = size / scale.unsqueeze(-1)
    miss = (value - _round_e2m1(value)).square_()
    if weights is not None:
        miss.mul_(weights)
    return miss.sum(-1).mul_(scale.square())


def _four_over_six(size: Tensor, six: Tensor, weights: Tensor | None) -> Tensor:
    import torch

    four = _nearest_codes(size.amax(-1) / 4)
    better = _errors(size, four, weights) < _errors(size, six, weights)
    return torch.where(better, four, six)


def _sweep(size: Tensor, start: Tensor, weights: Tensor | None) -> Tensor:
    """The best of all scales, exactly: seven bytes up, then down until clipping alone is worse."""
    import torch

    best, least = start.clone(), _errors(size, start, weights)
    for step in range(1, STEPS_UP + 1):
        codes = (start + step).clamp_(max=LAST_CODE)
        found = _errors(size, codes, weights)
        better = found < least
        best, least = torch.where(better, codes, best), torch.where(better, found, least)
    _sweep_down(size, start, weights, best, least)
    return best


def _sweep_down(
    size: Tensor, start: Tensor, weights: Tensor | None, best: Tensor, least: Tensor
) -> None:
    """Smaller scales, in place: a block drops out when what it clips costs more than its best.

    What is clipped only grows as the scale shrinks, so nothing better is ever missed.
    """
    import torch

    alive = torch.arange(size.shape[0], device=size.device)
    codes = start
    while True:
        codes = codes - 1
        keep = (codes >= FIRST_CODE).nonzero().squeeze(1)
        alive, codes, size = alive[keep], codes[keep], size[keep]
        weights = None if weights is None else weights[keep]
        clipped = (size - 6 * _values(codes).unsqueeze(-1)).clamp_(min=0).square_()
        cost = (clipped if weights is None else clipped.mul_(weights)).sum(-1)
        keep = (cost < least[alive]).nonzero().squeeze(1)
        if not keep.numel():
            return
        alive, codes, size = alive[keep], codes[keep], size[keep]
        weights = None if weights is None else weights[keep]
        found = _errors(size, codes, weights)
        better = found < least[alive]
        best[alive[better]], least[alive[better]] = codes[better], found[better]
