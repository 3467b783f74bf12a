"""A shortened demo on the real 135M model: it learns, and its adapter works without qerl.

One training run serves every test here and those of merging (`demo_run` of conftest.py), in fp32 so
that another program's greedy answers can be compared one by one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from demo_home import PROMPTS, STEPS

from qerl.config import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("demo")]


@pytest.fixture(scope="module")
def run(demo_run):
    return demo_run


@pytest.fixture(scope="module")
def plain(run, tmp_path_factory: pytest.TempPathFactory):
    """The same prompts, as ids, answered by plain peft + transformers in a process of its own."""
    from qerl.export import dequantized_base

    folder = tmp_path_factory.mktemp("plain")
    prompts = run.session.eval_prompts
    import torch

    checkpoint = run.session.policy.base.checkpoint
    given = {
        "base": str(dequantized_base(checkpoint, folder / "base", dtype=torch.float32)),
        "adapter": str(run.folder.adapter),
        "max_tokens": run.recipe.rollout.max_completion_tokens,
        "prompts": [list(prompt.token_ids) for prompt in prompts],
        "answers": [prompt.columns["answer"] for prompt in prompts],
    }
    (folder / "in.json").write_text(json.dumps(given))
    script = Path(__file__).with_name("plain_peft.py")
    command = [sys.executable, str(script), str(folder / "in.json"), str(folder / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out.json").read_text())


def metrics(run) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    return [row for row in rows if "reward" in row]


def test_the_reward_rises(run):
    """The full demo's curves are in benchmarks/results; they differ by seed and processor."""
    rewards = [row["reward"] for row in metrics(run)]
    assert len(rewards) == STEPS
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15


def test_held_out_accuracy_rises(run):
    """About a fifth is right before. Chance, given the format, is 25%."""
    before, after = run.summary["before"], run.summary["after"]
    assert after["accuracy"] > before["accuracy"] + 0.2


def test_summary_is_complete(run):
    summary = json.loads(run.folder.summary.read_text())
    assert summary == run.summary
    assert list(summary) == [
        *("task", "seed", "steps", "before", "after", "seconds"),
        *("peak_bytes", "base_sha256", "adapter", "versions"),
    ]
    assert (summary["task"], summary["seed"], summary["steps"]) == ("numbers", 3, STEPS)
    for side in ("before", "after"):
        low, high = summary[side]["ci95"]
        assert 0 <= low <= summary[side]["accuracy"] <= high <= 1
        assert summary[side]["n"] == PROMPTS and 0 <= summary[side]["mean_reward"] <= 1
    assert {"rollout", "forward", "backward", "eval", "gate"} <= set(summary["seconds"])
    assert all(value >= 0 for value in summary["seconds"].values())
    assert summary["peak_bytes"] > 500e6  # the base in fp32 alone is more
    assert summary["base_sha256"]["before"] == summary["base_sha256"]["after"]
    assert len(summary["base_sha256"]["after"]) == 64
    assert Path(summary["adapter"]) == run.folder.adapter
    assert all(summary["versions"][name] for name in ("qerl", "torch", "transformers", "peft"))


def test_the_folder_is_complete(run):
    names = {path.name for path in run.folder.path.iterdir()}
    assert names >= {
        *("recipe.yaml", "env.json", "log.txt", "metrics.jsonl", "completions.jsonl"),
        *("checkpoints", "best", "adapter", "summary.json"),
    }
    assert Recipe.load(run.folder.recipe) == run.recipe
    adapter = {path.name for path in run.folder.adapter.iterdir()}
    assert adapter >= {
        *("adapter_config.json", "adapter_model.safetensors", "README.md"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }


def test_plain_peft_gives_the_same_accuracy(run, plain):
    assert plain["qerl"] == [], "the other program must not import qerl"
    assert abs(plain["accuracy"] - run.summary["after"]["accuracy"]) <= 0.02


def test_plain_peft_gives_the_same_answers(run, plain):
    ours = [group.completions[0].text for group in run.samples]
    same = sum(a == b for a, b in zip(ours, plain["texts"], strict=True))
    assert same >= PROMPTS - 1  # one near-tie may fall the other way


def test_plain_peft_applies_every_module_saved(run, plain):
    layers = run.session.policy.network.config.num_hidden_layers
    assert plain["saved"] == plain["applied"] == plain["trained"] == 7 * layers
