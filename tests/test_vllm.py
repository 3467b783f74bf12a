"""What comes out is what vLLM serves: our checkpoints and adapters, scored by vLLM itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from demo_home import shared_home
from family_models import COMMON, DELTA, write_family
from oracle_site import vllm_site

import qerl
from qerl import demo_model
from qerl.adapter import adapter_state, save_adapter
from qerl.quantize.checkpoint import quantize_checkpoint

TESTS = Path(__file__).parent
TEXTS = ("The capital of France is Paris, which lies on the river Seine.", "2 + 2 = 4, 3 + 3 = 6")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """ask(model, prompts, …): what `vllm_oracle.py` found."""
    site = vllm_site()
    folder = tmp_path_factory.mktemp("vllm")

    def run(model: Path, prompts: list[list[int]], adapter: Path | None = None, **more):
        spec = {"model": str(model), "adapter": adapter and str(adapter), "prompts": prompts}
        spec |= {"qwen3_5": "qwen3_5" in model.name, "more": more}
        (folder / "spec.json").write_text(json.dumps(spec))
        files = [str(folder / name) for name in ("spec.json", "result.json")]
        command = [sys.executable, str(TESTS / "vllm_oracle.py"), *files]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return json.loads((folder / "result.json").read_text())

    return run


@pytest.fixture(scope="module")
def demo():
    with shared_home():
        return demo_model.demo_model_dir(print)


def logprobs(model, prompts: list[list[int]]) -> list[list[float]]:
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1) for ids in prompts]
    return [
        [table[at, token].item() for at, token in enumerate(ids[1:])]
        for table, ids in zip(logits, prompts, strict=True)
    ]


def apart(ours: list[list[float]], theirs: list[list[float]]) -> torch.Tensor:
    return torch.tensor(
        [a - b for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    )


def randomise(model) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, tensor in adapter_state(model).items():
        if "lora_B" in name:
            tensor.copy_(0.02 * torch.randn(tensor.shape, generator=generator))


def test_our_checkpoint_and_adapter(ask, demo, tmp_path):
    quantize_checkpoint(demo, tmp_path / "nvfp4")
    model = qerl.load(tmp_path / "nvfp4", dtype="float32", device="cpu")
    prompts = tokens(demo)
    base = logprobs(model, prompts)  # every B is zero
    randomise(model)
    save_adapter(model, tmp_path / "adapter", base_model=str(tmp_path / "nvfp4"))
    ours = logprobs(model, prompts)
    found = ask(tmp_path / "nvfp4", prompts, tmp_path / "adapter")
    assert apart(base, found["base"]).abs().max() < 1e-3
    assert apart(ours, found["adapter"]).abs().max() < 1e-3
    assert apart(ours, base).abs().mean() > 0.1
    # Modules applied = modules saved; vLLM has q, k and v in one, and gate and up in one.
    assert sum(found["applied"].values()) == 210
    assert found["applied"]["model.layers.0.self_attn.qkv_proj"] == 3


def test_our_modelopt_checkpoint(ask, demo, tmp_path):
    quantize_checkpoint(demo, tmp_path / "nvfp4", format="modelopt")
    prompts = tokens(demo)
    model = qerl.load(tmp_path / "nvfp4", adapter=False, dtype="float32", device="cpu")
    found = ask(tmp_path / "nvfp4", prompts)
    assert apart(logprobs(model, prompts), found["base"]).abs().max() < 1e-3


def test_a_text_adapter_of_a_model_that_sees(ask, tmp_path, monkeypatch):
    """Keys of a text-only class would be no module of vLLM's, which then serves the base."""
    monkeypatch.setitem(COMMON, "head_dim", 32)  # what vLLM's kernels for a CPU take
    monkeypatch.setitem(DELTA, "linear_key_head_dim", 128)
    monkeypatch.setitem(DELTA, "linear_value_head_dim", 128)
    write_family("qwen3_5", tmp_path / "wide", torch.bfloat16)
    folder = tmp_path / "qwen3_5"  # its linear layers in NVFP4; vision tower and mtp.* as they were
    quantize_checkpoint(tmp_path / "wide", folder)
    model = qerl.load(folder, dtype="float32", device="cpu")
    prompts = [[1, 3, 5, 7, 9, 4, 6, 11, 12], [1, 8, 8, 9, 10]]
    base = logprobs(model, prompts)
    randomise(model)
    save_adapter(model, tmp_path / "adapter", base_model=str(folder))
    ours = logprobs(model, prompts)
    none = {"image": 0, "video": 0}
    # vLLM's recurrence takes bf16 alone on a CPU, so distances are of its rounding.
    found = ask(folder, prompts, tmp_path / "adapter", dtype="bfloat16", limit_mm_per_prompt=none)
    rounding = apart(base, found["base"]).abs().mean()
    effect = apart(ours, base).abs().mean()
    assert rounding < 0.1 < effect / 2
    assert apart(ours, found["adapter"]).abs().mean() < effect / 3
    saved = {name.rpartition(".lora_")[0] for name in adapter_state(model)}
    fused = [name for name in saved if name.endswith("in_proj_qkv")]  # three slices in vLLM
    assert len(fused) == 3
    assert sum(found["applied"].values()) == len(saved) + 2 * len(fused)
    assert all(name.startswith("language_model.") for name in found["applied"])


def tokens(folder: Path) -> list[list[int]]:
    from qerl.model.load import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return [tokenizer(text)["input_ids"] for text in TEXTS]
