"""The public way in: what a run leaves on disk, gives back in memory, and takes as a reward."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from tiny_run import make_session, short, starts_right, step_rows, tiny_run_recipe

from qerl import loop
from qerl import run as run_module
from qerl.adapter import checksum
from qerl.checkpoint import checkpoints, latest
from qerl.config import Recipe
from qerl.errors import QerlError
from qerl.metrics import read_jsonl
from qerl.policy import base_sha256
from qerl.run import open_run, resume, train
from qerl.run_folder import RunFolder, list_runs
from qerl.session import Session
from qerl.types import EvalResult
from qerl_kernels import cpu


@pytest.fixture(scope="module")
def finished(tiny_dir, tmp_path_factory):
    """Five steps with everything that writes switched on; the run is closed."""
    root = tmp_path_factory.mktemp("finished")
    recipe = tiny_run_recipe(
        tiny_dir, root, train__steps=5, save={"every": 1, "keep": 3}, eval__every=2
    )
    with train(recipe, reward=short, report=False) as run:
        assert base_sha256(run.session.policy.network) == run.summary["base_sha256"]["before"]
        run.adapter.save(root / "copy")
        run.live_checksum = checksum(run.session.policy.model)
    return run


def test_run_folder_holds_what_it_promises(finished):
    folder = finished.folder
    assert {p.name for p in folder.path.iterdir()} == {
        "recipe.yaml", "env.json", "log.txt", "metrics.jsonl", "completions.jsonl",
        "checkpoints", "best", "adapter", "summary.json",
    }  # fmt: skip
    for adapter in (folder.adapter, folder.best):
        names = {p.name for p in adapter.iterdir()}
        assert names >= {
            "adapter_config.json", "adapter_model.safetensors", "README.md",
            "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        }, names  # fmt: skip
    assert Recipe.load(folder.recipe) == finished.recipe
    assert json.loads(folder.env.read_text())["python"]


def test_summary(finished):
    summary = json.loads(finished.folder.summary.read_text())
    assert list(summary) == [
        "task", "seed", "steps", "before", "after", "seconds", "peak_bytes", "base_sha256",
        "adapter", "versions",
    ]  # fmt: skip
    for side in ("before", "after"):
        assert set(summary[side]) == {"accuracy", "mean_reward", "ci95", "n"}
        assert summary[side]["n"] == 6
    assert summary["base_sha256"]["before"] == summary["base_sha256"]["after"]
    assert len(summary["base_sha256"]["before"]) == 64
    assert summary["steps"] == 5 and summary["task"] == "rows" and summary["peak_bytes"] > 1e6
    assert set(summary["seconds"]) >= {"rollout", "forward", "backward", "optimizer", "eval"}
    assert summary["adapter"] == str(finished.folder.adapter)


def test_completions_from_step_one(finished):
    rows, _ = read_jsonl(finished.folder.completions)
    assert [r["step"] for r in rows] == [step for step in range(1, 6) for _ in range(32)]
    assert set(rows[0]) >= {
        "prompt", "completion", "rewards", "reward", "advantage", "finish_reason", "version",
        "sigma",
    }  # fmt: skip
    assert rows[0]["rewards"] == {"short": rows[0]["reward"]} and rows[0]["version"] == 0
    assert rows[-1]["version"] == 4 and rows[-1]["sigma"] > 0 == rows[0]["sigma"]


def test_metrics_lines(finished):
    rows = step_rows(finished.folder)
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5]
    for key in (
        "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "kl", "entropy",
        "completions/clipped_ratio", "learning_rate", "grad_norm", "loss", "num_tokens",
        "step_time", "rewards/short/mean", "qerl/sigma", "qerl/accuracy", "qerl/version",
    ):  # fmt: skip
        assert all(isinstance(r[key], (int, float)) for r in rows), key
    for row in rows:
        assert "qerl/seconds/eval" not in row and "qerl/seconds/gate" not in row
        parts = sum(v for k, v in row.items() if k.startswith("qerl/seconds/"))
        assert row["step_time"] == pytest.approx(parts)
    others = [r for r in read_jsonl(finished.folder.metrics)[0] if "eval/accuracy" in r]
    assert [r["step"] for r in others] == [2, 4] and others[0]["eval/n"] == 6


def test_checkpoints_kept(finished):
    names = [p.name for p in checkpoints(finished.folder.checkpoints)]
    assert names == ["step-000003", "step-000004", "step-000005"]


def test_closed_run_says_how_to_open_it_and_opening_gives_the_same_adapter(finished):
    with pytest.raises(QerlError, match="is closed .*open_run"):
        finished.evaluate()
    with open_run(finished.folder.path, reward=short) as run:
        assert checksum(run.session.policy.model) == finished.live_checksum
        assert run.evaluate().as_dict() == finished.summary["after"]
        answer = run.generate("abc", max_tokens=4)
        assert answer == run.generate("abc", max_tokens=4) and isinstance(answer, str)


def test_max_hours_stops_and_finishes(tiny_dir, tmp_path):
    recipe = tiny_run_recipe(tiny_dir, tmp_path, train__steps=1000, train__max_hours=1e-6)
    with train(recipe, reward=short, report=False) as run:
        assert run.summary["steps"] == 1 and run.summary["after"] is not None
        assert run.folder.checkpoint(1).is_dir() and run.folder.adapter.is_dir()


def test_a_changed_base_is_noticed_and_nothing_is_saved(tiny_dir, tmp_path):
    def corrupt(completion_ids, **_):
        norm = run_module._open.session.policy.decoder.layers[0].input_layernorm
        norm.weight.data[0] += 1
        return short(completion_ids)

    recipe = tiny_run_recipe(tiny_dir, tmp_path, train__steps=1, eval__at_start=False)
    recipe.eval.at_end = False
    with pytest.raises(AssertionError, match="base has changed"):
        train(recipe, reward=corrupt, report=False)
    (folder,) = (tmp_path / "runs").iterdir()
    assert not (folder / "adapter").exists() and not (folder / "summary.json").exists()


def test_a_changed_unpacked_copy_is_noticed_and_nothing_is_saved(tiny_dir, tmp_path):
    """Products read the unpacked weights; the packed ones, which are hashed, stay as they were."""

    def corrupt(completion_ids, **_):
        network = run_module._open.session.policy.network
        packed = network.get_parameter("model.layers.1.mlp.up_proj.base_layer.weight")
        cpu._cache[packed].weights[torch.float32][3, 5] += 1
        return short(completion_ids)

    recipe = tiny_run_recipe(tiny_dir, tmp_path, train__steps=1, eval__at_start=False)
    recipe.eval.at_end = False
    with pytest.raises(AssertionError, match=r"1 unpacked weights .*layers\.1\.mlp\.up_proj"):
        train(recipe, reward=corrupt, report=False)
    folder = only_run(tmp_path)
    assert not folder.adapter.exists() and not folder.summary.exists()


# ------------------------------------------------------------------- evaluations and going on


def only_run(root: Path) -> RunFolder:
    (folder,) = list_runs(root / "runs")
    return folder


def dies_after(monkeypatch, last: int, error: type[BaseException] = torch.OutOfMemoryError):
    """An error of ours in the update of step `last` + 1: like a kill, it saves nothing."""
    real = loop.update

    def update(s, step):
        if step > last:
            raise error
        return real(s, step)

    monkeypatch.setattr(loop, "update", update)


def scripted_accuracy(monkeypatch, by_step: dict[int, float]):
    def evaluate(self, progress=None):
        accuracy = by_step[self.progress.step]
        return EvalResult("rows", accuracy, accuracy, (0.0, 1.0), 6), []

    monkeypatch.setattr(Session, "evaluate", evaluate)


def evaluated_steps(folder: RunFolder) -> list[int]:
    return [r["step"] for r in read_jsonl(folder.metrics)[0] if "eval/accuracy" in r]


def evaluating_recipe(tiny_dir: Path, root: Path, **changes):
    """Evaluations at even steps only."""
    values = {"train__steps": 4, "eval__every": 2, "eval__at_start": False, "eval__at_end": False}
    return tiny_run_recipe(tiny_dir, root, **{**values, **changes})


@pytest.mark.parametrize("every", [2, 1000])
def test_a_resumed_run_remembers_the_best_adapter(tiny_dir, tmp_path, monkeypatch, every):
    """Killed at step 3, after the best evaluation, at a step with or without a checkpoint due."""
    recipe = evaluating_recipe(tiny_dir, tmp_path, save__every=every)
    with monkeypatch.context() as patch:
        scripted_accuracy(patch, {2: 0.9})
        dies_after(patch, 2)
        with pytest.raises(torch.OutOfMemoryError):
            train(recipe, reward=short, report=False)
    folder = only_run(tmp_path)
    assert latest(folder.checkpoints) == folder.checkpoint(2)
    best = (folder.best / "adapter_model.safetensors").read_bytes()
    scripted_accuracy(monkeypatch, {4: 0.5})
    with resume(folder.path, reward=short, report=False) as run:
        assert run.session.progress.best_accuracy == 0.9
    assert (folder.best / "adapter_model.safetensors").read_bytes() == best
    assert evaluated_steps(folder) == [2, 4]


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_interrupted_evaluation_is_made_on_resuming(tiny_dir, tmp_path, monkeypatch, error):
    """Step 2 is saved before its evaluation and must be evaluated when the run goes on."""

    def evaluate(self, progress=None):
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(Session, "evaluate", evaluate)
        train(evaluating_recipe(tiny_dir, tmp_path, save__every=2), short, report=False)
    folder = only_run(tmp_path)
    assert latest(folder.checkpoints) == folder.checkpoint(2) and evaluated_steps(folder) == []
    resume(folder.path, reward=short, report=False).close()
    assert evaluated_steps(folder) == [2, 4]
    resume(folder.path, reward=short, report=False).close()
    assert evaluated_steps(folder) == [2, 4], "nothing is left to evaluate"


@pytest.mark.parametrize(("at_end", "expected"), [(False, [2]), (True, [])])
def test_an_evaluation_due_at_the_last_step(tiny_dir, tmp_path, at_end, expected):
    recipe = evaluating_recipe(tiny_dir, tmp_path, train__steps=2, eval__at_end=at_end)
    with train(recipe, reward=short, report=False) as run:
        assert evaluated_steps(run.folder) == expected
        assert run.folder.best.is_dir() and (run.summary["after"] is not None) == at_end


def test_an_error_of_ours_names_the_newest_checkpoint(tiny_dir, tmp_path, monkeypatch, capsys):
    dies_after(monkeypatch, 3)
    recipe = evaluating_recipe(tiny_dir, tmp_path, eval__every=0, save__every=2)
    with pytest.raises(torch.OutOfMemoryError):
        train(recipe, reward=short)
    folder = only_run(tmp_path)
    assert latest(folder.checkpoints) == folder.checkpoint(2) and not folder.adapter.exists()
    text = capsys.readouterr().out
    assert "OutOfMemoryError after step 3; the newest checkpoint is" in text
    assert f"{folder.checkpoint(2)}. Go on with:\n  qerl resume {folder.path}\n" in text


def test_without_a_checkpoint_an_error_of_ours_says_so(tiny_dir, tmp_path, monkeypatch, capsys):
    dies_after(monkeypatch, 1)
    with pytest.raises(torch.OutOfMemoryError):
        train(evaluating_recipe(tiny_dir, tmp_path), reward=short)
    text = capsys.readouterr().out
    assert "OutOfMemoryError after step 1; there is no checkpoint\n" in text
    assert "qerl resume" not in text


def test_long_runs_are_checkpointed_by_default():
    assert Recipe(model="m").save.every == 50


def test_skipped_updates_are_counted_saved_and_reported(tiny_dir, tmp_path, monkeypatch, capsys):
    real = loop.update

    def update(s, step):
        numbers = real(s, step)
        if step == 1:
            return numbers | {"grad_norm": math.nan, "qerl/skipped_step": 1.0}
        return numbers

    recipe = evaluating_recipe(tiny_dir, tmp_path, eval__every=0, train__steps=2)
    monkeypatch.setattr(loop, "update", update)
    with train(recipe, reward=short) as run:
        assert run.summary["skipped_updates"] == 1
    monkeypatch.undo()
    capsys.readouterr()
    with resume(run.folder.path, {"train.steps": 3}, reward=short) as run:
        assert json.loads(run.folder.summary.read_text())["skipped_updates"] == 1
    assert "1 of 3 updates skipped" in capsys.readouterr().out


def test_what_lora_init_names_may_be_gone_afterwards(finished, tiny_dir, tmp_path):
    """Only the first sitting reads it: later the adapter comes from the run's own folder."""
    source = tmp_path / "first"
    shutil.copytree(finished.folder.adapter, source)
    recipe = tiny_run_recipe(tiny_dir, tmp_path, lora__init=str(source))
    with train(recipe, reward=short, report=False) as run:
        folder, trained = run.folder, checksum(run.session.policy.model)
    shutil.rmtree(source)
    with open_run(folder.path, reward=short) as run:
        assert checksum(run.session.policy.model) == trained
    with resume(folder.path, {"train.steps": 3}, reward=short, report=False) as run:
        assert run.summary["steps"] == 3 and checksum(run.session.policy.model) != trained
        assert run.recipe.lora.init == run.session.recipe.lora.init == str(source)
    assert Recipe.load(folder.recipe).lora.init == str(source)


