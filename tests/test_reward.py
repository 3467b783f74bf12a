"""One reward signature, sync or async, and every mistake in one line."""

import asyncio
import functools
import math
import threading

import numpy as np
import pytest

from qerl.errors import QerlError
from qerl.reward import Reward, load_reward, name_rewards, per_row, score_groups
from qerl.types import Completion, Group, Prompt


def make_groups(texts, **columns):
    """One group for each list of completion texts; columns hold one value a group."""
    groups = []
    for i, row in enumerate(texts):
        prompt = Prompt(i, (), f"prompt {i}", (1,), {k: v[i] for k, v in columns.items()})
        answers = [
            Completion([10 + j, 2], [0.0] * 2, [0.0] * 2, [0] * 2, "stop", text)
            for j, text in enumerate(row)
        ]
        groups.append(Group(prompt, answers))
    return groups


def score(groups, *functions, weights=None):
    score_groups(groups, name_rewards(functions, weights))
    return [c.reward for g in groups for c in g.completions]


def error_of(groups, *functions):
    with pytest.raises(QerlError) as caught:
        score(groups, *functions)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_columns_are_aligned_with_completions():
    seen = {}

    def spy(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [float(i) for i in range(len(completions))]

    assert score(make_groups([["a", "b"], ["c"]], answer=["x", "y"]), spy) == [0.0, 1.0, 2.0]
    assert seen == {
        "prompts": ["prompt 0", "prompt 0", "prompt 1"],
        "completions": ["a", "b", "c"],
        "answer": ["x", "x", "y"],
        "completion_ids": [[10, 2], [11, 2], [10, 2]],
        "finish_reasons": ["stop", "stop", "stop"],
    }


def only_completions(completions, **kwargs):  # a common form with TRL
    return [float(len(c)) for c in completions]


def no_extras(completions):
    return [float(len(c)) for c in completions]


def other_names(questions, texts, answer):
    return [float(t == a) for t, a in zip(texts, answer, strict=True)]


def keyword_only(*, completions, answer):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def catch_all(**kwargs):
    pairs = zip(kwargs["completions"], kwargs["answer"], strict=True)
    return [float(c == a) for c, a in pairs]


def prompts_and_all(prompts, **kwargs):
    return [float(len(c)) for c in kwargs["completions"]]


class Callable:
    def __call__(self, prompts, completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (only_completions, [1.0, 2.0]),
        (no_extras, [1.0, 2.0]),
        (other_names, [1.0, 0.0]),
        (keyword_only, [1.0, 0.0]),
        (catch_all, [1.0, 0.0]),
        (prompts_and_all, [1.0, 2.0]),
        (Callable(), [1.0, 0.0]),
        (functools.partial(other_names, answer=["z", "zz"]), [0.0, 1.0]),
        (lambda p, c: [3.0 for _ in c], [3.0, 3.0]),
    ],
)
def test_any_signature_gets_what_it_names(function, expected):
    groups = make_groups([["a", "zz"]], answer=["a"])
    if isinstance(function, functools.partial):  # a bound keyword is overridden by the column
        expected = [1.0, 0.0]
    assert score(groups, function) == expected


def test_missing_column_is_named():
    message = error_of(make_groups([["a"]], answer=["a"]), lambda completions, solution: [1.0])
    assert message == (
        "reward `reward` wants `solution`, and the rows have no such column; they have: "
        "answer, completion_ids, finish_reasons"
    )


def test_weights_and_not_applicable():
    def length(completions):
        return [float(len(c)) for c in completions]

    def maybe(completions):
        return [None if c == "a" else 10.0 for c in completions]

    groups = make_groups([["a", "bb"]])
    assert score(groups, length, maybe, weights=[0.5, 2.0]) == [0.5, 21.0]
    assert groups[0].completions[0].rewards == {"length": 1.0, "maybe": None}
    assert groups[0].completions[1].rewards == {"length": 2.0, "maybe": 10.0}


