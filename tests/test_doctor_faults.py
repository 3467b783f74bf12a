"""Faults planted in a sound recipe one by one, each found by the check that is there for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_case import examine, sound_values, write_rows
from tiny import write_tiny_model

MODEL_CHECKS = {"load", "gate", "base_accuracy", "zero_variance", "truncated"}


@pytest.fixture
def values(tiny_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return sound_values(tiny_dir, tmp_path)


def test_a_reward_that_is_always_zero(values: dict):
    report = examine(values, lambda prompts, completions: [0.0] * len(completions))
    assert report["reward_gold"].status == "fail"
    assert "does not see the answer" in report["reward_gold"].fix
    assert report["zero_variance"].status == "fail"
    assert "8 of 8 groups have equal rewards" in report["zero_variance"].text
    assert report.failed


def test_a_reward_that_is_always_one(values: dict):
    report = examine(values, lambda prompts, completions: [1.0] * len(completions))
    assert report["reward_gold"].status == "ok"
    assert report["reward_wrong"].status == "fail"
    assert "up to 100% of them count as solved" in report["reward_wrong"].text
    assert report["base_accuracy"].status == "warn", "nothing is left to learn"


def test_a_reward_that_pays_for_everything_the_same(values: dict):
    report = examine(values, lambda prompts, completions: [0.5] * len(completions))
    assert report["reward_gold"].status == report["reward_wrong"].status == "fail"


def test_a_reward_that_pays_for_silence(values: dict):
    reward = lambda prompts, completions: [float(not text) for text in completions]  # noqa: E731
    report = examine(values, reward, only=["reward_gold", "reward_wrong"])
    assert report["reward_gold"].status == "fail"
    assert report["reward_wrong"].data["empty"]["solved"] == 1.0
    assert report["reward_wrong"].status == "fail"


def test_a_reward_that_wants_more_than_the_answer_column(values: dict):
    """Right answers beat wrong ones but are not full answers: told, not failed."""
    reward = lambda completions, answer, **_: [  # noqa: E731
        0.5 * (a in c) for c, a in zip(completions, answer, strict=True)
    ]
    report = examine(values, reward, only=["reward_gold", "reward_wrong"])
    assert (
        report["reward_gold"].status == "warn" and "0.50 on average" in report["reward_gold"].text
    )
    assert report["reward_wrong"].status == "ok"


def test_a_reward_that_raises_fails_once(values: dict):
    """One cause, one failure; whatever stands on it is not checked, and says why."""

    def broken(prompts, completions):
        raise KeyError("gold")

    report = examine(values, broken)
    assert report["reward_gold"].status == "fail"
    assert "reward `broken` raised KeyError: 'gold'" in report["reward_gold"].text
    assert report["gate"].status == "ok", "the gate needs no reward"
    assert report["truncated"].status == "not checked"
    assert "raised KeyError" in report["truncated"].text


def test_a_slow_reward(values: dict, monkeypatch: pytest.MonkeyPatch):
    import qerl.doctor.rewards as module

    monkeypatch.setattr(module, "SLOW_STEP", 0.0)
    assert examine(values, only=["reward_speed"])["reward_speed"].status == "warn"


def test_a_prompt_that_is_too_long(values: dict, tmp_path: Path):
    data = write_rows(tmp_path / "long.jsonl", ["a", "b", "c" * 250, *"defghijklm"])
    values["task"]["dataset"] = str(data)
    values["eval"]["prompts"] = 2
    report = examine(values)
    line = report["prompt_length"]
    assert line.status == "fail"
    assert "1 of 13 are too long: row 2 has 250 tokens" in line.text
    assert "context 256 minus completion leaves 248" in line.text
    assert "task.max_prompt_tokens: 248 drops them" in line.fix
    assert report["gate"].status == "ok", "the others can still be looked at"
    values["task"]["max_prompt_tokens"] = 248
    dropped = examine(values, only=["prompt_length"])["prompt_length"]
    assert dropped.status == "ok" and "1 of 13 are dropped" in dropped.text


def test_a_limit_that_drops_everything(values: dict):
    values["task"]["max_prompt_tokens"] = 1
    values["task"]["prefix"] = "abc"
    report = examine(values)
    assert report["prompt_length"].status == "fail"
    assert report["gate"].status == "not checked"
    assert report["gate"].text == "no prompt fits into 1 tokens"


def test_a_completion_that_fills_the_context(values: dict):
    values["rollout"]["max_completion_tokens"] = 256
    line = examine(values, only=["prompt_length"])["prompt_length"]
    assert line.status == "fail" and "leaves 0" in line.text


def test_answers_cut_and_left_out(values: dict):
    values["rollout"]["max_completion_tokens"] = 1
    values["algorithm"] = {"mask_truncated": True}
    line = examine(values, only=["truncated"])["truncated"]
    share = line.data["share"]
    assert line.status == ("fail" if share == 1 else "warn") and share > 0.5


def test_a_model_that_is_not_there(values: dict):
    values["model"] = "./no such model"
    report = examine(values)
    assert report["model"].status == "fail"
    assert "'./no such model' does not exist" in report["model"].text
    for name in MODEL_CHECKS | {"chat_template", "eos", "reward_gold"}:
        assert report[name].status == "not checked"
        assert "it needs the model, which failed" in report[name].text


def test_a_model_on_a_hub_that_does_not_answer(values: dict, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def unreachable(*args, **options):
        raise OSError("[Errno 101] Network is unreachable")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    values["model"] = "owner/name"
    report = examine(values)
    assert report["model"].status == "fail" and "Network is unreachable" in report["model"].text
    assert report["load"].status == "not checked"


def test_a_gpu_that_is_not_there(values: dict, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = examine(values | {"device": "cuda"})
    assert report["device"].status == "fail" and "0 CUDA devices" in report["device"].text
    assert report["model"].status == "ok", "the files can be looked at all the same"
    assert report["memory"].status == report["gate"].status == "not checked"


def test_more_memory_than_there_is(values: dict, monkeypatch: pytest.MonkeyPatch):
    import qerl.doctor.context as module

    monkeypatch.setattr(module, "available_memory", lambda: 1_000_000)
    report = examine(values)
    assert report["memory"].status == "fail" and report["memory"].text.startswith("does not fit")
    assert report["load"].status == "not checked", "loading it would be killed"


def test_bf16_on_a_cpu(values: dict):
    line = examine(values | {"dtype": "bfloat16"}, only=["device"])["device"]
    assert line.status == "warn" and "slower than float32" in line.text


def test_bos_twice(values: dict, tmp_path: Path):
    """A template that writes BOS, and rows that bring another."""
    values["model"] = str(edited_model(tmp_path, "{{ bos_token }}{{ bos_token }}" + JOINED))
    line = examine(values, only=["chat_template"])["chat_template"]
    assert line.status == "fail" and "BOS (<bos>) stands 2 times" in line.text


def test_no_chat_template(values: dict, tmp_path: Path):
    values["model"] = str(edited_model(tmp_path, None))
    assert examine(values, only=["chat_template"])["chat_template"].status == "warn"


def test_a_template_that_ends_turns_with_another_token(values: dict, tmp_path: Path):
    """The base model's EOS with a chat template's end of turn: answers would never stop."""
    values["model"] = str(edited_model(tmp_path, JOINED_WITH_PAD))
    line = examine(values, only=["eos"])["eos"]
    assert line.status == "warn"
    assert "ends an answer with <pad> (0), but EOS is <eos> (2)" in line.text


def test_an_eos_outside_the_vocabulary(values: dict, tmp_path: Path):
    folder = edited_model(tmp_path, JOINED)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 99]}')
    values["model"] = str(folder)
    line = examine(values, only=["eos"])["eos"]
    assert line.status == "fail" and "EOS id 99 is outside" in line.text


JOINED = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
JOINED_WITH_PAD = "{% for m in messages %}{{ m['content'] }}{{ '<pad>' }}{% endfor %}"


def edited_model(tmp_path: Path, template: str | None) -> Path:
    from transformers import AutoTokenizer

    folder = write_tiny_model(tmp_path / "edited")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    return folder


def test_versions_out_of_range(values: dict, monkeypatch: pytest.MonkeyPatch):
    from qerl.doctor import machine

    real = machine.installed
    monkeypatch.setattr(machine, "installed", lambda p: "0.20.0" if p == "peft" else real(p))
    line = examine(values, only=["versions"])["versions"]
    assert line.status == "fail" and "peft 0.20.0 (" in line.text


def test_versions_of_an_uninstalled_checkout_are_not_checked(values: dict, monkeypatch):
    from qerl.doctor import machine

    def absent(name):
        raise machine.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.metadata, "requires", absent)
    assert examine(values, only=["versions"])["versions"].status == "not checked"
