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


def forward_error(
    tile: dispatch.Tile, even: bool, device: torch.device, dtype: torch.dtype
) -> float:
    """even: the loop without masks, which whole models run; else the one with them."""
    m, n, r, like = tile.bm + 1, tile.bn + 3, 8, (device, dtype)
    k = 9 * 128 + (0 if even else 16)
    w = Weight(n, k, device)
    x, u = randn(m, k, seed=1, like=like), randn(m, r, seed=2, like=like)
    b, z = randn(n, r, seed=3, like=like), randn(n, seed=4, like=like)
    y = matmul.nvfp4_matmul(x, *w.packed, z, u, b, tile=tile)
    x, u, b, z = (t.double().cpu() for t in (x, u, b, z))
    sums = x.abs() @ w.dense.abs().T + u.abs() @ b.abs().T + z.abs()
    return excess(y, x @ w.dense.T + u @ b.T + z, sums, k + r)


def backward_error(
    tile: dispatch.Tile, even: bool, device: torch.device, dtype: torch.dtype
) -> float:
    m, n, r, like = tile.bm + 1, 2 * tile.bn + (0 if even else 3), 8, (device, dtype)
    k = 128 * tile.groups + (0 if even else 16)
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


def layer_error(device: torch.device, dtype: torch.dtype) -> float:
    """The adapted layer past the largest fused tile, forward and backward: unpacked and cuBLAS."""
    like, r, n, k = (device, dtype), 8, 67, 272
    target = dispatch.target_of(device)
    m = 1 + max(dispatch.tiles(target, d)[-1].max_m for d in ("forward", "backward"))
    w = Weight(n, k, device)
    x = randn(m, k, seed=1, like=like).requires_grad_()
    a, b = randn(r, k, seed=2, like=like), randn(n, r, seed=3, like=like)
    dy = randn(m, n, seed=4, like=like)
    y = ops.nvfp4_lora_matmul(x, *w.packed, None, a, b, 0.5)
    (dx,) = torch.autograd.grad(y, x, dy)
    x, a, b, dy = (t.detach().double().cpu() for t in (x, a, b, dy))
    whole, size = w.dense + 0.5 * b @ a, w.dense.abs() + 0.5 * b.abs() @ a.abs()
    # u and v, the products with the small factor, are rounded to dtype on their way, and so is
    # cuBLAS' product before the adapter is added.
    slack = 4 * HALF_ULP[dtype]
    return max(
        float(((f.detach().double().cpu() - t).abs() / (slack * s + 1e-7)).max())
        for f, t, s in (
            (y, x @ whole.T, x.abs() @ size.T),
            (dx, dy @ whole, dy.abs() @ size),
        )
    )


def fp8_error(device: torch.device, dtype: torch.dtype) -> float:
    """Both products, few rows and many, one scale a tensor and one a channel."""
    n, k, worst = 131, 272, 0.0
    weight = randn(n, k, seed=0, like=(torch.device("cpu"), torch.float32))
    codes = weight.to(torch.float8_e4m3fn)
    many = 1 + dispatch.tiles(dispatch.target_of(device), "fp8_forward")[-1].max_m
    for m in (17, many):
        x = randn(m, k, seed=1, like=(device, dtype))
        dy = randn(m, n, seed=2, like=(device, dtype))
        for scale in (torch.full((1,), 0.37), torch.linspace(0.1, 0.9, n)):
            where = codes.to(device), scale.to(device)
            y, dx = ops.fp8_matmul(x, *where), ops.fp8_matmul_t(dy, *where)
            size = (codes.double() * scale.double().reshape(-1, 1)).abs()
            wide, back = x.double().cpu(), dy.double().cpu()
            forward, sums = reference.fp8_matmul(wide, codes, scale), wide.abs() @ size.T
            if m == 17:
                worst = max(worst, excess(y, forward, sums, k))
            # Many rows: scaled weights are rounded to dtype; backward, a scale a channel: dy is.
            pairs = (
                (y, forward, sums),
                (dx, reference.fp8_matmul_t(back, codes, scale), back.abs() @ size),
            )
            for found, truth, sums in pairs:
                error = (found.double().cpu() - truth).abs()
                worst = max(worst, float((error / (2 * HALF_ULP[dtype] * sums + 1e-7)).max()))
    return worst


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