def test_fewer_steps_than_done_are_refused(finished):
    """Also when the newest checkpoint was being replaced when the run was killed."""
    newest = finished.folder.checkpoint(5)
    newest.rename(newest.with_name(newest.name + ".old.partial"))
    with pytest.raises(QerlError, match=r"^train.steps: 4, but run .* has done 5 steps already"):
        resume(finished.folder.path, {"train.steps": 4}, reward=short, report=False)
    assert json.loads(finished.folder.summary.read_text()) == finished.summary


@pytest.mark.parametrize("key, value", [("output.dir", "elsewhere"), ("output.name", "other")])
def test_a_resumed_run_stays_in_its_folder(finished, key, value):
    with pytest.raises(QerlError, match=rf"^{key}: a resumed run cannot change it"):
        resume(finished.folder.path, {key: value}, reward=short, report=False)


# ------------------------------------------------------------------------------- memory


def test_training_again_closes_the_first_and_gives_its_memory_back(tiny_dir, tmp_path):
    recipe = tiny_run_recipe(tiny_dir, tmp_path, train__steps=1)
    first = train(recipe, reward=short, report=False)
    policy = weakref.ref(first.session.policy)
    network = weakref.ref(first.session.policy.network)
    second = train(recipe, reward=short, report=False)
    gc.collect()
    assert policy() is None and network() is None
    assert first.folder.path != second.folder.path
    with pytest.raises(QerlError, match="is closed"):
        first.evaluate()
    assert second.evaluate().n == 6
    second.close()
    second.close()


