"""What a run writes down: `metrics.jsonl` (one line a step) and `completions.jsonl`.

Names are TRL's where TRL has one (`reward`, `completions/mean_length`, …), ours start with `qerl/`.
Lines are flushed one by one: a killed run keeps every finished step, and at most its last line is
half written (dropped when the file is opened for more). Numbers that are not finite become null,
because JSON has no name for them. Shape letters: P prompts, G group size, T tokens.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TextIO

from qerl.errors import QerlError
from qerl.types import Completion, Group

TOLERANCE = 1e-9  # a weighted sum of full marks may miss `solved_at` by rounding


def read_jsonl(path: str | Path) -> tuple[list[dict[str, Any]], int]:
    """Rows of a JSONL file, and 1 if its last line was half written (a live or killed run), else 0.

    Raises QerlError for a broken line anywhere else, and when there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise QerlError(f"{str(path)!r}: no such file; the run has not finished a step yet")
    lines = path.read_bytes().split(b"\n")
    tail = lines.pop()
    rows = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    return rows, int(bool(tail.strip()))


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise QerlError(f"{str(path)!r}: line {number} is not JSON; delete that line") from error


class JsonlWriter:
    """Appends rows to a JSONL file, each flushed when written. Every row has an integer `step`.

    The file is opened by the first write: who only reads a run must not touch the files of a
    process that may still be writing them.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file: TextIO | None = None

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        text = [json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) for row in rows]
        file = self._opened()
        file.write("".join(line + "\n" for line in text))
        file.flush()

    def truncate_after(self, step: int) -> None:
        """Forget rows of later steps: a resumed run writes them again."""
        self._opened().flush()
        _cut(self.path, lambda row: row["step"] <= step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _opened(self) -> TextIO:
        if self._file is None:
            if self.path.exists():
                _cut(self.path)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (see close)
        return self._file

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _cut(path: Path, keep: Callable[[dict[str, Any]], bool] | None = None) -> None:
    """Shorten the file to the whole lines before the first one that `keep` refuses."""
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") or (keep and not keep(_parse(path, number, line))):
                break
            end += len(line)
    if end < path.stat().st_size:
        os.truncate(path, end)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return value


class MetricsWriter(JsonlWriter):
    """`metrics.jsonl`: one flat dictionary of numbers a step."""

    def write(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Append the step's line: `{"step": step, **metrics}`."""
        self.append([{"step": step, **metrics}])


class CompletionsWriter(JsonlWriter):
    """`completions.jsonl`: what the model wrote, and what it got for it."""

    def write(self, step: int, groups: Sequence[Group], limit: int | None = None) -> None:
        """Append the step's first `limit` completions (None: all), whole groups first."""
        rows = (completion_row(step, g, c) for g in groups for c in g.completions)
        self.append([row for row, _ in zip(rows, range(_count(groups, limit)), strict=False)])


def _count(groups: Sequence[Group], limit: int | None) -> int:
    total = sum(len(group.completions) for group in groups)
    return total if limit is None else min(limit, total)


def completion_row(step: int, group: Group, completion: Completion) -> dict[str, Any]:
    """One line of completions.jsonl. `version` is the adapter that sampled the first token."""
    return {
        "step": step,
        "prompt": group.prompt.text,
        "completion": completion.text,
        "rewards": dict(completion.rewards),
        "reward": completion.reward,
        "advantage": completion.advantage,
        "finish_reason": completion.finish_reason,
        "version": completion.versions[0] if completion.versions else None,
        "sigma": group.sigma,
        "tokens": len(completion.token_ids),
        "index": group.prompt.index,
    }


def step_metrics(
    groups: Sequence[Group],
    *,
    solved_at: float = 1.0,
    tokens_before: int = 0,
    seconds: Mapping[str, float] | None = None,
    peak_bytes: int | None = None,
) -> dict[str, float]:
    """Everything a step's groups tell before the loss; pure. Keys are metric names.

    solved_at: reward from which a completion counts as correct (`qerl/accuracy`).
    tokens_before: prompt and completion tokens of earlier steps; `num_tokens` adds this step's.
    seconds: wall seconds by phase of this step. `step_time` is their sum, `qerl/tokens_per_second`
    sampled tokens over the seconds of phase "rollout".

    `reward_std` is the mean over the groups of their unbiased standard deviation, and
    `frac_reward_zero_std` the share of groups where it is zero, both as TRL's GRPO trainer.
    """
    completions = [c for group in groups for c in group.completions]
    assert completions, "a step has at least one completion"
    rewards = [c.reward for c in completions]
    deviations = [_std([c.reward for c in group.completions]) for group in groups]
    sampled = sum(len(c.token_ids) for c in completions)
    read = sum(len(g.prompt.token_ids) * len(g.completions) for g in groups)
    return {
        "reward": fmean(rewards),
        "reward_std": fmean(deviations),
        "frac_reward_zero_std": fmean(d < 1e-8 for d in deviations),
        **_part_metrics(completions),
        **_length_metrics(completions),
        "entropy": sum(sum(c.entropies) for c in completions) / max(sampled, 1),
        "num_tokens": tokens_before + read + sampled,
        "qerl/accuracy": fmean(r >= solved_at - TOLERANCE for r in rewards),
        "qerl/sigma": fmean(group.sigma for group in groups),
        **_time_metrics(seconds or {}, sampled),
        **({} if peak_bytes is None else {"qerl/peak_bytes": peak_bytes}),
    }


def _std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _part_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    names = dict.fromkeys(name for c in completions for name in c.rewards)
    out = {}
    for name in names:
        values = [v for c in completions if (v := c.rewards.get(name)) is not None]
        out[f"rewards/{name}/mean"] = fmean(values) if values else math.nan
        out[f"rewards/{name}/std"] = _std(values)
    return out


def _length_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    lengths = [len(c.token_ids) for c in completions]
    ended = [len(c.token_ids) for c in completions if c.finish_reason == "stop"]
    return {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
        "completions/mean_terminated_length": fmean(ended) if ended else 0.0,
    }


def _time_metrics(seconds: Mapping[str, float], sampled: int) -> dict[str, float]:
    out = {f"qerl/seconds/{phase}": value for phase, value in seconds.items()}
    if seconds:
        out["step_time"] = sum(seconds.values())
    if seconds.get("rollout"):
        out["qerl/tokens_per_second"] = sampled / seconds["rollout"]
    return out
