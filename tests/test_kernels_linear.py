"""The fused linear kernels, interpreted, against float64 over the stored numbers.

Bound of one result: half a unit in the last place of the output type, plus fp32 accumulation of n
terms, n·2⁻²⁴·Σ|term|, plus two roundings of the divisor's product. v·s is exact, so nothing else.
Shape letters: M tokens, N outputs, K inputs, R adapter rank.
"""

from __future__ import annotations

import pytest
import torch

from qerl_kernels import backward, dispatch, gemm, launch, linear, matmul, quantize, reference
from qerl_kernels import repack as packing
from qerl_kernels.unpack import unpack

BF16, FP16 = torch.bfloat16, torch.float16
HALF_ULP = {BF16: 2.0**-8, FP16: 2.0**-11}  # of numbers in [1, 2)
EPS = 2.0**-24


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=rng(seed)).to(dtype)


def weight(n: int, k: int, order: str = "paired"):
    """(on-disk tensors, repacked tensors): a zero block, −0 codes, scales 448 and 2⁻⁹."""
    packed, scale, g = quantize.quantize_absmax(torch.randn(n, k, generator=rng(0)))
    bytes_ = scale.view(torch.uint8)
    bytes_[0, 0] = 0
    packed[-1, :8] = 0x88
    bytes_[-1, -1], bytes_[n // 2, 0] = 0x01, 0x7E
    return (packed, scale, g), (*packing.repack(packed, scale, order=order), g)


def half_ulp(size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance of neighbouring numbers of `dtype` at |size|: the most a rounding errs."""
    binade = torch.frexp(size.clamp(min=torch.finfo(dtype).smallest_normal))[1] - 1
    return HALF_ULP[dtype] * torch.exp2(binade.double())


def within(found: torch.Tensor, truth: torch.Tensor, sums: torch.Tensor, terms: int) -> None:
    inner = (terms + 4) * EPS * sums
    excess = (found.double() - truth).abs() - inner - half_ulp(truth.abs() + inner, found.dtype)
    assert found.shape == truth.shape and (excess <= 0).all(), excess.max().item()


def check_forward(m, n, k, dtype, *, rank=0, bias=False, tile=None, order="paired") -> None:
    disk, w = weight(n, k, order)
    dense = reference.dequantize(*disk)
    x = randn(m, k, seed=1, dtype=dtype)
    u, b = randn(m, rank, seed=2, dtype=dtype), randn(n, rank, seed=3, dtype=dtype)
    z = randn(n, seed=4, dtype=dtype)
    with launch.interpreting():
        y = matmul.nvfp4_matmul(
            x, *w, z if bias else None, *((u, b) if rank else (None, None)), tile=tile
        )
    truth = x.double() @ dense.T + u.double() @ b.double().T + z.double() * bias
    sums = x.double().abs() @ dense.abs().T + u.double().abs() @ b.double().abs().T
    within(y, truth, sums + z.double().abs() * bias, k + rank)


def check_backward(m, n, k, dtype, *, rank=0, tile=None, order="paired") -> None:
    disk, w = weight(n, k, order)
    dense = reference.dequantize(*disk)
    dy = randn(m, n, seed=1, dtype=dtype)
    v, a = randn(m, rank, seed=2, dtype=dtype), randn(rank, k, seed=3, dtype=dtype)
    with launch.interpreting():
        dx = backward.nvfp4_matmul_t(dy, *w, k, *((v, a) if rank else (None, None)), tile=tile)
    truth = dy.double() @ dense + v.double() @ a.double()
    sums = dy.double().abs() @ dense.abs() + v.double().abs() @ a.double().abs()
    within(dx, truth, sums, n + rank)


# The last one fills every tile: no mask along the reduction, forward or backward.
SHAPES = [(1, 130, 16), (15, 15, 144), (17, 1, 272), (33, 130, 576), (70, 64, 48), (15, 64, 256)]


@pytest.mark.parametrize("dtype", HALF_ULP)
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_forward(m, n, k, dtype):
    check_forward(m, n, k, dtype, rank=5, bias=True)


@pytest.mark.parametrize("dtype", HALF_ULP)
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_backward(m, n, k, dtype):
    check_backward(m, n, k, dtype, rank=5)


@pytest.mark.parametrize("rank", [0, 1, 33])
def test_adapter_ranks_and_no_bias(rank):
    check_forward(3, 40, 144, BF16, rank=rank)
    check_backward(3, 40, 144, BF16, rank=rank)


@pytest.mark.parametrize("dtype", HALF_ULP)
def test_split_along_k(dtype):
    """K of nine groups in two splits, five and four; adapter and bias in one of them only."""
    tile = dispatch.Tile(16, 16, 64, 4, 3, split=True)
    assert dispatch.splits(tile, 17, 20, 9, torch.device("cpu")) == (2, 5)
    check_forward(17, 20, 1152, dtype, rank=5, bias=True, tile=tile)
    check_forward(3, 15, 1040, dtype, tile=tile)


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
def test_splits_are_summed_in_their_order_and_rounded_once(dtype):
    parts = (
        randn(3, 5, 700, seed=0, dtype=torch.float32) * torch.tensor([1, 1e4, 1e-2])[:, None, None]
    )
    # Halfway between two bf16 numbers, the even one below and above.
    parts[:, 0, :2] = torch.tensor([[1, 1 + 2**-7], [2**-8, 2**-8], [0, 0]])
    with launch.interpreting():
        y = matmul.sum_splits(parts, torch.empty(5, 700, dtype=dtype))
    assert torch.equal(y, ((parts[0] + parts[1]) + parts[2]).to(dtype))


@pytest.mark.parametrize(
    "flag, order", [("WIDE", "wide"), ("BY_LANE", "paired"), ("FMA", "paired")]
)
def test_what_differs_between_cards(flag, order, monkeypatch):
    real = dispatch.target_flags

    def flags(target: int) -> dict[str, bool]:
        return {**real(target), flag: flag != "BY_LANE"}

    monkeypatch.setattr(dispatch, "target_flags", flags)
    check_forward(15, 70, 272, BF16, rank=5, order=order)
    check_backward(15, 70, 272, BF16, rank=5, order=order)
    (packed, scale, g), w = weight(33, 144, order)
    with launch.interpreting():
        dense = unpack(*w[:2], 144, BF16)
    assert torch.equal(dense.double() * 256, quantize.unscaled(packed, scale, torch.float64))


@pytest.mark.parametrize("dtype", HALF_ULP)
@pytest.mark.parametrize("n, k", [(1, 16), (33, 144), (40, 576)])
def test_one_layer_unpacked_is_exact(n, k, dtype):
    (packed, scale, _), w = weight(n, k)
    with launch.interpreting():
        dense = unpack(*w[:2], k, dtype)
    assert torch.equal(dense.double() * 256, quantize.unscaled(packed, scale, torch.float64))


@pytest.mark.parametrize("dtype", HALF_ULP)
@pytest.mark.parametrize("adapted", [False, True])
def test_past_the_largest_tile(dtype, adapted, monkeypatch):
    """One layer unpacked and BLAS: one more 16-bit rounding where an adapter is added.

    CPU BLAS may also round the product before it adds the bias: one rounding more for that.
    """
    monkeypatch.setattr(dispatch, "is_large", lambda *_: True)
    disk, w = weight(40, 144)
    dense = reference.dequantize(*disk)
    x, dy = randn(2, 9, 144, seed=1, dtype=dtype), randn(2, 9, 40, seed=5, dtype=dtype)
    u, b, z = (randn(*s, seed=2, dtype=dtype) for s in ((2, 9, 4), (40, 4), (40,)))
    a = randn(4, 144, seed=7, dtype=dtype)
    with launch.interpreting():
        y = linear.matmul(x, *w, z, *((u, b) if adapted else ()))
        dx = linear.matmul_t(dy, *w, 144, *((u, a) if adapted else ()))
    z, u, a, b = z.double(), adapted * u.double(), a.double(), b.double()
    steps = [x.double() @ dense.T, z, u @ b.T]
    sums = x.double().abs() @ dense.abs().T + z.abs() + u.abs() @ b.abs().T
    rounded_at_every_step(y, steps, sums, 144 + 4)
    sums = dy.double().abs() @ dense.abs() + u.abs() @ a.abs()
    rounded_at_every_step(dx, [dy.double() @ dense, u @ a], sums, 40 + 4)


def rounded_at_every_step(found, steps, sums, terms) -> None:
    """Σ steps, rounded to 16 bits after each; a step may itself be rounded before it is added."""
    total, allowed = torch.zeros_like(sums), (terms + 4) * EPS * sums
    for step in steps:
        total = total + step
        allowed = allowed + half_ulp(total.abs() + allowed, found.dtype)
    assert found.shape == total.shape and ((found.double() - total).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", HALF_ULP)
@pytest.mark.parametrize("m, n, k", [(1, 1, 16), (15, 4, 80), (70, 33, 80)])
def test_gemm(m, n, k, dtype):
    x, w = randn(m, k, seed=1, dtype=dtype), randn(n, k, seed=2, dtype=dtype)
    truth = 0.7 * (x.double() @ w.double().T)
    for factor in (w.t(), w.t().contiguous()):
        with launch.interpreting():
            y = gemm.gemm(x, factor, 0.7)
        within(y, truth, 0.7 * (x.double().abs() @ w.double().abs().T), k)


def test_more_elements_than_32_bit_offsets_reach(monkeypatch):
    """In slices of rows, each with its part of the adapter: the bits are those of one launch."""
    _, w = weight(48, 128)
    x, dy = randn(37, 128, seed=1, dtype=BF16), randn(37, 48, seed=2, dtype=BF16)
    low, b, a = (randn(*s, seed=3, dtype=BF16) for s in ((37, 8), (48, 8), (8, 128)))

    def products() -> list[torch.Tensor]:
        with launch.interpreting(), launch.batch_invariant():
            return [
                matmul.nvfp4_matmul(x, *w, None, low, b),
                backward.nvfp4_matmul_t(dy, *w, 128, low, a),
            ]

    whole = products()
    monkeypatch.setattr(launch, "MAX_OFFSET", 128 * 16)
    assert len(list(launch.row_slices(37, 128))) == 3
    for one, parts in zip(whole, products(), strict=True):
        assert torch.equal(one, parts)


def test_nothing_in_gives_nothing_out():
    _, w = weight(40, 144)
    with launch.interpreting():
        assert matmul.nvfp4_matmul(torch.empty(0, 144, dtype=BF16), *w).shape == (0, 40)
        assert backward.nvfp4_matmul_t(torch.empty(0, 40, dtype=BF16), *w, 144).shape == (0, 144)
        assert gemm.gemm(
            torch.empty(0, 144, dtype=BF16), torch.zeros(144, 4, dtype=BF16)
        ).shape == (
            0,
            4,
        )
        assert linear.matmul(torch.empty(2, 0, 144, dtype=BF16), *w, None).shape == (2, 0, 40)
        assert linear.matmul_t(torch.empty(2, 0, 40, dtype=BF16), *w, 144).shape == (2, 0, 144)


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 90, 100])
@pytest.mark.parametrize("dtype", HALF_ULP)
def test_every_tile_of_the_dispatch(dtype, target, monkeypatch):
    """With the card's own lane order and row order, one row and column past whole tiles."""
    monkeypatch.setattr(dispatch, "target_of", lambda device: target)
    order = dispatch.lane_order(torch.device("cpu"))
    for tile in dispatch.tiles(target, "forward"):
        m, n, k = tile.bm + 1, tile.bn + 3, 5 * 128 + 16
        check_forward(m, n, k, dtype, rank=8, bias=True, tile=tile, order=order)
    for tile in dispatch.tiles(target, "backward"):
        m, n, k = tile.bm + 1, 2 * tile.bn + 3, 128 * tile.groups + 16
        check_backward(m, n, k, dtype, rank=33, tile=tile, order=order)


@pytest.mark.slow
@pytest.mark.parametrize("at, m", list(enumerate([1, 15, 17, 33, 70])))
def test_every_size(at, m):
    for turn, k in enumerate([16, 48, 144, 272, 576], start=at):
        n, dtype = (1, 15, 130)[turn % 3], (BF16, FP16)[turn % 2]
        check_forward(m, n, k, dtype, rank=1, bias=True)
        check_backward(m, n, k, dtype, rank=1)


# --- what does not fit ---------------------------------------------------------------------------

X, DY = torch.zeros(3, 144, dtype=BF16), torch.zeros(3, 40, dtype=BF16)
U, B, A = (torch.zeros(s, dtype=BF16) for s in ((3, 4), (40, 4), (4, 144)))
Z, G = torch.zeros(40, dtype=BF16), torch.ones(1)
CODES, SCALES = (torch.zeros(40, n, dtype=torch.int32) for n in (32, 4))


def gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, not contiguous."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


WEIGHT_REFUSALS = [
    (
        {"codes": CODES[:0], "scales": SCALES[:0]},
        r"at least one row and one block, found \[0, 144\]",
    ),
    ({"codes": CODES.long()}, r"codes must be int32 \[N, 32\] \(repacked\) for K = 144"),
    ({"codes": CODES.flatten()}, r"codes must be int32 \[N, 32\]"),
    ({"codes": gaps(CODES)}, "codes must be contiguous"),
    ({"codes": elsewhere(CODES)}, "codes must be on cpu, found meta"),
    ({"scales": SCALES[:, :2]}, r"scales must be int32 \[40, 4\]"),
    ({"scales": SCALES[1:]}, r"scales must be int32 \[40, 4\]"),
    ({"scales": SCALES.float()}, r"scales must be int32 \[40, 4\]"),
    ({"scales": gaps(SCALES)}, "scales must be contiguous"),
    ({"scales": elsewhere(SCALES)}, "scales must be on cpu, found meta"),
    ({"global_scale": G.repeat(2)}, r"global_scale must be \[1\], found \[2\]"),
    ({"global_scale": G[0]}, r"global_scale must be \[1\], found \[\]"),
    ({"global_scale": G.double()}, "global_scale must be float32, found float64"),
    ({"global_scale": elsewhere(G)}, "global_scale must be on cpu, found meta"),
]


@pytest.mark.parametrize(
    "change, message",
    [
        *WEIGHT_REFUSALS,
        ({"x": X.float()}, "x must be bfloat16 or float16, found float32"),
        ({"x": X[0]}, r"x must be \[\*, \*\], found \[144\]"),
        ({"x": gaps(X)}, "x must be contiguous"),
        ({"x": X[:, :128].contiguous()}, r"codes must be int32 \[N, 16\]"),
        ({"x": torch.zeros(3, 140, dtype=BF16)}, "K must be a multiple of 16, found 140"),
        ({"bias": Z.float()}, "bias must be bfloat16, found float32"),
        ({"bias": Z.half()}, "bias must be bfloat16, found float16"),
        ({"bias": Z[1:]}, r"bias must be \[40\], found \[39\]"),
        ({"bias": Z[:1]}, r"bias must be \[40\], found \[1\]"),
        ({"bias": gaps(Z)}, "bias must be contiguous"),
        ({"bias": elsewhere(Z)}, "bias must be on cpu, found meta"),
        ({"u": U}, "u and b"),
        ({"b": B}, "u and b"),
        ({"u": U.half(), "b": B}, "u must be bfloat16, found float16"),
        ({"u": U[:2], "b": B}, r"u must be \[3, \*\], found \[2, 4\]"),
        ({"u": gaps(U), "b": B}, "u must be contiguous"),
        ({"u": elsewhere(U), "b": B}, "u must be on cpu, found meta"),
        ({"u": U, "b": B.float()}, "b must be bfloat16, found float32"),
        ({"u": U, "b": B[:, :3]}, r"b must be \[40, 4\], found \[40, 3\]"),
        ({"u": U, "b": B[1:]}, r"b must be \[40, 4\], found \[39, 4\]"),
        ({"u": U, "b": gaps(B)}, "b must be contiguous"),
        ({"u": U, "b": elsewhere(B)}, "b must be on cpu, found meta"),
    ],
)
def test_forward_launcher_refuses(change, message):
    arguments = {"x": X, "codes": CODES, "scales": SCALES, "global_scale": G, **change}
    with launch.interpreting(), pytest.raises(ValueError, match=message):
        matmul.nvfp4_matmul(**arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        *WEIGHT_REFUSALS,
        ({"dy": DY.double()}, "dy must be bfloat16 or float16, found float64"),
        ({"dy": torch.zeros(3, 41, dtype=BF16)}, r"dy must be \[\*, 40\], found \[3, 41\]"),
        ({"dy": DY[0]}, r"dy must be \[\*, 40\], found \[40\]"),
        ({"dy": gaps(DY)}, "dy must be contiguous"),
        ({"in_features": 128}, r"codes must be int32 \[N, 16\]"),
        ({"in_features": 140}, "K must be a multiple of 16, found 140"),
        ({"v": U}, "v and a"),
        ({"a": A}, "v and a"),
        ({"v": U.half(), "a": A}, "v must be bfloat16, found float16"),
        ({"v": U[:2], "a": A}, r"v must be \[3, \*\], found \[2, 4\]"),
        ({"v": gaps(U), "a": A}, "v must be contiguous"),
        ({"v": U, "a": A.half()}, "a must be bfloat16, found float16"),
        ({"v": U, "a": A[:, :128]}, r"a must be \[4, 144\], found \[4, 128\]"),
        ({"v": U, "a": A[1:]}, r"a must be \[4, 144\], found \[3, 144\]"),
        ({"v": U, "a": gaps(A)}, "a must be contiguous"),
        ({"v": U, "a": elsewhere(A)}, "a must be on cpu, found meta"),
    ],
)
def test_backward_launcher_refuses(change, message):
    arguments = {
        "dy": DY, "codes": CODES, "scales": SCALES, "global_scale": G, "in_features": 144,
    }  # fmt: skip
    with launch.interpreting(), pytest.raises(ValueError, match=message):
        backward.nvfp4_matmul_t(**{**arguments, **change})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((CODES, SCALES, 144, torch.float32), "dtype must be bfloat16 or float16, found float32"),
        ((CODES, SCALES, 128, BF16), r"codes must be int32 \[N, 16\]"),
        ((CODES, SCALES[1:], 144, BF16), r"scales must be int32 \[40, 4\]"),
        ((gaps(CODES), SCALES, 144, BF16), "codes must be contiguous"),
        ((CODES, gaps(SCALES), 144, BF16), "scales must be contiguous"),
        ((CODES, elsewhere(SCALES), 144, BF16), "scales must be on cpu, found meta"),
    ],
)
def test_unpack_launcher_refuses(arguments, message):
    with launch.interpreting(), pytest.raises(ValueError, match=message):
        unpack(*arguments)


