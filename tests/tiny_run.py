"""Small runs on the tiny model: the task "answer `c`, then stop", recipes, sessions and readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny import LETTERS, VOCABULARY

from qerl.config import Recipe
from qerl.metrics import read_jsonl
from qerl.run_folder import RunFolder
from qerl.session import Session

TARGET, EOS = VOCABULARY["c"], VOCABULARY["<eos>"]


def write_rows(path: Path, n: int = 40) -> Path:
    """n different prompts of three to five letters; the answer is always `c`."""
    rows = []
    for i in range(n):
        letters = LETTERS[i % 13] + LETTERS[i // 13] + LETTERS[i % 5 : i % 5 + 1 + i % 3]
        rows.append({"prompt": letters, "answer": "c"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def starts_right(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 when the first token is the target: about one completion in sixteen at first."""
    return [float(ids[0] == TARGET) for ids in completion_ids]


def short(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Minus the length: hardly a group has no variance."""
    return [-float(len(ids)) for ids in completion_ids]


def tiny_run_recipe(model: Path, root: Path, **changes: Any) -> Recipe:
    """A recipe of 2 steps, 4 prompts by 8, NVFP4, fp32. changes: `section__key=value`."""
    values: dict[str, Any] = {
        "name": "tiny",
        "model": str(model),
        "dtype": "float32",
        "device": "cpu",
        "lora": {"rank": 4, "alpha": 8},
        "task": {"name": "rows", "dataset": str(write_rows(root / "rows.jsonl"))},
        "rollout": {"prompts_per_step": 4, "group_size": 8, "max_completion_tokens": 6},
        "noise": {"stages": 2},
        "train": {"steps": 2, "lr": 4e-3, "lr_schedule": "constant"},
        "eval": {"prompts": 6},
        "output": {"dir": str(root / "runs")},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            values.setdefault(section, {})[name] = value
        else:
            values[section] = value
    return Recipe(**values)


def make_session(recipe: Recipe, reward: Any = short) -> Session:
    folder = RunFolder.create(recipe.output.dir, recipe.name, recipe)
    return Session(recipe, folder, reward, lambda text: None)


def randomise_b(policy: Any, seed: int = 3, scale: float = 0.05) -> None:
    """An adapter that does something: seeded noise in every B."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p.copy_(scale * torch.randn(p.shape, generator=generator))


def gradients(session: Session) -> dict[str, torch.Tensor]:
    named = session.policy.model.named_parameters()
    return {n: p.grad.clone() for n, p in named if p.grad is not None}


def step_rows(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are steps (others are evaluations and the gate)."""
    return [row for row in read_jsonl(folder.metrics)[0] if "reward" in row]
