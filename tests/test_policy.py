"""The loaded policy: packed base, fp32 adapter, EOS ids, and the hash that guards the base."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny import VOCABULARY, tiny_tokenizer
from tiny_run import randomise_b, tiny_run_recipe
from torch import nn

from qerl.config import Recipe
from qerl.errors import QerlError
from qerl.model.linear import NVFP4Linear
from qerl.optim import adapter_parameters
from qerl.pack import pack_one
from qerl.policy import Policy, base_sha256, load_policy
from qerl.types import Completion, Group, Prompt
from qerl_kernels import reference

PROJECTIONS = 4 * 7  # layers of the tiny Llama by its linear layers each


@pytest.fixture(scope="module")
def packed(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_policy(tiny_run_recipe(tiny_dir, tmp_path_factory.mktemp("policy")))


def network_parts(policy: Policy) -> dict[str, NVFP4Linear]:
    return {n: m for n, m in policy.network.named_modules() if isinstance(m, NVFP4Linear)}


def plain_twin(policy: Policy) -> nn.Module:
    """The same network with float32 nn.Linears holding the dequantized weights."""
    twin = copy.deepcopy(policy.network)
    for name, layer in network_parts(policy).items():
        weight = reference.dequantize(layer.weight, layer.weight_scale, layer.weight_global_scale)
        linear = nn.Linear(layer.in_features, layer.out_features, bias=False)
        linear.weight = nn.Parameter(weight.float(), requires_grad=False)
        parent, _, leaf = name.rpartition(".")
        setattr(twin.get_submodule(parent), leaf, linear)
    return twin


def test_every_projection_is_packed_and_frozen_the_head_is_not(packed):
    layers = network_parts(packed)
    assert len(layers) == PROJECTIONS
    for name, layer in layers.items():
        assert layer.weight.dtype == torch.uint8 and not layer.weight.requires_grad, name
        assert layer.weight.shape == (layer.out_features, layer.in_features // 2)
        assert layer.weight_scale.shape == (layer.out_features, layer.in_features // 16)
    assert packed.head.dtype == torch.float32
    trained = adapter_parameters(packed.model)
    assert len(trained) == 2 * PROJECTIONS and all("lora_" in name for name in trained)


def test_no_16_or_32_bit_copy_of_a_packed_weight_is_held_by_the_model(packed):
    held = [*packed.network.parameters(), *packed.network.buffers()]
    floats = [t for t in held if t.dtype in (torch.bfloat16, torch.float16, torch.float32)]
    shapes = {(layer.out_features, layer.in_features) for layer in network_parts(packed).values()}
    assert not [t.shape for t in floats if tuple(t.shape) in shapes]


def test_packed_network_equals_its_dequantized_twin(packed):
    ids = torch.tensor([[1, 5, 6, 7, 8, 9, 4]])
    twin = plain_twin(packed)
    with torch.no_grad():
        got, want = packed.network(ids).logits, twin(ids).logits
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_adapter_depends_on_the_seed_alone(tiny_dir, tmp_path):
    def a_matrices(seed: int, disturb: int) -> torch.Tensor:
        torch.manual_seed(disturb)
        policy = load_policy(tiny_run_recipe(tiny_dir, tmp_path, seed=seed))
        state = adapter_parameters(policy.model)
        assert all(not p.any() for n, p in state.items() if "lora_B" in n)
        return torch.cat([p.detach().flatten() for n, p in state.items() if "lora_A" in n])

    first = a_matrices(seed=1, disturb=10)
    assert torch.equal(first, a_matrices(seed=1, disturb=11))
    assert not torch.equal(first, a_matrices(seed=2, disturb=10))


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_masters_are_fp32_under_bf16_compute(tiny_dir, tmp_path, format):
    recipe = tiny_run_recipe(tiny_dir, tmp_path, dtype="bfloat16", format=format)
    policy = load_policy(recipe)
    assert policy.head.dtype == torch.bfloat16
    assert {p.dtype for p in adapter_parameters(policy.model).values()} == {torch.float32}
    randomise_b(policy)
    group = Group(Prompt(0, (), "", (1, 5, 6)), [Completion([4, 5, 2], [0.0] * 3, [], [], "stop")])
    batch = pack_one([group], policy.device)
    assert policy.hidden(batch).dtype == torch.bfloat16
    policy.logprobs(batch, 1.0)[0].sum().backward()
    for name, p in adapter_parameters(policy.model).items():
        assert p.grad is not None and p.grad.dtype == torch.float32 and p.grad.any(), name


def test_the_base_is_quantized_once(tiny_dir, tmp_path, packed):
    said: list[str] = []
    again = load_policy(tiny_run_recipe(tiny_dir, tmp_path), said.append)
    assert said == [] and again.base.checkpoint == packed.base.checkpoint
    assert again.base.checkpoint != again.base.source == tiny_dir


def test_disabled_adapter_is_the_base(packed):
    ids = torch.tensor([[1, 5, 6, 7]])
    with torch.no_grad():
        fresh = packed.network(ids).logits
        randomise_b(packed)
        moved = packed.network(ids).logits
        with packed.adapter_disabled():
            off = packed.network(ids).logits
    randomise_b(packed, scale=0.0)
    assert (moved - fresh).abs().max() > 1e-3
    assert torch.equal(off, fresh)


@pytest.mark.parametrize("part", ["weight", "weight_scale", "weight_global_scale", "norm", "head"])
def test_hash_sees_a_change_of_any_frozen_tensor(packed, part):
    layer = next(iter(network_parts(packed).values()))
    tensors = {"norm": packed.decoder.norm.weight, "head": packed.head}
    tensor = tensors[part] if part in tensors else getattr(layer, part)
    before = base_sha256(packed.network)
    raw = tensor.data.view(torch.uint8).flatten()
    raw[0] ^= 1
    changed = base_sha256(packed.network)
    raw[0] ^= 1
    assert changed != before == base_sha256(packed.network)


def test_hash_does_not_see_the_adapter(packed):
    before = base_sha256(packed.network)
    randomise_b(packed)
    assert base_sha256(packed.network) == before
    randomise_b(packed, scale=0.0)


def model_copy(source: Path, target: Path, eos: int | list[int] | None) -> Path:
    """The tiny model with these EOS ids in generation_config.json only."""
    shutil.copytree(source, target)
    path = target / "generation_config.json"
    values = json.loads(path.read_text())
    values["eos_token_id"] = eos
    path.write_text(json.dumps(values))
    return target


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_every_eos_id_counts_in_both_formats(tiny_dir, tmp_path, format):
    """A chat model's generation_config.json often names an EOS id that config.json does not."""
    extra = VOCABULARY["m"]
    model = model_copy(tiny_dir, tmp_path / "model", [VOCABULARY["<eos>"], extra])
    policy = load_policy(tiny_run_recipe(model, tmp_path, format=format))
    assert policy.eos_ids == {VOCABULARY["<eos>"], extra}


