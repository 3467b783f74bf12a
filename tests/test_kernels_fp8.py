"""Products with an E4M3 weight against float64: CPU path, interpreted kernels, gradients."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.library import opcheck

from qerl_kernels import dispatch, fp8, reference
from qerl_kernels.dispatch import Tile
from qerl_kernels.launch import batch_invariant, interpreting
from qerl_kernels.ops.fp8 import check_fp8_weight, fp8_matmul, fp8_matmul_t

BF16, FP16 = torch.bfloat16, torch.float16
HALVES = [BF16, FP16]
DTYPES = [*HALVES, torch.float32, torch.float64]
SCALES = ["tensor", "channel", "column"]
EPS32 = 2.0**-24
U = {BF16: 2.0**-8, FP16: 2.0**-11, torch.float32: EPS32, torch.float64: 2.0**-53}
STEP = {BF16: 0.0, FP16: 2.0**-24, torch.float32: 0.0, torch.float64: 0.0}  # smallest number
SMALL = Tile(16, 16, 32, 4, 3)
SPLIT = Tile(16, 16, 32, 4, 3, split=True)
every_byte = torch.arange(256, dtype=torch.uint8)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=rng(seed)).to(dtype)


def make(n, k, kind="channel", seed=0, view=torch.float8_e4m3fn):
    """A weight with every finite byte alike and scales 2⁻⁹ to 2⁻⁷."""
    byte = torch.randint(0, 254, (n, k), generator=rng(seed), dtype=torch.uint8)
    byte = torch.where(byte >= 127, byte + 1, byte)  # 0…126 and 128…254: no NaN
    shape = {"tensor": (1,), "channel": (n,), "column": (n, 1)}[kind]
    scale = torch.exp2(-9 + 2 * torch.rand(shape, generator=rng(seed + 1)))
    return byte.view(view), scale


def sums(x, weight, scale, bias=None):
    """Σ|x·w| + |bias|, which every bound is relative to."""
    out = x.double().abs() @ reference.fp8_dequantize(weight, scale).abs().T
    return out if bias is None else out + bias.double().abs()


def sums_t(dy, weight, scale):
    return dy.double().abs() @ reference.fp8_dequantize(weight, scale).abs()


def within(found, truth, inner, last, dtype):
    """|found − truth| ≤ inner, what came before the last rounding, and that rounding."""
    assert found.dtype == dtype and found.shape == truth.shape
    bound = inner + last * (truth.abs() + inner) + STEP[dtype]
    assert ((found.double() - truth).abs() <= bound).all()


def accumulated(terms, unit=EPS32):
    """Relative to Σ|terms|: `terms` additions in any order, the scale's product, the bias."""
    return (terms + 3) * unit


# --- the numbers --------------------------------------------------------------------------------


