"""What a task is: rows to train on, rows held out, and rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from qerl.reward import Reward

Row = dict[str, Any]  # "prompt": str or list of messages; every other key is a column


class Task(ABC):
    """Dataset, prompt and reward of a run.

    rewards: summed with their weights. threshold: the recipe's task.solved_at.
    solved_at: a greedy answer counts as right when its reward reaches this: the threshold, or else
    full marks, which are 1 from every function, so the sum of the positive weights.
    uniform: every prompt has about the same length, so the rows need not all be rendered up
    front to find one that is too long.
    """

    name: str
    rewards: list[Reward]
    threshold: float | None = None
    uniform: bool = False

    @property
    def solved_at(self) -> float:
        if self.threshold is not None:
            return self.threshold
        return sum(reward.weight for reward in self.rewards if reward.weight > 0)

    @abstractmethod
    def train_rows(self) -> Sequence[Row]:
        """Rows to train on: `len` and indexing. The same index is always the same row."""

    @abstractmethod
    def eval_rows(self, n: int) -> list[Row]:
        """The first n held-out rows (all of them where there are fewer); none is trained on."""

    def ask(self, text: str) -> str | list[dict[str, str]]:
        """A question of the user's as this task's rows put theirs (default: as it is)."""
        return text
