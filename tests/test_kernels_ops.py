"""The linear operators as PyTorch sees them: opcheck, meta, compile, autograd, batch invariance."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.library import opcheck

from qerl_kernels import dispatch, ops, quantize, reference, repack

QERL = torch.ops.qerl
N, K, R = 48, 144, 4
DOUBLE = torch.float64


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


@pytest.mark.parametrize("case", range(7))
def test_opcheck(case):
    op, arguments = cases(weight(), torch.float32)[case]
    opcheck(op.default, arguments)


@pytest.mark.parametrize("case", [0, 3])
def test_opcheck_of_the_launchers(case):
    op, arguments = cases(weight(repacked=True), torch.bfloat16)[case]
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


def loss(x, w, a, b):
    hidden = ops.nvfp4_lora_matmul(x, *w, None, a, b, 0.5)
    return (ops.nvfp4_matmul_t(hidden.relu(), *w, K) ** 2).mean()


def test_compiled_whole_it_gives_the_same():
    w = weight()
    results = []
    for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        x, (a, b) = randn(5, K, grad=True), adapter()
        value = call(x, w, a, b)
        value.backward()
        results.append([value.detach(), x.grad, a.grad, b.grad])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)


def test_derivatives_of_the_adapter():
    w = weight()
    x, bias = randn(3, K, dtype=DOUBLE, grad=True), randn(N, dtype=DOUBLE, grad=True)
    a, b = adapter(DOUBLE)

    def run(x, bias, a, b):
        return ops.nvfp4_lora_matmul(x, *w, bias, a, b, 0.5)

    truth = reference.matmul(x, w[0], w[1].view(torch.float8_e4m3fn), w[2], bias)
    torch.testing.assert_close(run(x, bias, a, b), truth + 0.5 * (x @ a.t()) @ b.t())
    assert torch.autograd.gradcheck(run, (x, bias, a, b), fast_mode=True)
    assert torch.autograd.gradcheck(
        lambda x, a: run(x, None, a, b.detach()), (x, a), fast_mode=True
    )


def test_launchers_and_cpu_give_the_same_gradients():
    """bf16: one rounding of each result, and of u and v, whose error the other factor carries."""
    found = []
    for repacked in (False, True):
        x, (a, b) = randn(17, K, dtype=torch.bfloat16, grad=True), adapter(torch.bfloat16)
        w = weight(repacked)
        if repacked:
            with ops.interpreting():
                loss(x, w, a, b).backward()
        else:
            loss(x, w, a, b).backward()
        found.append((x.grad, a.grad, b.grad))
    for cpu, kernel in zip(*found, strict=True):
        assert (cpu.double() - kernel.double()).norm() <= 2.0**-6 * cpu.double().norm()


@pytest.mark.parametrize("repacked", [False, True])
def test_backward_keeps_what_the_adapter_needs(repacked):
    saved: list[torch.Tensor] = []
    x, (a, b) = randn(17, K, dtype=torch.bfloat16, grad=True), adapter(torch.bfloat16)
    w = weight(repacked)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        if repacked:
            with ops.interpreting():
                ops.nvfp4_lora_matmul(x, *w, None, a, b, 0.5)
        else:
            ops.nvfp4_lora_matmul(x, *w, None, a, b, 0.5)
    assert sorted(tuple(t.shape) for t in saved) == sorted([(17, K), (17, R), (R, K), (N, R)])


# --- batch invariance ----------------------------------------------------------------------------


def products(x, dy, w, a, b) -> list[torch.Tensor]:
    """Forward, dX, and the adapter's forward and dX, of the rows given."""
    x = x.clone().requires_grad_()
    y = ops.nvfp4_lora_matmul(x, *w, None, a, b, 0.5)
    y.backward(dy)
    plain = [ops.nvfp4_matmul(x.detach(), *w), ops.nvfp4_matmul_t(dy, *w, K)]
    return [y.detach(), x.grad, *plain]