def test_reference_is_e4m3():
    truth = every_byte.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    cast = every_byte.view(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(truth, cast, equal_nan=True)
    found = reference.fp8_dequantize(every_byte[None], torch.ones(1))[0].numpy()
    finite = ~np.isnan(truth)
    assert finite.sum() == 254
    assert np.array_equal(found[finite], truth[finite])
    assert np.array_equal(np.signbit(found[finite]), np.signbit(truth[finite]))


@pytest.mark.parametrize("dtype", HALVES)
def test_kernel_unpacks_every_byte(dtype):
    """NaN bytes come out as ±480."""
    weight = torch.stack((every_byte, every_byte.flip(0)))
    with interpreting():
        found = fp8.fp8_dequantize(weight, torch.ones(1), dtype)
    truth = weight.view(torch.float8_e4m3fn).to(dtype)
    truth[0, 127], truth[0, 255], truth[1, 0], truth[1, 128] = 480, -480, -480, 480
    assert torch.equal(found.view(torch.int16), truth.view(torch.int16))


@pytest.mark.parametrize(
    ("kernel", "dtype"), [*((False, d) for d in DTYPES), *((True, d) for d in HALVES)]
)
def test_products_see_every_byte(kernel, dtype):
    """One weight at a time: both products give its value exactly, in each of the byte's places."""
    weight = every_byte.repeat(4, 1)
    weight[(weight & 0x7F) == 0x7F] = 0
    truth = weight.view(torch.float8_e4m3fn).to(dtype)
    eye, rows, scale = torch.eye(256, dtype=dtype), torch.eye(4, dtype=dtype), torch.ones(1)
    if not kernel:
        assert torch.equal(fp8_matmul(eye, weight, scale), truth.T)
        assert torch.equal(fp8_matmul_t(rows, weight, scale), truth)
        return
    with interpreting():
        assert torch.equal(fp8_matmul(eye, weight, scale), truth.T)
        assert torch.equal(fp8_matmul_t(rows, weight, scale), truth)


def test_bf16_masks_are_exact_on_a_gpu():
    """The interpreter multiplies fp16; a GPU multiplies these bf16 bits by 2¹²⁰."""
    byte = np.arange(256, dtype=np.uint32)
    word = byte << 8 | (255 - byte) << 24
    shift, mask = fp8._BF16_SHIFT.value, fp8._BF16_MASK.value
    pair = (word & np.uint32(fp8._SIGNS.value)) | ((word >> shift) & np.uint32(mask))
    for half, codes in ((pair & 0xFFFF, byte), (pair >> 16, 255 - byte)):
        bits = half.astype(np.uint16).view(ml_dtypes.bfloat16)
        value = bits.astype(np.float64) * fp8._BF16_UNSCALE.value
        truth = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        finite = ~np.isnan(truth)
        assert np.array_equal(value[finite], truth[finite])


# --- against float64 ----------------------------------------------------------------------------

SHAPES = [(1, 48, 64), (15, 33, 48), (17, 64, 16), (3, 5, 576)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_cpu_path(m, n, k, kind, dtype):
    weight, scale = make(n, k, kind)
    x, bias = randn(m, k, seed=2).to(dtype), randn(n, seed=3).to(dtype)
    unit = min(U[dtype], EPS32)
    truth = reference.fp8_matmul(x, weight, scale, bias)
    inner = accumulated(k, unit) * sums(x, weight, scale, bias)
    within(fp8_matmul(x, weight, scale, bias), truth, inner, U[dtype], dtype)
    dy = randn(m, n, seed=4).to(dtype)
    truth = reference.fp8_matmul_t(dy, weight, scale)
    inner = accumulated(n, unit) * sums_t(dy, weight, scale)
    within(fp8_matmul_t(dy, weight, scale), truth, inner, U[dtype], dtype)


def check_forward(m, n, k, kind, dtype, tile, seed=0):
    weight, scale = make(n, k, kind, seed)
    x, bias = randn(m, k, seed=2).to(dtype), randn(n, seed=3).to(dtype)
    with interpreting():
        found = fp8.fp8_matmul(x, weight, scale, bias, tile)
    truth = reference.fp8_matmul(x, weight, scale, bias)
    within(found, truth, accumulated(k) * sums(x, weight, scale, bias), U[dtype], dtype)


def gradient_bound(dy, weight, scale):
    """fp32 sums; dy·(scale/largest) is rounded once for a scale of each output, none for one."""
    bound = accumulated(dy.shape[1]) * sums_t(dy, weight, scale)
    if scale.numel() > 1:
        bound = bound * (1 + U[dy.dtype]) + (U[dy.dtype] + 2 * EPS32) * sums_t(dy, weight, scale)
        bound += STEP[dy.dtype] / 2 * sums_t(torch.ones_like(dy), weight, scale.amax())
    return bound


def check_backward(m, n, k, kind, dtype, tile, seed=0):
    weight, scale = make(n, k, kind, seed)
    dy = randn(m, n, seed=4).to(dtype)
    with interpreting():
        found = fp8.fp8_matmul_t(dy, weight, scale, tile)
    truth = reference.fp8_matmul_t(dy, weight, scale)
    within(found, truth, gradient_bound(dy, weight, scale), U[dtype], dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize(("m", "n", "k"), [*SHAPES[:3], (3, 5, 144)])
def test_kernels(m, n, k, kind, dtype):
    check_forward(m, n, k, kind, dtype, SMALL)
    check_backward(m, n, k, kind, dtype, SMALL)


@pytest.mark.parametrize(("kind", "dtype"), [("tensor", BF16), ("column", FP16)])
def test_split_sums_in_order_and_adds_the_bias_once(kind, dtype):
    """K = 1040: 9 steps of 128 in 2 splits, the last one short and ragged."""
    assert fp8.dispatch.splits(SPLIT, 17, 33, 9, torch.device("cpu")) == (2, 5)
    check_forward(17, 33, 1040, kind, dtype, SPLIT)


@pytest.mark.parametrize("m", [1, 17, 33, 70])
def test_table_through_the_operator(m):
    """The table's own tiles, a leading dimension, and gradients as autograd takes them."""
    weight, scale = make(40, 272)
    x = randn(1, m, 272, seed=2).to(BF16).requires_grad_()
    bias = randn(40, seed=3).to(BF16).requires_grad_()
    dy = randn(1, m, 40, seed=4).to(BF16)
    with interpreting():
        y = fp8_matmul(x, weight, scale, bias)
        y.backward(dy)
    truth = reference.fp8_matmul(x.detach(), weight, scale, bias.detach())
    inner = accumulated(272) * sums(x.detach(), weight, scale, bias.detach())
    within(y.detach(), truth, inner, U[BF16], BF16)
    truth = reference.fp8_matmul_t(dy, weight, scale)
    bound = gradient_bound(dy[0], weight, scale)
    within(x.grad, truth, bound, U[BF16], BF16)
    within(bias.grad, dy.double().sum((0, 1)), accumulated(m) * dy.abs().sum((0, 1)), U[BF16], BF16)


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 90, 100])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_tile_of_the_table(dtype, target):
    for tile in dispatch.tiles(target, "fp8_forward"):
        check_forward(tile.bm + 1, tile.bn + 3, 5 * 128 + 16, "channel", dtype, tile)
    for tile in dispatch.tiles(target, "fp8_backward"):
        check_backward(tile.bm + 1, 2 * tile.bn + 3, 128 * tile.groups + 16, "channel", dtype, tile)


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("dtype", HALVES)
def test_dense_path(dtype, kind):
    """Past the tiles: w rounded once to 16 bits."""
    weight, scale = make(33, 48, kind)
    x, bias = randn(17, 48, seed=2).to(dtype), randn(33, seed=3).to(dtype)
    dy = randn(17, 33, seed=4).to(dtype)
    with interpreting():
        y = fp8._dense_matmul(x, weight, scale, bias)
        plain = fp8._dense_matmul(x, weight, scale, None)
        dx = fp8._dense_matmul_t(dy, weight, scale)
    rounded = U[dtype] + accumulated(64)
    ones = STEP[dtype] * torch.ones(48, dtype=torch.float64)
    inner = rounded * sums(x, weight, scale, bias) + (x.double().abs() @ ones)[:, None]
    within(y, reference.fp8_matmul(x, weight, scale, bias), inner, U[dtype], dtype)
    within(plain, reference.fp8_matmul(x, weight, scale), inner, U[dtype], dtype)
    inner = rounded * sums_t(dy, weight, scale) + STEP[dtype] * dy.double().abs().sum(1)[:, None]
    within(dx, reference.fp8_matmul_t(dy, weight, scale), inner, U[dtype], dtype)


def test_small_gradients_survive_float16():
    """Scales of 1e-7 times gradients of 1e-4 are under float16's smallest number."""
    weight, scale = make(33, 64)
    scale = scale * 2.0**-15
    dy = (randn(17, 33, seed=4) * 1e-4).to(FP16)
    with interpreting():
        scaled, largest = fp8._scaled_gradient(dy, scale)
    truth = dy.double() * scale.double()
    error = (scaled.double() * largest.double() - truth).abs()
    bound = (U[FP16] + 2 * EPS32) * truth.abs() + STEP[FP16] / 2 * largest.double()
    assert (error <= bound).all() and bound.max() < 0.01 * truth.abs().mean()


def test_gradient_of_all_zero_scales_is_zero():
    weight, scale = make(33, 64)
    with interpreting():
        dx = fp8_matmul_t(randn(3, 33).to(BF16), weight, torch.zeros_like(scale))
    assert torch.equal(dx, torch.zeros(3, 64, dtype=BF16))


# --- dispatch -----------------------------------------------------------------------------------


def test_tiles_by_batch_and_card():
    cpu = torch.device("cpu")
    for target in (80, 86, 89, 90, 100, 120, 121):
        for direction in ("fp8_forward", "fp8_backward"):
            rows = dispatch.tiles(target, direction)
            assert [row.max_m for row in rows] == sorted({row.max_m for row in rows})
            assert all(row.bm <= max(64, row.max_m) for row in rows)
    assert dispatch.tiles(89, "fp8_forward") == dispatch.tiles(80, "fp8_forward")
    assert dispatch.fused_tile("fp8_forward", 1, cpu).bm == 16
    assert dispatch.fused_tile("fp8_forward", 5000, cpu) is dispatch.tiles(90, "fp8_forward")[-1]
    with batch_invariant():
        tiles = {dispatch.fused_tile("fp8_forward", m, cpu) for m in (1, 17, 5000)}
    assert len(tiles) == 1


@pytest.fixture
def pretend_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "target_of", lambda device: 90)
    return torch.device("cuda")


