"""RMSNorm with noise against transformers' bits, and the kernel against float64."""

import pytest
import torch
from torch.library import opcheck
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from qerl_kernels import norm, reference
from qerl_kernels.launch import interpreting
from qerl_kernels.ops.norm import rms_norm

EPS = 1e-5
LLAMA, GEMMA, PLAIN = (0.0, True), (1.0, False), (0.0, False)  # offset, cast_first
MODULES = [
    (LlamaRMSNorm, LLAMA),
    (MistralRMSNorm, LLAMA),
    (Qwen2RMSNorm, LLAMA),
    (Qwen3RMSNorm, LLAMA),
    (Gemma2RMSNorm, GEMMA),
    (Gemma3RMSNorm, GEMMA),
    (Qwen3_5RMSNorm, GEMMA),
    (Olmo2RMSNorm, PLAIN),
]
FAMILIES = [pytest.param(c, f, id=c.__name__[: -len("RMSNorm")]) for c, f in MODULES]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NOISES = ["clean", "one", "rows"]
U = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # unit roundoff
TINY = {torch.float32: 1e-30, torch.float16: 2.0**-24, torch.bfloat16: 1e-30}  # below: subnormal


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=rng(seed)).to(dtype)


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def make_noise(kind, rows, d):
    """The noise arguments: Z and its row index."""
    if kind == "clean":
        return None, None
    if kind == "one":
        return 0.1 * randn(d, seed=7), None
    index = torch.randint(0, 3, (rows,), generator=rng(8)).int()
    return 0.1 * randn(3, d, seed=7), index


def make_module(cls, d, dtype):
    module = cls(d, eps=EPS).to(dtype).requires_grad_(False)
    module.weight.copy_(randn(d, seed=3))
    module.weight[0] = -0.0  # its sign must survive
    return module


def exact_rows(rows, d, dtype, seed=0):
    """Rows of small integers: any order of summing their squares is exact.

    Only those whose mean is the same divided by d (PyTorch on CPU) or times 1/d (on CUDA).
    """
    x = torch.randint(-7, 8, (8 * rows, d), generator=rng(seed)).float()
    x[:, 0] = 1.0
    total = x.square().sum(-1)
    x = x[total / d == total * torch.tensor(1 / d)]
    assert len(x) >= rows
    return x[:rows].to(dtype)


# --- the CPU path -------------------------------------------------------------------------------


@pytest.mark.parametrize("w_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cls", "family"), FAMILIES)
def test_cpu_has_transformers_bits(cls, family, dtype, w_dtype):
    for d in (1, 15, 128, 576, 896):
        module, x = make_module(cls, d, w_dtype), randn(2, 3, d, seed=d, dtype=dtype)
        found = rms_norm(x, module.weight, None, None, EPS, *family)
        assert same_bits(found, module(x))


@pytest.mark.parametrize("layout", ["sliced", "transposed"])
def test_cpu_has_transformers_bits_for_strided_input(layout):
    wide = randn(4, 5, 200, dtype=torch.bfloat16)
    x = wide[..., 30:158] if layout == "sliced" else wide[..., :128].transpose(0, 1)
    module = make_module(LlamaRMSNorm, 128, torch.bfloat16)
    assert same_bits(rms_norm(x, module.weight, None, None, EPS), module(x))


def test_by_hand():
    """x / rms(x) = [3, 4] / sqrt(12.5); weights 1 + [0.5, -1] and 1 + [0, 1]."""
    x, w = torch.tensor([[3.0, 4.0], [3.0, 4.0]]), torch.ones(2)
    z, index = torch.tensor([[0.5, -1.0], [0.0, 1.0]]), torch.tensor([1, 0], dtype=torch.int32)
    unit = 1 / 12.5**0.5
    expected = torch.tensor([[3 * unit, 8 * unit], [4.5 * unit, 0.0]])
    torch.testing.assert_close(rms_norm(x, w, z, index, eps=0.0), expected)
    torch.testing.assert_close(rms_norm(x[0], w, z[0], eps=0.0), expected[1])
    torch.testing.assert_close(rms_norm(x[0], w - 1, z[0], None, 0.0, 1.0, False), expected[1])


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("family", [LLAMA, GEMMA])
def test_gradcheck(family, kind):
    x, w = randn(5, 6, dtype=torch.float64).requires_grad_(), randn(6, seed=1, dtype=torch.float64)
    z, index = make_noise(kind, 5, 6)
    torch.autograd.gradcheck(lambda x: rms_norm(x, w, z, index, EPS, *family), x)


# --- the kernel, interpreted --------------------------------------------------------------------


def forward_bound(truth, x, weight, noise, index, offset, dtype, casts):
    """How far y may be from float64.

    The sum of d squares has relative error at most (d + 1)u in any order, the mean and eps add
    2u, the root halves that and adds 2u for its own; x̂, 2 sums for the weight and the product: 4u.
    Then each rounding to a 16-bit type.
    """
    size = reference.rms_norm(x.abs(), weight.abs(), noise_abs(noise), index, EPS, abs(offset))
    relative = ((x.shape[-1] + 3) / 2 + 6) * U[torch.float32] + casts * 1.01 * U[dtype]
    return relative * size + TINY[dtype]


