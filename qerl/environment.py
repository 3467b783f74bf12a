"""What a run ran on: machine, versions, commit. Written to `env.json`, printed beside numbers."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("qerl", "torch", "transformers", "peft", "safetensors", "accelerate", "datasets")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "asimd", "bf16", "i8mm")


def describe() -> dict[str, Any]:
    """Machine, versions and commit as one JSON-ready dictionary. Imports torch to ask for GPUs."""
    import psutil

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": list(sys.argv),
        "cpu": {
            "model": cpu_model(),
            "cores": usable_cores(),
            "flags": sorted(cpu_flags() & set(CPU_FLAGS)),
        },
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "versions": versions(),
        "commit": git_commit(),
        "threads": {name: os.environ[name] for name in _THREAD_VARS if name in os.environ},
    }


_THREAD_VARS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def versions() -> dict[str, str | None]:
    """Installed version of each package that decides the numbers; None when it is missing."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def usable_cores() -> int:
    """Cores this process may run on (an affinity mask or a container may allow fewer)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpuinfo(*keys: str) -> str:
    """First value of any of `keys` in /proc/cpuinfo; "" where there is no such file or key."""
    source = Path("/proc/cpuinfo")
    if not source.exists():
        return ""
    for line in source.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def cpu_model() -> str:
    """The processor's marketing name, or its architecture where the system does not tell."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """Instruction-set flags as Linux names them (empty on other systems)."""
    return set(_cpuinfo("flags", "Features").split())


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {"name": gpu.name, "bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"}
        for gpu in found
    ]


def git_commit(folder: str | Path | None = None) -> str | None:
    """Commit of the checkout qerl is imported from (`-dirty` if edited); None when installed."""
    root = Path(folder) if folder else Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return None
    return head + ("-dirty" if _git(root, "status", "--porcelain", "-uno") else "")


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command; None when there is no git or the command fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
