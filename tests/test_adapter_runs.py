"""A run that starts from an adapter made elsewhere: its recipe, resuming, opening, exporting."""

import json
import shutil

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from tiny_run import short, tiny_run_recipe
from transformers import AutoModelForCausalLM

import qerl
from qerl.adapter import adapter_state, adopted
from qerl.cli_export import _serve_line
from qerl.config import Recipe
from qerl.export import export_adapter

PATTERNS = {"rank_pattern": {"q_proj": 24}, "alpha_pattern": {"layers.1.self_attn.q_proj": 5}}


def made_elsewhere(base, folder):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        r=6, lora_alpha=12, target_modules=["q_proj", "up_proj"], use_rslora=True, **PATTERNS
    )
    model = get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape) * 0.1)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def test_a_run_from_a_foreign_adapter_resumes_opens_and_exports(tiny_dir, tmp_path):
    first = made_elsewhere(tiny_dir, tmp_path / "first")
    recipe = tiny_run_recipe(tiny_dir, tmp_path, lora__init=str(first), format="bf16")
    with qerl.train(recipe, reward=short, report=False) as run:
        path = run.folder.path
        trained = {n: t.clone() for n, t in adapter_state(run.session.policy.model).items()}
    shutil.rmtree(first)  # a run does not need it any more
    saved = Recipe.load(path / "recipe.yaml").lora
    assert (saved.rank, saved.alpha, saved.rslora) == (6, 12, True)
    assert {k: getattr(saved, k) for k in PATTERNS} == PATTERNS and len(saved.targets) == 8

    with qerl.open_run(path) as run:
        state = adapter_state(run.session.policy.model)
        assert state.keys() == trained.keys()
        assert all(torch.equal(state[name], trained[name]) for name in trained)
        ids = torch.tensor([[1, 4, 5, 6]])
        with torch.no_grad():
            ours = run.session.policy.model(input_ids=ids).logits
    with qerl.resume(path, {"train.steps": 3}, reward=short, report=False) as run:
        assert run.summary["steps"] == 3

    out = export_adapter(path, tmp_path / "out").path
    assert "--max-lora-rank 32 " in (_serve_line(out) or "")  # of any module
    assert Recipe.load(path / "recipe.yaml").lora.largest_rank == 24
    with safe_open(out / "adapter_model.safetensors", framework="pt") as file:
        sha256 = json.loads((path / "summary.json").read_text())["base_sha256"]["before"]
        assert file.metadata()["base_sha256"] == sha256
    base = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, str(out)).eval()
    with torch.no_grad():  # one more step has been trained since
        difference = (plain(input_ids=ids).logits - ours).abs().max()
    assert 0 < difference < 0.5


def test_a_recipe_without_init_is_left_alone(tiny_recipe):
    assert adopted(tiny_recipe) is tiny_recipe
