"""The doctor on a tiny model: a sound recipe, what it cannot check, the frame, the command."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from doctor_case import examine, sound_values
from rich.console import Console
from typer.testing import CliRunner

from qerl import demo_model
from qerl.cli_doctor import register
from qerl.config import Recipe
from qerl.doctor import Context, Finding, NotChecked, check, frame
from qerl.doctor.context import offline_model, spread
from qerl.doctor.prompts import leading, length_data
from qerl.errors import QerlError


@pytest.fixture
def values(tiny_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return sound_values(tiny_dir, tmp_path)


# ------------------------------------------------------------------------------------ all is well


def test_a_sound_recipe_fails_nothing(values: dict):
    report = examine(values)
    assert not report.failed, report.as_dict()
    assert report.count("not checked") == 0
    assert {line.name for line in report.lines} == set(frame.CHECKS)
    for name in ("versions", "device", "model", "memory", "eos", "prompt_length", "load", "gate"):
        assert report[name].status == "ok", report[name]


def test_numbers_are_in_the_data(values: dict):
    report = examine(values)
    assert report["prompt_length"].data["limit"] == 256 - 8
    assert report["prompt_length"].data["histogram"] == [
        [i, n] for i, n in enumerate([6, 6, 6, 6, 6, 5, 5], start=1)
    ]
    assert report["eos"].data["eos"] == {"2": "<eos>"}
    assert report["reward_gold"].data == {"mean": 1.0, "solved": 1.0, "n": 30}
    assert report["reward_wrong"].data["empty"] == {"mean": 0.0, "solved": 0.0}
    assert report["gate"].data["parity"]["max_abs"] < 1e-4
    assert report["base_accuracy"].data["n"] == 8
    assert report["zero_variance"].data["groups"] == 8
    assert report["truncated"].data["n"] == 8 * 4


def test_the_policy_is_loaded_once(values: dict, monkeypatch: pytest.MonkeyPatch):
    import qerl.policy

    loads = []
    real = qerl.policy.load_policy
    monkeypatch.setattr(qerl.policy, "load_policy", lambda *args: loads.append(1) or real(*args))
    examine(values)
    assert len(loads) == 1
    examine(values, only=["model", "prompt_length", "reward_gold"])
    assert len(loads) == 1, "checks without the model do not load it"


def test_the_report_as_json_and_table(values: dict):
    report = examine(values, only=["device", "reward_gold"])
    found = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert found["failed"] is False and found["counts"]["ok"] == 2
    assert list(found["checks"]) == ["device", "reward_gold"], "the order is the doctor's"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.table())
    text = console.export_text()
    assert "reward_gold" in text and "2 ok, 0 warn, 0 fail, 0 not checked" in text


# ------------------------------------------------------------------------- offline, and no answers


def test_offline_with_everything_local(values: dict):
    assert not examine(values, offline=True).failed


def test_offline_and_not_cached(values: dict, monkeypatch: pytest.MonkeyPatch):
    """Nothing is downloaded, and what then cannot be known is not called ok."""

    def forbidden(*args, **options):
        raise AssertionError("the network was used")

    monkeypatch.setattr(demo_model, "download_wheel", forbidden)
    report = examine(values | {"model": demo_model.MODEL_ID}, offline=True)
    assert report["model"].status == "not checked"
    assert "the demo model is not in" in report["model"].text
    assert report["gate"].status == "not checked" and not report.failed


def test_offline_hub_ids(values: dict, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(NotChecked, match="'owner/name' is not in the Hub's local cache"):
        offline_model("owner/name")
    with pytest.raises(QerlError, match="does not exist"):
        offline_model("./owner")
    values["task"]["dataset"] = "owner/data"
    report = examine(values, offline=True)
    assert report["chat_template"].status == "not checked"
    assert "task.dataset 'owner/data' is no local file" in report["chat_template"].text


def test_without_an_answer_column_right_answers_are_not_checked(values: dict):
    values["task"]["answer_column"] = None
    reward = lambda prompts, completions: [len(text) / 10 for text in completions]  # noqa: E731
    report = examine(values, reward, only=["reward_gold", "reward_wrong", "reward_speed"])
    assert report["reward_gold"].status == "not checked"
    assert "task.answer_column" in report["reward_gold"].text
    assert report["reward_wrong"].status == "ok" and report["reward_speed"].status == "ok"


# -------------------------------------------------------------------------------------- the frame


def test_a_check_of_ones_own(values: dict, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(frame, "CHECKS", dict(frame.CHECKS))

    @check("seed", "recipe")
    def seed(context: Context) -> Finding:
        return Finding("warn", f"seed is {context.recipe.seed}", "take another")

    line = examine(values, only=["seed"])["seed"]
    assert (line.status, line.text, line.fix) == ("warn", "seed is 0", "take another")
    with pytest.raises(AssertionError, match="two checks are named seed"):
        check("seed", "recipe")(seed)


def test_an_unknown_check(values: dict):
    with pytest.raises(QerlError, match="there is no check 'gates'; there are: versions, "):
        examine(values, only=["gates"])


def test_spread_and_histogram():
    assert spread(10, 3) == [0, 3, 6] and spread(2, 8) == [0, 1]
    data = length_data([3, 3, 4, 12])
    assert data == {"p50": 4, "p90": 12, "max": 12, "histogram": [[3, 2], [4, 1], [12, 1]]}
    assert length_data([5])["histogram"] == [[5, 1]]
    assert [n for _, n in length_data(list(range(100)))["histogram"]] == [10] * 10
    assert [leading(ids, 1) for ids in ([2, 1], [1, 2, 1], [1, 1])] == [0, 1, 2]
    assert leading([1], None) == 0


# -------------------------------------------------------------------------------- command line


@pytest.fixture
def command(values: dict, tmp_path: Path):
    values["task"]["reward"] = f"{tmp_path / 'reward.py'}:score"
    (tmp_path / "reward.py").write_text(
        "def score(completions, answer, **_):\n"
        "    return [float(c == a) + 0.01 * c.count(a) * (c != a)"
        " for c, a in zip(completions, answer)]\n"
        "def always(completions, **_):\n"
        "    return [1.0] * len(completions)\n"
    )
    path = Recipe(**values).write(tmp_path / "recipe.yaml")
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return lambda *words: CliRunner().invoke(app, ["doctor", str(path), *words])


def test_command_line(command, tmp_path: Path):
    target = tmp_path / "report.json"
    result = command("--only", "reward_gold", "--only", "model", "--json", str(target))
    assert result.exit_code == 0, result.output
    assert "reward_gold" in result.stdout and "2 ok" in result.stdout
    assert json.loads(target.read_text())["counts"]["ok"] == 2


def test_command_line_json_alone_on_standard_output(command):
    result = command("--only", "reward_gold", "--json", "-")
    assert json.loads(result.stdout)["checks"]["reward_gold"]["status"] == "ok"


def test_command_line_exits_with_1_when_a_check_fails(command, tmp_path: Path):
    wrong = f"task.reward={tmp_path / 'reward.py'}:always"
    result = command(wrong, "--offline", "--only", "reward_wrong")
    assert result.exit_code == 1
    assert "fail" in result.stdout


def test_command_line_with_an_unknown_key(command):
    assert isinstance(command("train.stepz=3").exception, QerlError)
