"""The fused linear kernels, interpreted, against float64 over the stored numbers.

Bound of one result: half a unit in the last place of the output type, plus fp32 accumulation of n
terms, n·2⁻²⁴·Σ|term|, plus two roundings of the divisor's product. v·s is exact, so nothing else.
"""

from __future__ import annotations

import pytest
import torch

from qerl_kernels import backward, dispatch, gemm, launch, linear, matmul, quantize, reference
from qerl_kernels import repack as packing
from qerl_kernels.unpack import unpack

BF16, FP16 = torch.bfloat16, torch.float16
HALF_ULP = {BF16: 2.0**-8, FP16: 2.0**-11}
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


def within(found: torch.Tensor, truth: torch.Tensor, sums: torch.Tensor, terms: int) -> None:
    inner = (terms + 4) * EPS * sums
    tiny = torch.finfo(found.dtype).smallest_normal * HALF_ULP[found.dtype]
    allowed = inner + HALF_ULP[found.dtype] * (truth.abs() + inner) + tiny
    excess = ((found.double() - truth).abs() / allowed).max()
    assert excess <= 1, excess.item()


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


SHAPES = [(1, 130, 16), (15, 15, 144), (17, 1, 272), (33, 130, 576), (70, 64, 48)]


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


def test_split_along_k_sums_in_order():
    """K of nine groups in three splits: exactly the partial sums added from the first on."""
    tile = dispatch.Tile(16, 16, 64, 4, 3, split=True)
    assert dispatch.splits(tile, 3, 40, 9, torch.device("cpu")) == (2, 5)
    check_forward(3, 40, 1152, BF16, rank=5, bias=True, tile=tile)
    parts = randn(3, 5, 7, seed=0, dtype=torch.float32)
    with launch.interpreting():
        y = matmul.sum_splits(parts, parts.new_empty(5, 7))
    assert torch.equal(y, ((parts[0] + parts[1]) + parts[2]))


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
def test_past_the_largest_tile(dtype, monkeypatch):
    """One layer unpacked and BLAS: one more 16-bit rounding where an adapter is added."""
    monkeypatch.setattr(dispatch, "is_large", lambda *_: True)
    disk, w = weight(40, 144)
    dense = reference.dequantize(*disk)
    x, dy = randn(2, 9, 144, seed=1, dtype=dtype), randn(2, 9, 40, seed=5, dtype=dtype)
    u, b, z = (randn(*s, seed=2, dtype=dtype) for s in ((2, 9, 4), (40, 4), (40,)))
    a = randn(4, 144, seed=7, dtype=dtype)
    with launch.interpreting():
        y = linear.matmul(x, *w, z, u, b)
        dx = linear.matmul_t(dy, *w, 144, u, a)
    plain = x.double() @ dense.T + z.double()
    truth = plain + u.double() @ b.double().T
    assert y.shape == (2, 9, 40) and dx.shape == (2, 9, 144)
    sums = x.double().abs() @ dense.abs().T + z.double().abs()
    once = HALF_ULP[dtype] * (plain.abs() + truth.abs()) + 200 * EPS * sums + 1e-6
    # CPU BLAS may round bias and product apart.
    assert ((y.double() - truth).abs() <= 2 * once).all()
    plain, truth = dy.double() @ dense, dy.double() @ dense + u.double() @ a.double()
    once = HALF_ULP[dtype] * (plain.abs() + truth.abs()) + 1e-4 * truth.abs() + 1e-5
    assert ((dx.double() - truth).abs() <= 2 * once).all()


@pytest.mark.parametrize("dtype", HALF_ULP)
def test_gemm(dtype):
    x, w = randn(70, 80, seed=1, dtype=dtype), randn(33, 80, seed=2, dtype=dtype)
    with launch.interpreting():
        y = gemm.gemm(x, w.t(), 0.5)
    truth = 0.5 * (x.double() @ w.double().T)
    within(y, truth, 0.5 * (x.double().abs() @ w.double().abs().T), 80)


