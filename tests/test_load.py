"""Loading: every published layout bit for bit, 16-bit leftovers, NF4, damage, and peak memory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from bitsandbytes import functional
from family_models import add, write_family
from published import LAYOUTS, publish
from safetensors.torch import load_file, save_file
from test_native_engine import randomise_adapter
from tiny import tiny_tokenizer, write_tiny_model

import qerl
from qerl.adapter import save_adapter
from qerl.config import LoraConfig, Recipe
from qerl.errors import QerlError
from qerl.model.fp8 import FP8Linear
from qerl.model.linear import NVFP4Linear
from qerl.model.load import load_base, load_network, load_packed, quantization_of
from qerl.model.lora import lora_layers
from qerl.policy import load_policy
from qerl.quantize.search import quantize_weight
from qerl_kernels.quantize import dequantize

CPU = torch.device("cpu")
IDS = torch.tensor([[1, 4, 5, 6, 7, 8, 9, 10, 3, 4]])
KINDS = {"nvfp4": NVFP4Linear, "fp8": FP8Linear, "dense": torch.nn.Linear}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("load") / "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """Vision tower, recurrent layers and an MTP head; 16-bit."""
    folder = tmp_path_factory.mktemp("load") / "qwen"
    return write_family("qwen3_5", folder, torch.bfloat16)


def dense_copy(made, folder: Path):
    """transformers' own model on the weights that the published tensors stand for, in fp32."""
    config = transformers.AutoConfig.from_pretrained(made.folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    tensors = {n: t for n, t in made.tensors().items() if t.dtype == torch.bfloat16}
    tensors |= {f"{name}.weight": weight for name, weight in made.weights.items()}
    folder.mkdir()
    config.save_pretrained(folder)
    save_file(
        {n: t.float().contiguous() for n, t in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    kind = getattr(transformers, config.architectures[0])
    return kind.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("family", ["llama", "qwen"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout_is_held_as_its_publisher_left_it(layout, family, request, tmp_path):
    made = publish(request.getfixturevalue(family), tmp_path / "made", layout)
    said: list[str] = []
    model = load_packed(made.folder, torch.float32, CPU, said.append)
    for name, kind in made.kinds.items():
        if name.startswith(("mtp", "model.visual")):
            continue
        module = model.get_submodule(name)
        if name == "lm_head":
            kind = "dense"  # the output head is never packed: log-probs are taken chunk by chunk
        assert type(module) is KINDS[kind], name
        if kind == "dense":
            assert torch.equal(module.weight, made.weights[name]), name
        elif kind == "nvfp4":
            assert torch.equal(dequantize(*module.packed, torch.float32), made.weights[name]), name
        else:
            weight = module.weight.view(torch.float8_e4m3fn).float()
            found = weight * module.weight_scale.reshape(-1, 1)
            assert torch.equal(found, made.weights[name]), name
    # Scales of activations and caches are understood, and not worth a word.
    assert not any("_scale" in line or "model.layers" in line for line in said)
    reference = dense_copy(made, tmp_path / "dense")
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, reference(IDS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", ["modelopt-mlp", "ct-mixed", "ct-fp8"])
def test_rest_quantizes_what_was_left_in_16_bits_and_nothing_else(qwen, layout, tmp_path):
    made = publish(qwen, tmp_path / "made", layout)
    model = load_packed(made.folder, torch.float32, CPU, rest="nvfp4")
    changed = []
    for name, kind in made.kinds.items():
        if not name.startswith("model.language_model.layers."):
            continue
        gate = name.endswith(("in_proj_a", "in_proj_b"))  # a row a head: always 16 bits
        wanted = "nvfp4" if kind == "dense" and not gate else kind
        module = model.get_submodule(name)
        assert type(module) is KINDS[wanted], name
        if kind == "dense" and not gate:
            changed.append(name)
            swept = quantize_weight(made.weights[name].bfloat16(), "sweep")
            for mine, theirs in zip(module.packed, swept, strict=True):
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name
    assert type(model.lm_head) is torch.nn.Linear
    assert bool(changed) == (layout == "modelopt-mlp")


def test_rest_leaves_a_layer_that_nvfp4_cannot_hold(tmp_path):
    """Gemma 4's per-layer projection has 8 inputs here."""
    changes = dict(num_attention_heads=3, num_key_value_heads=1, head_dim=8)  # o_proj: K = 24
    source = write_tiny_model(tmp_path / "odd", num_hidden_layers=1, hidden_size=48, **changes)
    made = publish(source, tmp_path / "made", "modelopt-mlp")
    model = load_packed(made.folder, torch.float32, CPU, rest="nvfp4")
    layer = model.model.layers[0].self_attn
    assert type(layer.o_proj) is torch.nn.Linear and type(layer.q_proj) is NVFP4Linear


def test_rest_is_a_recipe_key(qwen, tmp_path):
    made = publish(qwen, tmp_path / "made", "modelopt-mlp")
    for rest, kind in (("keep", torch.nn.Linear), ("nvfp4", NVFP4Linear)):
        recipe = Recipe(model=str(made.folder), rest=rest, dtype="float32", device="cpu")
        policy = load_policy(recipe)
        layers = lora_layers(policy.network).items()
        [layer] = {type(m.get_base_layer()) for n, m in layers if n.endswith("q_proj")}
        assert layer is kind, rest


def test_rest_contradicts_other_formats():
    with pytest.raises(QerlError, match="rest: nvfp4 contradicts format: bf16"):
        Recipe(model="m", rest="nvfp4", format="bf16")
    with pytest.raises(QerlError, match="rest: expected one of keep, nvfp4"):
        Recipe(model="m", rest="fp8")


# --- where a checkpoint says that it is quantized ---------------------------------------


@pytest.mark.parametrize("layout", ["ct-mixed", "modelopt-w4a4", "mistral-fp8"])
@pytest.mark.parametrize("format", ["bf16", "nf4"])
def test_a_quantized_checkpoint_is_no_16_bit_base(llama, layout, format, tmp_path):
    made = publish(llama, tmp_path / "made", layout)
    assert quantization_of(made.folder)
    with pytest.raises(QerlError, match=f"format: {format} was asked for, but .* set format: nvf"):
        load_network(made.folder, format, "keep", torch.float32, CPU, print)
    network, read = load_network(made.folder, "nvfp4", "keep", torch.float32, CPU, print)
    assert read == made.folder and not any(p.requires_grad for p in network.parameters())


def test_quantization_is_found_in_the_text_towers_part(tmp_path):
    assert quantization_of(write_tiny_model(tmp_path / "plain")) == {}
    path = tmp_path / "plain" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"text_config": {"quantization_config": {"a": 1}}}))
    assert quantization_of(tmp_path / "plain") == {"a": 1}


# --- code that comes with a model ---------------------------------------------------------


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class MineConfig(LlamaConfig):
    model_type = "mine"


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.fixture
def foreign(tmp_path):
    folder = write_tiny_model(tmp_path / "foreign", num_hidden_layers=1)
    (folder / "mine.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    config |= {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_foreign_code_runs_only_when_asked(foreign, format):
    recipe = Recipe(model=str(foreign), format=format, dtype="float32", device="cpu")
    with pytest.raises(QerlError, match="set trust_remote_code: true if you trust its authors"):
        load_policy(recipe)
    assert not [name for name in sys.modules if name.endswith("mine")]
    recipe.trust_remote_code = True
    policy = load_policy(recipe)
    assert type(policy.network).__name__ == "MineForCausalLM"
    kind = NVFP4Linear if format == "nvfp4" else torch.nn.Linear
    assert isinstance(policy.network.model.layers[0].mlp.up_proj.get_base_layer(), kind)
    policy.model(IDS, labels=IDS).loss.backward()
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def test_foreign_code_without_a_language_model_is_refused(foreign):
    config = json.loads((foreign / "config.json").read_text())
    del config["auto_map"]["AutoModelForCausalLM"]
    (foreign / "config.json").write_text(json.dumps(config))
    recipe = Recipe(model=str(foreign), trust_remote_code=True, dtype="float32", device="cpu")
    with pytest.raises(QerlError, match="names no AutoModelForCausalLM in its config.json"):
        load_policy(recipe)


# --- qerl.load --------------------------------------------------------------------------


def test_the_public_load_gives_a_model_to_train(llama):
    model = qerl.load(llama, device="cpu", lora=LoraConfig(rank=4), seed=3)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    bare = qerl.load(llama, adapter=False, device="cpu")
    assert type(bare) is transformers.LlamaForCausalLM
    assert type(bare.model.layers[0].mlp.up_proj) is NVFP4Linear
    with torch.no_grad():  # a fresh adapter changes nothing
        assert torch.equal(bare(IDS).logits, model(IDS).logits)


def test_the_public_load_starts_from_an_adapter(llama, tmp_path):
    policy = load_policy(Recipe(model=str(llama), dtype="float32", device="cpu"))
    randomise_adapter(policy)
    save_adapter(policy.model, tmp_path / "adapter", base_model="owner/name")
    model = qerl.load(llama, device="cpu", lora=LoraConfig(init=str(tmp_path / "adapter")))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, policy.model(IDS).logits)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(adapter=False, lora=LoraConfig()), "lora: given together with adapter=False"),
        (dict(format="int8"), "format: expected one of nvfp4, nf4, bf16"),
        (dict(dtype="fp8"), "dtype: expected one of"),
        (dict(device="tpu"), "device: "),
        (dict(rest="nvfp4", format="bf16"), "rest: nvfp4 contradicts"),
    ],
)
def test_the_public_loads_settings_are_checked_like_a_recipes(llama, wrong, message):
    with pytest.raises(QerlError, match=message):
        qerl.load(llama, **wrong)


