"""The demo over several seeds: does it learn every time, and in how many CPU-seconds?

    python scripts/bench_demo.py --seeds 0 1 2 3 4 --json benchmarks/results/demo-seeds.json

Each seed is a fresh process of `qerl train demo-smollm2 seed=N`. CPU-seconds are those of the
process and all its threads, by phase, so they mean the same on a busy machine. Training is all
but loading and evaluation: gate, rollout, reward, forward, backward, optimizer, save.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from qerl import environment
from qerl.files import write_json
from qerl.metrics import read_jsonl

CODE = """
import json, sys, time
import qerl
recipe = qerl.Recipe.load(sys.argv[1], overrides=json.loads(sys.argv[2]))
run = qerl.train(recipe, report=False)
cpu = dict(run.session.timer.cpu_seconds)
json.dump({"summary": run.summary, "cpu_seconds": cpu, "process_cpu": time.process_time(),
           "folder": str(run.folder.path)}, open(sys.argv[3], "w"))
"""


def run_seed(recipe: str, seed: int, overrides: dict[str, object], scratch: Path) -> dict:
    """Train one seed in a process of its own; what came out, in short."""
    out = scratch / f"{seed}.json"
    settings = json.dumps({**overrides, "seed": seed, "output.dir": str(scratch / "runs")})
    subprocess.run([sys.executable, "-c", CODE, recipe, settings, str(out)], check=True)
    got = json.loads(out.read_text())
    rows, _ = read_jsonl(Path(got["folder"]) / "metrics.jsonl")
    summary, cpu = got["summary"], got["cpu_seconds"]
    return {
        "seed": seed,
        "before": summary["before"],
        "after": summary["after"],
        "train_cpu_seconds": round(sum(v for k, v in cpu.items() if k != "eval"), 1),
        "cpu_seconds": {k: round(v, 1) for k, v in cpu.items()},
        "process_cpu_seconds": round(got["process_cpu"], 1),
        "peak_bytes": summary["peak_bytes"],
        "train_accuracy": [round(r["qerl/accuracy"], 3) for r in rows if "qerl/accuracy" in r],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="demo-smollm2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from qerl.recipes import parse_overrides

    overrides = parse_overrides(arguments.set)
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in arguments.seeds:
            runs.append(run_seed(arguments.recipe, seed, overrides, Path(scratch)))
            last = runs[-1]
            print(
                f"seed {seed}: {last['before']['accuracy']:.3f} -> {last['after']['accuracy']:.3f},"
                f" {last['train_cpu_seconds']} CPU-seconds of training",
                flush=True,
            )
    result = {"recipe": arguments.recipe, "overrides": overrides, "runs": runs}
    if arguments.json:
        write_json(arguments.json, result | {"environment": environment.describe()})


if __name__ == "__main__":
    main()