def test_numpy_and_booleans_are_numbers():
    assert score(make_groups([["a", "b"]]), lambda p, c: np.array([1, 2.5])) == [1.0, 2.5]
    assert score(make_groups([["a", "b"]]), lambda p, c: [True, np.bool_(False)]) == [1.0, 0.0]
    assert type(score(make_groups([["a"]]), lambda p, c: [np.float32(1)])[0]) is float


def test_no_completions_call_nothing():
    score_groups([], [Reward("never", lambda p, c: 1 / 0)])


async def double(prompts, completions, answer):
    await asyncio.sleep(0)
    return [2.0 * (c == a) for c, a in zip(completions, answer, strict=True)]


def test_async_outside_and_inside_a_running_loop():
    groups = make_groups([["a", "b"]], answer=["a"])
    assert score(groups, double) == [2.0, 0.0]

    async def notebook_cell():
        return score(groups, double)

    assert asyncio.run(notebook_cell()) == [2.0, 0.0]


def test_awaitable_from_a_plain_function_and_one_loop_for_all_calls():
    loops = []

    async def work(completions):
        loops.append(asyncio.get_running_loop())
        return [1.0 for _ in completions]

    groups = make_groups([["a"]])
    assert score(groups, lambda prompts, completions: work(completions)) == [1.0]
    assert score(groups, lambda prompts, completions: work(completions)) == [1.0]
    assert loops[0] is loops[1]  # so that a client opened in one step works in the next


def test_async_error_is_reported():
    async def boom(prompts, completions):
        raise RuntimeError("no quota")

    message = error_of(make_groups([["a"]]), boom)
    assert message.startswith("reward `boom` raised RuntimeError: no quota (test_reward.py:")


def test_per_row_gets_its_own_columns():
    rows = []

    def one(prompt, completion, answer, finish_reason, completion_ids):
        rows.append((prompt, completion, answer, finish_reason, completion_ids))
        return float(completion == answer)

    assert score(make_groups([["a"], ["b"]], answer=["a", "x"]), per_row(one)) == [1.0, 0.0]
    assert rows == [
        ("prompt 0", "a", "a", "stop", [10, 2]),
        ("prompt 1", "b", "x", "stop", [10, 2]),
    ]


def test_per_row_with_a_lambda_and_by_position():
    groups = make_groups([[" a "]], answer=["a"])
    strict = per_row(lambda prompt, completion, answer: float(completion.strip() == answer))
    assert score(groups, strict) == [1.0]
    assert score(groups, per_row(lambda p, c: len(c))) == [3.0]
    assert score(groups, per_row(lambda completion, **row: float(row["answer"] == "a"))) == [1.0]


def test_per_row_async_rows_run_together():
    barrier = asyncio.Barrier(3)

    async def meet(prompt, completion):
        await asyncio.wait_for(barrier.wait(), timeout=20)  # passes only if all three are waiting
        return 1.0

    assert score(make_groups([["a", "b", "c"]]), per_row(meet)) == [1.0, 1.0, 1.0]


def test_per_row_names_the_row_that_failed():
    def parse(prompt, completion):
        return int(completion)

    message = error_of(make_groups([["1"], ["two\nlines"]]), per_row(parse))
    assert message.startswith("reward `parse` raised ValueError: invalid literal for int()")
    assert "(test_reward.py:" in message
    assert message.endswith("on prompt 'prompt 1' completion 'two\\nlines'")


def test_per_row_async_names_the_row_that_failed():
    async def parse(prompt, completion):
        return int(completion)

    message = error_of(make_groups([["1", "x"]]), per_row(parse))
    assert message.endswith("on prompt 'prompt 0' completion 'x'")


def test_batch_reward_that_raises():
    def bad(prompts, completions):
        raise KeyError("first\nsecond")

    message = error_of(make_groups([["a", "b"]]), bad)
    assert "reward `bad` raised KeyError: " in message
    assert message.endswith("on prompt 'prompt 0' completion 'a' and 1 more")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_reward(value):
    message = error_of(make_groups([["a", "b"]]), lambda p, c: [1.0, value])
    assert message == (
        f"reward `reward` returned {value} for prompt 'prompt 0' completion 'b'; return a finite "
        "number, or None where it does not apply"
    )


