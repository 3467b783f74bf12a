"""Stopping and going on: Ctrl-C, SIGTERM, a reward that gives up, and what resume must equal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import make_session, short, step_rows, tiny_run_recipe

from qerl import loop
from qerl.adapter import adapter_state, checksum
from qerl.checkpoint import latest
from qerl.errors import QerlError
from qerl.interrupt import Interrupts, Terminated
from qerl.loop import run_steps
from qerl.metrics import read_jsonl
from qerl.rollout.gate import Canary
from qerl.run import open_run, resume, train
from qerl.run_folder import RunFolder, list_runs

COMPARED = ("reward", "loss", "grad_norm", "learning_rate", "qerl/sigma", "kl", "num_tokens")


class Stops:
    """`short`, but call number `at` raises; evaluations count too."""

    __name__ = "short"

    def __init__(self, at: int, error: BaseException) -> None:
        self.calls, self.at, self.error = 0, at, error

    def __call__(self, prompts, completions, completion_ids):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return short(completion_ids)


def only_run(root: Path) -> RunFolder:
    (folder,) = list_runs(root / "runs")
    return folder


def recipe_of_four(tiny_dir: Path, root: Path, **changes):
    """Everything that could go wrong on resuming is on: noise, decay, warm-up, dropout."""
    root.mkdir(exist_ok=True)
    values = {
        "train__steps": 4,
        "train__lr_schedule": "linear",
        "train__warmup_steps": 1,
        "noise__stages": 4,
        "lora__dropout": 0.1,
    }
    return tiny_run_recipe(tiny_dir, root, **{**values, **changes})


def numbers(folder: RunFolder) -> list[dict[str, float]]:
    return [{key: row[key] for key in COMPARED} for row in step_rows(folder)]


@pytest.fixture(scope="module")
def straight(tiny_dir, tmp_path_factory) -> RunFolder:
    """Four steps without a stop."""
    recipe = recipe_of_four(tiny_dir, tmp_path_factory.mktemp("straight"))
    with train(recipe, reward=short, report=False) as run:
        return run.folder


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("quota")])
def test_four_steps_equal_two_and_two_more(straight, tiny_dir, tmp_path, capsys, error):
    """Call 1 is the evaluation, so call 4 is the third step's reward: two steps are done."""
    expected = QerlError if isinstance(error, ValueError) else type(error)
    with pytest.raises(expected):
        train(recipe_of_four(tiny_dir, tmp_path), reward=Stops(4, error))
    folder = only_run(tmp_path)
    assert f"qerl resume {folder.path}" in capsys.readouterr().out
    assert [row["step"] for row in step_rows(folder)] == [1, 2]
    assert latest(folder.checkpoints) == folder.checkpoint(2)
    assert (folder.adapter / "adapter_model.safetensors").is_file()
    assert not folder.summary.exists()
    with resume(folder.path, reward=short, report=False) as run:
        assert run.summary["steps"] == 4 and run.summary["before"] is not None
    assert numbers(folder) == numbers(straight)
    weights = "adapter_model.safetensors"
    assert (folder.adapter / weights).read_bytes() == (straight.adapter / weights).read_bytes()
    rows, _ = read_jsonl(folder.completions)
    wanted, _ = read_jsonl(straight.completions)
    assert rows == wanted


def test_rows_after_the_checkpoint_are_written_once(straight, tiny_dir, tmp_path, monkeypatch):
    """A bug of ours at step 4 saves nothing; step 3 is done again, and written once."""

    def update(s, step):
        if step == 4:
            raise ZeroDivisionError
        return real(s, step)

    real = loop.update
    monkeypatch.setattr(loop, "update", update)
    with pytest.raises(ZeroDivisionError):
        train(recipe_of_four(tiny_dir, tmp_path, save__every=2), reward=short, report=False)
    monkeypatch.undo()
    folder = only_run(tmp_path)
    assert latest(folder.checkpoints) == folder.checkpoint(2)
    assert [row["step"] for row in step_rows(folder)] == [1, 2, 3]
    resume(folder.path, reward=short, report=False).close()
    assert numbers(folder) == numbers(straight)


def test_stopped_before_the_first_step_goes_on_from_the_start(straight, tiny_dir, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(
            recipe_of_four(tiny_dir, tmp_path), reward=Stops(1, KeyboardInterrupt()), report=False
        )
    folder = only_run(tmp_path)
    assert latest(folder.checkpoints) == folder.checkpoint(0)
    resume(folder.path, reward=short, report=False).close()
    assert numbers(folder) == numbers(straight)


def test_a_finished_run_can_be_made_longer(tiny_dir, tmp_path):
    recipe = tiny_run_recipe(tiny_dir, tmp_path)
    with train(recipe, reward=short, report=False) as run:
        folder, first = run.folder, checksum(run.session.policy.model)
    with resume(folder.path, {"train.steps": 3}, reward=short, report=False) as run:
        assert checksum(run.session.policy.model) != first
        assert run.summary["steps"] == 3
    assert [row["step"] for row in step_rows(folder)] == [1, 2, 3]
    assert "steps: 3" in folder.recipe.read_text()


# ------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def stopped(tiny_dir, tmp_path_factory) -> RunFolder:
    root = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        train(tiny_run_recipe(tiny_dir, root), Stops(3, KeyboardInterrupt()), report=False)
    return only_run(root)


def files_of(folder: RunFolder) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder.path)): p.read_bytes()
        for p in sorted(folder.path.rglob("*"))
        if p.is_file() and p.name != "log.txt"
    }


