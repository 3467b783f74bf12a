"""`gpu_check`'s section `numbers`: every kernel against float64 on the device at hand.

Bound of a result: half a unit in the last place of its type, plus accumulation of n terms,
n · ACCUMULATE · Σ|term| (tensor cores may truncate where they add, so more than fp32's 2⁻²⁴).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qerl_kernels import backward, dispatch, matmul, ops, quantize, reference
from qerl_kernels import unpack as unpacking

HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ACCUMULATE = 2.0**-22
Check = tuple[str, Callable[[], float]]


def excess(found: Tensor, truth: Tensor, sums: Tensor, terms: int) -> float:
    """Largest error as a share of what is allowed: at most 1 is right."""
    truth, sums = truth.to(found.device), sums.to(found.device)
    inner = (terms + 8) * ACCUMULATE * sums
    allowed = inner + HALF_ULP[found.dtype] * (truth.abs() + inner) + 1e-7
    return float(((found.double() - truth).abs() / allowed).max())


class Weight:
    """A random NVFP4 layer [n, k]: as on disk, repacked for the device, and in float64."""

    def __init__(self, n: int, k: int, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        disk = quantize.quantize_absmax(torch.randn(n, k, generator=generator))
        packed, scale, divisor = (t.to(device) for t in disk)
        self.disk = packed, scale, divisor
        self.dense = reference.dequantize(*disk)
        self.packed = (*ops.repack(packed, scale, divisor), divisor)
        self.k = k


def randn(*shape: int, seed: int, like: tuple[torch.device, torch.dtype]) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(*like)


def forward_error(tile: dispatch.Tile, device: torch.device, dtype: torch.dtype) -> float:
    m, n, k, r, like = tile.bm + 1, tile.bn + 3, 9 * 128 + 16, 8, (device, dtype)
    w = Weight(n, k, device)
    x, u = randn(m, k, seed=1, like=like), randn(m, r, seed=2, like=like)
    b, z = randn(n, r, seed=3, like=like), randn(n, seed=4, like=like)
    y = matmul.nvfp4_matmul(x, *w.packed, z, u, b, tile=tile)
    x, u, b, z = (t.double().cpu() for t in (x, u, b, z))
    sums = x.abs() @ w.dense.abs().T + u.abs() @ b.abs().T + z.abs()
    return excess(y, x @ w.dense.T + u @ b.T + z, sums, k + r)


def backward_error(tile: dispatch.Tile, device: torch.device, dtype: torch.dtype) -> float:
    m, n, r, like = tile.bm + 1, 2 * tile.bn + 3, 8, (device, dtype)
    k = 128 * tile.groups + 16
    w = Weight(n, k, device)
    dy, v = randn(m, n, seed=1, like=like), randn(m, r, seed=2, like=like)
    a = randn(r, k, seed=3, like=like)
    dx = backward.nvfp4_matmul_t(dy, *w.packed, k, v, a, tile=tile)
    dy, v, a = (t.double().cpu() for t in (dy, v, a))
    sums = dy.abs() @ w.dense.abs() + v.abs() @ a.abs()
    return excess(dx, dy @ w.dense + v @ a, sums, n + r)


def unpack_error(device: torch.device, dtype: torch.dtype) -> float:
    """0 when exact, else the number of weights that differ."""
    w = Weight(67, 272, device)
    dense = unpacking.unpack(w.packed[0], w.packed[1], w.k, dtype)
    return float(
        (dense.double() * 256 != quantize.unscaled(w.disk[0], w.disk[1], torch.float64)).sum()
    )


def fp8_error(device: torch.device, dtype: torch.dtype) -> float:
    n, k = 131, 272
    weight = randn(n, k, seed=0, like=(torch.device("cpu"), torch.float32))
    codes, scale = weight.to(torch.float8_e4m3fn), torch.full((1,), 0.37)
    x = randn(17, k, seed=1, like=(device, dtype))
    y = ops.fp8_matmul(x, codes.to(device), scale.to(device))
    wide = x.double().cpu()
    truth = reference.fp8_matmul(wide, codes, scale)
    return excess(y, truth, wide.abs() @ (codes.double().abs() * 0.37).T, k)


def norm_error(device: torch.device, dtype: torch.dtype) -> float:
    """Against transformers' own module on the same device: units of one rounding."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = randn(33, 1024, seed=1, like=(device, dtype))
    module = LlamaRMSNorm(1024, eps=1e-6).to(device, dtype)
    module.weight.data.copy_(randn(1024, seed=2, like=(device, dtype)))
    truth = module(x).detach().double()
    y = ops.rms_norm(x, module.weight.detach(), eps=1e-6)
    # Another order of the mean's sum can move 1/rms by a bit, and x̂ and y by one rounding each.
    allowed = 4 * HALF_ULP[dtype] * truth.abs() + 1e-7
    return float(((y.double() - truth).abs() / allowed).max())