def noise_abs(noise):
    return None if noise is None else noise.abs()


def backward_bound(dy, x, weight, noise, index, offset):
    """How far dx may be from float64 before its output rounding.

    dx = r(g − x̂·c), c = mean(g·x̂). r is within δ = d/2 + 6 roundings (see above), g within 4;
    a sum of d products adds d; every other operation one each.
    """
    d = x.shape[-1]
    delta = d / 2 + 6
    x64, w = x.double().abs(), weight.double().abs() + abs(offset)
    if noise is not None:
        w = w + (noise if index is None else noise[index]).double().abs()
    r = (x64.square().mean(-1, keepdim=True) + EPS).rsqrt()
    unit, g = x64 * r, dy.double().abs() * w
    along = unit * (unit * g).mean(-1, keepdim=True)
    return U[torch.float32] * r * ((delta + 6) * g + (d + 3 * delta + 12) * along)


SIZES = [(1, 1), (1, 15), (17, 17), (15, 128), (17, 200), (3, 576), (2, 1040)]
LONG = [(17, 896), (3, 3584), (2, 5120), (2, 8192), (1, 16384), (33, 64)]


def check_against_float64(rows, d, dtype, family, kind):
    offset, cast_first = family
    x, w = 3 * randn(rows, d, dtype=dtype), randn(d, seed=1, dtype=dtype)
    dy = randn(rows, d, seed=2, dtype=dtype)
    z, index = make_noise(kind, rows, d)
    x.requires_grad_()
    with interpreting():
        y = rms_norm(x, w, z, index, EPS, offset, cast_first)
        (dx,) = torch.autograd.grad(y, x, dy)
    x = x.detach()
    x64 = x.double().requires_grad_()
    truth = reference.rms_norm(x64, w, z, index, EPS, offset)
    (dx64,) = torch.autograd.grad(truth, x64, dy.double())
    assert y.dtype == dx.dtype == dtype
    casts = 2 if cast_first and z is None else 1
    bound = forward_bound(truth, x, w, z, index, offset, dtype, casts)
    assert ((y.double() - truth).abs() <= bound).all()
    bound = backward_bound(dy, x, w, z, index, offset) + 1.01 * U[dtype] * dx64.abs() + TINY[dtype]
    assert ((dx.double() - dx64).abs() <= bound).all()


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("family", [LLAMA, GEMMA], ids=["llama", "gemma"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_against_float64(dtype, family, kind):
    for rows, d in SIZES:
        check_against_float64(rows, d, dtype, family, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("family", [LLAMA, GEMMA], ids=["llama", "gemma"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_against_float64_model_sizes(dtype, family, kind):
    for rows, d in LONG:
        check_against_float64(rows, d, dtype, family, kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cls", "family"), FAMILIES)
def test_kernel_has_transformers_bits_when_the_sum_is_exact(cls, family, dtype):
    """Nothing but the order of one sum separates them; here every order gives the same sum."""
    for d in (128, 200, 1024, 5120):
        module, x = make_module(cls, d, dtype), exact_rows(5, d, dtype)
        with interpreting():
            found = rms_norm(x, module.weight, None, None, EPS, *family)
        assert same_bits(found, module(x))


@pytest.mark.parametrize("cls", [LlamaRMSNorm, Gemma3RMSNorm])
def test_kernel_types_when_weight_and_input_differ(cls):
    """Llama's norm returns the wider of the two types, Gemma's the input's: to the bit."""
    family = LLAMA if cls is LlamaRMSNorm else GEMMA
    for dtype in DTYPES:
        for w_dtype in DTYPES:
            module, x = make_module(cls, 128, w_dtype), exact_rows(3, 128, dtype)
            with interpreting():
                found = rms_norm(x, module.weight, None, None, EPS, *family)
            assert same_bits(found, module(x))


@pytest.mark.parametrize("kind", ["one", "rows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_noisy_kernel_and_cpu_agree_to_the_bit_when_the_sum_is_exact(dtype, kind):
    x, w = exact_rows(5, 200, dtype), randn(200, seed=1, dtype=dtype)
    z, index = make_noise(kind, 5, 200)
    with interpreting():
        found = rms_norm(x, w, z, index, EPS)
    assert same_bits(found, rms_norm(x, w, z, index, EPS))


def test_noise_below_bfloat16_resolution_reaches_the_product():
    """w = 1 and Z = 2^-9, which bfloat16 cannot add: a float32 output shows it in full."""
    x, w = exact_rows(2, 128, torch.float32), torch.ones(128, dtype=torch.bfloat16)
    z = torch.full((128,), 2.0**-9)
    with interpreting():
        clean = rms_norm(x, w, torch.zeros(128), None, EPS)
        noisy = rms_norm(x, w, z, None, EPS)
    torch.testing.assert_close(noisy, clean * (1 + 2.0**-9), rtol=2.0**-23, atol=0)


def test_kernel_takes_rows_that_lie_apart_and_spread_gradients():
    wide = randn(2, 3, 200, dtype=torch.bfloat16)
    w = randn(128, seed=1, dtype=torch.bfloat16)
    for x in (wide[..., 30:158], wide[..., :128].transpose(0, 1), wide[..., ::2][..., :96]):
        apart, dense = x.detach().requires_grad_(), x.contiguous().requires_grad_()
        weight = w[: x.shape[-1]]
        with interpreting():
            y, twin = rms_norm(apart, weight), rms_norm(dense, weight)
            y.sum().backward()  # the gradient has stride 0 everywhere
            twin.backward(torch.ones_like(twin))
        assert same_bits(y, twin) and same_bits(apart.grad, dense.grad)


def test_no_rows():
    x = torch.zeros(2, 0, 16, requires_grad=True)
    with interpreting():
        y = rms_norm(x, torch.ones(16))
        y.sum().backward()
    assert y.shape == x.grad.shape == x.shape


@pytest.mark.parametrize("kernel", [False, True], ids=["cpu", "kernel"])
@pytest.mark.parametrize("d", [200, 1500])
def test_a_row_is_the_same_whatever_is_beside_it(d, kernel):
    x, w = randn(17, d, dtype=torch.bfloat16), randn(d, seed=1, dtype=torch.bfloat16)
    dy = randn(17, d, seed=2, dtype=torch.bfloat16)
    z, index = make_noise("rows", 17, d)

    def run(rows):
        part = x[rows].requires_grad_()
        y = rms_norm(part, w, z, index[rows], EPS)
        return y.detach(), torch.autograd.grad(y, part, dy[rows])[0]

    y, dx = run(slice(None)) if not kernel else interpreted(run, slice(None))
    for i in (0, 6, 7, 16):
        alone = slice(i, i + 1)
        y1, dx1 = run(alone) if not kernel else interpreted(run, alone)
        assert same_bits(y1, y[alone]) and same_bits(dx1, dx[alone])


def interpreted(function, *args):
    with interpreting():
        return function(*args)


# --- the operator -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("family", [LLAMA, GEMMA])
def test_opcheck(family, kind):
    x, w = randn(2, 3, 16).requires_grad_(), randn(16, seed=1)
    z, index = make_noise(kind, 6, 16)
    opcheck(torch.ops.qerl.rms_norm.default, (x, w, z, index, EPS, *family))
    strided = randn(3, 2, 16, dtype=torch.bfloat16).transpose(0, 1).requires_grad_()
    opcheck(torch.ops.qerl.rms_norm.default, (strided, w, z, index, EPS, *family))
    rstd = torch.ops.qerl.rms_norm(x, w, z, index, EPS, *family)[1].detach()
    args = (randn(2, 3, 16), strided.detach(), rstd, w, z, index, family[0])
    opcheck(torch.ops.qerl.rms_norm_backward.default, args)


def test_only_input_and_one_number_a_row_are_kept():
    x, w, z = randn(4, 16).requires_grad_(), randn(16), randn(16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x, w, z)
    assert sorted(t.numel() for t in kept) == [4, 16, 16, 64]
    assert {t.data_ptr() for t in kept} >= {x.data_ptr(), w.data_ptr(), z.data_ptr()}


def test_meta_and_compile():
    x = torch.empty(2, 3, 16, dtype=torch.bfloat16, device="meta")
    y = rms_norm(x, torch.empty(16, device="meta"))
    assert y.shape == x.shape and y.dtype == torch.float32
    x, w, z = randn(4, 16).requires_grad_(), randn(16), randn(16)
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(x, w, z).square().sum(), x)
    (expected,) = torch.autograd.grad(rms_norm(x, w, z).square().sum(), x)
    assert same_bits(found, expected)


def test_frozen_arguments_and_second_derivatives_are_refused():
    x, w, z = randn(4, 16).requires_grad_(), randn(16), randn(16)
    with pytest.raises(ValueError, match="weight must not require grad"):
        rms_norm(x, w.clone().requires_grad_())
    with pytest.raises(ValueError, match="noise must not require grad"):
        rms_norm(x, w, z.clone().requires_grad_())
    with torch.no_grad():
        assert same_bits(rms_norm(x, w.clone().requires_grad_()), rms_norm(x, w))
    (dx,) = torch.autograd.grad(rms_norm(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(ValueError, match="no second derivative"):
        dx.sum().backward()


def test_variants_are_every_tile_of_every_size():
    tiles = {norm._tile(d) for d in range(1, norm.MAX_FEATURES + 1)}
    offered = list(norm.variants())
    for kernel in ("rms_norm", "rms_norm_backward"):
        found = {
            (v.constexprs["ROWS"], v.constexprs["BLOCK"], v.num_warps)
            for v in offered
            if v.kernel == kernel
        }
        assert found == tiles
    for v in offered:
        assert set(v.types) | set(v.constexprs) == set(v.function.arg_names)
