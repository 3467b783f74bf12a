"""Multiplying by a packed NVFP4 weight on the CPU, through a cache of unpacked copies.

The block scales are folded into the weight before the product (v·s is exact in 16 bits) and the
tensor's divisor g after it, in fp32: what remains is accumulation and one output rounding.
Shape letters: M tokens, N outputs, K inputs.
"""

from dataclasses import dataclass, field
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from qerl_kernels.launch import is_batch_invariant
from qerl_kernels.layout import check_global_scale
from qerl_kernels.quantize import unscaled


@dataclass(slots=True)
class _Entry:
    """v·s of one packed tensor, a copy per dtype in use, and what it was made from."""

    scale: ref
    version: tuple[int, int]
    weights: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)


# Rows of one product in batch-invariant mode.
_BLOCK_ROWS = 16
# Keyed on the identity of the packed tensor: an entry dies with its weight.
_cache = WeakIdKeyDictionary()
_inverses = WeakIdKeyDictionary()


def _version(tensor: torch.Tensor) -> int:
    # Tensors made under inference_mode carry no version and cannot be written in place outside it.
    return 0 if tensor.is_inference() else tensor._version


def cached_weight(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """v·s [N, K] in `dtype`, made once per packed tensor; made anew if codes or scales changed."""
    entry = _cache.get(packed)
    version = (_version(packed), _version(scale))
    if entry is None or entry.version != version or entry.scale() is not scale:
        entry = _cache[packed] = _Entry(ref(scale), version)
    weight = entry.weights.get(dtype)
    if weight is None:
        # Made outside inference_mode whoever asks first, so that training can use it as well.
        with torch.inference_mode(False), torch.no_grad():
            weight = entry.weights[dtype] = unscaled(packed, scale, dtype)
    return weight


def cache_bytes() -> int:
    """Bytes the cache of unpacked CPU weights holds."""
    return sum(w.nbytes for entry in list(_cache.values()) for w in entry.weights.values())


def verify_cache() -> list[torch.Tensor]:
    """The packed weights whose unpacked copy is no longer, bit for bit, what they unpack to.

    Copies that the next product would make anew are left out. Unpacks one weight at a time.
    """
    changed = []
    for packed, entry in list(_cache.items()):
        scale = entry.scale()
        if scale is None or entry.version != (_version(packed), _version(scale)):
            continue
        if not all(_same_bits(w, unscaled(packed, scale, d)) for d, w in entry.weights.items()):
            changed.append(packed)
    return changed


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    # As bytes: a zero of the other sign is a change, and a NaN equals itself.
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def clear_cache() -> None:
    """Drop every unpacked CPU weight; the next product makes its own again."""
    _cache.clear()


def _blas(
    x: torch.Tensor, weight: torch.Tensor, alpha: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """alpha · x @ weight + bias for x [M, ·]; alpha and bias ride on BLAS's own epilogue."""
    if bias is None:
        # beta = 0: the first argument is not read, it only has to broadcast.
        return torch.addmm(x.new_empty(1), x, weight, beta=0, alpha=alpha)
    if bias.shape != weight.shape[1:]:
        raise ValueError(f"bias must be [{weight.shape[1]}], found {tuple(bias.shape)}")
    return torch.addmm(bias, x, weight, alpha=alpha)


def _in_blocks(
    x: torch.Tensor, weight: torch.Tensor, alpha: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """`_blas` in products of one shape, so that no row depends on how many there are."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % _BLOCK_ROWS))
    blocks = [_blas(rows, weight, alpha, bias) for rows in padded.split(_BLOCK_ROWS)]
    return torch.cat(blocks)[: x.shape[0]] if blocks else _blas(x, weight, alpha, bias)


def _product(
    x: torch.Tensor, weight: torch.Tensor, alpha: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """`_blas` on the CPU, where 16-bit operands are widened first.

    Then v·s up to 2688 cannot overflow fp16, sums are fp32 whatever the processor, and the
    result is rounded once.
    """
    if x.dtype in (torch.float32, torch.float64):
        return (_in_blocks if is_batch_invariant() else _blas)(x, weight, alpha, bias)
    wide_bias = None if bias is None else bias.float()
    return _product(x.float(), weight.float(), alpha, wide_bias).to(x.dtype)


def inverse(global_scale: torch.Tensor) -> float:
    """1/g as a Python number. Off the CPU reading it stalls the device, so it is remembered.

    `ops.repack` asks first, so that nothing stalls (or breaks a CUDA graph's capture) later.
    """
    check_global_scale(global_scale)
    if global_scale.is_cpu:
        return 1.0 / global_scale.item()
    version = _version(global_scale)
    known = _inverses.get(global_scale)
    if known is None or known[0] != version:
        known = _inverses[global_scale] = (version, 1.0 / global_scale.item())
    return known[1]


def _checked(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x as [M, features], refused when the weight [features, …] takes another number of them."""
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"the input {tuple(x.shape)} has {x.shape[-1]} features, the weight takes "
            f"{weight.shape[0]}"
        )
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _shaped(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


def matmul_cpu(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [*, K] → [*, N], through the cache."""
    weight = cached_weight(packed, scale, x.dtype).t()
    return _shaped(_product(_checked(x, weight), weight, inverse(global_scale), bias), x)


def matmul_t_cpu(
    dy: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor
) -> torch.Tensor:
    """dy [*, N] → [*, K], through the same cached copy."""
    weight = cached_weight(packed, scale, dy.dtype)
    return _shaped(_product(_checked(dy, weight), weight, inverse(global_scale), None), dy)


def lora_matmul_cpu(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [*, K] → y [*, N] with the adapter's product added, and u = scaling · x Aᵀ [*, R]."""
    y = matmul_cpu(x, packed, scale, global_scale, bias)
    u = narrow(x, a.t(), scaling)
    return _plus(y, u, b.t()), u


def lora_matmul_t_cpu(
    dy: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
) -> torch.Tensor:
    """dy [*, N] → dy W + v A [*, K]."""
    return _plus(matmul_t_cpu(dy, packed, scale, global_scale), v, a)


def narrow(x: torch.Tensor, factor: torch.Tensor, alpha: float) -> torch.Tensor:
    """alpha · x [*, C] @ factor [C, R] in x's dtype."""
    return _shaped(_product(_checked(x, factor), factor, alpha, None), x)


def _plus(y: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """y [*, N] + left [*, R] @ right [R, N], in y's own memory."""
    rows, left_rows = y.view(-1, y.shape[-1]), left.reshape(-1, left.shape[-1])
    if is_batch_invariant():
        rows += _product(left_rows, right, 1.0, None)
    else:
        rows.addmm_(left_rows, right)
    return y
