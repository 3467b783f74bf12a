"""One layer unpacked to 16 bits, v·s·2⁻⁸ in K order: for cuBLAS, where M is large.

Reads 4.5 bits a weight, writes 16: 0.11 ms for 27,648 × 5,120 at 3.35 TB/s by arithmetic (not yet
measured on a GPU). Shape letters: N outputs, K inputs, G groups of 128 along K.
"""
# Launch options (num_warps, num_stages) are no parameters of the kernel.
# pyright: reportCallIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_kernels import dispatch, launch, repack
from qerl_kernels.device import unpack_tile
from qerl_kernels.variants import ALL_TARGETS, Variant

_ROWS, _WARPS = 32, 4


@triton.jit
def _unpack_kernel(
    codes_ptr,  # int32 [N, 16·G]
    scales_ptr,  # int32 [N, 2·G]
    w_ptr,  # [N, K]
    N,
    K,
    G,
    BN: tl.constexpr,
    FMA: tl.constexpr,
    WIDE: tl.constexpr,
):
    group = tl.program_id(1)
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    inside = rows[:, None] < N
    word = group * 16 + tl.arange(0, 16)[None, :]
    pair = group * 2 + tl.arange(0, 2)[None, :]
    words = tl.load(codes_ptr + rows[:, None] * (G * 16) + word, mask=inside, other=0)
    scales = tl.load(scales_ptr + rows[:, None] * (G * 2) + pair, mask=inside, other=0)
    w = unpack_tile(words, scales, BN, 1, w_ptr.dtype.element_ty, FMA, WIDE)
    k = group * 128 + tl.arange(0, 128)[None, :]
    tl.store(w_ptr + rows[:, None] * K + k, w, mask=inside & (k < K))


def unpack(codes: Tensor, scales: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """The weight without its divisor, v·s·2⁻⁸ [N, K] in bf16 or fp16, exact.

    codes, scales: repacked, K = in_features. Raises ValueError for tensors that do not fit.
    """
    repack.check_repacked(codes, scales, in_features)
    launch.check("codes", codes)
    launch.check("scales", scales, like=codes)
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be bfloat16 or float16, found {str(dtype)[6:]}")
    n, g = codes.shape[0], repack.groups(in_features)
    w = torch.empty(n, in_features, dtype=dtype, device=codes.device)
    flags = dispatch.flags(codes.device)
    _unpack_kernel[(triton.cdiv(n, _ROWS), g)](
        codes, scales, w, n, in_features, g,
        BN=_ROWS, FMA=flags["FMA"], WIDE=flags["WIDE"], num_warps=_WARPS,
    )  # fmt: skip
    return w


def variants() -> Iterator[Variant]:
    for target in ALL_TARGETS:
        flags = dispatch.target_flags(target)
        for dtype in ("bf16", "fp16"):
            yield Variant(
                kernel="nvfp4_unpack",
                tile=f"{_ROWS}x128 w{_WARPS} {dtype}",
                function=_unpack_kernel,
                types={
                    "codes_ptr": "*i32", "scales_ptr": "*i32", "w_ptr": f"*{dtype}",
                    "N": "i32", "K": "i32", "G": "i32",
                },
                constexprs={"BN": _ROWS, "FMA": flags["FMA"], "WIDE": flags["WIDE"]},
                divisible=frozenset({"N", "K"}),
                num_warps=_WARPS,
                num_stages=3,
                elements=None,
                targets=(target,),
            )  # fmt: skip
