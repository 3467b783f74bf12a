"""The demo task: which of four two-digit numbers is the largest?

Rows are made from counters, so there is nothing to download. A problem is a *set* of four
numbers; a hash of the set says whether it is for training or held out, so no held-out problem
is ever trained on in any order. Format alone scores 25%, the chance of naming the right one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, overload

import numpy as np

from qerl.reward import Reward
from qerl.tasks.base import Row, Task

# One worked example, as an earlier turn: it shows the format and, above all, where to stop.
# Without it the model explains itself at length (0% exact answers); with it a fifth is right.
SYSTEM = "Answer with a number."
QUESTION = "Which number is the largest: {numbers}?"
EXAMPLE = ("24, 71, 36, 58", "71")
TRAIN_ROWS = 10_000
LOWEST, HIGHEST = 10, 99
HELD_OUT_SHARE = 8  # one problem in eight
HELD_OUT_SEED = 2**32  # recipes' seeds are below 2**31: the held-out rows are the same for all


def reward(
    prompts: list[str],
    completions: list[str],
    answer: list[str],
    finish_reasons: list[str],
    **_: Any,
) -> list[float]:
    """1 for exactly the answer and then a stop; 0.1 for any two digits; else 0.

    The small part teaches the format. It is small because a large one is learned instead of
    the task.
    """
    return [
        1.0 if text.strip() == right and reason == "stop" else 0.1 * is_two_digits(text)
        for text, right, reason in zip(completions, answer, finish_reasons, strict=True)
    ]


def is_two_digits(text: str) -> bool:
    return re.fullmatch("[0-9]{2}", text.strip()) is not None


def is_held_out(numbers: Sequence[int]) -> bool:
    """Whether this set of numbers, in any order, is kept for evaluation."""
    key = 0
    for number in sorted(numbers):
        key = key * 100 + number
    return key * 0x9E3779B97F4A7C15 % 2**64 < 2**64 // HELD_OUT_SHARE


def draw(seed: int, index: int, held_out: bool) -> list[int]:
    """The four distinct numbers of a row: a function of its arguments alone."""
    stream = np.random.Philox(key=np.array([seed, index], dtype=np.uint64))
    while True:
        numbers = sample_four(stream)
        if is_held_out(numbers) == held_out:
            return numbers


def sample_four(stream: np.random.Philox) -> list[int]:
    """Four distinct numbers: the first steps of a Fisher-Yates shuffle, on raw bits.

    Raw bits because NumPy guarantees them across versions, unlike its shuffles.
    """
    pool = list(range(LOWEST, HIGHEST + 1))
    for i, bits in enumerate(stream.random_raw(4)):
        j = i + int(bits) % (len(pool) - i)
        pool[i], pool[j] = pool[j], pool[i]
    return pool[:4]


def make_row(numbers: list[int]) -> Row:
    listed = ", ".join(map(str, numbers))
    question = QUESTION.format(numbers=listed)
    return {"prompt": messages(question), "answer": str(max(numbers))}


def messages(question: str) -> list[dict[str, str]]:
    """The conversation that ends in a question, after the worked example."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION.format(numbers=EXAMPLE[0])},
        {"role": "assistant", "content": EXAMPLE[1]},
        {"role": "user", "content": question},
    ]


class TrainRows(Sequence[Row]):
    """TRAIN_ROWS rows, each made when asked for."""

    def __init__(self, seed: int):
        self.seed = seed

    def __len__(self) -> int:
        return TRAIN_ROWS

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return make_row(draw(self.seed, index, held_out=False))


def held_out_problems() -> Iterator[list[int]]:
    """Held-out problems, without end and without repeating a set."""
    seen: set[tuple[int, ...]] = set()
    index = 0
    while True:
        numbers = draw(HELD_OUT_SEED, index, held_out=True)
        index += 1
        if tuple(sorted(numbers)) not in seen:
            seen.add(tuple(sorted(numbers)))
            yield numbers


class NumbersTask(Task):
    """Training rows depend on the seed; the held-out rows are the same for every seed."""

    name = "numbers"
    uniform = True

    def __init__(self, seed: int, rewards: list[Reward] | None = None):
        self.rewards = rewards or [Reward("largest", reward)]
        self._rows = TrainRows(seed)

    def train_rows(self) -> Sequence[Row]:
        return self._rows

    def eval_rows(self, n: int) -> list[Row]:
        return [make_row(numbers) for numbers in islice(held_out_problems(), n)]

    def ask(self, text: str) -> str | list[dict[str, str]]:
        return messages(text)
