"""`qerl export` merged and to the Hub, and `qerl eval --base`, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hub_server import TOKEN, serving
from peft import PeftModel
from test_cli import qerl
from test_merge import train_tiny
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM

ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "small", num_hidden_layers=2)


@pytest.fixture(scope="module")
def trained(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the NVFP4 copy of `small`; every held-out prompt is right after it, none before."""
    return train_tiny(tmp_path_factory.mktemp("trained"), small)


@pytest.fixture(scope="module")
def merged(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    target = tmp_path_factory.mktemp("merged") / "made"
    result = qerl("export", trained, "--merge", "bf16", "-o", target, "--json", "-")
    return SimpleNamespace(folder=target, report=json.loads(result.out), err=result.err)


# ------------------------------------------------------------------------------------------ merge


def test_a_merged_model_is_scored_and_told(trained: Path, merged: SimpleNamespace):
    report = merged.report
    assert report["path"] == str(merged.folder) and report["merge"] == "bf16"
    assert (report["base"]["accuracy"], report["adapter"]["accuracy"]) == (0, 1)
    assert report["export"]["accuracy"] == 1 == report["share_kept"]
    assert report["export"]["distance"] < 0.01 < report["base"]["distance"]
    lines = merged.err.splitlines()
    assert [line.split()[0] for line in lines if "nats a token" in line] == [
        "base", "adapter", "export"
    ]  # fmt: skip
    assert "kept 100% of the gain, by accuracy" in lines
    assert f"  vllm serve '{merged.folder}'" in lines or f"  vllm serve {merged.folder}" in lines
    assert [path.name for path in merged.folder.parent.iterdir()] == ["made"]


def test_eval_of_the_merged_folder_is_the_same_score(trained: Path, merged: SimpleNamespace):
    """`--base` with `--base-only`: the folder by itself, as anyone loads it."""
    report = json.loads(
        qerl("eval", trained, "--base", merged.folder, "--base-only", "--json", "-").out
    )
    assert report["adapter"] == "base" and report["base"] == str(merged.folder)
    assert report["accuracy"] == merged.report["export"]["accuracy"]
    assert report["mean_reward"] == merged.report["export"]["mean_reward"]


def test_a_merge_into_nvfp4_by_the_command(trained: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = qerl("export", trained, "--merge", "nvfp4", "--bf16-budget", "0").out
    target = tmp_path / f"{trained.name}-merged-nvfp4"
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["format"] == "nvfp4-pack-quantized"
    assert f"{target.name}: " in out and "of the gain, by accuracy\n" in out


def test_a_lossy_merge_is_an_error_of_one_line(trained: Path, tmp_path: Path, monkeypatch):
    """The scores are printed and reported all the same; nothing is left."""
    monkeypatch.setattr("qerl.export_merged.LEAST", 1.01)
    report = tmp_path / "report.json"
    target = tmp_path / "made"
    result = qerl("export", trained, "--merge", "bf16", "-o", target, "--json", report, code=2)
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "keeps 100% of the gain, less than 101%" in errors[0]
    assert "--allow-loss" in errors[0]
    assert "\nexport " in result.out and "kept 100%" in result.out
    assert json.loads(report.read_text())["path"] is None
    assert list(tmp_path.iterdir()) == [report]
    qerl("export", trained, "--merge", "bf16", "-o", target, "--allow-loss")
    assert (target / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--merge", "int4"], "export: invalid value for '--merge'"),
        (["--allow-loss"], "--allow-loss: only a merged model can lose; add --merge"),
        (["--private"], "--private: it belongs to --push; add --push USER/NAME"),
        (["--dry-run"], "--dry-run: it belongs to --push; add --push USER/NAME"),
        (["--no-score"], "--no-score: it belongs to --push; add --push USER/NAME"),
        (["--merge", "nvfp4", "--bf16-budget", "2"], "export: invalid value for '--bf16-budget'"),
        (["--merge", "bf16", "--best", "-o", "there"], "output: 'there' exists and is not empty"),
        (["--push", "mex", "--dry-run"], "--push: 'mex' is no repository name; write USER/NAME"),
        (["--push", "me/x", "--merge", "bf16"], "--push: you are not logged in"),
        (["--push", "me/x", "--dry-run", "-o", "there"], "output 'there': it exists and is not"),
    ],
)
def test_mistakes_are_one_line(trained: Path, tmp_path: Path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.txt").write_text("years of work")
    result = qerl("export", trained, *options, code=2)
    assert result.err.splitlines()[-1].startswith(f"error: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["thesis.txt"]


# ------------------------------------------------------------------------------------ another base


def test_eval_on_the_16_bit_base(trained: Path, small: Path):
    """The model the NVFP4 base was made from; the completions do not replace the run's own."""
    result = qerl("eval", trained, "--base", small, "--json", "-")
    report = json.loads(result.out)
    assert report["adapter"] == "last" and report["base"] == str(small)
    assert f"last adapter on {small}: " in result.err
    path = Path(report["completions"])
    assert path.parent == trained and path.name.startswith("eval-last-on-")
    assert path.name.endswith("small.jsonl") and len(path.read_text().splitlines()) == report["n"]
    own = json.loads(qerl("eval", trained, "--json", "-").out)
    assert Path(own["completions"]).name == "eval-last.jsonl" and "base" not in own


def test_eval_on_another_base_runs_that_base(trained: Path, small: Path, tmp_path: Path):
    """Against plain transformers and peft: greedy answers on a model of other weights."""
    other = write_tiny_model(tmp_path / "other", seed=7, num_hidden_layers=2)
    out = tmp_path / "answers.jsonl"
    qerl("eval", trained, "--base", other, "--out", out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    plain = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, str(trained / "adapter")).eval()
    vocabulary = json.loads((other / "tokenizer.json").read_text())["model"]["vocab"]
    for row in rows:
        ids = torch.tensor([[vocabulary[letter] for letter in row["prompt"]]])
        made = model.generate(input_ids=ids, max_new_tokens=2, do_sample=False)[0, ids.shape[1] :]
        letters = {number: letter for letter, number in vocabulary.items()}
        text = "".join(letters[int(i)] for i in made if letters[int(i)] in "abcdefghijklm")
        assert text == row["completion"].replace(" ", "")


def test_a_base_that_does_not_fit_is_one_line(trained: Path, tmp_path: Path):
    wide = write_tiny_model(tmp_path / "wide", num_hidden_layers=2, intermediate_size=96)
    error = qerl("eval", trained, "--base", wide, code=2).err
    assert error.startswith("error: lora.init: ") and "trained on another base model" in error
    assert error.count("\n") == 1
    assert "choose one" in qerl("eval", trained, "--best", "--base-only", code=2).err
    assert "does not exist" in qerl("eval", trained, "--base", tmp_path / "no", code=2).err


# --------------------------------------------------------------------------------------- the push


def test_a_dry_run_writes_what_would_be_pushed(trained: Path, tmp_path: Path, monkeypatch):
    """With the adapter's score on the 16-bit base in the card; nothing else is left anywhere."""
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in trained.iterdir()}
    result = qerl("export", trained, "--push", "me/tiny", "--dry-run", "--json", "-")
    report = json.loads(result.out)
    folder = tmp_path / report["path"]
    assert folder.name == f"{trained.name}-adapter-hub" and report["url"] is None
    assert {ADAPTER, "README.md", "metrics.jsonl", "samples.jsonl"} <= set(report["files"])
    assert sorted(path.name for path in folder.iterdir()) == report["files"]
    ((label, score),) = report["scores"].items()
    card = (folder / "README.md").read_text()
    assert label == "small" and f"{score['accuracy']:.1%}" in card
    assert "nothing was pushed (--dry-run)" in result.err
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}
    assert {path.name for path in trained.iterdir()} == before


def test_a_merged_model_is_prepared_from_its_scored_export(trained: Path, tmp_path: Path):
    target = tmp_path / "hub"
    result = qerl(
        "export", trained, "--push", "me/tiny", "--merge", "bf16", "--dry-run", "-o", target,
        "--json", "-",
    )  # fmt: skip
    report = json.loads(result.out)
    assert "model.safetensors" in report["files"] and ADAPTER not in report["files"]
    assert report["scores"]["merged in bf16"]["accuracy"] == 1
    assert "merged in bf16" in (target / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]


def test_a_push_arrives_and_may_be_repeated(trained: Path, tmp_path: Path):
    """The command as a program, against a server that speaks the Hub's endpoints."""
    with serving() as server:
        env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
            "HF_ENDPOINT": server.endpoint,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": TOKEN,
            "OMP_NUM_THREADS": "1",
        }
        words = ["export", str(trained), "--push", "me/tiny", "--private", "--no-score"]
        command = [sys.executable, "-c", "from qerl.cli import main; main()", *words]
        for _ in range(2):
            done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert f"pushed: {server.endpoint}/me/tiny\n" in done.stdout
            assert TOKEN not in done.stdout + done.stderr
        repo = server.repos["me/tiny"]
        files = repo.commits[repo.branches["main"]]
        assert repo.private and len(repo.titles) == len(set(repo.commits))
        assert files[ADAPTER].data == (trained / "adapter" / ADAPTER).read_bytes()
        assert "README.md" in files and "samples.jsonl" in files
    assert not [path for path in trained.iterdir() if path.name.startswith(".export")]
    assert {path.name for path in tmp_path.iterdir()} <= {"hf"}
