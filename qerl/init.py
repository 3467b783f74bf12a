"""`qerl init`: a recipe, a reward and five rows of data that train as they are."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from qerl.errors import QerlError
from qerl.files import atomic_write, check_writable

DEMO_MODEL = "smollm2-135m-instruct-pypi"

_RECIPE = """\
# Start:   qerl train {recipe}
# Keys:    qerl explain            (all of them)     qerl explain train.lr   (one)
# Change:  qerl train {recipe} train.steps=50
# Paths that start with ./ are taken from this file's folder.
name: starter
description: Five questions, a reward of your own, a few minutes on a CPU.
model: {model}
format: nvfp4                  # how the frozen base is stored: 4.5 bits a weight

lora: {{rank: 16, alpha: 32}}

task:
  name: rows                   # a dataset of your own: one JSON object per line
  dataset: ./data.jsonl
  prompt_column: prompt
  answer_column: answer        # every column is passed to the reward by name
  reward: ./reward.py:score

rollout:
  prompts_per_step: 2          # questions in one step ...
  group_size: 8                # ... with this many sampled answers each
  max_completion_tokens: 16

noise: {{schedule: exponential, sigma_start: 1.0e-2, sigma_end: 5.0e-4, stages: 5}}

train: {{steps: 10, lr: 2.0e-4}}

eval: {{prompts: 2}}             # the last two rows are held out
"""

_REWARD = '''\
"""The reward: one number for each completion. Change it freely; nothing else needs to know."""


def score(prompts, completions, **columns):
    """1 for the answer alone, 0.5 if it is in the text, and a little for being short.

    prompts, completions: lists of text, one entry per completion.
    columns: the other columns of data.jsonl, as lists of the same length (here: answer).
    Returns a list of numbers; None in it means "does not apply to this one".
    """
    rewards = []
    for completion, answer in zip(completions, columns["answer"], strict=True):
        text = completion.strip().lower()
        short = 0.1 / len(text.split()) if text else 0.0
        exact = text.rstrip(".") == answer.lower()
        found = answer.lower() in text
        rewards.append(1.0 if exact else 0.5 * found + short)
    return rewards
'''

_ROWS = (
    ("Answer with one word. What is the capital of France?", "Paris"),
    ("Answer with one word. What colour is a clear sky at noon?", "Blue"),
    ("Answer with one word. Which planet do we live on?", "Earth"),
    ("Answer with one word. What is the opposite of hot?", "Cold"),
    ("Answer with one word. Which animal says meow?", "Cat"),
)


def write_starter(folder: Path, model: str | None = None) -> list[Path]:
    """Write recipe.yaml, reward.py and data.jsonl into `folder` (made if needed).

    model: a Hub id or a local directory; None for the demo model.
    Returns the three paths. Raises `QerlError`, writing nothing, if one of them exists or cannot
    be written.
    """
    folder = folder.expanduser()
    check_writable("init:", folder, inside=True)
    texts = {
        "recipe.yaml": _recipe(folder / "recipe.yaml", model),
        "reward.py": _REWARD,
        "data.jsonl": "".join(
            json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in _ROWS
        ),
    }
    for name in texts:
        if (folder / name).exists():
            raise QerlError(f"init: {str(folder / name)!r} exists; name an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        atomic_write(folder / name, text)
    return [folder / name for name in texts]


def _recipe(path: Path, model: str | None) -> str:
    """The recipe's text. A local model is named by its absolute path: the recipe may move."""
    name = model or DEMO_MODEL
    local = Path(name).expanduser()
    if local.is_dir():
        name = str(local.resolve())
    # A JSON string is a YAML string, whatever characters it holds.
    quoted = name if name == DEMO_MODEL else json.dumps(name, ensure_ascii=False)
    return _RECIPE.format(recipe=shlex.quote(str(path)), model=quoted)
