"""The cache folder that slow tests share, so that the demo model is made once a machine, and the
short demo run that they share.

`QERL_TEST_HOME` names it; otherwise it is the user's own cache, as in a real run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qerl.run import Run


@contextmanager
def shared_home() -> Iterator[Path]:
    """Within: QERL_HOME is the shared cache. After: what it was."""
    home = Path(os.environ.get("QERL_TEST_HOME") or "~/.cache/qerl").expanduser()
    before = os.environ.get("QERL_HOME")
    os.environ["QERL_HOME"] = str(home)
    try:
        yield home
    finally:
        if before is None:
            del os.environ["QERL_HOME"]
        else:
            os.environ["QERL_HOME"] = before


STEPS, PROMPTS = 10, 60  # of the short demo: enough to learn more than chance


@contextmanager
def short_demo(folder: Path) -> Iterator[Run]:
    """The demo on the real model, at a learning rate for so few steps, in fp32."""
    import qerl
    from qerl.config import Recipe

    changes = {
        "train.steps": STEPS,
        "train.lr": 7e-4,
        "train.warmup_steps": 1,
        "train.max_grad_norm": 1.0,
        "eval.prompts": PROMPTS,
        "seed": 3,
        "dtype": "float32",
        "device": "cpu",
        "output.dir": str(folder),
    }
    with shared_home():
        recipe = Recipe.load("demo-smollm2", overrides=changes)
        with qerl.train(recipe, report=False) as run:
            yield run
