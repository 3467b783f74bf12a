"""Linear → log-prob and entropy of chosen tokens: ours, the full logits, and Liger's.

    python scripts/bench_logprob.py --tokens 512 --hidden 576 --vocab 49152 --json out.json

Each method runs in a process of its own: forward alone, then forward and backward into the hidden
states (the head is frozen). Time is CPU-seconds of all threads, or milliseconds on a GPU; the best
of the repeats. Memory is the most held beyond the inputs. Errors are against float64, over the
first 16 tokens; the gradient's is relative to its largest entry. Liger's is the selective
log-probability inside its fused GRPO loss: plain PyTorch, so it runs on a CPU too; no entropy.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from qerl import environment
from qerl.files import write_json
from qerl_kernels import ops, reference

CHECKED = 16
METHODS = ("ours", "naive", "liger")


def inputs(arguments: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [T, H], head [V, H] with logits of a few units, targets [T]."""
    rng = torch.Generator().manual_seed(0)
    device, dtype = arguments.device, getattr(torch, arguments.dtype)
    hidden = torch.randn(arguments.tokens, arguments.hidden, generator=rng).to(device, dtype)
    weight = torch.empty(arguments.vocab, arguments.hidden, device=device, dtype=dtype)
    # Piece by piece, so that making the inputs is not the process's peak.
    for piece in weight.split(1024):
        piece.copy_(torch.randn(piece.shape, generator=rng) * (3 / arguments.hidden**0.5))
    targets = torch.randint(0, arguments.vocab, (arguments.tokens,), generator=rng)
    return hidden, weight, targets.to(device)


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    from liger_kernel.chunked_loss import fused_linear_ppo  # type: ignore[import-not-found]

    function = fused_linear_ppo._ChunkedSelectiveLogProbFunction
    return function.apply(hidden, weight, targets, None, 1.0, 4096), None


def seconds(run: Callable[[], object], cuda: bool, repeats: int) -> float:
    """The best of the repeats: CPU-seconds of the process, or seconds by CUDA events."""
    found = []
    for _ in range(repeats):
        if not cuda:
            start = time.process_time()
            run()
            found.append(time.process_time() - start)
            continue
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) / 1e3)
    return min(found)


def peak_bytes(run: Callable[[], object], cuda: bool) -> int:
    """The most memory held beyond what is held now."""
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the high-water mark
    before = _high_water()
    run()
    return _high_water() - before


def _high_water() -> int:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) * 1024


def errors(function: Callable, hidden: Tensor, weight: Tensor, targets: Tensor) -> dict:
    part = hidden[:CHECKED].detach().requires_grad_()
    logp, _ = function(part, weight, targets[:CHECKED])
    (grad,) = torch.autograd.grad(logp.sum(), part)
    wide = part.detach().double().cpu().requires_grad_()
    true, _, _ = reference.linear_logprob(wide, weight.cpu(), targets[:CHECKED].cpu())
    (true_grad,) = torch.autograd.grad(true.sum(), wide)
    worst = (grad.cpu().double() - true_grad).abs().max() / true_grad.abs().max()
    return {
        "logp_error": (logp.cpu().double() - true).abs().max().item(),
        "grad_error": worst.item(),
    }


def measure(method: str, arguments: argparse.Namespace) -> dict:
    """One method's row, in this process."""
    torch.set_num_threads(arguments.threads)
    hidden, weight, targets = inputs(arguments)
    function = {"ours": ops.linear_logprob, "naive": naive, "liger": liger}[method]
    cuda = arguments.device == "cuda"

    def forward() -> None:
        with torch.no_grad():
            function(hidden, weight, targets)

    def both() -> None:
        leaf = hidden.detach().requires_grad_()
        function(leaf, weight, targets)[0].sum().backward()

    function(hidden[:1], weight, targets[:1])  # compiles, and warms BLAS up
    forward_bytes = peak_bytes(forward, cuda)
    return {
        "method": method,
        "forward_mib": round(forward_bytes / 2**20, 1),
        "both_mib": round(peak_bytes(both, cuda) / 2**20, 1),
        "forward_seconds": seconds(forward, cuda, arguments.repeats),
        "both_seconds": seconds(both, cuda, arguments.repeats),
        **errors(function, hidden, weight, targets),
    }


def show(rows: list[dict], device: str) -> None:
    unit, factor = ("ms", 1e3) if device == "cuda" else ("CPU-s", 1.0)
    print(f"{'':6} {'forward':>14} {'+ backward':>14} {'memory, MiB':>16} {'logp':>8} {'grad':>8}")
    for row in rows:
        print(
            f"{row['method']:6} {row['forward_seconds'] * factor:8.3f} {unit:5} "
            f"{row['both_seconds'] * factor:8.3f} {unit:5} "
            f"{row['forward_mib']:7.0f} {row['both_mib']:8.0f} "
            f"{row['logp_error']:8.1e} {row['grad_error']:8.1e}"
        )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=4096 if cuda else 512)
    parser.add_argument("--hidden", type=int, default=4096 if cuda else 576)
    parser.add_argument("--vocab", type=int, default=151936 if cuda else 49152)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="PATH", help="- is standard output")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    missing = importlib.util.find_spec("liger_kernel") is None
    if missing:
        print("liger: not installed (pip install --no-deps liger-kernel)", file=sys.stderr)
    rows = []
    for method in METHODS[: 2 if missing else 3]:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measure, (method, arguments)))
    shape = {name: getattr(arguments, name) for name in ("tokens", "hidden", "vocab", "dtype")}
    result = {**shape, "device": arguments.device, "threads": arguments.threads, "rows": rows}
    if arguments.json == "-":
        print(json.dumps(result | {"environment": environment.describe()}))
        return
    print(" ".join(f"{name}={value}" for name, value in shape.items()), arguments.device)
    show(rows, arguments.device)
    if arguments.json:
        write_json(Path(arguments.json), result | {"environment": environment.describe()})


if __name__ == "__main__":
    main()
