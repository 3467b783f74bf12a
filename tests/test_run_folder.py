"""Run folders, and the atomic writes below them."""

import json
import os
import re

import pytest

from qerl import environment
from qerl.config import Recipe
from qerl.errors import QerlError
from qerl.files import atomic_dir, atomic_write, check_writable, write_json
from qerl.run_folder import RunFolder, find_run, list_runs


class FakeRecipe:
    def to_yaml(self):
        return "name: fake\nmodel: m\n"


@pytest.fixture
def recipe():
    return FakeRecipe()


def test_create_writes_recipe_and_environment(tmp_path, recipe):
    run = RunFolder.create(tmp_path / "runs", "demo", recipe)
    assert re.fullmatch(r"demo-\d{8}-\d{6}", run.name)
    assert run.recipe.read_text() == recipe.to_yaml()
    env = json.loads(run.env.read_text())
    assert env["python"].startswith("3.") and env["versions"]["torch"]
    assert env["cpu"]["cores"] >= 1 and env["memory_bytes"] > 0
    assert run.checkpoints.is_dir()
    assert run.checkpoint(100) == run.path / "checkpoints" / "step-000100"
    names = [p.name for p in (run.log, run.metrics, run.completions, run.best, run.adapter)]
    assert names == ["log.txt", "metrics.jsonl", "completions.jsonl", "best", "adapter"]
    assert run.summary.name == "summary.json"


def test_create_takes_a_real_recipe(tmp_path):
    recipe = Recipe(model="m", name="real")
    run = RunFolder.create(tmp_path, recipe.name, recipe)
    assert "model: m" in run.recipe.read_text()


def test_two_runs_in_one_second_get_two_folders(tmp_path, recipe):
    runs = [RunFolder.create(tmp_path, "demo", recipe) for _ in range(4)]
    assert len({run.path for run in runs}) == 4


def test_name_is_made_safe_for_shells(tmp_path, recipe):
    run = RunFolder.create(tmp_path, "../my run; rm", recipe)
    assert run.path.parent == tmp_path
    assert re.fullmatch(r"my-run-rm-\d{8}-\d{6}", run.name)


def test_open_names_what_is_missing(tmp_path, recipe):
    run = RunFolder.create(tmp_path, "demo", recipe)
    assert RunFolder.open(run.path) == run
    run.env.unlink()
    with pytest.raises(QerlError, match=r"not a run folder \(env\.json missing\)"):
        RunFolder.open(run.path)
    with pytest.raises(QerlError, match="no such folder"):
        RunFolder.open(tmp_path / "nothing here")


def test_open_expands_home_and_spaces(tmp_path, recipe, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = RunFolder.create("~/my runs", "demo", recipe)
    assert run.path.parent == tmp_path / "my runs"
    assert RunFolder.open(f"~/my runs/{run.name}").path == run.path


def test_find_latest_by_name_and_by_path(tmp_path, recipe):
    old = RunFolder.create(tmp_path, "zzz", recipe)
    new = RunFolder.create(tmp_path, "aaa", recipe)
    os.utime(old.env, ns=(1, 1))
    broken = tmp_path / "unfinished"
    broken.mkdir()
    assert find_run("latest", tmp_path) == new
    assert [run.name for run in list_runs(tmp_path)] == [new.name, old.name]
    assert find_run(old.name, tmp_path) == old
    assert find_run(old.path, tmp_path / "elsewhere") == old


def test_find_errors_in_one_line(tmp_path, recipe):
    with pytest.raises(QerlError, match="no run below"):
        find_run("latest", tmp_path)
    run = RunFolder.create(tmp_path, "demo", recipe)
    with pytest.raises(QerlError, match=f"did you mean {run.name}") as caught:
        find_run("demo", tmp_path)
    assert "\n" not in str(caught.value)


def test_find_lists_the_newest_runs_or_says_there_are_none(tmp_path, recipe):
    with pytest.raises(
        QerlError, match="run 'zzz': .* there are no runs below '.*' either; .*demo"
    ):
        find_run("zzz", tmp_path)
    runs = [RunFolder.create(tmp_path, "demo", recipe) for _ in range(4)]
    for age, run in enumerate(runs):
        os.utime(run.env, (1e9 - age, 1e9 - age))
    newest = ", ".join(run.name for run in runs[:3])
    with pytest.raises(QerlError, match=f"run 'zzz': no such folder; the newest .*: {newest}; or"):
        find_run("zzz", tmp_path)


def test_output_folder_that_is_a_file(tmp_path, recipe):
    (tmp_path / "runs").write_text("")
    with pytest.raises(QerlError, match=r"output\.dir .*runs"):
        RunFolder.create(tmp_path / "runs", "demo", recipe)


def test_atomic_write_replaces_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "a.txt"
    atomic_write(target, "é\n")
    atomic_write(target, b"two")
    assert target.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    target = tmp_path / "a.txt"
    atomic_write(target, "old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        atomic_write(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_check_writable_tries_it_and_leaves_nothing(tmp_path, monkeypatch):
    check_writable("--output", tmp_path / "new" / "deep")
    check_writable("--output", tmp_path / "new", inside=True)
    check_writable("--output", tmp_path, inside=True)
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(
        QerlError, match=r"^--output '.*/file/x': '.*/file' is not a folder; name a"
    ):
        check_writable("--output", tmp_path / "file" / "x")
    with pytest.raises(QerlError, match=r"cannot be written to \(File name too long\)"):
        check_writable("--output", tmp_path / "new" / ("x" * 300) / "y")

    def refused(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refused)
    with pytest.raises(QerlError, match=r"cannot be written to \(Permission denied\); name a file"):
        check_writable("--out", tmp_path / "x", fix="name a file")


def test_write_json_refuses_nan(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1.5})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1.5}
    with pytest.raises(ValueError):
        write_json(tmp_path / "b.json", {"x": float("nan")})
    assert not (tmp_path / "b.json").exists()


def test_atomic_dir_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "best"
    with atomic_dir(target) as folder:
        (folder / "one").write_text("1")
        assert not target.exists()
    with pytest.raises(KeyboardInterrupt), atomic_dir(target) as folder:
        (folder / "two").write_text("2")
        raise KeyboardInterrupt
    assert os.listdir(target) == ["one"]
    with atomic_dir(target) as folder:
        (folder / "three").write_text("3")
    assert os.listdir(target) == ["three"]
    assert os.listdir(tmp_path) == ["best"]


def test_atomic_dir_clears_and_recovers_what_a_kill_left(tmp_path):
    target = tmp_path / "best"
    (tmp_path / "best.partial").mkdir()
    (tmp_path / "best.partial" / "half").write_text("")
    (tmp_path / "best.old.partial").mkdir()
    (tmp_path / "best.old.partial" / "kept").write_text("")
    with pytest.raises(RuntimeError), atomic_dir(target) as folder:
        assert os.listdir(folder) == []
        raise RuntimeError
    assert os.listdir(target) == ["kept"]


def test_commit_is_none_outside_a_checkout(tmp_path):
    assert environment.git_commit(tmp_path) is None