def norm_bits_error(device: torch.device, dtype: torch.dtype) -> float:
    """Elements that differ from transformers' Llama and Gemma norms, where the mean is exact."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    generator = torch.Generator().manual_seed(3)
    # Small integers, and 1024 of them: any order of summing their squares is exact.
    x = torch.randint(-7, 8, (33, 1024), generator=generator).to(device, dtype)
    differ = 0
    for cls, family in ((LlamaRMSNorm, (0.0, True)), (GemmaRMSNorm, (1.0, False))):
        module = cls(1024, eps=1e-6).to(device, dtype)
        module.weight.data.copy_(randn(1024, seed=2, like=(device, dtype)))
        y = ops.rms_norm(x, module.weight.detach(), None, None, 1e-6, *family)
        differ += int((y != module(x)).sum())
    return float(differ)


def noisy_norm_error(device: torch.device, dtype: torch.dtype) -> float:
    """Noise of its own for each of three groups of rows; forward and backward, against float64."""
    like = (device, dtype)
    x = randn(9, 576, seed=1, like=like).requires_grad_()
    w, dy = randn(576, seed=2, like=like), randn(9, 576, seed=3, like=like)
    noise = 0.1 * randn(3, 576, seed=4, like=(device, torch.float32))
    index = torch.tensor([0, 0, 1, 1, 1, 2, 2, 0, 1], dtype=torch.int32, device=device)
    y = ops.rms_norm(x, w, noise, index)
    (dx,) = torch.autograd.grad(y, x, dy)
    wide = x.detach().double().cpu().requires_grad_()
    truth = reference.rms_norm(wide, w.cpu(), noise.cpu(), index.cpu().long())
    (dtruth,) = torch.autograd.grad(truth, wide, dy.double().cpu())
    # x̂ and y are rounded once each; the gradient adds two terms of that size.
    return max(
        float(
            (
                (f.detach().double().cpu() - t.detach()).abs()
                / (4 * HALF_ULP[dtype] * (t.detach().abs() + s))
            ).max()
        )
        for f, t, s in ((y, truth, 1e-6), (dx, dtruth, float(dtruth.abs().max())))
    )


def logprob_error(device: torch.device, dtype: torch.dtype) -> float:
    """Log-prob, entropy, mass of the 5 likeliest, and the gradient of the hidden states."""
    hidden = randn(37, 256, seed=1, like=(device, dtype)).requires_grad_()
    weight = randn(1003, 256, seed=2, like=(device, dtype)) * 0.2
    targets = torch.arange(37, device=device) * 27
    found = ops.linear_logprob_topk(hidden, weight, targets, 5, 1 / 0.7, 15.0)
    (dh,) = torch.autograd.grad(found[0].sum(), hidden)
    wide = hidden.detach().double().cpu().requires_grad_()
    rest = (weight.double().cpu(), targets.cpu())
    truth = reference.linear_logprob(wide, *rest, 1 / 0.7, 15.0, 1.0, 5)
    (dtruth,) = torch.autograd.grad(truth[0].sum(), wide)
    errors = [
        float((f.detach().double().cpu() - t.detach()).abs().max()) / 2e-4
        for f, t in zip(found, truth, strict=True)
    ]
    # The weights of the gradient's sum are rounded to dtype, and the result once more.
    share = float((dh.double().cpu() - dtruth).norm() / dtruth.norm())
    return max(*errors, share / (2 * HALF_ULP[dtype]))


def attention_error(device: torch.device, dtype: torch.dtype) -> float:
    """Three rows behind a prompt of 37 tokens, pages of 16: in full, windowed, capped, in E4M3."""
    like = (device, dtype)
    q = randn(3, 8, 64, seed=1, like=like)
    k_pages, v_pages = (randn(12, 16, 2, 64, seed=s, like=like) for s in (2, 3))

    def ints(*values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    arguments = (
        q, k_pages, v_pages, ints([3, 4], [5, 6], [7, 8]), ints(37 + 20, 37, 37 + 5),
        ints(0, 3), ints([0, 1, 2]), ints(37),
    )  # fmt: skip
    codes = [pages.to(torch.float8_e4m3fn).view(torch.uint8) for pages in (k_pages, v_pages)]
    in_bytes, scale = (q, *codes, *arguments[3:]), torch.tensor([0.5, 0.25])
    worst = 0.0
    for given, options in (
        (arguments, {}), (arguments, {"window": 25}), (arguments, {"softcap": 3.0}),
        (in_bytes, {"k_scale": scale, "v_scale": scale}),
    ):  # fmt: skip
        there = {n: o.to(device) if isinstance(o, Tensor) else o for n, o in options.items()}
        out, _ = ops.decode_attention(*given, scale=0.125, **there)
        truth, _ = reference.decode_attention(*(t.cpu() for t in given), scale=0.125, **options)
        # Values are weighted averages: one rounding of the weights and one of the result.
        worst = max(worst, float((out.double().cpu() - truth.double()).abs().max()))
    return worst / (4 * HALF_ULP[dtype])


def invariance_error(device: torch.device, dtype: torch.dtype) -> float:
    """Rows of an adapted layer that differ by a bit between a batch of 70 and one of their own."""
    w, like = Weight(131, 272, device), (device, dtype)
    x, dy = randn(70, 272, seed=1, like=like), randn(70, 131, seed=2, like=like)
    a, b = randn(8, 272, seed=3, like=like), randn(131, 8, seed=4, like=like)

    def both(rows: slice) -> list[Tensor]:
        part = x[rows].clone().requires_grad_()
        y = ops.nvfp4_lora_matmul(part, *w.packed, None, a, b, 0.5)
        return [y, *torch.autograd.grad(y, part, dy[rows])]

    wrong = 0
    with ops.batch_invariant():
        whole = both(slice(0, 70))
        for i in (0, 33, 69):
            one = slice(i, i + 1)
            wrong += sum(
                not torch.equal(alone, among[one])
                for alone, among in zip(both(one), whole, strict=True)
            )
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
        for direction, error in (("forward", forward_error), ("backward", backward_error)):
            for tile in dispatch.tiles(target, direction):
                for even in (False, True):
                    name = f"{direction} {tile}{' even' * even} {kind}"
                    yield name, lambda f=error, t=tile, e=even, d=dtype: f(t, e, device, d)
        for check in (
            unpack_error, layer_error, fp8_error, norm_error, norm_bits_error, noisy_norm_error,
            logprob_error, attention_error, invariance_error,
        ):  # fmt: skip
            name = check.__name__.removesuffix("_error")
            yield f"{name} {kind}", lambda c=check, d=dtype: c(device, d)
    if device.type == "cuda":
        yield "far rows", lambda: far_rows_error(device, torch.bfloat16)
        yield "graph", lambda: graph_error(device, torch.bfloat16)
        yield "compile", lambda: compile_error(device, torch.bfloat16)
