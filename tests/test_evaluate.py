"""The evaluator, with an engine that answers from a list."""

import pytest

from qerl.config import Recipe
from qerl.errors import QerlError
from qerl.evaluate import evaluate
from qerl.reward import Reward
from qerl.stats import wilson
from qerl.tasks import Task
from qerl.types import Completion, Group, Prompt


class FixedTask(Task):
    name = "fixed"

    def __init__(self, *rewards):
        self.rewards = list(rewards)

    def train_rows(self):
        return []

    def eval_rows(self, n):
        return []


class FixedEngine:
    def __init__(self, answers):
        self.answers, self.calls = answers, []

    def sample(self, prompts, params, *, progress=None):
        self.calls.append((params, progress))
        return [
            Group(p, [Completion([5] * length, [], [], [], reason, text)])
            for p, (text, length, reason) in zip(prompts, self.answers, strict=True)
        ]


def exact(prompts, completions, answer):
    return [1.0 if c == a else 0.25 for c, a in zip(completions, answer, strict=True)]


def make_prompts(*answers):
    return [Prompt(i, (), f"q{i}", (1,), {"answer": a}) for i, a in enumerate(answers)]


def make_recipe(**sections):
    return Recipe(model="m", seed=3, rollout={"max_completion_tokens": 9}, **sections)


def test_result_by_hand():
    engine = FixedEngine([("a", 2, "stop"), ("x", 4, "length"), ("c", 3, "stop"), ("d", 1, "stop")])
    result, groups = evaluate(
        engine, FixedTask(Reward("exact", exact)), make_prompts("a", "b", "c", "d"), make_recipe()
    )
    assert (result.task, result.n, result.accuracy) == ("fixed", 4, 0.75)
    assert result.mean_reward == pytest.approx(3.25 / 4)
    assert result.ci95 == wilson(3, 4)
    assert (result.mean_length, result.truncated) == (2.5, 0.25)
    assert [g.completions[0].rewards["exact"] for g in groups] == [1.0, 0.25, 1.0, 1.0]
    assert result.as_dict() == {
        "accuracy": 0.75,
        "mean_reward": pytest.approx(0.8125),
        "ci95": list(wilson(3, 4)),
        "n": 4,
    }


def test_sampling_is_greedy_and_progress_is_passed_on():
    engine, ticks = FixedEngine([("a", 1, "stop")]), []
    task = FixedTask(Reward("exact", exact))
    evaluate(engine, task, make_prompts("a"), make_recipe(), progress=ticks.append)
    evaluate(engine, task, make_prompts("a"), make_recipe(eval={"max_completion_tokens": 30}))
    (first, progress), (second, _) = engine.calls
    assert (first.n, first.temperature, first.max_tokens, first.seed) == (1, 0.0, 9, 3)
    assert second.max_tokens == 30
    progress(1)
    assert ticks == [1]


def test_solved_means_full_marks_from_every_weighted_reward():
    def parts(prompts, completions, answer):
        assert 0.7 + 0.2 + 0.1 < 1.0  # full marks, but for rounding
        return [0.7 + 0.2 + 0.1 * (c == a) for c, a in zip(completions, answer, strict=True)]

    engine = FixedEngine([("a", 1, "stop"), ("x", 1, "stop")])
    task = FixedTask(Reward("parts", parts))
    result, _ = evaluate(engine, task, make_prompts("a", "b"), make_recipe())
    assert result.accuracy == 0.5
    assert FixedTask(Reward("a", exact, 1.0), Reward("b", exact, 2.0)).solved_at == 3.0
    # A penalty (negative weight) does not raise the bar.
    assert FixedTask(Reward("a", exact, 1.0), Reward("b", exact, -0.5)).solved_at == 1.0


def test_a_threshold_of_the_recipes_takes_the_place_of_full_marks():
    engine = FixedEngine([("a", 1, "stop"), ("x", 1, "stop")])  # rewards 1 and 0.25
    task = FixedTask(Reward("exact", exact))
    for threshold, accuracy in ((0.25, 1.0), (0.3, 0.5), (1.1, 0.0), (None, 0.5)):
        task.threshold = threshold
        result, _ = evaluate(engine, task, make_prompts("a", "b"), make_recipe())
        assert result.accuracy == accuracy


def test_no_prompts():
    with pytest.raises(QerlError, match="eval: there are no held-out prompts"):
        evaluate(FixedEngine([]), FixedTask(Reward("exact", exact)), [], make_recipe())
