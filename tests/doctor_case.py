"""A sound recipe on the tiny model for the doctor, to plant faults in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny import LETTERS

from qerl.config import Recipe
from qerl.doctor import Report, run_checks


def write_rows(path: Path, prompts: list[str]) -> Path:
    rows = [{"prompt": text, "answer": LETTERS[i % 13]} for i, text in enumerate(prompts)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def per_letter(prompts, completions, answer, **_):
    """Part marks for every sampled letter, so that groups of a random model vary."""
    return [
        1.0 if text == right else 0.01 * text.count(right)
        for text, right in zip(completions, answer, strict=True)
    ]


def sound_values(model: Path, folder: Path) -> dict[str, Any]:
    """40 rows, prompts of 1 to 7 letters, 10 of them held out."""
    data = write_rows(folder / "rows.jsonl", [LETTERS[i % 13] * (1 + i % 7) for i in range(40)])
    return {
        "model": str(model),
        "format": "bf16",
        "dtype": "float32",
        "device": "cpu",
        "task": {"name": "rows", "dataset": str(data)},
        "rollout": {"max_completion_tokens": 8, "group_size": 4},
        "eval": {"prompts": 10},
    }


def examine(values: dict[str, Any], reward: Any = per_letter, **options: Any) -> Report:
    return run_checks(Recipe(**values), reward=reward, **options)
