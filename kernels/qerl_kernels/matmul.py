"""y = x Wᵀ with W packed: the fused Triton kernel, its split along K, and its launcher.

The weight is the tensor core's left operand (outᵀ = W xᵀ), unpacked in registers; the other
operand is the activations, unrounded 16-bit. Block scales are folded in before the product
(exact), the tensor's divisor after it, in fp32. Shape letters: M tokens, N outputs, K inputs,
R adapter rank, S splits, G groups of 128 along K.
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
from qerl_kernels.ptx import SCALE_SHIFT
from qerl_kernels.variants import KINDS, Variant

UNSCALE = tl.constexpr(float(2**SCALE_SHIFT))


@triton.jit
def tile_rows(first, N, BN: tl.constexpr, WARPS: tl.constexpr, BY_LANE: tl.constexpr):
    """Rows that a tile loads, ordered so that `in_place` gives the tensor core its own lanes.

    A coalesced load gives warp w rows 8w…8w+7 of every 8·WARPS; mma.sync and wgmma want rows
    16w…16w+15 there (BY_LANE), tcgen05 does not. Rows past N repeat the last one: they are
    computed and not stored.
    """
    i = tl.arange(0, BN)
    if not BY_LANE:
        return tl.minimum(first + i, N - 1)
    block = i // (16 * WARPS)
    half = i // (8 * WARPS) % 2
    warp = i // 8 % WARPS
    return tl.minimum(first + block * (16 * WARPS) + warp * 16 + half * 8 + i % 8, N - 1)


@triton.jit
def in_place(tile, BN: tl.constexpr, K: tl.constexpr, WARPS: tl.constexpr, BY_LANE: tl.constexpr):
    """A tile [BN, K] of rows `tile_rows` back in natural order: a permutation of registers."""
    if not BY_LANE:
        return tile
    split = tile.reshape(BN // (16 * WARPS), 2, WARPS, 8, K)
    return split.permute(0, 2, 1, 3, 4).reshape(BN, K)


@triton.jit(do_not_specialize=["M", "G", "groups_per_split"])
def _nvfp4_matmul_kernel(
    x_ptr,  # [M, K]
    codes_ptr,  # int32 [N, 16·G]
    scales_ptr,  # int32 [N, 2·G]
    global_ptr,  # fp32 [1]
    bias_ptr,  # [N]
    u_ptr,  # [M, R]
    b_ptr,  # [N, R]
    y_ptr,  # [M, N], or fp32 [S, M, N] when split
    M,
    N,
    K,
    G,
    R,
    groups_per_split,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    WARPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    FMA: tl.constexpr,
    WIDE: tl.constexpr,
    BY_LANE: tl.constexpr,
):
    pid_n, pid_m, pid_k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows_m = tl.minimum(pid_m * BM + tl.arange(0, BM), M - 1)
    rows_n = tile_rows(pid_n * BN, N, BN, WARPS, BY_LANE)
    first = pid_k * groups_per_split
    last = tl.minimum(first + groups_per_split, G)
    k = tl.arange(0, 128)
    # Bases move, offsets stay: one scalar addition a step instead of one for every pointer.
    x_offsets = rows_m[:, None] * K + k[None, :]
    code_offsets = rows_n[:, None] * (G * 16) + tl.arange(0, 16)[None, :]
    scale_offsets = rows_n[:, None] * (G * 2) + tl.arange(0, 2)[None, :]
    x_ptr += first * 128
    codes_ptr += first * 16
    scales_ptr += first * 2
    acc = tl.zeros((BN, BM), tl.float32)
    for group in range(first, last):
        words = tl.load(codes_ptr + code_offsets)
        scales = tl.load(scales_ptr + scale_offsets)
        if EVEN_K:
            x = tl.load(x_ptr + x_offsets)
        else:
            x = tl.load(x_ptr + x_offsets, mask=group * 128 + k[None, :] < K, other=0.0)
        w = unpack_tile(words, scales, BN, 1, x.dtype, FMA, WIDE)
        w = in_place(w, BN, 128, WARPS, BY_LANE)
        acc = dot(w, x.T, acc)
        x_ptr += 128
        codes_ptr += 16
        scales_ptr += 2
    acc = acc * (UNSCALE / tl.load(global_ptr))
    out_m = pid_m * BM + tl.arange(0, BM)
    out_n = pid_n * BN + tl.arange(0, BN)
    if pid_k == 0:  # adapter and bias once, after the tensor's scale
        if HAS_LORA:
            acc = low_rank(acc, b_ptr, u_ptr, out_n, out_m, N, M, R, BR)
        if HAS_BIAS:
            acc += tl.load(bias_ptr + out_n, mask=out_n < N, other=0.0).to(tl.float32)[:, None]
    offsets = out_m.to(tl.int64)[None, :] * N + out_n[:, None]
    if SPLIT:
        offsets += pid_k.to(tl.int64) * M * N
    mask = (out_m[None, :] < M) & (out_n[:, None] < N)
    tl.store(y_ptr + offsets, narrow(acc, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def low_rank(acc, left_ptr, right_ptr, rows, columns, n_rows, n_columns, R, BR: tl.constexpr):
    """acc + left[rows] @ right[columns]ᵀ for row-major [*, R] factors, R in steps of BR."""
    for start in range(0, R, BR):
        r = start + tl.arange(0, BR)
        left = tl.load(
            left_ptr + rows[:, None].to(tl.int64) * R + r[None, :],
            mask=(rows[:, None] < n_rows) & (r[None, :] < R),
            other=0.0,
        )
        right = tl.load(
            right_ptr + columns[:, None].to(tl.int64) * R + r[None, :],
            mask=(columns[:, None] < n_columns) & (r[None, :] < R),
            other=0.0,
        )
        acc = dot(left, right.T, acc)
    return acc


@triton.jit
def _sum_splits_kernel(parts_ptr, y_ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """y = Σ parts [S, size], always in the order of the splits."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts_ptr + split * size + i, mask=i < size, other=0.0)
    tl.store(y_ptr + i, narrow(total, y_ptr.dtype.element_ty), mask=i < size)


