"""`gpu_check`'s section `speed`: packed products against cuBLAS bf16, and the dispatch to take.

Each alternative (every tile, one unpacked layer with cuBLAS, batch-invariant mode, dense bf16,
bitsandbytes NF4 where it is installed) is timed on the linear shapes of Qwen2.5-7B and 32B. Weights
rotate through copies larger together than the L2 cache. The floor of a product is the larger of
its bytes at the measured copy bandwidth and its operations at the measured bf16 peak.
Marlin needs vLLM's own repacking and is not timed here.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gpu_numbers import randn
from torch import Tensor

from qerl_kernels import backward, dispatch, linear, matmul, ops, repack
from qerl_kernels.cpu import inverse

ROWS = (1, 4, 16, 32, 64, 128, 512, 2048, 8192)
SHAPES = {
    "7B q": (3584, 3584), "7B gate": (3584, 18944), "7B down": (18944, 3584),
    "32B q": (5120, 5120), "32B gate": (5120, 27648), "32B down": (27648, 5120),
}  # fmt: skip
UNPACKED = "unpacked"
Times = Mapping[str, Mapping[int, float]]  # alternative -> M -> microseconds


class Packed:
    """A repacked layer of random codes, every scale 1: any bits are a weight."""

    def __init__(self, n: int, k: int, device: torch.device) -> None:
        groups = repack.groups(k)
        codes = torch.randint(-(2**31), 2**31, (n, 16 * groups), dtype=torch.int32, device=device)
        one = torch.ones(n, 8 * groups, device=device).to(torch.float8_e4m3fn)
        scales, g = repack.encode_scales(one).view(torch.int32), torch.ones(1, device=device)
        inverse(g)  # reading it stalls: once, here
        self.packed = (codes, scales, g)


def microseconds(calls: Sequence[Callable[[], object]], runs: int = 5, least: float = 2e3) -> float:
    """Median over `runs` of one call's time: calls in turn, in one CUDA graph of about `least` µs.

    A graph, because a launch from Python takes longer than a decode product does.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(work: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * start.elapsed_time(end)

    def once() -> None:
        for call in calls:
            call()

    once()  # compiles
    rounds = max(1, min(256 // len(calls), int(least / max(timed(once), 1.0))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            once()
    graph.replay()
    return statistics.median(timed(graph.replay) for _ in range(runs)) / (rounds * len(calls))


def floor_us(m: int, k: int, n: int, bits: float, bandwidth: float, peak: float) -> float:
    """µs of y [m, n] = x [m, k] Wᵀ at best: weights of `bits`, x and y of 16; bytes/s, flop/s."""
    moved = n * k * bits / 8 + 2 * m * (k + n)
    return 1e6 * max(moved / bandwidth, 2 * m * n * k / peak)


def thresholds(times: Sequence[Times], order: Sequence[str], rows: Sequence[int]) -> list[int]:
    """`max_m` of each alternative but the last, given times of several shapes.

    An alternative is kept up to the largest M at which it, or one before it in `order`, has the
    least total time; 0 where it never has.
    """
    found = []
    best = {m: min(order, key=lambda a: sum(t[a][m] for t in times)) for m in rows}
    for index in range(len(order) - 1):
        kept = [m for m in rows if order.index(best[m]) <= index]
        found.append(max(kept, default=0))
    return found


def goals(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The goals as ratios, 1 or more is reached: the worst over all shapes, and which that was."""
    products = result["products"]
    decode = [r for r in products if r["m"] <= 16 and r["pass"] == "forward"]
    train = [r for r in products if r["m"] >= 2048]
    ratios = {
        "decode, share of copy bandwidth / 0.85": [
            (r["bandwidth_share"] / 0.85, r) for r in decode
        ],
        "decode, times cuBLAS bf16 / 3": [(r["dense_us"] / r["us"] / 3, r) for r in decode],
        "large M, cuBLAS bf16 / ours / 0.9": [(r["dense_us"] / r["us"] / 0.9, r) for r in train],
    }
    found = {}
    for goal, pairs in ratios.items():
        ratio, row = min(pairs, key=lambda pair: pair[0])
        found[goal] = {"ratio": ratio, "worst": f"{row['shape']} {row['pass']} M {row['m']}"}
    return found


def copy_bandwidth(device: torch.device) -> float:
    """Bytes/s read and written by a copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (microseconds([lambda: target.copy_(source)]) * 1e-6)


def matmul_peak(device: torch.device) -> float:
    """flop/s of an 8192³ product in bf16."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    return 2 * 8192**3 / (microseconds([lambda: a @ a]) * 1e-6)


def _alternatives(
    direction: dispatch.Pass, x: Tensor, weights: list[Packed], dense: list[Tensor], k: int
) -> dict[str, list[Callable[[], object]]]:
    """Name -> one call for each copy of the weight."""
    forward = direction == "forward"

    def product(w: Packed, tile: dispatch.Tile | None = None) -> Tensor:
        if forward:
            return matmul.nvfp4_matmul(x, *w.packed, tile=tile)
        return backward.nvfp4_matmul_t(x, *w.packed, k, tile=tile)

    found: dict[str, list[Callable[[], object]]] = {
        str(tile): [lambda w=w, t=tile: product(w, t) for w in weights]
        for tile in dispatch.tiles(dispatch.target_of(x.device), direction)
    }

    def unpacked(w: Packed) -> Tensor:
        weight, alpha = linear.unpacked(x, *w.packed, k)
        return torch.addmm(
            x.new_empty(1), x, weight.t() if forward else weight, beta=0, alpha=alpha
        )

    def invariant(w: Packed) -> Tensor:
        with ops.batch_invariant():
            return product(w)

    found[UNPACKED] = [lambda w=w: unpacked(w) for w in weights]
    found["invariant"] = [lambda w=w: invariant(w) for w in weights]
    found["dense"] = [lambda d=d: x @ (d.t() if forward else d) for d in dense]
    if forward and importlib.util.find_spec("bitsandbytes"):
        from bitsandbytes import functional
        from bitsandbytes.autograd._functions import matmul_4bit

        quantized = [functional.quantize_4bit(d, quant_type="nf4") for d in dense]
        found["nf4"] = [lambda q=q: matmul_4bit(x, q[0].t(), q[1]) for q in quantized]
    return found


def _product(name: str, k: int, n: int, device: torch.device, rows: Sequence[int], machine) -> list:
    bytes_ = n * k * 9 // 16
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(1, min(8, -(-2 * cache // bytes_)))
    like = (device, torch.bfloat16)
    weights = [Packed(n, k, device) for _ in range(copies)]
    dense = [randn(n, k, seed=0, like=like) for _ in range(max(1, min(2, copies)))]
    found = []
    for direction in ("forward", "backward"):
        for m in rows:
            x = randn(m, k if direction == "forward" else n, seed=1, like=like)
            calls = _alternatives(direction, x, weights, dense, k)
            times = {a: microseconds(c) for a, c in calls.items() if _worth_timing(a, m)}
            found.append(_row(name, direction, m, k, n, times, machine))
    return found


def _worth_timing(name: str, m: int) -> bool:
    """Decode tiles at thousands of rows take seconds and cannot win."""
    return not (m > 512 and name.split("x")[0] in ("16", "32"))


def _row(name, direction, m, k, n, times: dict[str, float], machine) -> dict[str, Any]:
    ours = {a: t for a, t in times.items() if a not in ("dense", "nf4", "invariant")}
    best = min(ours, key=ours.__getitem__)
    floor = floor_us(m, k, n, 4.5, machine["bandwidth"], machine["peak"])
    moved = n * k * 4.5 / 8 + 2 * m * (k + n)
    return {
        "shape": name, "k": k, "n": n, "m": m, "pass": direction, "best": best, "us": ours[best],
        "dense_us": times["dense"], "floor_us": floor, "floor_share": floor / ours[best],
        "tb_per_s": moved / ours[best] * 1e-6, "tflop_per_s": 2 * m * n * k / ours[best] * 1e-6,
        "bandwidth_share": moved / (ours[best] * 1e-6) / machine["bandwidth"], "times_us": times,
    }  # fmt: skip


def proposal(products: Sequence[Mapping[str, Any]], target: int) -> dict[str, Any]:
    """Tiles of `dispatch.json` with the measured `max_m`, those never chosen left out."""
    found: dict[str, Any] = {}
    for direction in ("forward", "backward"):
        rows = [p for p in products if p["pass"] == direction]
        sizes = sorted({p["m"] for p in rows})
        tiles = {str(t): t for t in dispatch.tiles(target, direction)}
        order = [*tiles, UNPACKED]
        times = [
            {a: {p["m"]: p["times_us"].get(a, float("inf")) for p in rows if p["shape"] == s}
             for a in order}
            for s in {p["shape"] for p in rows}
        ]  # fmt: skip
        limits, last = thresholds(times, order, sizes), 0
        found[direction] = []
        for tile, limit in zip(tiles.values(), limits, strict=True):
            if limit > last:
                found[direction].append(_entry(tile, limit))
                last = limit
    return found


def _entry(tile: dispatch.Tile, max_m: int) -> dict[str, Any]:
    return {"max_m": max_m, "bm": tile.bm, "bn": tile.bn, "warps": tile.warps,
            "stages": tile.stages, "groups": tile.groups, "split": tile.split}  # fmt: skip


def speed(device: torch.device, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Every shape and M; the machine's own limits; the goals; a proposal for the dispatch."""
    machine = {"bandwidth": copy_bandwidth(device), "peak": matmul_peak(device)}
    say(f"copy {machine['bandwidth'] / 1e12:.2f} TB/s, bf16 {machine['peak'] / 1e12:.0f} TFLOP/s")
    rows = ROWS[::2] if quick else ROWS
    products = []
    for name, (k, n) in SHAPES.items():
        for row in _product(name, k, n, device, rows, machine):
            products.append(row)
            say(
                f"{name:9} {row['pass']:8} M {row['m']:5}: {row['us']:8.1f} µs ({row['best']}), "
                f"{row['dense_us'] / row['us']:.2f}× cuBLAS, {row['floor_share']:.0%} of the floor"
            )
    result = {"machine": machine, "products": products}
    target, reached = dispatch.target_of(device), goals(result)
    for goal, found in reached.items():
        say(f"{found['ratio']:.2f}  {goal} (worst: {found['worst']})")
    return {**result, "goals": reached, "dispatch": {str(target): proposal(products, target)}}
