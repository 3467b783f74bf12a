"""NVFP4 as stored on disk: the numbers, and how two of them share a byte.

A weight [N, K] is 4-bit E2M1 codes in blocks of 16 along K, one E4M3 scale a block and one fp32
number for the tensor. Shape letters: M tokens, N output features, K input features.
"""

import torch

BLOCK = 16
E4M3_MAX = 448.0
E2M1_MAX = 6.0
# Scales are E4M3, or the same bytes as uint8 (sm_80 has no 8-bit float type).
SCALE_DTYPES = (torch.float8_e4m3fn, torch.uint8)
# A code is a sign (bit 3) and an index into the eight magnitudes.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = E2M1_MAGNITUDES + tuple(-v for v in E2M1_MAGNITUDES)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Put uint8 codes 0..15 [N, K] two to a byte, even k in the low nibble: [N, K/2]."""
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise ValueError(
            f"codes must be uint8 with an even last dimension, found {codes.dtype} "
            f"{tuple(codes.shape)}"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack`: uint8 [N, K/2] to uint8 codes [N, K]."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed codes must be uint8, found {packed.dtype}")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def check_weight(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    name: str = "packed",
) -> None:
    """Raise ValueError, naming the layer, unless the tensors are together one NVFP4 weight."""
    if packed.dtype != torch.uint8 or packed.dim() != 2:
        raise ValueError(
            f"{name} must be uint8 [N, K/2], found {packed.dtype} {tuple(packed.shape)}"
        )
    n, half_k = packed.shape
    if half_k % (BLOCK // 2):
        raise ValueError(f"{name}: K must be a multiple of {BLOCK}, found {2 * half_k}")
    if scale.dtype not in SCALE_DTYPES or scale.shape != (n, 2 * half_k // BLOCK):
        raise ValueError(
            f"{name}: scale must be float8_e4m3fn (or its bytes) [{n}, {2 * half_k // BLOCK}] for "
            f"codes {tuple(packed.shape)}, found {scale.dtype} {tuple(scale.shape)}"
        )
    if global_scale is not None:
        check_global_scale(global_scale, name)


def check_global_scale(global_scale: torch.Tensor, name: str = "weight") -> None:
    """Raise ValueError, naming the layer, unless it is one float32 number."""
    if global_scale.dtype != torch.float32 or global_scale.numel() != 1:
        raise ValueError(
            f"{name}: global_scale must be one float32, found {global_scale.dtype} "
            f"{tuple(global_scale.shape)}"
        )
