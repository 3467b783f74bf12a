"""A task = dataset + prompt + reward. `load_task` makes one from a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qerl.config import Recipe
from qerl.errors import QerlError
from qerl.reward import Reward, load_reward, name_rewards
from qerl.tasks.base import Row, Task
from qerl.tasks.prompts import PromptStream, make_prompts, make_question, train_prompts

__all__ = [
    "PromptStream",
    "Row",
    "Task",
    "load_task",
    "make_prompts",
    "make_question",
    "train_prompts",
]

RewardArgument = Callable[..., Any] | list[Callable[..., Any]]


def load_task(recipe: Recipe, reward: RewardArgument | None = None) -> Task:
    """The recipe's task. `reward` (one function or several) replaces the recipe's and the task's.

    Raises QerlError for an unknown task, an unreadable dataset, a missing column or reward.
    """
    task = _built(recipe, recipe_rewards(recipe, reward))
    task.threshold = recipe.task.solved_at
    return task


def _built(recipe: Recipe, rewards: list[Reward] | None) -> Task:
    from qerl.tasks.numbers import NumbersTask
    from qerl.tasks.rows import RowsTask

    name = recipe.task.name
    if name == "numbers":
        return NumbersTask(recipe.seed, rewards)
    if name == "rows":
        return RowsTask(recipe, rewards)
    raise QerlError(
        f"task.name: there is no task {name!r}; the tasks are numbers, rows (a dataset of yours)"
    )


def recipe_rewards(recipe: Recipe, reward: RewardArgument | None) -> list[Reward] | None:
    """The rewards asked for, with their weights; None where the task's own is meant."""
    given = recipe.task.reward if reward is None else reward
    weights = recipe.task.reward_weights
    if given is None:
        if weights is not None:
            raise QerlError(
                f"task.reward_weights: {weights} is given, but no task.reward; list the functions"
            )
        return None
    items = list(given) if isinstance(given, list | tuple) else [given]
    functions = [load_reward(item, Path.cwd()) if isinstance(item, str) else item for item in items]
    return name_rewards(functions, weights)
