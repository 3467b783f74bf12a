"""The in-memory layout: NVFP4 arranged once for the tensor core, and back.

codes int32 [N, 16·G], scales int32 [N, 2·G], G = ceil(K/128) groups a row; a row's tail beyond K is
zero. Nothing moves between rows, so any slice of rows is itself a packed weight. Within a group
the words run (t 4, j 4): lane t of a quad reads its four words at once; word j holds MMA steps
(blocks) 2j and 2j+1, a step being one block of 16 along K with one scale. Inside a step lane t
holds k = 2t, 2t+1, 2t+8, 2t+9 (order "paired": wgmma, and mma.sync from Triton 3.9) or 4t … 4t+3
(order "wide": mma.sync as Triton up to 3.8 feeds it). Bits within two words: see `ptx`.

The inverse is exact to the byte, except that a block whose scale is zero comes back with zero
codes and scale +0. Shape letters: N outputs, K inputs, G groups.
"""

import torch
from torch import Tensor

from qerl_kernels import layout, ptx

GROUP = 128
_STEPS = GROUP // layout.BLOCK
ORDERS = ("paired", "wide")


def groups(in_features: int) -> int:
    """Groups of 128 that a row of `in_features` occupies."""
    return -(-in_features // GROUP)


def _bit_sources() -> list[list[tuple[int, int]]]:
    """Where each bit of a pair of words comes from: per code 0…15 four (word, bit), sign last.

    Codes of a word pair: (word 2, pair 4, half 2), pair = (step in word, h). Derived from the
    shifts that `ptx` takes them out by.
    """
    table = []
    for word in range(2):
        for pair in range(4):
            for half in range(2):
                bits = []
                for place in (6, 7, 8, 15):
                    j = 16 * half + place
                    if pair == 0:
                        bits.append((word, j))
                    elif pair == 1:
                        bits.append((word, j - ptx.LSHIFT))
                    elif pair == 2:
                        bits.append((word, (j + ptx.RROTATE) % 32))
                    else:
                        j = j if word == 0 else j - ptx.LSHIFT
                        first = ptx.SELECT >> j & 1
                        turn = ptx.X_FIRST if first else ptx.X_SECOND
                        bits.append((0 if first else 1, (j - turn) % 32))
                table.append(bits)
    return table


_BITS = _bit_sources()


def check_values(scale: Tensor, global_scale: Tensor, name: str = "weight") -> None:
    """Raise ValueError naming `name` unless scales are finite and ≥ 0, and the divisor positive.

    scale: E4M3 [N, K/16]; global_scale: float32 [1]. Reads the values: for load time only.
    """
    byte = scale.view(torch.uint8)
    bad = (byte == 0x7F) | (byte > 0x80)
    if bad.any():
        row, block = divmod(int(bad.flatten().to(torch.uint8).argmax()), byte.shape[1])
        value = byte[row, block].view(torch.float8_e4m3fn).item()
        raise ValueError(
            f"{name}: block scale [{row}, {block}] is {value}; NVFP4 scales are finite and not "
            "negative: quantize the layer again"
        )
    layout.check_global_scale(global_scale, name)
    g = global_scale.item()
    if not 0 < g < float("inf"):
        raise ValueError(f"{name}: global scale is {g}; it must be positive and finite")


def encode_scales(scale: Tensor) -> Tensor:
    """E4M3 bytes [N, B] to swapped 5e3m bytes, 0 for zero; exp + 21 keeps bf16's top bits 111."""
    byte = scale.view(torch.uint8).int()
    exponent, fraction = byte >> 3 & 15, byte & 7
    # A subnormal 0.fff · 2⁻⁶ is 1.ff · 2⁻⁷, 1.f · 2⁻⁸ or 1 · 2⁻⁹.
    shift = torch.where(fraction >= 4, 1, torch.where(fraction >= 2, 2, 3))
    code = torch.where(
        exponent > 0, (exponent - 7 + 21) << 3 | fraction, (15 - shift) << 3 | fraction << shift & 7
    )
    code = torch.where(byte & 0x7F == 0, 0, code)
    return ((code & 15) << 4 | code >> 4).to(torch.uint8)


def _decode_scales(stored: Tensor) -> Tensor:
    """Undo `encode_scales`: uint8 bytes to E4M3 bytes."""
    code = (stored.int() & 15) << 4 | stored.int() >> 4
    exponent, fraction = (code >> 3) - 21, code & 7
    shift = (-6 - exponent).clamp(min=0)
    byte = torch.where(shift == 0, (exponent + 7) << 3 | fraction, (8 | fraction) >> shift)
    return torch.where(code == 0, 0, byte).to(torch.uint8)


def _lane_major(codes: Tensor, order: str) -> Tensor:
    """Codes [N, G, 128] in K order to [N, G, t 4, word pair 2, (word 2, step 2, h 2, p 2)]."""
    if order == "paired":
        split = codes.unflatten(2, (2, 2, 2, 2, 4, 2))  # pair, word, step, h, t, p
        return split.permute(0, 1, 6, 2, 3, 4, 5, 7).flatten(4)
    split = codes.unflatten(2, (2, 2, 2, 4, 2, 2))  # pair, word, step, t, h, p
    return split.permute(0, 1, 5, 2, 3, 4, 6, 7).flatten(4)


def _k_major(codes: Tensor, order: str) -> Tensor:
    """Undo `_lane_major`."""
    split = codes.unflatten(4, (2, 2, 2, 2))  # N, G, t, pair, word, step, h, p
    if order == "paired":
        return split.permute(0, 1, 3, 4, 5, 6, 2, 7).flatten(2)
    return split.permute(0, 1, 3, 4, 5, 2, 6, 7).flatten(2)


def _check_order(order: str) -> None:
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, found {order!r}")


@torch.no_grad()
def repack(
    packed: Tensor, scale: Tensor, *, order: str = "paired", name: str = "weight"
) -> tuple[Tensor, Tensor]:
    """On-disk codes uint8 [N, K/2] and E4M3 scales [N, K/16] to the in-memory pair.

    Returns codes int32 [N, 16·G] and scales int32 [N, 2·G]. The scales must have passed
    `check_values`. Raises ValueError (with `name`) for tensors that do not belong together.
    """
    _check_order(order)
    layout.check_weight(packed, scale, name=name)
    n, k = packed.shape[0], packed.shape[1] * 2
    g = groups(k)
    zero = (scale.view(torch.uint8) & 0x7F) == 0
    codes = layout.unpack(packed).masked_fill(zero.repeat_interleave(layout.BLOCK, 1), 0)
    codes = torch.nn.functional.pad(codes, (0, g * GROUP - k)).view(n, g, GROUP)
    lanes = _lane_major(codes, order).to(torch.int64)
    words = lanes.new_zeros(*lanes.shape[:-1], 2)
    for code, bits in enumerate(_BITS):
        for bit, (word, place) in enumerate(bits):
            words[..., word] |= (lanes[..., code] >> bit & 1) << place
    stored = torch.nn.functional.pad(encode_scales(scale), (0, g * _STEPS - scale.shape[1]))
    # Through the two's complement: a word with bit 31 set is a negative int32.
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).view(n, g * 16), stored.contiguous().view(torch.int32)


