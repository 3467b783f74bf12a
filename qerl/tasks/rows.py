"""A dataset of your own as a task: a local .jsonl, .json, .csv or .parquet file, or a Hub id.

JSON is read here, so that a bad line is named and an answer may be 3 in one row and "three" in
the next; CSV, Parquet and the Hub go through `datasets`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from qerl.config import Recipe
from qerl.errors import QerlError
from qerl.reward import RESERVED, Reward
from qerl.tasks.base import Row, Task

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


class RowsTask(Task):
    """Training rows are the dataset's; the held-out ones are `task.eval_dataset`'s, or else its
    last `eval.prompts` rows."""

    name = "rows"

    def __init__(self, recipe: Recipe, rewards: list[Reward] | None = None):
        task = recipe.task
        assert task.dataset is not None, "Recipe.check refuses this"
        needed = {"task.prompt_column": task.prompt_column}
        if rewards is None:
            if task.answer_column is None:
                raise QerlError(
                    "task.answer_column: null, and there is no task.reward; set one of them"
                )
            needed["task.answer_column"] = task.answer_column
            rewards = [exact_match(task.answer_column)]
        self.rewards = rewards
        rows = read("task.dataset", task.dataset, task.split)
        self._train, self._held_out = rows, rows
        if task.eval_dataset is None:
            self._train, self._held_out = split_off(rows, recipe.eval.prompts, task.dataset)
        else:
            self._held_out = read("task.eval_dataset", task.eval_dataset, task.split)
            check_columns(self._held_out, needed, task.eval_dataset)
        check_columns(rows, needed, task.dataset)
        self._prompt_column = task.prompt_column

    def train_rows(self) -> Sequence[Row]:
        return PromptRows(self._train, self._prompt_column)

    def eval_rows(self, n: int) -> list[Row]:
        return PromptRows(self._held_out, self._prompt_column)[:n]


class PromptRows(Sequence[Row]):
    """Rows of a dataset with the prompt column under "prompt"."""

    def __init__(self, rows: Sequence[Row], prompt_column: str):
        self.rows, self.prompt_column = rows, prompt_column

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = dict(self.rows[index])
        prompt = row.pop(self.prompt_column)
        return {**row, "prompt": prompt}


class Part(Sequence[Row]):
    """Rows start … stop-1 of a dataset, without a copy (slicing `datasets` would transpose)."""

    def __init__(self, rows: Sequence[Row], start: int, stop: int):
        self.rows, self.positions = rows, range(start, stop)

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self.rows[i] for i in self.positions[index]]
        return self.rows[self.positions[index]]


def exact_match(column: str) -> Reward:
    """1 if the completion is the answer, blanks around either aside; None where there is none."""

    def exact_match(prompts: list[str], completions: list[str], **columns: Any) -> list[Any]:
        return [
            None if right is None else float(text.strip() == str(right).strip())
            for text, right in zip(completions, columns[column], strict=True)
        ]

    return Reward("exact_match", exact_match)


def split_off(rows: Sequence[Row], held_out: int, source: str) -> tuple[Part, Part]:
    """All rows but the last `held_out`, and those."""
    if len(rows) <= held_out:
        raise QerlError(
            f"eval.prompts: {held_out} rows are to be held out and {source!r} has {len(rows)}; "
            "lower eval.prompts, or set task.eval_dataset"
        )
    cut = len(rows) - held_out
    return Part(rows, 0, cut), Part(rows, cut, len(rows))


def check_columns(rows: Sequence[Row], needed: dict[str, str], source: str) -> None:
    """Every row must have the needed columns, and none may have a name rewards use."""
    names = list(dict.fromkeys(name for row in distinct_shapes(rows) for name in row))
    for key, column in needed.items():
        if column not in names:
            raise QerlError(
                f"{key}: {source!r} has no column {column!r}; its columns are: {', '.join(names)}"
            )
    for name in names:
        if name in RESERVED:
            raise QerlError(
                f"task.dataset: {source!r} has a column {name!r}, a name that rewards use for the "
                "sampled text; rename it"
            )
    if isinstance(rows, list):
        for i, row in enumerate(rows):
            for key, column in needed.items():
                if column not in row:
                    raise QerlError(
                        f"{key}: row {i} of {source!r} has no {column!r}; it has: {', '.join(row)}"
                    )


def distinct_shapes(rows: Sequence[Row]) -> Sequence[Row]:
    """Rows that together have every column: all JSON rows, one row of a table."""
    return rows if isinstance(rows, list) else [rows[0]] if len(rows) else []


def read(key: str, source: str, split: str) -> Sequence[Row]:
    """The rows of a file or Hub dataset. `key` is the recipe's key, for messages."""
    path = Path(source).expanduser()
    local = path.suffix.lower() in SUFFIXES or path.exists() or source[:1] in "./~"
    if not local and not HUB_ID.fullmatch(source):
        raise QerlError(f"{key}: {source!r} is neither a file that exists nor a Hub dataset id")
    rows = read_file(key, path) if local else read_hub(key, source, split)
    if not len(rows):
        raise QerlError(f"{key}: {source!r} has no rows")
    return rows


def read_file(key: str, path: Path) -> Sequence[Row]:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise QerlError(
            f"{key}: {str(path.absolute())!r} {what}; name a {', '.join(SUFFIXES)} file"
        )
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise QerlError(f"{key}: {path.name!r} is none of {', '.join(SUFFIXES)}; convert it")
    if suffix in (".json", ".jsonl"):
        return read_json(key, path)
    return load_with_datasets(
        key, str(path), suffix.removeprefix("."), data_files=str(path.resolve()), split="train"
    )


def read_json(key: str, path: Path) -> list[Row]:
    """JSON Lines, or one list of objects."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise QerlError(f"{key}: {path.name!r} is not UTF-8 text; convert it") from error
    if text.lstrip().startswith("["):
        unit, rows = "item", list(enumerate(parse_json(key, path, text, 1), start=1))
    else:
        lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        unit, rows = "line", [(i, parse_json(key, path, line, i)) for i, line in lines]
    for i, row in rows:
        if not isinstance(row, dict):
            raise QerlError(
                f"{key}: {unit} {i} of {path.name!r} is no object; expected "
                '{"prompt": …, "answer": …}'
            )
    return [row for _, row in rows]


def parse_json(key: str, path: Path, text: str, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        raise QerlError(f"{key}: {path.name!r}, line {line}, is not JSON: {error.msg}") from error


def read_hub(key: str, source: str, split: str) -> Sequence[Row]:
    """A Hub dataset, "owner/name" or "owner/name:config" ("openai/gsm8k:main")."""
    name, _, config = source.partition(":")
    return load_with_datasets(key, source, name, config or None, split=split)


def load_with_datasets(key: str, source: str, *arguments: Any, **options: Any) -> Sequence[Row]:
    """`datasets.load_dataset`, its failures as one line."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset(*arguments, **options)  # pyright: ignore[reportReturnType]
    except (OSError, ValueError, DatasetsError) as error:
        cause = error
        while cause.__cause__ is not None:  # `datasets` wraps the parser's message
            cause = cause.__cause__
        reason = " ".join((str(cause) or type(cause).__name__).split())
        raise QerlError(f"{key}: cannot read {source!r}: {reason[:300]}{hint(reason)}") from error


def hint(reason: str) -> str:
    """What to do about the commonest reasons."""
    if "onfig name is missing" in reason:
        return '; add the configuration, as in "openai/gsm8k:main"'
    if "reach" in reason or "offline" in reason.lower() or "onnect" in reason:
        return "; is the Hub reachable? A local file works offline"
    return ""