@pytest.mark.parametrize("where", ["reward", "engine"])
def test_an_interrupted_run_gives_its_memory_back_while_its_traceback_lives(
    tiny_dir, tmp_path, monkeypatch, where
):
    """A notebook keeps the last exception; the next run must find the memory free."""
    kept = []

    def stop(completion_ids, **_):
        kept.append(weakref.ref(run_module._open.session.policy))
        if where == "reward":
            raise KeyboardInterrupt
        monkeypatch.setattr("qerl.rollout.native.sample_tokens", interrupted)
        return short(completion_ids)

    def interrupted(*args):
        raise KeyboardInterrupt

    recipe = tiny_run_recipe(tiny_dir, tmp_path)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(recipe, reward=stop, report=False)
    gc.collect()
    assert kept[0]() is None and caught.value is not None


# ------------------------------------------------------------------------------- rewards


def test_async_reward_inside_a_running_loop(tiny_dir, tmp_path):
    """As in a notebook: the caller's loop is running, and the reward awaits."""
    loops = set()

    async def waiting(completion_ids, **_):
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return starts_right(completion_ids)

    async def cell():
        recipe = tiny_run_recipe(tiny_dir, tmp_path, train__steps=1)
        with train(recipe, reward=waiting, report=False) as run:
            return step_rows(run.folder)[0], asyncio.get_running_loop()

    row, outer = asyncio.run(cell())
    assert 0 < row["reward"] < 1 and loops and outer not in loops


def test_a_reward_may_leave_out_prompts_and_completions(tiny_dir, tmp_path):
    """TRL's own example: `def reward_func(completion_ids, **kwargs)`."""
    s = make_session(tiny_run_recipe(tiny_dir, tmp_path), short)
    assert s.task.rewards[0].name == "short" and s.evaluate()[0].mean_reward < 0
    s.close()


# ------------------------------------------------------------------------------- mistakes


def test_a_run_that_cannot_be_built_leaves_no_folder(tiny_dir, tmp_path):
    recipe = tiny_run_recipe(tiny_dir, tmp_path, lora__targets=["no_such_proj"])
    with pytest.raises(QerlError, match="lora.targets: 'no_such_proj'"):
        train(recipe, reward=short, report=False)
    assert list((tmp_path / "runs").iterdir()) == []


def test_open_run_without_an_adapter(finished, tmp_path):
    for name in ("recipe.yaml", "env.json"):
        (tmp_path / name).write_bytes((finished.folder.path / name).read_bytes())
    with pytest.raises(QerlError, match="it has no adapter/ yet"):
        open_run(tmp_path)
