"""The starter: three files that fit each other, and never overwrite anything."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from qerl.config import Recipe
from qerl.errors import QerlError
from qerl.init import DEMO_MODEL, write_starter


def load_score(path: Path):
    spec = importlib.util.spec_from_file_location("starter_reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score


def test_starter_fits_together_from_any_directory(tmp_path: Path, monkeypatch):
    folder = tmp_path / "my first run"
    recipe_path, reward_path, data_path = write_starter(folder)
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.load("my first run/recipe.yaml")
    assert recipe.model == DEMO_MODEL
    assert recipe.task.dataset == str(data_path)
    assert recipe.task.reward == f"{reward_path}:score"
    rows = [json.loads(line) for line in data_path.read_text().splitlines()]
    assert len(rows) == 5 and all(set(row) == {"prompt", "answer"} for row in rows)
    # Some rows are left to train on after the held-out ones are taken.
    assert len(rows) - recipe.eval.prompts >= recipe.rollout.prompts_per_step
    monkeypatch.chdir(folder)
    assert Recipe.load("recipe.yaml") == recipe
    assert f"qerl train '{recipe_path}'" in recipe_path.read_text()


def test_starter_reward_values(tmp_path: Path):
    score = load_score(write_starter(tmp_path / "s")[1])
    completions = [" Paris.\n", "It is Paris", "London", ""]
    rewards = score(["q"] * 4, completions, answer=["Paris"] * 4, finish_reasons=["stop"] * 4)
    assert rewards == pytest.approx([1.0, 0.5 + 0.1 / 3, 0.1, 0.0])
    full_marks = 1.0
    assert max(rewards) == full_marks  # "solved" in evaluation means full marks


def test_starter_model_is_quoted_and_local_folders_are_absolute(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a: model").mkdir()
    write_starter(tmp_path / "one", "./a: model")
    assert Recipe.load(tmp_path / "one" / "recipe.yaml").model == str(tmp_path / "a: model")
    write_starter(tmp_path / "two", "org/model-1B")
    assert Recipe.load(tmp_path / "two" / "recipe.yaml").model == "org/model-1B"


@pytest.mark.parametrize("name", ["recipe.yaml", "reward.py", "data.jsonl"])
def test_starter_refuses_to_overwrite(name: str, tmp_path: Path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(QerlError, match=f"{name}' exists; name an empty folder"):
        write_starter(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_starter_into_a_file(tmp_path: Path):
    target = tmp_path / "taken"
    target.write_text("")
    for folder in (target, target / "below", target / "far" / "below"):
        with pytest.raises(QerlError, match=r"^init: '.*': '.*/taken' is not a folder; name "):
            write_starter(folder)