def sum_splits(parts: Tensor, y: Tensor) -> Tensor:
    """y [M, N] = Σ parts, fp32 [S, M, N], in the order of the splits: no atomics, same bits."""
    _sum_splits_kernel[(triton.cdiv(y.numel(), 1024),)](
        parts, y, y.numel(), SPLITS=parts.shape[0], BLOCK=1024, num_warps=4
    )
    return y


def check_forward(x, codes, scales, global_scale, bias, u, b) -> tuple[int, int, int]:
    """(M, N, K), or ValueError naming the argument that does not fit."""
    launch.check("x", x, dtype=(torch.bfloat16, torch.float16), shape=(None, None))
    m, k = x.shape
    repack.check_factor(codes, scales, k)
    n = codes.shape[0]
    launch.check("codes", codes, like=x)
    launch.check("scales", scales, like=x)
    launch.check("global_scale", global_scale, dtype=torch.float32, shape=(1,), like=x)
    if bias is not None:
        launch.check("bias", bias, dtype=x.dtype, shape=(n,), like=x)
    if (u is None) != (b is None):
        raise ValueError("u and b, the adapter's two factors, are given together or not at all")
    if u is not None and b is not None:
        launch.check("u", u, dtype=x.dtype, shape=(m, None), like=x)
        launch.check("b", b, dtype=x.dtype, shape=(n, u.shape[1]), like=x)
    return m, n, k