@pytest.mark.parametrize(
    "key, value", [("train.lr", 1e-3), ("noise.sigma_start", 0.02), ("lora.rank", 8), ("seed", 1)]
)
def test_changed_keys_are_refused_by_name(stopped, key, value):
    before = files_of(stopped)
    with pytest.raises(QerlError, match=rf"^{re.escape(key)}: a resumed run cannot change it"):
        resume(stopped.path, {key: value}, reward=short, report=False)
    assert files_of(stopped) == before


def test_another_reward_is_refused(stopped):
    """Without the function it was trained with, a run would go on with the task's own."""
    before = files_of(stopped)
    with pytest.raises(QerlError, match="reward: this run was trained with short, not with exact"):
        resume(stopped.path, report=False)
    assert files_of(stopped) == before


def test_interrupted_while_resuming_changes_nothing(stopped, monkeypatch):
    """The session then holds a fresh adapter: it must not be saved over the trained one."""
    from qerl import session

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    before = files_of(stopped)
    monkeypatch.setattr(session, "load_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resume(stopped.path, reward=short, report=False)
    assert files_of(stopped) == before


def test_another_base_is_refused(stopped, monkeypatch):
    from qerl import session

    before = files_of(stopped)
    monkeypatch.setattr(session, "base_sha256", lambda network: "0" * 64)
    with pytest.raises(QerlError, match="model: the base of .* is not the one"):
        resume(stopped.path, reward=short, report=False)
    assert files_of(stopped) == before


def test_resume_without_a_checkpoint(stopped, tmp_path):
    for name in ("recipe.yaml", "env.json"):
        (tmp_path / name).write_bytes((stopped.path / name).read_bytes())
    with pytest.raises(QerlError, match="no checkpoint yet, nothing to resume"):
        resume(tmp_path, reward=short, report=False)


def test_relative_paths_mean_the_same_when_resumed_elsewhere(tiny_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = tiny_run_recipe(tiny_dir, tmp_path)
    recipe.task.dataset = "rows.jsonl"
    recipe.model = os.path.relpath(tiny_dir)
    with train(recipe, reward=short, report=False) as run:
        folder = run.folder.path.resolve()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with open_run(folder) as run:
        assert run.evaluate().n == 6
    resume(folder, {"train.steps": 3}, reward=short, report=False).close()


# --------------------------------------------------------------------------- the handlers


def test_a_signal_in_a_critical_block_waits_for_its_end():
    done = []
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.critical():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            done.append("critical")
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
            done.append("not reached")
    assert done == ["critical"]


def test_handlers_come_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_ctrl_c_while_the_canary_is_taken_out(tiny_dir, tmp_path, monkeypatch):
    """The most harmful moment: what is saved next is the adapter, and B must be its own again."""
    s = make_session(tiny_run_recipe(tiny_dir, tmp_path))
    real = Canary.__exit__

    def interrupted(self, *exception):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        real(self, *exception)

    monkeypatch.setattr(Canary, "__exit__", interrupted)
    before = checksum(s.policy.model)
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        run_steps(s, interrupts, lambda step, numbers: None)
    assert checksum(s.policy.model) == before
    assert not any(t.any() for n, t in adapter_state(s.policy.model).items() if "lora_B" in n)
    s.close()


def test_no_handlers_outside_the_main_thread(tiny_dir, tmp_path):
    import threading

    steps = []

    def work():
        with train(tiny_run_recipe(tiny_dir, tmp_path), reward=short, report=False) as run:
            steps.append(run.summary["steps"])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert steps == [2]


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import qerl
from tiny_run import short
try:
    qerl.train(qerl.Recipe.load({recipe!r}), reward=short)
except KeyboardInterrupt as error:
    print("ended by", type(error).__name__, flush=True)
try:
    qerl.resume("latest", reward=short)
except KeyboardInterrupt as error:
    print("ended by", type(error).__name__, flush=True)
"""


def test_signals_to_a_training_process(tiny_dir, tmp_path):
    """SIGINT in the middle of a run, SIGTERM in the middle of its resumption."""
    recipe = tiny_run_recipe(tiny_dir, tmp_path, train__steps=100_000)
    path = recipe.write(tmp_path / "recipe.yaml")
    script = SCRIPT.format(tests=str(Path(__file__).parent), recipe=str(path))
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    text, resumed = "", False
    for line in process.stdout:
        text += line
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGINT)
        resumed = resumed or line.startswith("resumed from")
        if resumed and line.startswith("step "):
            process.send_signal(signal.SIGTERM)
            break
    text += process.communicate(timeout=60)[0]
    assert process.returncode == 0, text
    assert text.index("ended by KeyboardInterrupt") < text.index("ended by Terminated"), text
    folder = only_run(tmp_path)
    assert (
        text.count(f"qerl resume {folder.path}") + text.count(f"qerl resume runs/{folder.name}")
        == 2
    )
    newest = latest(folder.checkpoints)
    assert newest is not None
    step = json.loads((newest / "state.json").read_text())["step"]
    steps = [row["step"] for row in step_rows(folder)]
    assert step >= 3 and steps == list(range(1, step + 1))