def logprob_error(device: torch.device, dtype: torch.dtype) -> float:
    hidden = randn(37, 256, seed=1, like=(device, dtype))
    weight = randn(1003, 256, seed=2, like=(device, dtype)) * 0.2
    targets = torch.arange(37, device=device) * 27
    logp, entropy = ops.linear_logprob(hidden, weight, targets, 1 / 0.7, 15.0)
    cpu = (hidden.cpu(), weight.cpu(), targets.cpu())
    truth = reference.linear_logprob(*cpu, 1 / 0.7, 15.0)[:2]
    errors = [
        (f.double().cpu() - t).abs().max() for f, t in zip((logp, entropy), truth, strict=True)
    ]
    return float(max(errors)) / 2e-4


def attention_error(device: torch.device, dtype: torch.dtype) -> float:
    """Three rows of one group behind a prompt of 37 tokens, own tokens in pages of 16."""
    like = (device, dtype)
    q = randn(3, 8, 64, seed=1, like=like)
    k_pages, v_pages = (randn(12, 16, 2, 64, seed=s, like=like) for s in (2, 3))

    def ints(*values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    arguments = (
        q, k_pages, v_pages, ints([3, 4], [5, 6], [7, 8]), ints(37 + 20, 37, 37 + 5),
        ints(0, 3), ints([0, 1, 2]), ints(37),
    )  # fmt: skip
    out, _ = ops.decode_attention(*arguments, scale=0.125)
    truth, _ = reference.decode_attention(*(t.cpu() for t in arguments), scale=0.125)
    # Values are weighted averages: one rounding of the weights and one of the result.
    return float((out.double().cpu() - truth.double()).abs().max()) / (4 * HALF_ULP[dtype])


def invariance_error(device: torch.device, dtype: torch.dtype) -> float:
    """Rows that differ by one bit between a batch of 70 and a batch of their own."""
    w = Weight(131, 272, device)
    x, dy = (
        randn(70, 272, seed=1, like=(device, dtype)),
        randn(70, 131, seed=2, like=(device, dtype)),
    )
    with ops.batch_invariant():
        y, dx = ops.nvfp4_matmul(x, *w.packed), ops.nvfp4_matmul_t(dy, *w.packed, w.k)
        wrong = 0
        for i in (0, 33, 69):
            one = slice(i, i + 1)
            wrong += not torch.equal(ops.nvfp4_matmul(x[one], *w.packed), y[one])
            wrong += not torch.equal(ops.nvfp4_matmul_t(dy[one], *w.packed, w.k), dx[one])
    return float(wrong)


def far_rows_error(device: torch.device, dtype: torch.dtype) -> float:
    """Elements of the last rows of x and dy past 2³¹ that differ from the rows alone."""
    m, width = 2**31 // 27648 + 64, 27648
    w, wt = Weight(16, width, device), Weight(width, 16, device)
    x = torch.randn(m, width, device=device, dtype=dtype)
    wrong = 0
    with ops.batch_invariant():
        for product in (
            lambda rows: ops.nvfp4_matmul(rows, *w.packed),
            lambda rows: ops.nvfp4_matmul_t(rows, *wt.packed, 16),
        ):
            wrong += int((product(x)[-16:] != product(x[-16:])).sum())
    return float(wrong)


def graph_error(device: torch.device, dtype: torch.dtype) -> float:
    """A captured decode product, replayed on another input: elements that differ from eager."""
    w = Weight(512, 1024, device)
    x = randn(4, 1024, seed=1, like=(device, dtype))
    ops.nvfp4_matmul(x, *w.packed)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.nvfp4_matmul(x, *w.packed)
    x.copy_(randn(4, 1024, seed=2, like=(device, dtype)))
    graph.replay()
    return float((y != ops.nvfp4_matmul(x, *w.packed)).sum())


def compile_error(device: torch.device, dtype: torch.dtype) -> float:
    w = Weight(512, 1024, device)
    x = randn(4, 1024, seed=1, like=(device, dtype))

    def layer(x: Tensor) -> Tensor:
        return ops.nvfp4_matmul(x, *w.packed).relu()

    return float((torch.compile(layer, fullgraph=True)(x) != layer(x)).sum())


def checks(device: torch.device) -> Iterator[Check]:
    """(name, what returns at most 1 where it is right), in order."""
    target = dispatch.target_of(device)
    for dtype in HALF_ULP:
        kind = str(dtype)[6:]
        for tile in dispatch.tiles(target, "forward"):
            yield f"forward {tile} {kind}", lambda t=tile, d=dtype: forward_error(t, device, d)
        for tile in dispatch.tiles(target, "backward"):
            yield f"backward {tile} {kind}", lambda t=tile, d=dtype: backward_error(t, device, d)
        for check in (unpack_error, fp8_error, norm_error, logprob_error, attention_error,
                      invariance_error):  # fmt: skip
            name = check.__name__.removesuffix("_error")
            yield f"{name} {kind}", lambda c=check, d=dtype: c(device, d)
    if device.type == "cuda":
        yield "far rows", lambda: far_rows_error(device, torch.bfloat16)
        yield "graph", lambda: graph_error(device, torch.bfloat16)
        yield "compile", lambda: compile_error(device, torch.bfloat16)
