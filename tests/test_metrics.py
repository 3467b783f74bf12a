"""Metric names and values by hand, and JSONL files that survive a kill."""

import json
import math

import pytest

from qerl.errors import QerlError
from qerl.metrics import CompletionsWriter, MetricsWriter, read_jsonl, step_metrics
from qerl.types import Completion, Group, Prompt


def completion(reward, tokens, *, reason="stop", entropy=0.5, parts=None, version=3):
    return Completion(
        token_ids=[7] * tokens,
        logprobs=[-1.0] * tokens,
        entropies=[entropy] * tokens,
        versions=[version] * tokens,
        finish_reason=reason,
        text="é" * tokens,
        rewards=parts if parts is not None else {"exact": reward},
        reward=reward,
        advantage=reward - 0.5,
    )


def group(index, completions, *, prompt_tokens=4, sigma=0.01):
    prompt = Prompt(index, (), f"prompt {index}", tuple(range(prompt_tokens)))
    return Group(prompt, completions, sigma)


def two_groups():
    first = group(0, [completion(1.0, 2), completion(0.0, 4, reason="length", entropy=1.0)])
    second = group(1, [completion(1.0, 1), completion(1.0, 3)], prompt_tokens=6)
    return [first, second]


def test_step_metrics_by_hand():
    m = step_metrics(
        two_groups(), tokens_before=100, seconds={"rollout": 2.0, "loss": 3.0}, peak_bytes=9
    )
    assert m["reward"] == 0.75
    # unbiased deviations: {1, 0} -> sqrt(1/2), {1, 1} -> 0; mean of the two
    assert m["reward_std"] == pytest.approx(math.sqrt(0.5) / 2)
    assert m["frac_reward_zero_std"] == 0.5
    assert m["qerl/accuracy"] == 0.75
    assert m["completions/mean_length"] == 2.5
    assert (m["completions/min_length"], m["completions/max_length"]) == (1, 4)
    assert m["completions/clipped_ratio"] == 0.25
    assert m["completions/mean_terminated_length"] == 2.0
    # 6 tokens of entropy 0.5 and 4 of entropy 1: a mean over tokens, not over completions
    assert m["entropy"] == pytest.approx(0.7)
    # prompts are read once per completion: 2·4 + 2·6 = 20, plus 10 sampled
    assert m["num_tokens"] == 130
    assert m["qerl/sigma"] == 0.01
    assert m["step_time"] == 5.0
    assert m["qerl/seconds/loss"] == 3.0
    assert m["qerl/tokens_per_second"] == 5.0
    assert m["qerl/peak_bytes"] == 9


def test_reward_parts_ignore_what_does_not_apply():
    parts = [{"a": 1.0, "b": None}, {"a": 0.0, "b": None}, {"a": 0.5, "b": 2.0}]
    m = step_metrics([group(0, [completion(0.0, 1, parts=p) for p in parts])])
    assert m["rewards/a/mean"] == 0.5 and m["rewards/a/std"] == 0.5
    assert m["rewards/b/mean"] == 2.0 and m["rewards/b/std"] == 0.0


def test_accuracy_uses_the_tasks_threshold():
    groups = [group(0, [completion(0.1, 1), completion(0.8, 1), completion(0.1 * 3 + 0.6, 1)])]
    assert step_metrics(groups, solved_at=0.9)["qerl/accuracy"] == pytest.approx(1 / 3)


def test_single_completion_group_has_no_deviation():
    m = step_metrics([group(0, [completion(1.0, 1)])])
    assert m["reward_std"] == 0.0 and m["frac_reward_zero_std"] == 1.0
    assert "step_time" not in m and "qerl/peak_bytes" not in m


def test_writer_appends_and_names_infinity_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {"reward": 0.5, "grad_norm": math.inf})
        assert read_jsonl(path)[0] == [{"step": 1, "reward": 0.5, "grad_norm": None}]  # flushed
        writer.write(2, {"reward": 0.75})
    assert [row["step"] for row in read_jsonl(path)[0]] == [1, 2]


def test_truncate_after_then_append(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"reward": step})
    with MetricsWriter(path) as writer:
        writer.truncate_after(1)
        writer.write(2, {"reward": 20})
    assert [(r["step"], r["reward"]) for r in read_jsonl(path)[0]] == [(1, 1), (2, 20)]


def test_half_written_line_is_counted_then_dropped_on_append(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_jsonl(path) == ([{"step": 1}], 1)
    with MetricsWriter(path) as writer:
        writer.write(2, {})
    assert read_jsonl(path) == ([{"step": 1}, {"step": 2}], 0)


def test_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(QerlError, match="line 2 is not JSON"):
        read_jsonl(path)
    with pytest.raises(QerlError, match="no such file"):
        read_jsonl(tmp_path / "absent.jsonl")


def test_completions_rows_and_limit(tmp_path):
    path = tmp_path / "completions.jsonl"
    with CompletionsWriter(path) as writer:
        writer.write(5, two_groups(), limit=3)
        writer.write(6, two_groups(), limit=0)
        writer.write(7, two_groups())
    rows, _ = read_jsonl(path)
    assert [row["step"] for row in rows] == [5] * 3 + [7] * 4
    assert [row["index"] for row in rows[:3]] == [0, 0, 1]
    assert rows[1] == {
        "step": 5,
        "prompt": "prompt 0",
        "completion": "éééé",
        "rewards": {"exact": 0.0},
        "reward": 0.0,
        "advantage": -0.5,
        "finish_reason": "length",
        "version": 3,
        "sigma": 0.01,
        "tokens": 4,
        "index": 0,
    }
    assert "é" in path.read_text() and json.loads(path.read_text().splitlines()[0])
