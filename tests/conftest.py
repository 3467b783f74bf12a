"""Shared fixtures: a tiny model on disk, its policy, and a private cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:  # one process a core; their threads would only contend
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels run in Triton's interpreter here; it is chosen when a kernel is decorated, at import.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def private_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unit tests never read or write the user's cache."""
    home = tmp_path_factory.mktemp("qerl-home")
    os.environ["QERL_HOME"] = str(home)
    return home


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny llama")


@pytest.fixture
def tiny_recipe(tiny_dir: Path):
    from qerl.config import Recipe

    return Recipe(model=str(tiny_dir), format="bf16", dtype="float32", device="cpu")


@pytest.fixture
def tiny_policy(tiny_recipe):
    from qerl.policy import load_policy

    return load_policy(tiny_recipe)


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory):
    """A short run on the real demo model, open; slow."""
    from demo_home import short_demo

    with short_demo(tmp_path_factory.mktemp("demo") / "runs") as run:
        yield run
