"""The linear operators as PyTorch sees them: opcheck, meta, compile, autograd, batch invariance.

Shape letters: M tokens, N outputs, K inputs, R adapter rank.
"""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.library import opcheck

from qerl_kernels import dispatch, gemm, linear, ops, quantize, reference, repack

QERL = torch.ops.qerl
N, K, R = 48, 144, 4
BF16, DOUBLE = torch.bfloat16, torch.float64
CASES = range(7)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype=torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=DOUBLE).to(dtype).requires_grad_(grad)


def weight(repacked: bool = False):
    """On-disk tensors (scales as bytes: opcheck cannot compare 8-bit floats), or repacked ones."""
    packed, scale, g = quantize.quantize_absmax(torch.randn(N, K, generator=rng(9)))
    if repacked:
        return (*repack.repack(packed, scale), g)
    return packed, scale.view(torch.uint8), g


def adapter(dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(R, K, seed=2, dtype=dtype, grad=True), randn(N, R, seed=3, dtype=dtype, grad=True)


def cases(w, dtype):
    """(op, arguments): every operator with everything it can take, and with the least."""
    x, dy = randn(5, K, dtype=dtype, grad=True), randn(5, N, seed=1, dtype=dtype, grad=True)
    bias = randn(N, seed=4, dtype=dtype, grad=True)
    a, b = adapter(dtype)
    v = randn(5, R, seed=5, dtype=dtype, grad=True)
    return [
        (QERL.nvfp4_matmul, (x, *w, bias)),
        (QERL.nvfp4_matmul, (randn(2, 3, K, dtype=dtype), *w, None)),
        (QERL.nvfp4_matmul_t, (dy, *w, K)),
        (QERL.nvfp4_lora_matmul, (x, *w, bias, a, b, 0.5)),
        (QERL.nvfp4_lora_matmul, (randn(2, 3, K, dtype=dtype), *w, None, a, b, 0.5)),
        (QERL.nvfp4_lora_matmul_t, (dy, *w, v, a)),
        (QERL.nvfp4_narrow, (x, a.detach().t().contiguous().requires_grad_(), 0.5)),
    ]


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    op, arguments = cases(weight(), torch.float32)[case]
    opcheck(op.default, arguments)


@pytest.mark.parametrize(
    "case", [c if c in (0, 3) else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_opcheck_of_the_launchers(case):
    op, arguments = cases(weight(repacked=True), BF16)[case]
    with ops.interpreting():
        opcheck(op.default, arguments)


def test_meta_tensors_take_both_layouts():
    for w in (weight(), weight(repacked=True)):
        w = tuple(t.to("meta") for t in w)
        x = torch.empty(2, 3, K, dtype=torch.bfloat16, device="meta")
        a, b = (t.detach().to("meta", torch.bfloat16) for t in adapter())
        y = ops.nvfp4_lora_matmul(x, *w, None, a, b, 1.0)
        assert (y.shape, y.dtype, y.device.type) == ((2, 3, N), torch.bfloat16, "meta")
        assert ops.nvfp4_matmul_t(y, *w, K).shape == x.shape
        with pytest.raises(ValueError, match=r"a \[R, 144\] and b \[48, R\]"):
            ops.nvfp4_lora_matmul(x, *w, None, a, b[1:], 1.0)
        with pytest.raises(ValueError, match="a and b must be bfloat16 like x"):
            ops.nvfp4_lora_matmul(x, *w, None, a.float(), b, 1.0)
        with pytest.raises(ValueError, match="dy must be a float"):
            ops.nvfp4_matmul_t(x, *w, K)


def loss(x, w, bias, a, b):
    """Every operator forward; their gradients call every one of them again."""
    hidden = ops.nvfp4_lora_matmul(x, *w, bias, a, b, 0.5)
    back = ops.nvfp4_matmul_t(hidden.relu(), *w, K)
    return (ops.nvfp4_matmul(back, *w, bias).float() ** 2).mean()


@pytest.mark.parametrize("repacked", [False, True])
def test_compiled_whole_it_gives_the_same(repacked):
    w, dtype = weight(repacked), BF16 if repacked else torch.float32
    results = []
    for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        x, (a, b) = randn(5, K, dtype=dtype, grad=True), adapter(dtype)
        bias = randn(N, seed=4, dtype=dtype, grad=True)
        with ops.interpreting() if repacked else contextlib.nullcontext():
            value = call(x, w, bias, a, b)
            value.backward()
        results.append([value.detach(), x.grad, bias.grad, a.grad, b.grad])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled) and eager.abs().max() > 0


def test_derivatives_of_the_adapter():
    w = weight()
    x, bias = randn(3, K, dtype=DOUBLE, grad=True), randn(N, dtype=DOUBLE, grad=True)
    a, b = adapter(DOUBLE)

    def run(x, bias, a, b):
        return ops.nvfp4_lora_matmul(x, *w, bias, a, b, 0.5)

    truth = reference.matmul(x, w[0], w[1].view(torch.float8_e4m3fn), w[2], bias)
    torch.testing.assert_close(run(x, bias, a, b), truth + 0.5 * (x @ a.t()) @ b.t())
    assert torch.autograd.gradcheck(run, (x, bias, a, b))
    assert torch.autograd.gradcheck(lambda x, a: run(x, None, a, b.detach()), (x, a))
    assert torch.autograd.gradgradcheck(run, (x, bias, a, b), fast_mode=True)


def test_derivatives_of_the_operators_that_backward_calls():
    w = weight()
    dy, v = randn(3, N, dtype=DOUBLE, grad=True), randn(3, R, seed=5, dtype=DOUBLE, grad=True)
    x, (a, b) = randn(3, K, dtype=DOUBLE, grad=True), adapter(DOUBLE)
    for run, arguments in (
        (lambda dy, v, a: QERL.nvfp4_lora_matmul_t(dy, *w, v, a), (dy, v, a)),
        (lambda dy: QERL.nvfp4_matmul_t(dy, *w, K), (dy,)),
        (lambda x, a: QERL.nvfp4_narrow(x, a.t(), 0.5), (x, a)),
        (lambda dy, b: QERL.nvfp4_narrow(dy, b, 0.5), (dy, b)),
    ):
        assert torch.autograd.gradcheck(run, arguments, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, arguments, fast_mode=True)


HALF_ULP, EPS = 2.0**-8, 2.0**-24  # of bf16 and fp32, relative


def bounded(found, truth, carried, sums, terms, roundings=1) -> None:
    """|error| ≤ carried + fp32 accumulation of `terms` terms + bf16 roundings of the result.

    carried: the error of an input that was itself rounded. sums: Σ|terms|.
    """
    inner = carried + (terms + 4) * EPS * sums
    allowed = inner + roundings * HALF_ULP * (truth.abs() + inner)
    assert found.shape == truth.shape
    excess = (found.double() - truth).abs() - allowed
    assert (excess <= 0).all(), excess.max().item()


@pytest.mark.parametrize("repacked", [False, True])
def test_results_and_gradients_of_the_adapter_against_float64(repacked):
    """bf16: u and v are rounded twice (product, scaling) and the other factor carries their error.

    A launcher rounds y and dx once. The CPU rounds y before and after the adapter's product, whose
    own rounding may come in between: never more than three, of numbers no larger than |base| + |y|.
    """
    w, scaling = weight(repacked), 0.7
    x, (a, b) = randn(17, K, dtype=BF16, grad=True), adapter(BF16)
    bias, dy = randn(N, seed=4, dtype=BF16, grad=True), randn(17, N, seed=1, dtype=BF16)
    with ops.interpreting() if repacked else contextlib.nullcontext():
        y = ops.nvfp4_lora_matmul(x, *w, bias, a, b, scaling)
        y.backward(dy)
    packed, scale, g = weight()
    dense = reference.dequantize(packed, scale.view(torch.float8_e4m3fn), g)
    x_, a_, b_, z_, dy_ = (t.detach().double() for t in (x, a, b, bias, dy))

    def factor(left, right, terms):
        """scaling · left @ right and what two bf16 roundings and its sum may have cost it."""
        value = scaling * left @ right
        sums = scaling * left.abs() @ right.abs()
        return value, 2.02 * HALF_ULP * value.abs() + 2 * (terms + 4) * EPS * sums

    (u, u_error), (v, v_error) = factor(x_, a_.T, K), factor(dy_, b_, N)
    base, sums = x_ @ dense.T + z_, x_.abs() @ dense.abs().T + z_.abs()
    cpu = 0 if repacked else 2 * HALF_ULP
    carried = u_error @ b_.abs().T + cpu * (base.abs() + u.abs() @ b_.abs().T)
    bounded(y.detach(), base + u @ b_.T, carried, sums + u.abs() @ b_.abs().T, K + R)
    base, sums = dy_ @ dense, dy_.abs() @ dense.abs()
    carried = v_error @ a_.abs() + cpu * (base.abs() + v.abs() @ a_.abs())
    bounded(x.grad, base + v @ a_, carried, sums + v.abs() @ a_.abs(), N + R)
    rows = len(x_)
    bounded(a.grad, v.T @ x_, v_error.T @ x_.abs(), v.abs().T @ x_.abs(), rows)
    bounded(b.grad, dy_.T @ u, dy_.abs().T @ u_error, dy_.abs().T @ u.abs(), rows)
    bounded(bias.grad, dy_.sum(0), 0, dy_.abs().sum(0), rows)


def wide_copies() -> int:
    """Tensors alive that could be the layer in 16 or 32 bits."""
    gc.collect()
    return sum(
        issubclass(type(t), torch.Tensor) and t.is_floating_point() and t.numel() >= N * K
        for t in gc.get_objects()
    )


@pytest.mark.parametrize("repacked", [False, True])
def test_backward_keeps_what_the_adapter_needs(repacked):
    """x, u, A and B are saved, and on a GPU no 16-bit copy of the layer exists afterwards."""
    ops.clear_cache()
    saved: list[torch.Tensor] = []
    x, (a, b) = randn(17, K, dtype=BF16, grad=True), adapter(BF16)
    w = weight(repacked)
    before = wide_copies() if repacked else 0
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        ops.interpreting() if repacked else contextlib.nullcontext(),
    ):
        y = ops.nvfp4_lora_matmul(x, *w, None, a, b, 0.5)
    assert sorted(tuple(t.shape) for t in saved) == sorted([(17, K), (17, R), (R, K), (N, R)])
    assert {t.data_ptr() for t in saved} >= {t.data_ptr() for t in (x, a, b)}
    assert (ops.cache_bytes() > 0) is not repacked
    assert y.grad_fn is not None and (not repacked or wide_copies() == before)
    ops.clear_cache()


# --- batch invariance ----------------------------------------------------------------------------


@pytest.fixture
def plain_sums(monkeypatch):
    """NumPy's BLAS, under the interpreter, orders a row's sum by its place; a tensor core does not.

    An einsum adds along K in one order, within what one instruction of the kernel takes.
    """
    monkeypatch.setattr(
        "triton.runtime.interpreter.np.matmul",
        lambda a, b, dtype: np.einsum("ik,kj->ij", a, b, dtype=dtype),
    )


def products(x, dy, w, a, b) -> list[torch.Tensor]:
    """Forward, dX, and the adapter's forward and dX, of the rows given."""
    x = x.clone().requires_grad_()
    y = ops.nvfp4_lora_matmul(x, *w, None, a, b, 0.5)
    y.backward(dy)
    plain = [ops.nvfp4_matmul(x.detach(), *w), ops.nvfp4_matmul_t(dy, *w, K)]
    return [y.detach(), x.grad, *plain]


def check_invariance(w, dtype, rows: int, parts: list[slice]) -> None:
    x, dy = randn(rows, K, dtype=dtype), randn(rows, N, seed=1, dtype=dtype)
    a, b = (t.detach() for t in adapter(dtype))
    together = products(x, dy, w, a, b)
    for part in parts:
        alone = products(x[part], dy[part], w, a, b)
        for one, many in zip(alone, together, strict=True):
            assert torch.equal(one, many[part])


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_a_row_on_the_cpu_does_not_depend_on_its_neighbours(dtype):
    """fp32 sums of this very data differ without the mode (BLAS has a path for each M)."""
    starts = (0, 1, 7, 15, 16, 130, 299)
    parts = [slice(s, min(s + size, 300)) for s in starts for size in (1, 5, 17, 70)]
    with ops.batch_invariant():
        check_invariance(weight(), dtype, 300, parts)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_a_row_in_a_kernel_does_not_depend_on_its_neighbours(dtype, plain_sums):
    """Decode and prefill sizes through one tile: the same bits."""
    with ops.interpreting(), ops.batch_invariant():
        parts = [slice(0, 1), slice(33, 34), slice(53, 70)]
        check_invariance(weight(repacked=True), dtype, 70, parts)


def cancelling(rows: int):
    """x [rows, 1152] and a repacked weight [32, 1152] whose sum is what its order made of it.

    The last group of 128 takes back what the first one brought, 2¹⁸ times the size of the rest.
    """
    packed, scale, g = quantize.quantize_absmax(torch.randn(32, 1152, generator=rng(9)))
    packed[:, -64:] = packed[:, :64]
    scale.view(torch.uint8)[:, -8:] = scale.view(torch.uint8)[:, :8]
    x = randn(rows, 1152, dtype=BF16)
    x[:, :128] *= 2.0**18
    x[:, -128:] = -x[:, :128]
    order = dispatch.lane_order(x.device)
    return x, (*repack.repack(packed, scale, order=order), g)


def test_the_mode_is_what_keeps_the_order_of_a_sum(plain_sums, monkeypatch):
    """An sm_80 of one multiprocessor splits K in two for one row and not at all for 33."""
    monkeypatch.setattr(dispatch, "target_of", lambda device: 80)
    monkeypatch.setattr(dispatch, "_multiprocessors", lambda device: 1)
    x, w = cancelling(33)
    with ops.interpreting():
        free = [ops.nvfp4_matmul(rows, *w)[-1] for rows in (x, x[-1:])]
        with ops.batch_invariant():
            held = [ops.nvfp4_matmul(rows, *w)[-1] for rows in (x, x[-1:])]
    assert not torch.equal(*free)
    assert torch.equal(*held)


def test_in_the_mode_the_adapter_keeps_off_blas(monkeypatch):
    """cuBLAS chooses by shape: both of the adapter's first products take the fixed tile instead."""
    ran: list[tuple[int, ...]] = []

    def recorded(x, factor, alpha):
        ran.append(tuple(factor.shape))
        return gemm.gemm(x, factor, alpha)

    monkeypatch.setattr(linear, "gemm", recorded)
    x, (a, b), w = randn(3, K, dtype=BF16, grad=True), adapter(BF16), weight(repacked=True)
    with ops.interpreting():
        ops.nvfp4_lora_matmul(x, *w, None, a, b, 0.5).sum().backward()
        assert ran == []
        with ops.batch_invariant():
            ops.nvfp4_lora_matmul(x, *w, None, a, b, 0.5).sum().backward()
    assert ran == [(K, R), (N, R)]


# --- imports -------------------------------------------------------------------------------------


def test_the_operators_load_no_triton():
    code = "import sys, qerl_kernels.ops; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_interpreter_must_be_chosen_before_triton(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1"), ops.interpreting():
        pass


