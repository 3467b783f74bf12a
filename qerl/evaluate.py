"""One evaluator: greedy answers to held-out prompts, scored by the task's own rewards.

It asks any engine, so the base, an adapter and a merged model are judged alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from qerl.config import Recipe
from qerl.errors import QerlError
from qerl.reward import score_groups
from qerl.stats import wilson
from qerl.tasks.base import Task
from qerl.types import Completion, EvalResult, Group, Prompt, SamplingParams

TOLERANCE = 1e-9  # a reward added up from parts (0.7 + 0.2 + 0.1) may miss 1 by rounding


class Sampler(Protocol):
    """The part of an engine that evaluation needs."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        progress: Callable[..., Any] | None = None,
    ) -> list[Group]: ...


def evaluate(
    engine: Sampler,
    task: Task,
    prompts: Sequence[Prompt],
    recipe: Recipe,
    *,
    progress: Callable[..., Any] | None = None,
) -> tuple[EvalResult, list[Group]]:
    """Answer every prompt once, greedily; return the result and the scored answers, in order.

    progress is handed to the engine. Raises QerlError without prompts and for a bad reward.
    """
    if not prompts:
        raise QerlError("eval: there are no held-out prompts; check task.eval_dataset")
    params = SamplingParams(
        n=1,
        max_tokens=recipe.eval.max_completion_tokens or recipe.rollout.max_completion_tokens,
        temperature=0.0,
        seed=recipe.seed,
    )
    groups = engine.sample(prompts, params, progress=progress)
    assert [group.prompt.index for group in groups] == [prompt.index for prompt in prompts]
    score_groups(groups, task.rewards)
    return summarize(task, groups), groups


def summarize(task: Task, groups: Sequence[Group]) -> EvalResult:
    """Accuracy, its interval and the means over one scored completion a group."""
    answers = [answer(group) for group in groups]
    n = len(answers)
    solved = sum(is_solved(task, completion) for completion in answers)
    return EvalResult(
        task=task.name,
        accuracy=solved / n,
        mean_reward=sum(completion.reward for completion in answers) / n,
        ci95=wilson(solved, n),
        n=n,
        mean_length=sum(len(completion.token_ids) for completion in answers) / n,
        truncated=sum(completion.finish_reason == "length" for completion in answers) / n,
    )


def answer(group: Group) -> Completion:
    assert len(group.completions) == 1, "evaluation samples one completion a prompt"
    return group.completions[0]


def is_solved(task: Task, completion: Completion) -> bool:
    return completion.reward >= task.solved_at - TOLERANCE