def test_nothing_in_gives_nothing_out():
    _, w = weight(40, 144)
    with launch.interpreting():
        assert matmul.nvfp4_matmul(torch.empty(0, 144, dtype=BF16), *w).shape == (0, 40)
        assert backward.nvfp4_matmul_t(torch.empty(0, 40, dtype=BF16), *w, 144).shape == (0, 144)


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 90, 100])
@pytest.mark.parametrize("dtype", HALF_ULP)
def test_every_tile_of_the_dispatch(dtype, target):
    for tile in dispatch.tiles(target, "forward"):
        check_forward(tile.bm + 1, tile.bn + 3, 5 * 128 + 16, dtype, rank=8, bias=True, tile=tile)
    for tile in dispatch.tiles(target, "backward"):
        k = 128 * tile.groups + 16
        check_backward(tile.bm + 1, 2 * tile.bn + 3, k, dtype, rank=8, tile=tile)


# --- what does not fit ---------------------------------------------------------------------------

X, DY = torch.zeros(3, 144, dtype=BF16), torch.zeros(3, 40, dtype=BF16)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": X.float()}, "x must be bfloat16 or float16, found float32"),
        ({"x": X[0]}, r"x must be \[\*, \*\], found \[144\]"),
        ({"x": torch.zeros(144, 3, dtype=BF16).t()}, "x must be contiguous"),
        ({"x": X[:, :128].contiguous()}, r"codes must be int32 \[N, 16\]"),
        ({"x": torch.zeros(3, 140, dtype=BF16)}, "K must be a multiple of 16, found 140"),
        ({"scales": torch.zeros(40, 2, dtype=torch.int32)}, r"scales must be int32 \[40, 4\]"),
        ({"global_scale": torch.ones(2)}, r"global_scale must be \[1\]"),
        ({"global_scale": torch.ones(1, dtype=BF16)}, "global_scale must be float32"),
        ({"bias": torch.zeros(40)}, "bias must be bfloat16"),
        ({"bias": torch.zeros(39, dtype=BF16)}, r"bias must be \[40\]"),
        ({"u": torch.zeros(3, 4, dtype=BF16)}, "u and b"),
        (
            {"u": torch.zeros(3, 4, dtype=BF16), "b": torch.zeros(40, 5, dtype=BF16)},
            r"b must be \[40, 4\]",
        ),
        ({"codes": torch.zeros(32, 40, dtype=torch.int32).t()}, "codes must be contiguous"),
    ],
)
def test_forward_launcher_refuses(change, message):
    _, (codes, scales, g) = weight(40, 144)
    arguments = {"x": X, "codes": codes, "scales": scales, "global_scale": g, **change}
    with launch.interpreting(), pytest.raises(ValueError, match=message):
        matmul.nvfp4_matmul(**arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dy": DY.double()}, "dy must be bfloat16 or float16, found float64"),
        ({"dy": torch.zeros(3, 41, dtype=BF16)}, r"dy must be \[\*, 40\]"),
        ({"in_features": 128}, r"codes must be int32 \[N, 16\]"),
        ({"v": torch.zeros(3, 4, dtype=BF16)}, "v and a"),
        (
            {"v": torch.zeros(3, 4, dtype=BF16), "a": torch.zeros(4, 128, dtype=BF16)},
            r"a must be \[4, 144\]",
        ),
    ],
)
def test_backward_launcher_refuses(change, message):
    _, (codes, scales, g) = weight(40, 144)
    arguments = {
        "dy": DY, "codes": codes, "scales": scales, "global_scale": g, "in_features": 144,
    }  # fmt: skip
    with launch.interpreting(), pytest.raises(ValueError, match=message):
        backward.nvfp4_matmul_t(**{**arguments, **change})


def test_other_launchers_refuse():
    _, w = weight(40, 144)
    with launch.interpreting():
        with pytest.raises(ValueError, match="dtype must be bfloat16 or float16, found float32"):
            unpack(*w[:2], 144, torch.float32)
        with pytest.raises(ValueError, match=r"w must be bfloat16 \[144, N\]"):
            gemm.gemm(X, torch.zeros(40, 3, dtype=BF16))
    with pytest.raises(ValueError, match="x must be on a CUDA device, found cpu"):
        matmul.nvfp4_matmul(X, *w)
