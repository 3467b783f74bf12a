"""qerl: reinforcement learning for large language models on one GPU.

The public API, imported when first used: `import qerl` alone loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.config import Recipe
    from qerl.errors import QerlError
    from qerl.model.hf import NVFP4Config
    from qerl.packed import load
    from qerl.policy import Policy
    from qerl.reward import per_row
    from qerl.run import Run, open_run, resume, train

__version__ = "0.1.0"
__all__ = [
    "NVFP4Config",
    "Policy",
    "QerlError",
    "Recipe",
    "Run",
    "load",
    "open_run",
    "per_row",
    "resume",
    "train",
]

_HOME = {
    "NVFP4Config": "qerl.model.hf",
    "Policy": "qerl.policy",
    "QerlError": "qerl.errors",
    "Recipe": "qerl.config",
    "Run": "qerl.run",
    "load": "qerl.packed",
    "open_run": "qerl.run",
    "per_row": "qerl.reward",
    "resume": "qerl.run",
    "train": "qerl.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qerl' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
