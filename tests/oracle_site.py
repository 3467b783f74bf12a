"""Other people's quantizers beside this environment's torch: fetched once a machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from demo_home import shared_home


def oracle_site(package: str, *needs: str) -> Path:
    """A folder for `sys.path` with `package` (pinned) and what it needs, and nothing of those."""
    with shared_home() as home:
        folder = home / "oracles" / package
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted download left
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        command = [*pip, "--no-deps", "--target", str(folder), package, *needs]
        subprocess.run(command, check=True)
        (folder / "complete").touch()
    return folder
