"""y = x Wᵀ and dX = dY W with W in E4M3, a byte a weight: Triton kernels and their launchers.

Forward puts the weight on the left (outᵀ = W xᵀ), so that few tokens still fill the tensor core.
Four weights are loaded as one 32-bit word and unpacked two at a time by shifts and masks (sm_80
has no 8-bit float type): exact, so what remains is fp32 accumulation and the output's rounding.
Few tokens: K is split among programs, their fp32 sums go to a workspace and are added in order.
Past the table's last `max_m` the layer is rounded to 16 bits once and cuBLAS multiplies, except in
batch-invariant mode. Speed not yet measured on a GPU.
Shape letters: M tokens, N outputs, K inputs, S splits.
"""
# Launch options (num_warps, num_stages) are no parameters of the kernel.
# pyright: reportCallIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_kernels import dispatch, launch
from qerl_kernels.device import dot, narrow, scaled_bf16
from qerl_kernels.dispatch import Tile
from qerl_kernels.fp8_cpu import check_weight
from qerl_kernels.matmul import sum_splits
from qerl_kernels.variants import ALL_TARGETS, KINDS, Variant

# The sign of two E4M3 bytes in the high halves of a word, and how far the rest moves right to be
# a 16-bit float's exponent and fraction: bf16 v·2⁻¹²⁰, fp16 v·2⁻⁸, subnormals included.
_SIGNS = tl.constexpr(0x80008000)
_BF16_SHIFT, _BF16_MASK = tl.constexpr(4), tl.constexpr(0x07F007F0)
_FP16_SHIFT, _FP16_MASK = tl.constexpr(1), tl.constexpr(0x3F803F80)
_BF16_UNSCALE = tl.constexpr(2.0**120)
_FP16_UNSCALE = tl.constexpr(2.0**8)


@triton.jit
def _float16(bits, DTYPE: tl.constexpr):
    """uint16 bits from `_halves`: v itself as bf16, v·2⁻⁸ as fp16."""
    if tl.float16 == DTYPE:
        return bits.to(tl.float16, bitcast=True)
    else:
        return scaled_bf16(bits, _BF16_UNSCALE)


@triton.jit
def _halves(word, DTYPE: tl.constexpr):
    """Bytes 1 and 3 of each uint32 as two floats (`_float16`), joined in a new last dimension."""
    if tl.float16 == DTYPE:
        rest = (word >> _FP16_SHIFT) & _FP16_MASK
    else:
        rest = (word >> _BF16_SHIFT) & _BF16_MASK
    pair = (word & _SIGNS) | rest
    low = (pair & 0xFFFF).to(tl.uint16)
    return tl.join(_float16(low, DTYPE), _float16((pair >> 16).to(tl.uint16), DTYPE))


