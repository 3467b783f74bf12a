"""Check the kernels on a CUDA device, in minutes: are they right, how fast, do they learn?

    PYTHONPATH=.:kernels python scripts/gpu_check.py [--section NAME] [--out FILE] [--quick]

Needs torch >= 2.11, triton >= 3.6, transformers, peft and safetensors, no network and no download.
Sections in order: `numbers` (every kernel against float64), `speed` (against cuBLAS, with the
thresholds for dispatch.json), `learn` (a tiny Llama learns through the kernels in a minute). The
JSON is written after each. A section that fails is recorded and the next one runs; exit status 1
if one failed, 2 where there is no GPU. `--write-dispatch` puts the measured thresholds in place.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_learn
import gpu_numbers
import gpu_speed
import torch
from triton.errors import TritonError

ROOT = Path(__file__).resolve().parent.parent
# What checks, PyTorch, CUDA and Triton's compiler raise; anything else is a bug here.
FAILURES = (AssertionError, RuntimeError, ValueError, NotImplementedError, TritonError)
DISPATCH = ROOT / "kernels" / "qerl_kernels" / "dispatch.json"


def numbers(device: torch.device, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Error of each kernel as a share of its bound, or what it raised; the others still run."""
    errors: dict[str, float | str] = {}
    for name, check in gpu_numbers.checks(device):
        if quick and "float16" in name and "bfloat16" not in name:
            continue
        try:
            errors[name] = round(check(), 4)
        except FAILURES as error:
            errors[name] = f"{type(error).__name__}: {error}"
        say(f"{'BAD' if _is_bad(errors[name]) else 'ok '} {errors[name]!s:>8}  {name}")
    bad = [name for name, error in errors.items() if _is_bad(error)]
    found: dict[str, Any] = {"share_of_bound": errors}
    return found | {"ok": False, "error": f"wrong: {', '.join(bad)}"} if bad else found


def _is_bad(error: float | str) -> bool:
    return isinstance(error, str) or not error <= 1


def learn(device: torch.device, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """See `gpu_learn`; raises AssertionError when the reward does not come."""
    result = gpu_learn.learn(device, say=say)
    assert result["reached"], f"reward {result['rewards'][-1]:.3f} after {result['steps']} steps"
    return result


SECTIONS = {"numbers": numbers, "speed": gpu_speed.speed, "learn": learn}


def about(device: torch.device) -> dict[str, Any]:
    """Machine, versions and commit."""
    import peft
    import transformers
    import triton

    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "device": gpu.name if gpu else device.type,
        "capability": f"{gpu.major}.{gpu.minor}" if gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


def run(
    device: torch.device, sections: list[str], out: Path, quick: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run sections in order, writing `out` after each; a failure is recorded and told."""
    report: dict[str, Any] = {"about": about(device), "sections": {}}
    for name in sections:
        say(f"== {name}")
        start = time.monotonic()
        try:
            entry = {"ok": True, **SECTIONS[name](device, quick, say)}
        except FAILURES as error:
            entry = {"ok": False, "error": f"{type(error).__name__}: {error}",
                     "traceback": traceback.format_exc()}  # fmt: skip
            say(f"{name} failed: {entry['error']}")
        report["sections"][name] = {**entry, "wall_seconds": round(time.monotonic() - start, 1)}
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=1) + "\n")
        partial.replace(out)
    return report


def with_thresholds(table: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """dispatch.json with the thresholds that `speed` measured."""
    about, (target, measured) = report["about"], *report["sections"]["speed"]["dispatch"].items()
    families = sorted(table["targets"], key=int)
    family = [name for name in families if int(name) <= int(target)][-1]
    entry = table["targets"].setdefault(target, json.loads(json.dumps(table["targets"][family])))
    for direction, rows in measured.items():
        entry[direction] = rows or entry[direction]
        at_64 = [i for i, row in enumerate(entry[direction]) if row["max_m"] >= 64]
        entry["invariant"][direction] = at_64[0] if at_64 else len(entry[direction]) - 1
    source = f"sm_{target} measured on {about['device']}, {about['date']}, torch {about['torch']}, "
    source += f"triton {about['triton']}; the rest: {table['source']}"
    return {**table, "source": source}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("--section", action="append", choices=list(SECTIONS))
    found.add_argument("--out", type=Path, help="default: benchmarks/results/gpu-<name>.json")
    found.add_argument("--quick", action="store_true", help="fewer sizes and types")
    found.add_argument("--list", action="store_true", help="name the sections")
    found.add_argument("--write-dispatch", action="store_true")
    return found


def main() -> int:
    options = parser().parse_args()
    if options.list:
        print("\n".join(SECTIONS))
        return 0
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA device, and PyTorch sees none", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    out = options.out or ROOT / "benchmarks" / "results" / f"gpu-{name}.json"
    report = run(device, options.section or list(SECTIONS), out, options.quick, print)
    print(f"written: {out}")
    if options.write_dispatch and report["sections"].get("speed", {}).get("ok"):
        table = with_thresholds(json.loads(DISPATCH.read_text()), report)
        DISPATCH.write_text(json.dumps(table, indent=1) + "\n")
    return 0 if all(entry["ok"] for entry in report["sections"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