def test_wrong_length():
    message = error_of(make_groups([["a", "b"]]), lambda p, c: [1.0])
    assert message == (
        "reward `reward` returned 1 values for 2 completions; return one per completion"
    )


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (1.0, "returned float; return a list"),
        (None, "returned NoneType; return a list"),
        ({"a": 1}, "returned dict; return a list"),
        (["1"], "returned '1' (str) for prompt"),
        ([[1.0]], "returned [1.0] (list) for prompt"),
        (np.float64(1.0), "returned float; return a list"),
    ],
)
def test_wrong_type(values, found):
    assert found in error_of(make_groups([["a"]]), lambda p, c: values)


def test_all_none_is_an_error():
    message = error_of(make_groups([["a"]]), lambda p, c: [None], lambda p, c: [None])
    assert message == (
        "reward `reward`, `reward_2`: None for completion 'a', so it has no reward; return a "
        "number, such as 0.0"
    )


def test_long_texts_are_shortened():
    groups = make_groups([["x" * 5000]])
    assert len(error_of(groups, lambda p, c: [math.nan])) < 300


def test_names_and_weights():
    def one(p, c): ...

    rewards = name_rewards([one, per_row(one), lambda p, c: [1.0]], [1, 2, 3])
    assert [(r.name, r.weight) for r in rewards] == [("one", 1), ("one_2", 2), ("reward", 3)]
    with pytest.raises(QerlError, match="task.reward_weights: 1 weights for 2 reward functions"):
        name_rewards([one, one], [1.0])
    with pytest.raises(QerlError, match="reward: 'one' is not a function"):
        name_rewards(["one"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(QerlError, match="the list is empty"):
        name_rewards([])


def test_load_reward_from_a_path_with_spaces(tmp_path, monkeypatch):
    folder = tmp_path / "my rewards"
    folder.mkdir()
    (folder / "helper_for_reward.py").write_text("VALUE = 7.0\n")
    (folder / "reward.py").write_text(
        "from dataclasses import dataclass\n"
        "from helper_for_reward import VALUE\n"
        "@dataclass\nclass Box:\n    value: float = VALUE\n"
        "def score(prompts, completions):\n    return [Box().value for _ in completions]\n"
    )
    assert score(make_groups([["a"]]), load_reward("./reward.py:score", folder)) == [7.0]
    monkeypatch.setenv("HOME", str(tmp_path))
    function = load_reward("~/my rewards/reward.py:score", tmp_path)
    assert score(make_groups([["a"]]), function) == [7.0]


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        ("", "./gone.py:f", r"task.reward: there is no file '.*gone\.py'; check the path"),
        ("", "reward.py", "task.reward: found 'reward.py', expected \"./file.py:function\""),
        ("", "./r.py:", "expected"),
        (
            "import os\ndef one(p, c): ...\ndef two(p, c): ...\n",
            "./r.py:score",
            "r.py has no function 'score'; it has: one, two",
        ),
        ("x = 1\n", "./r.py:x", "r.py has no function 'x'; it has: none"),
        ("def f(:\n", "./r.py:f", "r.py, line 1, raised SyntaxError"),
        ("\nimport not_there_at_all\n", "./r.py:f", "r.py, line 2, raised ModuleNotFoundError"),
    ],
)
def test_load_reward_mistakes(tmp_path, text, spec, message):
    (tmp_path / "r.py").write_text(text)
    with pytest.raises(QerlError, match=message):
        load_reward(spec, tmp_path)


def test_async_rewards_use_one_daemon_thread():
    score(make_groups([["a"]], answer=["a"]), double)
    score(make_groups([["a"]], answer=["a"]), double)
    threads = [t for t in threading.enumerate() if t.name == "qerl-async-rewards"]
    assert len(threads) == 1 and threads[0].daemon