def test_cublas_takes_over_past_the_table(pretend_gpu):
    for direction in ("fp8_forward", "fp8_backward"):
        assert not dispatch.is_large(direction, 1024, pretend_gpu)
        assert dispatch.is_large(direction, 1025, pretend_gpu)
        with batch_invariant():
            assert not dispatch.is_large(direction, 1025, pretend_gpu)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_batch_invariant(dtype, kernel):
    """A row alone and among 17 has the same bits, where the plain mode would split K by M."""
    weight, scale = make(33, 1040)
    x, dy = randn(17, 1040, seed=2).to(dtype), randn(17, 33, seed=4).to(dtype)

    def both(first, last):
        return fp8_matmul(x[first:last], weight, scale), fp8_matmul_t(dy[first:last], weight, scale)

    def compare():
        y, dx = both(0, 17)
        for row in (0, 16):
            alone_y, alone_dx = both(row, row + 1)
            assert torch.equal(alone_y, y[row : row + 1])
            assert torch.equal(alone_dx, dx[row : row + 1])

    with batch_invariant():
        if not kernel:
            compare()
            return
        with interpreting():
            compare()


# --- the operator -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCALES)
def test_gradcheck(kind):
    weight, scale = make(6, 16, kind)
    x = randn(2, 3, 16, dtype=torch.float64).requires_grad_()
    bias = randn(6, seed=1, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, b: fp8_matmul(x, weight, scale, b), (x, bias))
    dy = randn(5, 6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda dy: fp8_matmul_t(dy, weight, scale), dy)
    assert torch.autograd.gradgradcheck(lambda x: fp8_matmul(x, weight, scale), x)


