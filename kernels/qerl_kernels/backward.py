"""dX = dY W from the same packed buffer that the forward reads: no transposed or 16-bit copy.

The contraction runs over the weight's rows, so its tile is the right operand and goes through
shared memory; the adapter's share, v A with v = dY B, joins the accumulator after the tensor's
divisor. Shape letters: M tokens, N outputs, K inputs, R adapter rank, G groups of 128 along K.
"""
# Launch options (num_warps, num_stages) are no parameters of the kernel.
# pyright: reportCallIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_kernels import dispatch, launch, repack
from qerl_kernels.device import dot, narrow, unpack_tile
from qerl_kernels.dispatch import Tile
from qerl_kernels.matmul import UNSCALE
from qerl_kernels.variants import KINDS, Variant


@triton.jit(do_not_specialize=["M", "G"])
def _nvfp4_matmul_t_kernel(
    dy_ptr,  # [M, N]
    codes_ptr,  # int32 [N, 16·G]
    scales_ptr,  # int32 [N, 2·G]
    global_ptr,  # fp32 [1]
    v_ptr,  # [M, R]
    a_ptr,  # [R, K]
    dx_ptr,  # [M, K]
    M,
    N,
    K,
    G,
    R,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUPS: tl.constexpr,
    BR: tl.constexpr,
    HAS_LORA: tl.constexpr,
    EVEN: tl.constexpr,
    FMA: tl.constexpr,
    WIDE: tl.constexpr,
):
    BK: tl.constexpr = 128 * GROUPS
    pid_k, pid_m = tl.program_id(0), tl.program_id(1)
    rows_m = tl.minimum(pid_m * BM + tl.arange(0, BM), M - 1)
    n = tl.arange(0, BN)
    word = pid_k * (16 * GROUPS) + tl.arange(0, 16 * GROUPS)
    pair = pid_k * (2 * GROUPS) + tl.arange(0, 2 * GROUPS)
    # Bases move, offsets stay: one scalar addition a step instead of one for every pointer.
    dy_offsets = rows_m[:, None] * N + n[None, :]
    code_offsets = n[:, None] * (G * 16) + word[None, :]
    scale_offsets = n[:, None] * (G * 2) + pair[None, :]
    acc = tl.zeros((BM, BK), tl.float32)
    for start in range(0, N, BN):
        if EVEN:
            words = tl.load(codes_ptr + code_offsets)
            scales = tl.load(scales_ptr + scale_offsets)
            dy = tl.load(dy_ptr + dy_offsets)
        else:
            inside = start + n < N
            word_mask = inside[:, None] & (word < G * 16)[None, :]
            pair_mask = inside[:, None] & (pair < G * 2)[None, :]
            words = tl.load(codes_ptr + code_offsets, mask=word_mask, other=0)
            scales = tl.load(scales_ptr + scale_offsets, mask=pair_mask, other=0)
            dy = tl.load(dy_ptr + dy_offsets, mask=inside[None, :], other=0.0)
        acc = dot(dy, unpack_tile(words, scales, BN, GROUPS, dy.dtype, FMA, WIDE), acc)
        dy_ptr += BN
        codes_ptr += BN * (G * 16)
        scales_ptr += BN * (G * 2)
    acc = acc * (UNSCALE / tl.load(global_ptr))
    out_m = pid_m * BM + tl.arange(0, BM)
    out_k = pid_k * BK + tl.arange(0, BK)
    if HAS_LORA:
        for start in range(0, R, BR):
            r = start + tl.arange(0, BR)
            v = tl.load(v_ptr + rows_m[:, None] * R + r[None, :], mask=r[None, :] < R, other=0.0)
            a = tl.load(
                a_ptr + r[:, None] * K + out_k[None, :],
                mask=(r[:, None] < R) & (out_k[None, :] < K),
                other=0.0,
            )
            acc = dot(v, a, acc)
    mask = (out_m[:, None] < M) & (out_k[None, :] < K)
    offsets = out_m.to(tl.int64)[:, None] * K + out_k[None, :]
    tl.store(dx_ptr + offsets, narrow(acc, dx_ptr.dtype.element_ty), mask=mask)


