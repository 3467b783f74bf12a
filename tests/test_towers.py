"""Models that also see: the checkpoint's own class, its text tower alone, and what is refused."""

from __future__ import annotations

import json
import shutil

import peft
import pytest
import torch
import transformers
from family_models import COMMON, DELTA, TOWERS, write_family
from safetensors.torch import load_file, save_file
from tiny import tiny_tokenizer

from qerl.config import LoraConfig, Recipe
from qerl.errors import QerlError
from qerl.model import towers
from qerl.model.load import load_base, load_dense
from qerl.model.lora import attach_lora
from qerl.policy import load_policy
from qerl.quantize import structure
from qerl.tasks.images import refuse_images

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=TOWERS)
def folder(request, tmp_path_factory):
    return write_family(request.param, tmp_path_factory.mktemp("towers") / request.param)


def test_what_is_left_out_is_listed_and_costs_nothing(folder):
    said: list[str] = []
    model = load_dense(folder, torch.float32, CPU, said.append)
    stored = load_file(folder / "model.safetensors")
    headed = any("lm_head" in name for name in stored)  # else it is the embedding, tied
    held = {name for name in model.state_dict() if headed or name != "lm_head.weight"}
    text = [name for name in stored if "language_model" in name or "lm_head" in name]
    assert len(held) == len(text) < len(stored)
    [line] = said
    assert line.startswith(f"{len(stored) - len(text)} tensors of the checkpoint are no part")
    assert ("mtp (2)" in line) == (folder.name == "qwen3_5")
    assert "visual" in line or "vision_tower" in line


def test_weights_are_the_files(folder):
    """Also those that transformers' rule for computed buffers would draw anew (Gemma's)."""
    model = load_dense(folder, torch.float32, CPU)
    theirs = type(model).from_pretrained(folder, dtype=torch.float32)
    state = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    mine = dict(model.named_parameters()) | dict(model.named_buffers())
    assert len(mine) > 20
    for name, tensor in mine.items():
        assert torch.equal(tensor, state[name]), name


def test_names_of_what_was_left_out_stay_known(folder):
    model = load_dense(folder, torch.float32, CPU)
    theirs = {name for name, _ in type(model)(model.config).named_modules()}
    here = {name for name, _ in model.named_modules()}
    assert here | set(towers.modules_left_out(model)) == theirs
    assert not towers.modules_left_out(model.get_decoder())


def test_a_tower_that_was_left_out_refuses_images(folder):
    model = load_dense(folder, torch.float32, CPU)
    tower = next(m for m in model.modules() if isinstance(m, towers.LeftOut))
    with pytest.raises(QerlError, match=r"is not loaded, .* leave out rows with images") as caught:
        tower(torch.ones(1))
    assert tower.name in str(caught.value) and "\n" not in str(caught.value)


def test_adapter_keys_are_the_checkpoints_own(folder):
    policy = load_policy(Recipe(model=str(folder), format="bf16", dtype="float32", device="cpu"))
    assert policy.decoder is policy.network.model.language_model
    keys = peft.get_peft_model_state_dict(policy.model)
    assert all(key.startswith("base_model.model.model.language_model.") for key in keys)