@torch.no_grad()
def unrepack(
    codes: Tensor, scales: Tensor, in_features: int, *, order: str = "paired"
) -> tuple[Tensor, Tensor]:
    """Undo `repack`: packed uint8 [N, K/2] and float8_e4m3fn scales [N, K/16]."""
    _check_order(order)
    check_repacked(codes, scales, in_features)
    n, g = codes.shape[0], groups(in_features)
    words = codes.view(n, g, 4, 2, 2).to(torch.int64)
    lanes = torch.zeros(n, g, 4, 2, 16, dtype=torch.int64, device=codes.device)
    for code, bits in enumerate(_BITS):
        for bit, (word, place) in enumerate(bits):
            lanes[..., code] |= (words[..., word] >> place & 1) << bit
    k_major = _k_major(lanes.to(torch.uint8), order).reshape(n, g * GROUP)[:, :in_features]
    bytes_ = _decode_scales(scales.contiguous().view(torch.uint8))[:, : in_features // layout.BLOCK]
    return layout.pack(k_major), bytes_.contiguous().view(torch.float8_e4m3fn)


def check_factor(codes: Tensor, scales: Tensor, in_features: int) -> None:
    """`check_repacked`, and ValueError for a weight of nothing, which no grid can be made for."""
    check_repacked(codes, scales, in_features)
    if not codes.numel():
        found = [codes.shape[0], in_features]
        raise ValueError(f"a weight must have at least one row and one block, found {found}")


def check_repacked(codes: Tensor, scales: Tensor, in_features: int) -> None:
    """Raise ValueError unless the tensors are one repacked weight with `in_features` inputs."""
    g = groups(in_features)
    if in_features % layout.BLOCK:
        raise ValueError(f"K must be a multiple of {layout.BLOCK}, found {in_features}")
    if codes.dtype != torch.int32 or codes.dim() != 2 or codes.shape[1] != 16 * g:
        raise ValueError(
            f"codes must be int32 [N, {16 * g}] (repacked) for K = {in_features}, found "
            f"{str(codes.dtype)[6:]} {list(codes.shape)}"
        )
    if scales.dtype != torch.int32 or scales.shape != (codes.shape[0], 2 * g):
        raise ValueError(
            f"scales must be int32 [{codes.shape[0]}, {2 * g}] (repacked), found "
            f"{str(scales.dtype)[6:]} {list(scales.shape)}"
        )