def check_backward(dy, codes, scales, global_scale, in_features, v, a) -> tuple[int, int]:
    """(M, N), or ValueError naming the argument that does not fit."""
    repack.check_factor(codes, scales, in_features)
    n = codes.shape[0]
    launch.check("dy", dy, dtype=(torch.bfloat16, torch.float16), shape=(None, n))
    launch.check("codes", codes, like=dy)
    launch.check("scales", scales, like=dy)
    launch.check("global_scale", global_scale, dtype=torch.float32, shape=(1,), like=dy)
    m = dy.shape[0]
    if (v is None) != (a is None):
        raise ValueError("v and a, the adapter's two factors, are given together or not at all")
    if v is not None and a is not None:
        launch.check("v", v, dtype=dy.dtype, shape=(m, None), like=dy)
        launch.check("a", a, dtype=dy.dtype, shape=(v.shape[1], in_features), like=dy)
    return m, n


def nvfp4_matmul_t(
    dy: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    in_features: int,
    v: Tensor | None = None,
    a: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """dy [M, N] @ W (+ v [M, R] @ a [R, K]) → [M, K] in dy's dtype, bf16 or fp16.

    codes, scales: repacked for this device, K = in_features. tile: instead of the one the dispatch
    would choose. Raises ValueError naming the argument that does not fit.
    """
    m, n = check_backward(dy, codes, scales, global_scale, in_features, v, a)
    tile = tile or dispatch.fused_tile("backward", m, dy.device)
    dx = dy.new_empty(m, in_features)
    rank = 0 if v is None else v.shape[1]
    for rows in launch.row_slices(m, max(n, rank)):
        v_rows = None if v is None else v[rows]
        _backward(dy[rows], codes, scales, global_scale, v_rows, a, tile, dx[rows])
    return dx


def _backward(dy, codes, scales, global_scale, v, a, tile: Tile, dx) -> None:
    (m, n), k = dy.shape, dx.shape[1]
    rank = 0 if v is None else v.shape[1]
    groups = repack.groups(k)
    grid = (triton.cdiv(groups, tile.groups), triton.cdiv(m, tile.bm))
    flags = dispatch.flags(dy.device)
    _nvfp4_matmul_t_kernel[grid](
        dy, codes, scales, global_scale, dy if v is None else v, dy if a is None else a, dx,
        m, n, k, groups, rank,
        BM=tile.bm, BN=tile.bn, GROUPS=tile.groups, BR=16, HAS_LORA=rank > 0,
        EVEN=n % tile.bn == 0 and groups % tile.groups == 0,
        FMA=flags["FMA"], WIDE=flags["WIDE"],
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    """Every tile of the dispatch with the adapter's product; with masks on a card of each kind."""
    for target, tiles in dispatch.all_tiles("backward"):
        for tile in tiles:
            for dtype in ("bf16", "fp16"):
                yield _variant(tile, dtype, target, even=True)
                if target in KINDS:
                    yield _variant(tile, dtype, target, even=False)


def _variant(tile: Tile, dtype: str, target: int, *, even: bool) -> Variant:
    half, flags = f"*{dtype}", dispatch.target_flags(target)
    return Variant(
        kernel="nvfp4_matmul_t",
        tile=f"{tile} {dtype}{'' if even else ' masked'}",
        function=_nvfp4_matmul_t_kernel,
        types={
            "dy_ptr": half, "codes_ptr": "*i32", "scales_ptr": "*i32", "global_ptr": "*fp32",
            "v_ptr": half, "a_ptr": half, "dx_ptr": half,
            **dict.fromkeys(("M", "N", "K", "G", "R"), "i32"),
        },
        constexprs={
            "BM": tile.bm, "BN": tile.bn, "GROUPS": tile.groups, "BR": 16, "HAS_LORA": True,
            "EVEN": even, "FMA": flags["FMA"], "WIDE": flags["WIDE"],
        },
        divisible=frozenset({"N", "K"}),
        num_warps=tile.warps,
        num_stages=tile.stages,
        elements=tile.bn * 128 * tile.groups,
        targets=(target,),
    )  # fmt: skip