@triton.jit
def _unpack_tile(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """int32 words [ROWS, COLUMNS / 4] to weights [ROWS, COLUMNS]: bf16 v, or fp16 v·2⁻⁸; exact."""
    word = words.to(tl.uint32, bitcast=True)
    # The last dimensions are (0 or 2, 0 or 1): together the number of the byte.
    return tl.join(_halves(word << 8, DTYPE), _halves(word, DTYPE)).reshape(ROWS, COLUMNS)


@triton.jit
def _unscale(scale, DTYPE: tl.constexpr):
    """The factor of a sum over `_unpack_tile`'s weights."""
    if tl.float16 == DTYPE:
        scale = scale * _FP16_UNSCALE
    return scale


@triton.jit(do_not_specialize=["M", "steps"])
def _fp8_matmul_kernel(
    x_ptr,  # [M, K]
    words_ptr,  # int32 [N, K/4]
    scale_ptr,  # fp32 [1] or [N]
    bias_ptr,  # [N]
    y_ptr,  # [M, N], or fp32 [S, M, N] when split
    M,
    N,
    K,
    steps,  # of BK, for each split
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    pid_n, pid_m, pid_k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    out_m = pid_m * BM + tl.arange(0, BM)
    out_n = pid_n * BN + tl.arange(0, BN)
    # Rows past the end repeat the last one: they are computed and not stored.
    rows_m = tl.minimum(out_m, M - 1).to(tl.int64)
    rows_n = tl.minimum(out_n, N - 1).to(tl.int64)
    first = pid_k * steps * BK
    k = tl.arange(0, BK)
    word = tl.arange(0, BK // 4)
    x_ptrs = x_ptr + rows_m[:, None] * K + first + k[None, :]
    word_ptrs = words_ptr + rows_n[:, None] * (K // 4) + first // 4 + word[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(first, tl.minimum(first + steps * BK, K), BK):
        if EVEN_K:
            words = tl.load(word_ptrs)
            x = tl.load(x_ptrs)
        else:
            words = tl.load(word_ptrs, mask=word[None, :] < (K - start) // 4, other=0)
            x = tl.load(x_ptrs, mask=k[None, :] < K - start, other=0.0)
        acc = dot(_unpack_tile(words, BN, BK, DTYPE), x.T, acc)
        x_ptrs += BK
        word_ptrs += BK // 4
    if PER_CHANNEL:
        acc *= _unscale(tl.load(scale_ptr + rows_n), DTYPE)[:, None]
    else:
        acc *= _unscale(tl.load(scale_ptr), DTYPE)
    if HAS_BIAS and pid_k == 0:
        acc += tl.load(bias_ptr + rows_n).to(tl.float32)[:, None]
    offsets = out_m.to(tl.int64)[None, :] * N + out_n[:, None]
    if SPLIT:
        offsets += pid_k.to(tl.int64) * M * N
    mask = (out_m[None, :] < M) & (out_n[:, None] < N)
    tl.store(y_ptr + offsets, narrow(acc, y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _fp8_matmul_t_kernel(
    dy_ptr,  # [M, N]
    words_ptr,  # int32 [N, K/4]
    scale_ptr,  # fp32 [1]
    dx_ptr,  # [M, K]
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    DTYPE: tl.constexpr = dy_ptr.dtype.element_ty
    pid_k, pid_m = tl.program_id(0), tl.program_id(1)
    out_m = pid_m * BM + tl.arange(0, BM)
    out_k = pid_k * BK + tl.arange(0, BK)
    rows_m = tl.minimum(out_m, M - 1).to(tl.int64)
    n = tl.arange(0, BN)
    word = pid_k * (BK // 4) + tl.arange(0, BK // 4)
    dy_ptrs = dy_ptr + rows_m[:, None] * N + n[None, :]
    word_ptrs = words_ptr + n[:, None].to(tl.int64) * (K // 4) + word[None, :]
    acc = tl.zeros((BM, BK), tl.float32)
    for start in range(0, N, BN):
        if EVEN_N and EVEN_K:
            words = tl.load(word_ptrs)
        else:
            inside = (n[:, None] < N - start) & (word[None, :] < K // 4)
            words = tl.load(word_ptrs, mask=inside, other=0)
        if EVEN_N:
            dy = tl.load(dy_ptrs)
        else:
            dy = tl.load(dy_ptrs, mask=n[None, :] < N - start, other=0.0)
        acc = dot(dy, _unpack_tile(words, BN, BK, DTYPE), acc)
        dy_ptrs += BN
        word_ptrs += BN * (K // 4).to(tl.int64)
    acc *= _unscale(tl.load(scale_ptr), DTYPE)
    offsets = out_m.to(tl.int64)[:, None] * K + out_k[None, :]
    mask = (out_m[:, None] < M) & (out_k[None, :] < K)
    tl.store(dx_ptr + offsets, narrow(acc, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fp8_dequantize_kernel(
    words_ptr,  # int32 [N, K/4]
    scale_ptr,  # fp32 [1] or [N]
    out_ptr,  # [N, K]
    N,
    K,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = n.to(tl.int64)[:, None]
    word = tl.program_id(1) * (BK // 4) + tl.arange(0, BK // 4)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    mask = (n[:, None] < N) & (word[None, :] < K // 4)
    words = tl.load(words_ptr + rows * (K // 4) + word[None, :], mask=mask, other=0)
    # Through fp16 for either type: it needs no product of its own.
    weights = _unpack_tile(words, BN, BK, tl.float16).to(tl.float32)
    if PER_CHANNEL:
        scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
    else:
        scale = tl.load(scale_ptr)
    weights *= _unscale(scale, tl.float16)
    mask = (n[:, None] < N) & (k[None, :] < K)
    tl.store(out_ptr + rows * K + k[None, :], narrow(weights, out_ptr.dtype.element_ty), mask=mask)


def _check_weight(weight: Tensor, scale: Tensor, like: Tensor | None = None) -> tuple[int, int]:
    """(N, K), or ValueError naming the argument that does not fit."""
    check_weight(weight, scale)
    launch.check("weight", weight, like=like)
    launch.check("scale", scale, like=weight)
    if weight.data_ptr() % 16:
        raise ValueError("weight must start at an address that is a multiple of 16")
    return weight.shape[0], weight.shape[1]


def _words(weight: Tensor) -> Tensor:
    """The bytes [N, K] four at a time: int32 [N, K/4], the same memory."""
    return weight.view(torch.int32)


def fp8_dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """v · scale [N, K], multiplied in fp32 and rounded once to `dtype` (bfloat16 or float16).

    Raises ValueError naming the argument that does not fit.
    """
    n, k = _check_weight(weight, scale)
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be bfloat16 or float16, found {str(dtype)[6:]}")
    out = torch.empty(n, k, dtype=dtype, device=weight.device)
    grid = (triton.cdiv(n, 8), triton.cdiv(k, 512))
    _fp8_dequantize_kernel[grid](
        _words(weight), scale, out, n, k, BN=8, BK=512, PER_CHANNEL=scale.numel() > 1, num_warps=4
    )
    return out


def _dense_matmul(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The layer rounded to x's type in a fresh workspace, then cuBLAS."""
    dense = fp8_dequantize(weight, scale, x.dtype).t()
    return torch.mm(x, dense) if bias is None else torch.addmm(bias, x, dense)


def _dense_matmul_t(dy: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return torch.mm(dy, fp8_dequantize(weight, scale, dy.dtype))


def fp8_matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """x [M, K] @ Wᵀ (+ bias [N]) → [M, N] in x's dtype, bf16 or fp16.

    weight, scale: see `qerl_kernels.ops.fp8_matmul`. tile: instead of the one the dispatch
    would choose. Raises
    ValueError naming the argument that does not fit.
    """
    n, k = _check_weight(weight, scale, like=x)
    launch.check("x", x, dtype=(torch.bfloat16, torch.float16), shape=(None, k))
    if bias is not None:
        launch.check("bias", bias, dtype=x.dtype, shape=(n,), like=x)
    m = x.shape[0]
    if tile is None and dispatch.is_large("fp8_forward", m, x.device):
        return _dense_matmul(x, weight, scale, bias)
    tile = tile or dispatch.fused_tile("fp8_forward", m, x.device)
    y = x.new_empty(m, n)
    if m == 0:
        return y
    bk = 128 * tile.groups
    splits, steps = dispatch.splits(tile, m, n, -(-k // bk), x.device)
    out = y if splits == 1 else x.new_empty(splits, m, n, dtype=torch.float32)
    grid = (triton.cdiv(n, tile.bn), triton.cdiv(m, tile.bm), splits)
    _fp8_matmul_kernel[grid](
        x, _words(weight), scale, x if bias is None else bias, out, m, n, k, steps,
        BM=tile.bm, BN=tile.bn, BK=bk, PER_CHANNEL=scale.numel() > 1,
        HAS_BIAS=bias is not None, SPLIT=splits > 1, EVEN_K=k % bk == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y if splits == 1 else sum_splits(out, y)


def _scaled_gradient(dy: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """dy [M, N] times each output's share of the largest scale, rounded once, and that scale [1].

    A share is at most 1: nothing overflows, and float16 loses only what is small beside the rest.
    """
    largest = scale.amax().clamp_min(torch.finfo(torch.float32).tiny).reshape(1)
    return torch.mul(dy, scale.reshape(-1) / largest, out=torch.empty_like(dy)), largest


def fp8_matmul_t(dy: Tensor, weight: Tensor, scale: Tensor, tile: Tile | None = None) -> Tensor:
    """dy [M, N] @ W → [M, K] in dy's dtype, bf16 or fp16; arguments as for `fp8_matmul`."""
    n, k = _check_weight(weight, scale, like=dy)
    launch.check("dy", dy, dtype=(torch.bfloat16, torch.float16), shape=(None, n))
    m = dy.shape[0]
    if tile is None and dispatch.is_large("fp8_backward", m, dy.device):
        return _dense_matmul_t(dy, weight, scale)
    tile = tile or dispatch.fused_tile("fp8_backward", m, dy.device)
    dx = dy.new_empty(m, k)
    if m == 0:
        return dx
    if scale.numel() > 1:
        dy, scale = _scaled_gradient(dy, scale)
    bk = 128 * tile.groups
    _fp8_matmul_t_kernel[(triton.cdiv(k, bk), triton.cdiv(m, tile.bm))](
        dy, _words(weight), scale, dx, m, n, k, BM=tile.bm, BN=tile.bn, BK=bk,
        EVEN_N=n % tile.bn == 0, EVEN_K=k % bk == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dx


def variants() -> Iterator[Variant]:
    """Every tile of every target, with a scale for each output and a bias; forms as in `matmul`."""
    for dtype in ("bf16", "fp16"):
        yield _dequantize_variant(dtype)
        for target in ALL_TARGETS:
            for even in (True, False) if target in KINDS else (True,):
                for tile in dispatch.tiles(target, "fp8_forward"):
                    yield _forward_variant(tile, dtype, target, even)
                for tile in dispatch.tiles(target, "fp8_backward"):
                    yield _backward_variant(tile, dtype, target, even)


def _forward_variant(tile: Tile, dtype: str, target: int, even: bool) -> Variant:
    half, split = f"*{dtype}", tile.split and even
    return Variant(
        kernel="fp8_matmul",
        tile=f"{tile} {dtype}{'' if even else ' masked'}",
        function=_fp8_matmul_kernel,
        types={
            "x_ptr": half, "words_ptr": "*i32", "scale_ptr": "*fp32", "bias_ptr": half,
            "y_ptr": "*fp32" if split else half,
            **dict.fromkeys(("M", "N", "K", "steps"), "i32"),
        },
        constexprs={
            "BM": tile.bm, "BN": tile.bn, "BK": 128 * tile.groups, "PER_CHANNEL": True,
            "HAS_BIAS": True, "SPLIT": split, "EVEN_K": even,
        },
        divisible=frozenset({"N", "K"}),
        num_warps=tile.warps,
        num_stages=tile.stages,
        elements=tile.bn * 128 * tile.groups,
        targets=(target,),
    )  # fmt: skip


def _backward_variant(tile: Tile, dtype: str, target: int, even: bool) -> Variant:
    half = f"*{dtype}"
    return Variant(
        kernel="fp8_matmul_t",
        tile=f"{tile} {dtype}{'' if even else ' masked'}",
        function=_fp8_matmul_t_kernel,
        types={
            "dy_ptr": half, "words_ptr": "*i32", "scale_ptr": "*fp32", "dx_ptr": half,
            **dict.fromkeys(("M", "N", "K"), "i32"),
        },
        constexprs={
            "BM": tile.bm, "BN": tile.bn, "BK": 128 * tile.groups, "EVEN_N": even, "EVEN_K": even,
        },
        divisible=frozenset({"N", "K"}),
        num_warps=tile.warps,
        num_stages=tile.stages,
        elements=tile.bn * 128 * tile.groups,
        targets=(target,),
    )  # fmt: skip


def _dequantize_variant(dtype: str) -> Variant:
    return Variant(
        kernel="fp8_dequantize",
        tile=f"8x512 w4 {dtype}",
        function=_fp8_dequantize_kernel,
        types={
            "words_ptr": "*i32", "scale_ptr": "*fp32", "out_ptr": f"*{dtype}", "N": "i32",
            "K": "i32",
        },
        constexprs={"BN": 8, "BK": 512, "PER_CHANNEL": True},
        divisible=frozenset({"N", "K"}),
        num_warps=4,
        num_stages=3,
        elements=None,
    )  # fmt: skip