def test_the_names_that_hub_files_have(tmp_path):
    """Gemma 3 is published as language_model.model.…, saved by newer versions as
    model.language_model.…: one model."""
    new = write_family("gemma3", tmp_path / "new")
    tensors = load_file(new / "model.safetensors")
    other = {swapped(name): tensor for name, tensor in tensors.items()}
    assert other.keys() != tensors.keys()
    shutil.copytree(new, tmp_path / "other")
    save_file(other, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    models = [load_dense(f, torch.float32, CPU) for f in (new, tmp_path / "other")]
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(*[model(ids).logits for model in models])


def swapped(name: str) -> str:
    for one, two in (
        ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ):
        if name.startswith(two):
            return name.replace(two, one, 1)
        if name.startswith(one):
            return name.replace(one, two, 1)
    return name


# --- refused --------------------------------------------------------------------------------------


def config_only(folder, config, **changes):
    folder.mkdir()
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    tiny_tokenizer().save_pretrained(folder)
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    return folder


MOE = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)  # fmt: skip
REFUSED = {
    "moe": (
        lambda: transformers.Qwen3MoeConfig(
            **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        ),
        "Qwen3MoeForCausalLM",
        r"Qwen3MoeForCausalLM is a mixture of experts \('layers.0.mlp.experts'\)",
    ),
    "moe-tower": (
        lambda: transformers.Qwen3_5MoeConfig(text_config=dict(COMMON, **DELTA, **MOE)),
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration is a mixture of experts",
    ),
    "encoder-decoder": (
        lambda: transformers.T5Config(vocab_size=16, d_model=32, num_layers=1),
        "T5ForConditionalGeneration",
        "T5ForConditionalGeneration is an encoder-decoder",
    ),
    "embeds": (
        lambda: transformers.Qwen3Config(**COMMON),
        "Qwen3Model",
        "Qwen3Model does not write text",
    ),
    "scores": (
        lambda: transformers.LlamaConfig(**COMMON),
        "LlamaForSequenceClassification",
        "LlamaForSequenceClassification does not write text",
    ),
    "attention": (
        lambda: transformers.FalconConfig(hidden_size=64, num_attention_heads=4),
        "FalconForCausalLM",
        "FalconForCausalLM computes attention in code of its own, which cannot be packed",
    ),
    "attention that takes any name": (
        lambda: transformers.BloomConfig(hidden_size=64, n_layer=1, n_head=4),
        "BloomForCausalLM",
        "BloomForCausalLM computes attention in code of its own, which cannot be packed",
    ),
    "unknown class": (
        lambda: transformers.LlamaConfig(**COMMON),
        "MyLlamaForCausalLM",
        r"transformers .* has no MyLlamaForCausalLM",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(kind, tmp_path):
    make, architecture, message = REFUSED[kind]
    folder = config_only(tmp_path / "model", make(), architectures=[architecture])
    with pytest.raises(QerlError, match=f"model: {message}") as caught:
        load_base(str(folder), format="bf16", dtype=torch.float32, device=CPU)
    assert "\n" not in str(caught.value)


def test_a_model_without_linear_layers_is_refused():
    """GPT-2's are transformers' own Conv1D."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2))
    with pytest.raises(QerlError, match="model: GPT2LMHeadModel has no linear layers of a kind"):
        attach_lora(model, LoraConfig(), seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nosuch"}, r"model_type 'nosuch', LlamaForCausalLM .*newer transformers"),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}},
            r"\(LlamaForCausalLM\) needs Python code that comes with it \(trust_remote_code\)",
        ),
    ],
)
@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_an_architecture_nobody_knows_is_named(format, changes, message, tmp_path):
    config = transformers.LlamaConfig(**COMMON)
    changes = {"architectures": ["LlamaForCausalLM"], **changes}
    folder = config_only(tmp_path / "model", config, **changes)
    with pytest.raises(QerlError, match=message) as caught:
        load_base(str(folder), format=format, dtype=torch.float32, device=CPU)
    assert "\n" not in str(caught.value)


def test_a_config_without_architectures_is_the_usual_class():
    config = transformers.LlamaConfig(**COMMON)
    assert structure.architecture(config) is transformers.LlamaForCausalLM
    seeing = transformers.Gemma3Config(text_config=dict(COMMON))
    assert structure.architecture(seeing) is transformers.Gemma3ForConditionalGeneration


def test_tensors_that_transformers_would_join_are_refused(tmp_path):
    """Experts one by one in the files: with experts refused, still never a silent gap."""
    config = transformers.Qwen3MoeConfig(
        **COMMON, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32
    )
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    names = [f"model.layers.0.mlp.experts.{i}.down_proj.weight" for i in range(2)]
    with pytest.raises(QerlError, match=r"experts.0.down_proj.weight' has to be split or joined"):
        towers.file_names(model, names)


# --- rows with images -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "what is it?", "image": b"png"}, "column 'image'"),
        ({"prompt": "what is it?", "images": [object()]}, "column 'images'"),
        ({"prompt": "what is said?", "audio_path": "a.wav"}, "column 'audio_path'"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "message part 'image_url'",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text"}, {"type": "video"}]}]},
            "message part 'video'",
        ),
    ],
)
def test_rows_with_more_than_text_are_one_line(row, named):
    with pytest.raises(QerlError, match=rf"row 3: it has more than text \({named}\)") as caught:
        refuse_images("row 3", row)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "what is it?", "image": None, "images": [], "video": ""},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "image"}]}]},
        {"prompt": [{"role": "user", "content": "an image"}], "image_count": 3},
    ],
)
def test_rows_of_text_pass(row):
    assert refuse_images("row 3", row) is None