def check_invariance(w, dtype, rows: int, picked: list[int]) -> None:
    x, dy = randn(rows, K, dtype=dtype), randn(rows, N, seed=1, dtype=dtype)
    a, b = (t.detach() for t in adapter(dtype))
    together = products(x, dy, w, a, b)
    for row in picked:
        for size in (1, 5):
            part = slice(row, min(row + size, rows))
            alone = products(x[part], dy[part], w, a, b)
            for one, many in zip(alone, together, strict=True):
                assert torch.equal(one, many[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_on_the_cpu_does_not_depend_on_its_neighbours(dtype):
    with ops.batch_invariant():
        check_invariance(weight(), dtype, 300, [0, 1, 7, 16, 130, 299])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_in_a_kernel_does_not_depend_on_its_neighbours(dtype, monkeypatch):
    """Decode and prefill sizes through one tile: the same bits.

    NumPy's BLAS, under the interpreter, orders a row's sum by its place; a tensor core does not.
    """
    monkeypatch.setattr(
        "triton.runtime.interpreter.np.matmul",
        lambda a, b, dtype: np.einsum("ik,kj->ij", a, b, dtype=dtype),
    )
    with ops.interpreting(), ops.batch_invariant():
        check_invariance(weight(repacked=True), dtype, 70, [0, 33, 69])


def test_without_the_mode_tiles_and_splits_follow_the_batch():
    device = torch.device("cpu")
    sizes = (1, 17, 70)
    tiles = [dispatch.fused_tile("forward", m, device) for m in sizes]
    assert len(set(tiles)) == 3
    splits = [dispatch.splits(t, m, 4096, 40, device) for t, m in zip(tiles, sizes, strict=True)]
    assert splits[0][0] > 1
    with ops.batch_invariant():
        assert ops.is_batch_invariant()
        tiles = {dispatch.fused_tile("forward", m, device) for m in sizes}
        assert len(tiles) == 1 and not dispatch.is_large("forward", 10**6, device)
        assert dispatch.splits(tiles.pop(), 1, 4096, 40, device) == (1, 40)
    assert not ops.is_batch_invariant()


# --- dispatch ------------------------------------------------------------------------------------


def test_the_table_is_whole():
    table = dispatch.table()
    assert table["source"]
    for target in (80, 86, 89, 90, 100, 103, 120, 121):
        for direction in ("forward", "backward", "fp8_forward", "fp8_backward"):
            rows = dispatch.tiles(target, direction)
            assert [t.max_m for t in rows] == sorted({t.max_m for t in rows})
    for entry in table["targets"].values():
        for direction, index in entry["invariant"].items():
            assert 0 <= index < len(entry[direction])
    with pytest.raises(ValueError, match="no kernel runs on sm_75"):
        dispatch.tiles(75, "forward")


@pytest.mark.parametrize("groups", [1, 4, 7, 40, 216])
@pytest.mark.parametrize("n", [64, 5120, 27648])
def test_splits_cover_every_group_once(groups, n):
    tile = dispatch.tiles(90, "forward")[0]
    splits, each = dispatch.splits(tile, 1, n, groups, torch.device("cpu"))
    assert (splits - 1) * each < groups <= splits * each
    assert splits == 1 or each >= dispatch.table()["min_groups_per_split"]


@pytest.mark.parametrize("version, wide", [((3, 6), True), ((3, 7), True), ((3, 8), False)])
def test_lane_order_follows_triton_and_card(version, wide, monkeypatch):
    monkeypatch.setattr(dispatch, "_triton_version", lambda: version)
    for target in (80, 86, 89, 120, 121):
        assert dispatch.target_flags(target)["WIDE"] is wide
        assert dispatch.target_flags(target)["FMA"] is (target < 90)
        assert dispatch.target_flags(target)["BY_LANE"]
    for target in (90, 100):
        assert not dispatch.target_flags(target)["WIDE"]
        assert not dispatch.target_flags(target)["FMA"]


def test_the_operators_load_no_triton():
    code = "import sys, qerl_kernels.ops; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_interpreter_must_be_chosen_before_triton(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1"), ops.interpreting():
        pass