@pytest.mark.parametrize("repacked", [False, True])
def test_an_adapter_that_does_not_fit_is_refused_on_both_paths(repacked):
    """Eagerly, where no meta tensors look first."""
    w, x = weight(repacked), randn(3, K, dtype=torch.bfloat16)
    a, b = (t.detach() for t in adapter(torch.bfloat16))
    dy, v = randn(3, N, dtype=torch.bfloat16), randn(3, R, dtype=torch.bfloat16)

    def refused(message: str, op, *arguments) -> None:
        path = ops.interpreting() if repacked else contextlib.nullcontext()
        with path, pytest.raises(ValueError, match=message):
            op(*arguments)

    forward, backward = ops.nvfp4_lora_matmul, QERL.nvfp4_lora_matmul_t.default
    refused(r"a \[R, 144\] and b \[48, R\]", forward, x, *w, None, a, b[:, 1:], 1.0)
    refused("a and b must be bfloat16 like x", forward, x, *w, None, a.float(), b, 1.0)
    refused("rank must be at least 1, found 0", forward, x, *w, None, a[:0], b[:, :0], 1.0)
    refused("v and a must be bfloat16", backward, dy, *w, v[:, 1:], a)
    refused("v and a must be bfloat16", backward, dy, *w, v.float(), a)
