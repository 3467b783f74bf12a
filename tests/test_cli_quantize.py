"""`qerl quantize` on a tiny model, and what it makes of calibration text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_cli import qerl
from test_gguf import Kind, llama, write_gguf
from tiny import LETTERS, tiny_tokenizer

from qerl import cli_quantize
from qerl.cli_quantize import _text, token_lists
from qerl.errors import QerlError


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def test_options_reach_the_checkpoint(tiny_dir: Path, tmp_path: Path):
    target = tmp_path / "q"
    options = ["--keep", "*.layers.0.mlp.*", "--keep", "re:1.*o_proj", "--lm-head", "fp8"]
    made = qerl("quantize", tiny_dir, "-o", target, "--method", "absmax", *options, "--json", "-")
    report = json.loads(made.out)
    assert report["layers"] == 28 - 4 and report["method"] == "absmax"
    assert report["path"] == str(target)
    config = config_of(target)
    assert config["format"] == "mixed-precision" and "lm_head" not in config["ignore"]
    assert config["config_groups"]["group_1"]["targets"] == ["lm_head"]
    # What it wrote it may also replace.
    out = qerl("quantize", tiny_dir, "-o", target, "--overwrite", "--format", "modelopt").out
    assert "28 layers" in out and "(sweep)" in out
    assert config_of(target)["quant_method"] == "modelopt"
    assert "28 layers" in qerl("quantize", tiny_dir, "-o", target, "--overwrite").out


def test_calibration_text_makes_it_imatrix(tiny_dir: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text(LETTERS * 40)
    options = ["--calibration", text, "--texts", 3, "--length", 16, "--json", "-"]
    made = json.loads(qerl("quantize", tiny_dir, "-o", tmp_path / "q", *options).out)
    assert made["method"] == "imatrix"
    qerl("quantize", tiny_dir, "-o", tmp_path / "free")
    name = "model.layers.0.mlp.down_proj.weight_packed"
    ours, free = (load_file(tmp_path / n / "model.safetensors")[name] for n in ("q", "free"))
    assert not ours.equal(free)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "best"], "invalid value for '--method'"),
        (["--keep", "nothing"], "keep: 'nothing' matches no linear layer"),
        (["--calibration", "gone.jsonl"], "--calibration: "),
        (["--method", "gptq"], "method: gptq needs calibration text"),
    ],
)
def test_mistakes_are_one_line(tiny_dir: Path, tmp_path: Path, options: list, message: str):
    said = qerl("quantize", tiny_dir, "-o", tmp_path / "q", *options, code=2).err
    assert message in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_gguf_file(tmp_path: Path):
    path = write_gguf(tmp_path / "tiny.gguf", llama(), Kind.Q4_0)
    made = qerl("quantize", path, "-o", tmp_path / "q")
    assert "14 layers" in made.out and "quantized once already (Q4_0)" in made.err
    said = qerl("quantize", tmp_path / "none.gguf", "-o", tmp_path / "x", code=2).err
    assert "there is no file" in said


def test_text_files_are_cut_into_even_pieces(tmp_path: Path):
    path = tmp_path / "book.md"
    path.write_text("abcdefghijklm" * 10)  # 130 tokens
    found = token_lists(str(path), tiny_tokenizer(), texts=4, length=16)
    assert [len(ids) for ids in found] == [16] * 4  # nine pieces, every second one
    assert [ids[0] - 3 for ids in found] == [0, 32 % 13, 64 % 13, 96 % 13]
    assert [len(ids) for ids in token_lists(str(path), tiny_tokenizer(), 99, 100)] == [100, 30]


@pytest.mark.parametrize(
    ("row", "ids"),
    [
        ({"text": "abc"}, [3, 4, 5]),
        (
            {"messages": [{"role": "user", "content": "ab"}, {"role": "x", "content": "c"}]},
            [3, 4, 5],
        ),
        ({"prompt": "a", "answer": "c"}, [3, 3, 5]),  # the newline between is an unknown letter
        ({"content": "b", "answer": "c"}, [4]),
    ],
)
def test_rows(tmp_path: Path, row: dict, ids: list[int]):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(5)))
    assert token_lists(str(path), tiny_tokenizer(), 3, 16) == [ids] * 3


@pytest.mark.parametrize("end", ["ак", "ак\n", "naïve\n", "日本", "日本a", "🙂", "🙂ab"])
def test_text_may_end_in_any_character(tmp_path: Path, monkeypatch, end: str):
    path = tmp_path / "text.txt"
    text = "a" * 40 + end
    path.write_text(text, encoding="utf-8")
    assert _text(path) == text
    for limit in range(40, len(text.encode()) + 1):  # cut by us anywhere, a character or not
        monkeypatch.setattr(cli_quantize, "TEXT_BYTES", limit)
        assert text.startswith(_text(path)) and len(_text(path)) >= 40


def test_text_that_cannot_be_used(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "abc"}\n')
    with pytest.raises(QerlError, match=r"no column messages, text.*its columns are question"):
        token_lists(str(path), tiny_tokenizer(), 3, 16)
    path.write_text('{"text": ""}\n')
    with pytest.raises(QerlError, match="holds no text"):
        token_lists(str(path), tiny_tokenizer(), 3, 16)
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"\xff\xfe" * 100)
    with pytest.raises(QerlError, match="is not UTF-8 text"):
        token_lists(str(binary), tiny_tokenizer(), 3, 16)
