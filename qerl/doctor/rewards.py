"""Checks of the reward: right answers score high, empty and wrong ones low, and soon enough.

A reward that is constant, or that pays for nothing, trains for hours without an error.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qerl.doctor.context import Context, NotChecked
from qerl.doctor.frame import Finding, check
from qerl.types import Completion, Group, Prompt

ROWS = 32
NONSENSE = "?"
SLOW_STEP = 10.0  # seconds of reward a step


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards of one kind of answer. solved: share that reaches the task's `solved_at`."""

    mean: float
    solved: float
    n: int
    seconds: float


@check("reward_gold", "tokenizer")
def reward_gold(context: Context) -> Finding:
    """The dataset's own answers score as solved, and above wrong ones."""
    gold, bad = scores(context, "gold"), best_of_bad(context)
    data = {"mean": gold.mean, "solved": gold.solved, "n": gold.n}
    text = f"{gold.n} right answers score {gold.mean:.2f} on average, {gold.solved:.0%} as solved"
    if gold.solved >= 0.95:
        return Finding("ok", text, data=data)
    if gold.mean > bad.mean + 1e-6:
        column = context.recipe.task.answer_column
        fix = f"if column {column!r} alone is not a full answer (a format is wanted), ignore this"
        return Finding("warn", f"{text} (solved is {context.task.solved_at:g})", fix, data)
    fix = "the reward does not see the answer: check its columns and how it reads the text"
    return Finding("fail", f"{text}, wrong ones {bad.mean:.2f}", fix, data)


@check("reward_wrong", "tokenizer")
def reward_wrong(context: Context) -> Finding:
    """Empty and wrong answers do not score as solved, nor as much as right ones."""
    kinds = {"empty": scores(context, "empty"), "wrong": scores(context, "wrong")}
    data = {name: {"mean": s.mean, "solved": s.solved} for name, s in kinds.items()}
    text = ", ".join(f"{name} answers score {s.mean:.2f}" for name, s in kinds.items())
    solved = max(s.solved for s in kinds.values())
    fix = "the reward pays for a wrong answer, and that is what will be learnt"
    if solved >= 0.5:
        return Finding("fail", f"{text}; up to {solved:.0%} of them count as solved", fix, data)
    if has_gold(context) and best_of_bad(context).mean >= scores(context, "gold").mean - 1e-6:
        return Finding("fail", f"{text}, as much as right ones", fix, data)
    if solved > 0:
        return Finding("warn", f"{text}; {solved:.0%} of them count as solved", fix, data)
    return Finding("ok", text, data=data)


@check("reward_speed", "tokenizer")
def reward_speed(context: Context) -> Finding:
    """What a step will wait for its rewards."""
    names = ["empty", "wrong"] + ["gold"] * has_gold(context)
    known = [scores(context, name) for name in names]
    each = sum(s.seconds for s in known) / sum(s.n for s in known)
    r = context.recipe.rollout
    step = each * r.prompts_per_step * r.group_size
    data = {"seconds_per_completion": each, "seconds_per_step": step}
    text = f"{each * 1e3:.3g} ms a completion, about {step:.2g} s a step"
    if step > SLOW_STEP:
        return Finding("warn", text, "make it async, or score several rows at once", data)
    return Finding("ok", text, data=data)


def has_gold(context: Context) -> bool:
    column = context.recipe.task.answer_column
    return column is not None and any(
        prompt.columns.get(column) is not None for prompt in context.prompts
    )


def best_of_bad(context: Context) -> Scores:
    return max(scores(context, "empty"), scores(context, "wrong"), key=lambda s: s.mean)


def scores(context: Context, kind: str) -> Scores:
    """Score one kind of answer to a few rows; made once."""
    return context.once(f"reward of {kind} answers", lambda: measure(context, kind))


def measure(context: Context, kind: str) -> Scores:
    from qerl.evaluate import is_solved
    from qerl.reward import score_groups

    column = context.recipe.task.answer_column or ""
    prompts = context.prompts
    if has_gold(context):
        prompts = [p for p in prompts if p.columns.get(column) is not None]
    elif kind == "gold":
        raise NotChecked("no column holds a right answer (task.answer_column)")
    prompts = prompts[:: max(1, len(prompts) // ROWS)][:ROWS]
    task = context.task
    groups = [
        Group(prompt, [finished(context, text)])
        for prompt, text in zip(prompts, answers(prompts, column, kind), strict=True)
    ]
    begun = time.perf_counter()
    score_groups(groups, task.rewards)
    seconds = time.perf_counter() - begun
    done = [group.completions[0] for group in groups]
    mean = sum(c.reward for c in done) / len(done)
    return Scores(mean, sum(is_solved(task, c) for c in done) / len(done), len(done), seconds)


def answers(prompts: Sequence[Prompt], column: str, kind: str) -> list[str]:
    """Texts of one kind; a wrong answer is another row's, if that differs."""
    if kind == "empty":
        return [""] * len(prompts)
    own: list[Any] = [prompt.columns.get(column) for prompt in prompts]
    if kind == "gold":
        return [str(answer) for answer in own]
    return [
        next((str(a) for a in own[i:] + own[:i] if a is not None and a != own[i]), NONSENSE)
        for i in range(len(own))
    ]


def finished(context: Context, text: str) -> Completion:
    """`text` as a completion that ended by itself."""
    tokenizer = context.tokenizer
    ids = list(tokenizer(text, add_special_tokens=False).input_ids) if text else []
    ids += [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    zeros = [0.0] * len(ids)
    return Completion(ids, zeros, list(zeros), [0] * len(ids), "stop", text)