# The schema check of `opcheck` cannot compare 8-bit floats; it sees the same bytes as uint8.
FLOAT8_CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(
    ("view", "utils"), [(torch.uint8, "ALL"), (torch.float8_e4m3fn, FLOAT8_CHECKS)]
)
def test_opcheck(view, utils):
    weight, scale = make(6, 16, "column", view=view)
    x, bias = randn(2, 3, 16).requires_grad_(), randn(6).requires_grad_()
    dy = randn(3, 6).requires_grad_()
    forward, backward = torch.ops.qerl.fp8_matmul.default, torch.ops.qerl.fp8_matmul_t.default
    opcheck(forward, (x, weight, scale, bias), test_utils=utils)
    opcheck(forward, (x, weight, scale, None), test_utils=utils)
    opcheck(backward, (dy, weight, scale), test_utils=utils)


def test_compiles_whole_and_works_on_meta_tensors():
    weight, scale = make(6, 16)
    x = randn(3, 16).requires_grad_()
    compiled = torch.compile(fp8_matmul, fullgraph=True, backend="aot_eager")
    (eager_grad,) = torch.autograd.grad(fp8_matmul(x, weight, scale).sum(), x)
    y = compiled(x, weight, scale)
    assert torch.equal(y, fp8_matmul(x, weight, scale))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], eager_grad)
    y = fp8_matmul(randn(2, 7, 16).to("meta"), weight.to("meta"), scale.to("meta"))
    assert y.shape == (2, 7, 6) and y.device.type == "meta"


