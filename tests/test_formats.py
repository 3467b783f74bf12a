"""Published layouts read bit for bit, against compressed-tensors' own readers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from compressed_tensors.entrypoints.convert.converters import (
    CompressedTensorsDequantizer,
    ModelOptNvfp4Converter,
)
from published import LAYOUTS, LINEAR, Published, layers_of, publish, tensors_of
from safetensors.torch import save_file
from tiny import write_tiny_model

from qerl.errors import QerlError
from qerl.model.formats import read_layers
from qerl.model.formats_config import aliases
from qerl.model.fp8 import FP8Linear
from qerl.model.linear import NVFP4Linear

BLOCK0 = "model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("formats") / "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision tower, recurrent blocks, and an MTP head as an exporter copies it from elsewhere."""
    folder = tmp_path_factory.mktemp("formats") / "qwen"
    heads = dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    text = dict(vocab_size=16, hidden_size=64, intermediate_size=96, num_hidden_layers=4)
    vision = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64)
    config = transformers.Qwen3_5Config(text_config=text | heads, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(config).bfloat16()
    model.save_pretrained(folder)
    wide = {"mtp.layers.0.mlp.up_proj_wide.weight": torch.ones(64, 96).to(torch.float8_e4m3fn)}
    blocks = {"mtp.layers.0.mlp.up_proj_wide.weight_scale_inv": torch.ones(1, 6)}
    save_file(wide | blocks, folder / "mtp.safetensors")
    return folder


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


# --- every layout --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_read_bit_for_bit(layout, family, request, tmp_path):
    made = publish(request.getfixturevalue(family), tmp_path / "made", layout)
    tensors, layers = made.tensors(), layers_of(made)
    read = tensors.__getitem__
    for name, kind in made.kinds.items():
        assert layers.kind(name) == kind, name
        assert layers.shape(name) == made.weights[name].shape
        assert torch.equal(layers.dequantized(read, name), made.weights[name])
        if kind == "nvfp4":
            packed, scale, divisor = layers.nvfp4(read, name)
            codes = tensors.get(f"{name}.weight_packed", tensors.get(f"{name}.weight"))
            assert torch.equal(packed, codes) and divisor.shape == (1,)
            assert torch.equal(bits(scale), bits(tensors[f"{name}.weight_scale"]))
        elif kind == "fp8":
            weight, scale = layers.fp8(read, name)
            assert torch.equal(bits(weight), bits(tensors[f"{name}.weight"]))
            assert scale.dtype == torch.float32 and scale.shape in ((1,), weight.shape[:1])
    assert {n for n in made.kinds if made.kinds[n] != "dense"} <= set(layers.quantized())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_is_read_or_understood(layout, llama, tmp_path):
    made = publish(llama, tmp_path / "made", layout)
    layers, tensors = layers_of(made), made.tensors()
    parts = {part for name in made.kinds for part in layers.parts(name)}
    plain = set(tensors_of(llama))  # norms, embeddings: read by their own names
    left = set(tensors) - parts - plain
    assert all(layers.understood(name) for name in left)
    assert not any(layers.understood(name) for name in parts | plain)
    asked = []
    for name in made.kinds:
        layers.dequantized(lambda n: asked.append(n) or tensors[n], name)
    assert set(asked) == parts


def test_head_kinds_and_activations(llama, tmp_path):
    made = publish(llama, tmp_path / "mixed", "ct-mixed")
    layers = layers_of(made)
    assert (layers.kind("lm_head"), layers.publisher, layers.activations) == (
        "fp8",
        "compressed-tensors",
        True,
    )
    assert layers.kind("model.layers.1.mlp.up_proj") == "fp8"  # both groups' patterns cover it
    assert layers.kind("model.layers.0.mlp.up_proj") == "nvfp4"
    made = publish(llama, tmp_path / "a16", "modelopt-w4a16")
    assert not layers_of(made).activations
    assert layers_of(made).kind("lm_head") == "dense"


def test_16_bit_checkpoint_is_dense(llama):
    layers = read_layers(
        llama, json.loads((llama / "config.json").read_text()), list(tensors_of(llama))
    )
    assert (layers.publisher, layers.quantized()) == ("16-bit", [])
    assert layers.kind(BLOCK0) == "dense" and layers.kind("nowhere.tied_head") == "dense"
    assert not layers.understood(f"{BLOCK0}.input_scale")


def test_a_file_nobody_named_is_not_looked_at(llama, tmp_path):
    """Mistral's folders hold every weight twice; a mapping to paths says which to read."""
    made = publish(llama, tmp_path / "made", "ct-a16")
    (made.folder / "consolidated.safetensors").write_bytes(b"in another layout")
    names = dict.fromkeys(made_names := _names(made), made.folder / "model.safetensors")
    assert read_layers(made.folder, made.config(), names).kind(BLOCK0) == "nvfp4"
    with pytest.raises(QerlError, match=r"consolidated.safetensors' is damaged"):
        read_layers(made.folder, made.config(), made_names)


def _names(made: Published) -> list[str]:
    from safetensors import safe_open

    with safe_open(made.folder / "model.safetensors", "pt") as handle:
        return list(handle.keys())


# --- other people's readers ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("ct-")])
def test_compressed_tensors_dequantizes_to_the_same(layout, llama, tmp_path):
    made = publish(llama, tmp_path / "made", layout)
    layers, tensors = layers_of(made), made.tensors()
    skipped = ["re:.*embed_tokens$"]  # it takes "Linear" to mean everything 2-D
    reader = CompressedTensorsDequantizer(str(made.folder), ignore=skipped)
    theirs = reader.process(made.tensors())
    quantized = [name for name, kind in made.kinds.items() if kind != "dense"]
    assert len(quantized) >= 14
    for name in quantized:
        ours = layers.dequantized(tensors.__getitem__, name, torch.bfloat16)
        assert torch.equal(ours, theirs[f"{name}.weight"]), name


@pytest.mark.parametrize("layout", ["modelopt-w4a4", "modelopt-w4a16", "modelopt-mlp"])
def test_compressed_tensors_converts_modelopt_to_the_same(layout, llama, tmp_path):
    made = publish(llama, tmp_path / "made", layout)
    layers, tensors = layers_of(made), made.tensors()
    dense = [name for name, kind in made.kinds.items() if kind == "dense"]
    skipped = [*dense, "re:.*(norm|embed_tokens)$"]
    theirs = ModelOptNvfp4Converter(ignore=skipped, targets=["Linear"]).process(made.tensors())
    for name in set(made.kinds) - set(dense):
        ours = layers.nvfp4(tensors.__getitem__, name)
        suffixes = ("weight_packed", "weight_scale", "weight_global_scale")
        for mine, suffix in zip(ours, suffixes, strict=True):
            other = theirs[f"{name}.{suffix}"]
            assert torch.equal(bits(mine), bits(other.reshape(mine.shape))), (name, suffix)


# --- names ---------------------------------------------------------------------------------------


def test_tower_goes_by_several_names():
    assert set(aliases("model.language_model.layers.1.mlp.up_proj")) >= {
        "language_model.model.layers.1.mlp.up_proj",
        "model.layers.1.mlp.up_proj",
    }


@pytest.mark.parametrize("layout", ["modelopt-mixed", "modelopt-mlp"])
def test_configuration_may_name_the_tower_otherwise(layout, qwen, tmp_path):
    """Transformers renames between memory and file: config.json then has the other names."""
    made = publish(qwen, tmp_path / "made", layout)
    for file in ("config.json", "hf_quant_config.json"):
        text = (made.folder / file).read_text()
        changed = text.replace("model.language_model.", "language_model.model.")
        assert changed != text
        (made.folder / file).write_text(changed)
    layers = layers_of(made)
    assert {name: layers.kind(name) for name in made.kinds} == made.kinds


def test_unreadable_head_that_nobody_loads_is_in_nobodys_way(qwen, tmp_path):
    made = publish(qwen, tmp_path / "made", "modelopt-mixed")
    layers = layers_of(made)
    mtp = "mtp.layers.0.mlp.up_proj_wide"
    assert mtp in layers.quantized()
    with pytest.raises(QerlError, match=r"layer 'mtp\..* is stored as FP8.*names no group"):
        layers.kind(mtp)


def test_hf_quant_config_alone_is_enough(llama, tmp_path):
    made = publish(llama, tmp_path / "made", "modelopt-mixed")
    config = made.config()
    del config["quantization_config"]["quantized_layers"]  # older exports list them beside only
    names = list(made.tensors())
    assert read_layers(made.folder, config, names).kind("lm_head") == "nvfp4"
    del config["quantization_config"]
    assert read_layers(made.folder, config, names).kind("lm_head") == "nvfp4"


# --- a whole model -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["ct-mixed", "modelopt-mixed", "mistral-fp8"])
def test_model_of_packed_layers_equals_the_dequantized_one(layout, llama, tmp_path):
    made = publish(llama, tmp_path / "made", layout)
    layers, read = layers_of(made), made.tensors().__getitem__
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    packed = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    linears = [name for name, _ in plain.named_modules() if LINEAR.match(name)]
    assert set(linears) == set(made.kinds)
    for name in linears:
        plain.get_submodule(name).weight.data = made.weights[name]
        kind = layers.kind(name)
        if kind != "dense":
            made_layer = (
                NVFP4Linear(*layers.nvfp4(read, name))
                if kind == "nvfp4"
                else FP8Linear(*layers.fp8(read, name))
            )
            packed.set_submodule(name, made_layer)
    ids = torch.arange(3, 15).reshape(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(packed(ids).logits, plain(ids).logits, rtol=0, atol=1e-4)
