"""The packed product on the CPU against a dense one, and what batch-invariant mode costs.

    python scripts/bench_matmul.py --json benchmarks/results/matmul-cpu.json

CPU-seconds of the process (all threads), medians of several runs, the variants of a shape one
after the other in each run. On a GPU the same comparison is a section of `gpu_check.py`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from qerl import environment
from qerl.files import write_json
from qerl_kernels import ops, quantize

SHAPES = [(576, 1536), (1536, 576), (2048, 2048)]  # (K, N): the demo model's MLP, and a square
ROWS = [1, 16, 128, 1024]


def milliseconds(call: Callable[[], object], least: float = 0.05) -> float:
    """CPU-milliseconds of one call, from as many as fill `least` seconds."""
    calls, start = 0, time.process_time()
    while (spent := time.process_time() - start) < least:
        call()
        calls += 1
    return 1e3 * spent / calls


def measure(m: int, k: int, n: int, repeats: int) -> dict[str, float]:
    """Medians for y = x Wᵀ and dX = dY W: packed, packed and batch-invariant, dense fp32."""
    dense = torch.randn(n, k)
    w = quantize.quantize_absmax(dense)
    x, dy = torch.randn(m, k), torch.randn(m, n)

    def invariant() -> torch.Tensor:
        with ops.batch_invariant():
            return ops.nvfp4_matmul(x, *w)

    calls: dict[str, Callable[[], object]] = {
        "dense": lambda: x @ dense.t(),
        "packed": lambda: ops.nvfp4_matmul(x, *w),
        "packed_invariant": invariant,
        "dense_dx": lambda: dy @ dense,
        "packed_dx": lambda: ops.nvfp4_matmul_t(dy, *w, k),
    }
    runs = [{name: milliseconds(call) for name, call in calls.items()} for _ in range(repeats)]
    return {name: round(statistics.median(run[name] for run in runs), 4) for name in calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    print(f"{'M':>5} {'K':>5} {'N':>5}  CPU-milliseconds")
    for k, n in SHAPES:
        for m in ROWS:
            found = measure(m, k, n, arguments.repeats)
            rows.append({"m": m, "k": k, "n": n, "cpu_ms": found})
            print(f"{m:>5} {k:>5} {n:>5}  " + "  ".join(f"{a} {b:.3f}" for a, b in found.items()))
    if arguments.json:
        result = {"threads": arguments.threads, "rows": rows}
        write_json(arguments.json, result | {"environment": environment.describe()})


if __name__ == "__main__":
    main()
