"""lora.init: an adapter made elsewhere sets rank, alpha, scaling and targets; misfits are named."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM

from qerl.adapter import adapted_modules, adapter_state, checksum, load_adapter, save_adapter
from qerl.config import Recipe
from qerl.errors import QerlError
from qerl.model.fp8 import FP8Linear
from qerl.model.lora import attach_lora
from qerl.model.peft_folder import shape_of
from qerl.policy import base_sha256, load_policy

IDS = torch.tensor([[1, 3, 4, 5, 6, 7, 8]])
WEIGHTS = "adapter_model.safetensors"


def plain_base(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def made_elsewhere(base_dir, folder, *, targets=("q_proj", "down_proj"), rank=6, alpha=12, **more):
    """A trained adapter that plain peft made and saved; returns the live model."""
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=list(targets), task_type="CAUSAL_LM", **more
    )
    model = get_peft_model(plain_base(base_dir), config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return model.eval()


def policy_from(base_dir, folder, **lora):
    recipe = Recipe(
        model=str(base_dir),
        format="bf16",
        dtype="float32",
        device="cpu",
        lora={"init": str(folder), **lora},
    )
    return load_policy(recipe)


def edit_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


PATTERNS = {
    "rank_pattern": {"layers.0.self_attn.q_proj": 3, "down_proj": 2},
    "alpha_pattern": {"layers.1.mlp.down_proj": 5},
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"use_rslora": True},
        PATTERNS,
        {"use_rslora": True, **PATTERNS},
        {"layers_to_transform": [1, 2]},
        {"targets": ("k_proj", "gate_proj"), "exclude_modules": ["model.layers.3.mlp.gate_proj"]},
    ],
    ids=["plain", "rslora", "patterns", "rslora+patterns", "two layers", "excluded"],
)
def test_an_adapter_of_plain_peft_is_taken_as_it_is(tiny_dir, tmp_path, more):
    theirs = made_elsewhere(tiny_dir, tmp_path / "a", **more)
    policy = policy_from(tiny_dir, tmp_path / "a", rank=64, alpha=1.0)  # the recipe's do not count
    modules = {n.rpartition(".lora_")[0] for n in load_file(tmp_path / "a" / WEIGHTS)}
    assert len(adapted_modules(policy.model)) == len(modules)
    with torch.no_grad():
        ours, plain = policy.model(input_ids=IDS).logits, theirs(input_ids=IDS).logits
        base = plain_base(tiny_dir)(IDS).logits
    assert torch.allclose(ours, plain, atol=1e-5) and (ours - base).abs().max() > 0.1
    # and what is saved again is, for plain peft, the same adapter
    save_adapter(policy.model, tmp_path / "b", base_model="me/base")
    again = PeftModel.from_pretrained(plain_base(tiny_dir), str(tmp_path / "b")).eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, plain)


def test_it_fits_a_packed_base_and_only_it_is_trained(tiny_dir, tmp_path):
    made_elsewhere(tiny_dir, tmp_path / "a", **PATTERNS)
    recipe = Recipe(
        model=str(tiny_dir), dtype="float32", device="cpu", lora={"init": str(tmp_path / "a")}
    )
    policy = load_policy(recipe)
    file = load_file(tmp_path / "a" / WEIGHTS)
    state = adapter_state(policy.model)
    assert state.keys() == file.keys()
    assert all(torch.equal(state[name], file[name]) for name in file)
    assert state["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape[0] == 3
    trained = {n for n, p in policy.model.named_parameters() if p.requires_grad}
    assert len(trained) == len(file) and all("lora_" in name for name in trained)


def test_the_shape_names_modules_in_full(tiny_dir, tmp_path):
    made_elsewhere(tiny_dir, tmp_path / "a", layers_to_transform=[2], use_rslora=True)
    shape = shape_of(str(tmp_path / "a"))
    assert (shape.rank, shape.alpha, shape.rslora) == (6, 12, True)
    assert shape.targets == ["model.layers.2.mlp.down_proj", "model.layers.2.self_attn.q_proj"]


def test_attaching_for_an_adapter_reads_no_weights(tiny_dir, tmp_path):
    made_elsewhere(tiny_dir, tmp_path / "a")
    lora = Recipe(model="x/y", lora={"init": str(tmp_path / "a")}).lora
    model = attach_lora(plain_base(tiny_dir), lora, seed=0)
    assert not any(t.any() for name, t in adapter_state(model).items() if "lora_B" in name)


def test_load_compares_scaling_with_the_live_adapter(tiny_dir, tmp_path):
    made_elsewhere(tiny_dir, tmp_path / "rs", use_rslora=True)
    made_elsewhere(tiny_dir, tmp_path / "plain")
    rs = policy_from(tiny_dir, tmp_path / "rs").model
    before = checksum(rs)
    with pytest.raises(QerlError, match="uses rsLoRA .use_rslora: none. and the one here has True"):
        load_adapter(rs, tmp_path / "plain")
    assert checksum(rs) == before
    assert load_adapter(rs, tmp_path / "rs") == 8


def test_an_fp8_layer_takes_an_adapter(tiny_dir, tmp_path):
    model = plain_base(tiny_dir).requires_grad_(False)
    mlp = model.model.layers[1].mlp
    dense = mlp.down_proj.weight
    mlp.down_proj = FP8Linear(dense.to(torch.float8_e4m3fn), torch.ones(1))
    lora = Recipe(model="x/y", lora={"init": str(made_and_named(tiny_dir, tmp_path / "a"))}).lora
    wrapped = attach_lora(model, lora, seed=0)
    assert load_adapter(wrapped, tmp_path / "a") == 8
    layer = mlp.down_proj
    a, b = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    x = torch.randn(3, dense.shape[1])
    expected = x @ dense.to(torch.float8_e4m3fn).float().T + 2 * (x @ a.T @ b.T)
    assert torch.allclose(layer(x), expected, atol=1e-3)
    wrapped(input_ids=IDS).logits.square().sum().backward()
    assert a.grad.abs().sum() > 0 and b.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "uses DoRA .use_dora.: only plain LoRA is supported .its magnitudes"),
        ({"modules_to_save": ["norm"]}, "uses whole trained modules .modules_to_save"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "initialised by pissa_niter_4 .* changes the base",
        ),
        ({"init_lora_weights": "OLoRA"}, "initialised by OLoRA"),
        ({"lora_bias": True}, "uses a LoRA bias"),
        ({"use_qalora": True}, "uses QALoRA"),
        ({"peft_type": "IA3"}, "is IA3, not LORA"),
        ({"r": 0}, "has r=0 in adapter_config.json, wanted a number above 0"),
        ({"lora_alpha": None}, "has lora_alpha=None"),
    ],
)
def test_other_methods_are_refused_with_the_reason(tiny_dir, tmp_path, changes, words):
    made_elsewhere(tiny_dir, tmp_path / "a")
    edit_config(tmp_path / "a", **changes)
    with pytest.raises(QerlError, match=words) as error:
        policy_from(tiny_dir, tmp_path / "a")
    assert "\n" not in str(error.value)


def test_real_dora_and_gaussian_start(tiny_dir, tmp_path):
    made_elsewhere(tiny_dir, tmp_path / "dora", use_dora=True)
    with pytest.raises(QerlError, match="uses DoRA"):
        policy_from(tiny_dir, tmp_path / "dora")
    edit_config(tmp_path / "dora", use_dora=False)  # the weights tell
    with pytest.raises(QerlError, match="lora_magnitude_vector.*: it is DoRA"):
        policy_from(tiny_dir, tmp_path / "dora")
    made_elsewhere(tiny_dir, tmp_path / "gauss", init_lora_weights="gaussian")
    policy_from(tiny_dir, tmp_path / "gauss")


def test_trained_norms_are_refused(tiny_dir, tmp_path):
    made_elsewhere(tiny_dir, tmp_path / "a")
    path = tmp_path / "a" / WEIGHTS
    name = "base_model.model.model.layers.0.input_layernorm.weight"
    save_file(load_file(path) | {name: torch.ones(128)}, path)
    words = f"holds {name}, a norm trained elsewhere: .* neither vLLM nor GGUF .* merge it"
    with pytest.raises(QerlError, match=words):
        policy_from(tiny_dir, tmp_path / "a")
    live = policy_from(tiny_dir, made_and_named(tiny_dir, tmp_path / "b")).model
    with pytest.raises(QerlError, match=words):
        load_adapter(live, tmp_path / "a")


def made_and_named(base_dir, folder):
    made_elsewhere(base_dir, folder)
    return folder


def test_trained_embeddings_are_refused(tiny_dir, tmp_path):
    made_elsewhere(tiny_dir, tmp_path / "a", targets=("embed_tokens", "q_proj"))
    with pytest.raises(QerlError, match="embed_tokens.lora_embedding_A: the embeddings are frozen"):
        policy_from(tiny_dir, tmp_path / "a")


def test_an_adapter_of_another_base_names_shape_and_hash(tiny_dir, tmp_path):
    policy = policy_from(tiny_dir, made_and_named(tiny_dir, tmp_path / "a"))
    sha = base_sha256(policy.network)
    save_adapter(policy.model, tmp_path / "b", base_model="me/base", base_sha256=sha)
    wide = write_tiny_model(tmp_path / "wide", intermediate_size=480)
    with pytest.raises(QerlError) as error:
        policy_from(wide, tmp_path / "b")
    said = str(error.value)
    assert "down_proj.lora_A.weight is [6, 352] in the adapter" in said and "[6, 480] here" in said
    assert f"another base model (it names me/base, SHA-256 {sha[:12]}; here SHA-256 " in said
    assert sha[:12] not in said.partition("here SHA-256")[2] and "\n" not in said
    with pytest.raises(QerlError, match="no hash of it; here SHA-256"):
        policy_from(wide, tmp_path / "a")
    shallow = write_tiny_model(tmp_path / "shallow", num_hidden_layers=2)
    with pytest.raises(QerlError, match="adapts model.layers.2.mlp.down_proj, which is no linear"):
        policy_from(shallow, tmp_path / "b")


def test_keys_of_another_class_of_the_model_are_named(tiny_dir, tmp_path):
    made_elsewhere(tiny_dir, tmp_path / "a")
    path = tmp_path / "a" / WEIGHTS
    renamed = {
        n.replace("model.model.layers", "model.model.language_model.layers"): t
        for n, t in load_file(path).items()
    }
    save_file(renamed, path)
    words = r"\(model.layers.0.mlp.down_proj is\): it was saved from another class of this model"
    with pytest.raises(QerlError, match=words):
        policy_from(tiny_dir, tmp_path / "a")


def test_a_configuration_of_other_weights_and_numbers_that_are_none(tiny_dir, tmp_path):
    made_elsewhere(tiny_dir, tmp_path / "a")
    edit_config(tmp_path / "a", r=5)
    with pytest.raises(QerlError, match="says rank 5 and is not of these weights; copy both again"):
        policy_from(tiny_dir, tmp_path / "a")
    edit_config(tmp_path / "a", r=6)
    path = tmp_path / "a" / WEIGHTS
    tensors = load_file(path)
    first = min(tensors)
    tensors[first][0, 0] = float("nan")
    save_file(tensors, path)
    with pytest.raises(QerlError, match=f"{first} in the adapter at .* is not finite"):
        policy_from(tiny_dir, tmp_path / "a")


def test_half_a_pair_is_named(tiny_dir, tmp_path):
    made_elsewhere(tiny_dir, tmp_path / "a")
    path = tmp_path / "a" / WEIGHTS
    tensors = load_file(path)
    del tensors[next(name for name in tensors if "lora_B" in name)]
    save_file(tensors, path)
    with pytest.raises(QerlError, match="has no .*lora_B.weight"):
        policy_from(tiny_dir, tmp_path / "a")


def test_the_hash_of_the_base_is_in_the_weights_only(tiny_dir, tmp_path):
    policy = policy_from(tiny_dir, made_and_named(tiny_dir, tmp_path / "a"))
    save_adapter(policy.model, tmp_path / "b", base_model="me/base", base_sha256="ab" * 32)
    from safetensors import safe_open

    with safe_open(tmp_path / "b" / WEIGHTS, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "base_sha256": "ab" * 32}
    assert "base_sha256" not in (tmp_path / "b" / "adapter_config.json").read_text()
    PeftModel.from_pretrained(plain_base(tiny_dir), str(tmp_path / "b"))