# --- NF4 --------------------------------------------------------------------------------


def test_without_bitsandbytes_nf4_says_what_to_install(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(QerlError, match="format: nf4 needs the package bitsandbytes .*pip install"):
        load_base(str(llama), format="nf4", dtype=torch.float32, device=CPU)


def test_nf4_is_what_bitsandbytes_makes_of_the_weights(llama, tmp_path):
    policy = load_policy(Recipe(model=str(llama), format="nf4", dtype="float32", device="cpu"))
    reference = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    linears = {n: m for n, m in reference.model.named_modules() if type(m) is torch.nn.Linear}
    for linear in linears.values():
        codes, state = functional.quantize_4bit(
            linear.weight.data.bfloat16(), quant_type="nf4", compress_statistics=True
        )
        linear.weight.data = functional.dequantize_4bit(codes, state).float()
    assert len(linears) == 14 and type(policy.network.lm_head) is torch.nn.Linear
    with policy.adapter_disabled(), torch.no_grad():
        torch.testing.assert_close(
            policy.network(IDS).logits, reference(IDS).logits, atol=2e-3, rtol=0
        )
    randomise_adapter(policy)
    policy.model(IDS, labels=IDS).loss.backward()
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    assert len(trained) == 2 * 14 and all(p.grad.any() for p in trained)
    with torch.no_grad():  # the sampler's forward, again, leaves the storage as it is
        policy.network(IDS)
    held = sum(p.numel() for n, p in policy.network.named_parameters() if "base_layer" in n)
    assert held * 2 == sum(m.weight.numel() for m in linears.values())


# --- damage -----------------------------------------------------------------------------


def damaged(source: Path, folder: Path, change) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


UP = "model.layers.1.mlp.up_proj.weight"
DAMAGE = {
    "missing": (lambda t: t.pop(UP), rf"lacks 1 tensors, the first is {UP}; download it again"),
    "norm missing": (lambda t: t.pop("model.norm.weight"), "the first is model.norm.weight"),
    "shape": (
        lambda t: t.update({UP: t[UP][:-16].clone()}),
        rf"{UP} is \[336, 128\] in the files and \[352, 128\] by config.json",
    ),
    "norm's shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(64)}),
        r"model.norm.weight is \[64\] in the files and \[128\]",
    ),
    "NaN": (
        lambda t: t[UP].__setitem__((3, 4), math.nan),
        "layer 'model.layers.1.mlp.up_proj': weight holds a NaN or an infinity",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line_that_names_the_tensor(llama, kind, tmp_path):
    change, message = DAMAGE[kind]
    folder = damaged(llama, tmp_path / "bad", change)
    with pytest.raises(QerlError, match=message) as caught:
        load_base(str(folder), format="bf16", dtype=torch.float32, device=CPU)
    assert "\n" not in str(caught.value)


def test_a_missing_shard_and_an_index_that_lies_are_named(llama, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path / "parts", max_shard_size="300KB")
    tiny_tokenizer().save_pretrained(tmp_path / "parts")
    shards = sorted((tmp_path / "parts").glob("model-*.safetensors"))
    assert len(shards) > 2
    load_network(tmp_path / "parts", "bf16", "keep", torch.float32, CPU, print)
    index = tmp_path / "parts" / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"]["model.absent.weight"] = shards[0].name
    index.write_text(json.dumps(said))
    with pytest.raises(QerlError, match=f"'model.absent.weight' is in {shards[0].name}, which"):
        load_network(tmp_path / "parts", "bf16", "keep", torch.float32, CPU, print)
    shards[1].unlink()
    with pytest.raises(QerlError, match=f"has no {shards[1].name}"):
        load_network(tmp_path / "parts", "bf16", "keep", torch.float32, CPU, print)


def test_tensors_of_no_known_place_are_listed(llama, tmp_path):
    folder = damaged(llama, tmp_path / "more", lambda tensors: None)
    add(folder, {"mtp.fc.weight": torch.ones(4), "extra": torch.ones(4)})
    said: list[str] = []
    load_network(folder, "bf16", "keep", torch.float32, CPU, said.append)
    assert said == [
        "2 tensors of the checkpoint are no part of the language model and were left out: "
        "extra (1), mtp (1)"
    ]


# --- memory -----------------------------------------------------------------------------

MEASURE = """
import sys, torch
from pathlib import Path
from qerl.memory import Meter, peak_resident_bytes
from qerl.model.load import load_network
folder, format, rest = sys.argv[1:]
load_network(Path(sys.argv[1]).parent / "small", format, rest, torch.bfloat16, torch.device("cpu"),
             print)
before = Meter().current_bytes()
network, _ = load_network(Path(folder), format, rest, torch.bfloat16, torch.device("cpu"), print)
held = sum(t.nbytes for t in [*network.parameters(), *network.buffers()])
print(before, held, peak_resident_bytes())
"""
WIDE = dict(hidden_size=1024, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=8)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "rest"), [(None, "keep"), ("ct-a16", "keep"),
                                              ("modelopt-mlp", "nvfp4")])  # fmt: skip
def test_peak_memory_is_the_model_and_one_layer(layout, rest, tmp_path):
    """8 blocks of 46 MB in bf16; a layer is at most 17 MB in bf16 and 34 in fp32."""
    source = write_tiny_model(tmp_path / "source", **WIDE)
    small = write_tiny_model(tmp_path / "source_small", num_hidden_layers=1)
    if layout is None:
        source.rename(tmp_path / "big")
        small.rename(tmp_path / "small")
    else:
        publish(source, tmp_path / "big", layout)
        publish(small, tmp_path / "small", layout)
    args = [str(tmp_path / "big"), "nvfp4" if layout else "bf16", rest]
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, *args], capture_output=True, text=True, check=True
    ).stdout
    before, held, peak = map(int, out.splitlines()[-1].split())
    assert held > 90e6
    fp32_layer = 4 * 1024 * 8192
    # The search works in fp32 pieces of a few MB beside the weight; the reader holds one tensor.
    assert peak - before < held + fp32_layer + 24e6