@pytest.mark.parametrize(
    "x, w, message",
    [
        (X.float(), A.t(), "x must be bfloat16 or float16, found float32"),
        (X[0], A.t(), r"x must be \[\*, \*\], found \[144\]"),
        (gaps(X), A.t(), "x must be contiguous"),
        (X, A, r"w must be bfloat16 \[144, N\], found bfloat16 \[4, 144\]"),
        (X, A.t().half(), r"w must be bfloat16 \[144, N\], found float16"),
        (X, A[0], r"w must be bfloat16 \[144, N\], found bfloat16 \[144\]"),
        (X, elsewhere(A.t()), "w must be on cpu, found meta"),
    ],
)
def test_gemm_launcher_refuses(x, w, message):
    with launch.interpreting(), pytest.raises(ValueError, match=message):
        gemm.gemm(x, w)


def test_launchers_refuse_a_tensor_off_the_gpu():
    w = (CODES, SCALES, G)
    with pytest.raises(ValueError, match="x must be on a CUDA device, found cpu"):
        matmul.nvfp4_matmul(X, *w)
    with pytest.raises(ValueError, match="dy must be on a CUDA device, found cpu"):
        backward.nvfp4_matmul_t(DY, *w, 144)
    with pytest.raises(ValueError, match="codes must be on a CUDA device, found cpu"):
        unpack(CODES, SCALES, 144, BF16)
    with pytest.raises(ValueError, match="x must be on a CUDA device, found cpu"):
        gemm.gemm(X, A.t())


@pytest.mark.parametrize(
    "bias, message",
    [
        (torch.zeros(1, dtype=BF16), r"bias must be \[40\], found \[1\]"),
        (torch.zeros(40), "bias must be bfloat16"),
    ],
)
def test_the_path_past_the_tiles_checks_as_well(bias, message, monkeypatch):
    """A bias of one number would be spread over the outputs by BLAS."""
    monkeypatch.setattr(dispatch, "is_large", lambda *_: True)
    _, w = weight(40, 144)
    with launch.interpreting():
        with pytest.raises(ValueError, match=message):
            linear.matmul(X, *w, bias)
        with pytest.raises(ValueError, match=r"dy must be \[\*, 40\]"):
            linear.matmul_t(torch.zeros(3, 41, dtype=BF16), *w, 144)