def test_a_model_without_any_eos_is_refused(tiny_dir, tmp_path):
    model = model_copy(tiny_dir, tmp_path / "model", None)
    config = json.loads((model / "config.json").read_text())
    config["eos_token_id"] = None
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model)
    with pytest.raises(QerlError, match="names an EOS id"):
        load_policy(tiny_run_recipe(model, tmp_path, format="bf16"))


def test_a_head_with_a_bias_is_refused(tmp_path: Path):
    """Sampler and trainer would both drop it, and agree with each other."""
    import transformers

    config = transformers.PhiConfig(
        vocab_size=16, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, eos_token_id=2,
    )  # fmt: skip
    transformers.PhiForCausalLM(config).save_pretrained(tmp_path / "phi")
    tiny_tokenizer().save_pretrained(tmp_path / "phi")
    recipe = Recipe(model=str(tmp_path / "phi"), device="cpu")
    with pytest.raises(QerlError, match="output head of PhiForCausalLM has a bias"):
        load_policy(recipe)


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "config.json").write_text("{"), "is not JSON"),
        (lambda d: (d / "config.json").write_text('{"model_type": "nosuch"}'), "transformers can"),
        (
            lambda d: truncate(d / "model.safetensors"),
            "is damaged|is not a whole safetensors file",
        ),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "only pickle files"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(tiny_dir: Path, tmp_path: Path, format, damage, message):
    folder = tmp_path / "model"
    shutil.copytree(tiny_dir, folder)
    damage(folder)
    with pytest.raises(QerlError, match=message) as caught:
        load_policy(Recipe(model=str(folder), format=format, device="cpu"))
    assert "\n" not in str(caught.value)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_a_checkpoints_own_code_never_runs(tiny_dir: Path, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for format in ("nvfp4", "bf16"):
        with pytest.raises(QerlError, match="model: "):
            load_policy(Recipe(model=str(folder), format=format, device="cpu"))
    assert not (tmp_path / "ran").exists()