def nvfp4_matmul(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    bias: Tensor | None = None,
    u: Tensor | None = None,
    b: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """x [M, K] @ Wᵀ (+ u [M, R] @ b [N, R]ᵀ) (+ bias [N]) → [M, N] in x's dtype, bf16 or fp16.

    codes, scales: repacked for this device (`dispatch.lane_order`). tile: instead of the one the
    dispatch would choose. Raises ValueError naming the argument that does not fit.
    """
    m, n, k = check_forward(x, codes, scales, global_scale, bias, u, b)
    tile = tile or dispatch.fused_tile("forward", m, x.device)
    y = x.new_empty(m, n)
    for rows in launch.row_slices(m, k):
        u_rows = None if u is None else u[rows]
        _forward(x[rows], codes, scales, global_scale, bias, u_rows, b, tile, y[rows])
    return y


def _forward(x, codes, scales, global_scale, bias, u, b, tile: Tile, y) -> None:
    (m, k), n = x.shape, codes.shape[0]
    splits, per_split = dispatch.splits(tile, m, n, repack.groups(k), x.device)
    out = y if splits == 1 else x.new_empty(splits, m, n, dtype=torch.float32)
    rank = 0 if u is None else u.shape[1]
    grid = (triton.cdiv(n, tile.bn), triton.cdiv(m, tile.bm), splits)
    _nvfp4_matmul_kernel[grid](
        x, codes, scales, global_scale, x if bias is None else bias,
        x if u is None else u, x if b is None else b, out,
        m, n, k, repack.groups(k), rank, per_split,
        BM=tile.bm, BN=tile.bn, BR=16, WARPS=tile.warps,
        HAS_BIAS=bias is not None, HAS_LORA=rank > 0, SPLIT=splits > 1,
        EVEN_K=k % 128 == 0, **dispatch.flags(x.device),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        sum_splits(out, y)


_POINTERS = {"codes_ptr": "*i32", "scales_ptr": "*i32", "global_ptr": "*fp32"}
_INTEGERS = ("M", "N", "K", "G", "R", "groups_per_split")


def variants() -> Iterator[Variant]:
    """Every tile of the dispatch with adapter and bias, in two forms.

    Whole groups of K, and where the tile may split, partial sums; and (for one card of each kind)
    masks along K, and the result itself. The loop and what follows it do not depend on one
    another, so the two hold for all four.
    """
    for target, tiles in dispatch.all_tiles("forward"):
        for tile in tiles:
            for dtype in ("bf16", "fp16"):
                yield _variant(tile, dtype, target, even=True)
                if target in KINDS:
                    yield _variant(tile, dtype, target, even=False)
    yield Variant(
        kernel="nvfp4_matmul/sum",
        tile="1024",
        function=_sum_splits_kernel,
        types={"parts_ptr": "*fp32", "y_ptr": "*bf16", "size": "i32"},
        constexprs={"SPLITS": 16, "BLOCK": 1024},
        divisible=frozenset(),
        num_warps=4,
        num_stages=3,
        elements=None,
    )


def _variant(tile: Tile, dtype: str, target: int, *, even: bool) -> Variant:
    split = tile.split and even
    half = f"*{dtype}"
    types = {
        "x_ptr": half, **_POINTERS, "bias_ptr": half, "u_ptr": half, "b_ptr": half,
        "y_ptr": "*fp32" if split else half, **dict.fromkeys(_INTEGERS, "i32"),
    }  # fmt: skip
    return Variant(
        kernel="nvfp4_matmul",
        tile=f"{tile} {dtype}{'' if even else ' masked'}",
        function=_nvfp4_matmul_kernel,
        types=types,
        constexprs={
            "BM": tile.bm,
            "BN": tile.bn,
            "BR": 16,
            "WARPS": tile.warps,
            "HAS_BIAS": True,
            "HAS_LORA": True,
            "SPLIT": split,
            "EVEN_K": even,
            **dispatch.target_flags(target),
        },  # fmt: skip
        divisible=frozenset({"N", "K"}),
        num_warps=tile.warps,
        num_stages=tile.stages,
        elements=tile.bn * 128,
        targets=(target,),
    )