def test_keeps_only_the_weight():
    weight, scale = make(6, 16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fp8_matmul(randn(3, 16).requires_grad_(), weight, scale, randn(6))
    assert {t.data_ptr() for t in kept} == {weight.data_ptr(), scale.data_ptr()}


@pytest.mark.parametrize("kernel", [False, True])
def test_strided_and_empty_inputs(kernel):
    weight, scale = make(6, 16)
    wide = randn(4, 40).to(BF16)

    def run(x):
        if not kernel:
            return fp8_matmul(x, weight, scale)
        with interpreting():
            return fp8_matmul(x, weight, scale)

    assert torch.equal(run(wide[:, 3:19]), run(wide[:, 3:19].contiguous()))
    assert run(wide[:0, :16]).shape == (0, 6)
    x = wide[:, :16].clone().requires_grad_()
    run(x).sum().backward()  # dy is one number with stride 0
    assert x.grad.shape == x.shape


def test_bytes_and_floats_are_one_weight():
    weight, scale = make(6, 16)
    x = randn(3, 16)
    assert torch.equal(
        fp8_matmul(x, weight, scale), fp8_matmul(x, weight.view(torch.uint8), scale[:, None])
    )


# --- refusals -----------------------------------------------------------------------------------


def test_check_fp8_weight():
    weight, scale = make(6, 16, view=torch.uint8)
    check_fp8_weight(weight, scale)
    check_fp8_weight(weight.view(torch.float8_e4m3fn), torch.zeros(1))
    for nan in (0x7F, 0xFF):
        bad = weight.clone()
        bad[2, 3] = nan
        with pytest.raises(ValueError, match="q_proj holds 1 NaN"):
            check_fp8_weight(bad, scale, "q_proj")
    for value in (float("nan"), float("inf"), -1.0):
        bad = scale.clone()
        bad[1] = value
        with pytest.raises(ValueError, match="scale of q_proj must be finite"):
            check_fp8_weight(weight, bad, "q_proj")


WEIGHT, SCALE = make(6, 32)
X = torch.zeros(3, 32, dtype=BF16)
BOTH = [
    ({"weight": WEIGHT.float()}, "weight must be float8_e4m3fn"),
    ({"weight": WEIGHT[0]}, "weight must be float8_e4m3fn"),
    ({"weight": make(6, 24)[0]}, "K must be a multiple of 16, found 24"),
    ({"weight": make(6, 48)[0][:, :32]}, "weight must be contiguous"),
    ({"scale": SCALE.double()}, "scale of weight must be float32"),
    ({"scale": SCALE[:5]}, r"scale of weight must be float32 \[1\], \[6\] or \[6, 1\]"),
    ({"scale": torch.ones(12)[::2]}, "scale of weight must be contiguous"),
    ({"scale": torch.ones(())}, "scale of weight must be float32"),
    ({"x": X[:, :16]}, r"x is bfloat16 \[3, 16\]"),
    ({"x": X.int()}, r"x is int32 \[3, 32\]"),
]
BIAS = [
    ({"bias": torch.zeros(5, dtype=BF16)}, r"bias must be bfloat16 \[6\]"),
    ({"bias": torch.zeros(6)}, "bias must be bfloat16"),
]
LAUNCHER = [
    ({"x": X.float()}, "x must be bfloat16 or float16"),
    ({"x": X[None]}, r"x must be \[\*, 32\]"),
    ({"x": torch.zeros(3, 64, dtype=BF16)[:, ::2]}, "x must be contiguous"),
    ({"x": X.to("meta")}, "weight must be on meta"),
    ({"scale": SCALE.to("meta")}, "scale must be on cpu"),
    ({"bias": torch.zeros(6, dtype=BF16, device="meta")}, "bias must be on cpu"),
    ({"bias": torch.zeros(6)}, "bias must be bfloat16"),
    ({"bias": torch.zeros(5, dtype=BF16)}, r"bias must be \[6\]"),
    ({"weight": WEIGHT.float()}, "weight must be float8_e4m3fn"),
    ({"scale": SCALE[:5]}, "scale of weight must be float32"),
]


def arguments(change):
    return {"x": X, "weight": WEIGHT, "scale": SCALE, "bias": None} | change


@pytest.mark.parametrize(("change", "message"), BOTH + BIAS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operator_refuses(device, change, message):
    call = {k: v if v is None else v.to(device) for k, v in arguments(change).items()}
    for name in ("weight", "scale"):  # moving a tensor closes its gaps
        if name in change and not change[name].is_contiguous():
            call[name] = torch.empty_strided(
                change[name].shape, change[name].stride(), dtype=change[name].dtype, device=device
            )
    with pytest.raises(ValueError, match=message):
        fp8_matmul(**call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dy": torch.zeros(3, 5)}, r"dy is float32 \[3, 5\]"),
        ({"scale": SCALE[:5]}, "scale of weight"),
        ({"weight": make(6, 24)[0]}, "multiple of 16"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gradient_operator_refuses(device, change, message):
    call = {"dy": torch.zeros(3, 6), "weight": WEIGHT, "scale": SCALE} | change
    with pytest.raises(ValueError, match=message):
        fp8_matmul_t(**{k: v.to(device) for k, v in call.items()})


@pytest.mark.parametrize(("change", "message"), LAUNCHER)
def test_launcher_refuses(change, message):
    with interpreting(), pytest.raises(ValueError, match=message):
        fp8.fp8_matmul(**arguments(change))


@pytest.mark.parametrize(
    ("dy", "message"),
    [
        (torch.zeros(3, 6), "dy must be bfloat16 or float16"),
        (torch.zeros(3, 5, dtype=BF16), r"dy must be \[\*, 6\]"),
        (torch.zeros(3, 12, dtype=BF16)[:, ::2], "dy must be contiguous"),
        (torch.zeros(3, 6, dtype=BF16, device="meta"), "weight must be on meta"),
    ],
)
def test_gradient_launcher_refuses(dy, message):
    with interpreting(), pytest.raises(ValueError, match=message):
        fp8.fp8_matmul_t(dy, WEIGHT, SCALE)


def test_launcher_refuses_a_cpu_an_odd_address_and_a_wide_copy():
    with pytest.raises(ValueError, match="weight must be on a CUDA device"):
        fp8.fp8_matmul(X, WEIGHT, SCALE)
    odd = torch.empty(6 * 32 + 16, dtype=torch.uint8)[1 : 6 * 32 + 1].view(6, 32)
    with interpreting(), pytest.raises(ValueError, match="multiple of 16"):
        fp8.fp8_matmul(X, odd, SCALE)
    with interpreting(), pytest.raises(ValueError, match="dtype must be bfloat16 or float16"):
        fp8.fp8_dequantize(WEIGHT, SCALE, torch.float32)


def test_frozen_tensors_must_not_require_grad():
    x = randn(3, 32).requires_grad_()
    with pytest.raises(ValueError, match="scale must not require grad"):
        fp8_matmul(x, WEIGHT, SCALE.clone().requires_grad_())


def test_one_variant_for_each_compilation():
    made = list(fp8.variants())
    names = [(v.kernel, v.tile, target) for v in made for target in v.targets]
    assert len(names) == len(set(names))
    for v in made:
        arguments_ = [*v.types, *v.constexprs]
        assert sorted(arguments_) == sorted(v.function.arg_names), v.kernel
