"""What of a published checkpoint is refused, at once or by layer, each with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published import layers_of, publish
from safetensors.torch import save_file
from tiny import write_tiny_model

from qerl.errors import QerlError
from qerl.model.formats import read_layers

BLOCK0 = "model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("refused") / "llama", num_hidden_layers=2)


def change_group(**changes):
    def change(config):
        config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes

    return change


def change_config(**changes):
    return lambda config: config["quantization_config"].update(changes)


def method(name, **more):
    return lambda config: config.update(quantization_config={"quant_method": name, **more})


WHOLE = {
    "awq": (method("awq", bits=4), "is quantized as awq; name a 16-bit checkpoint"),
    "gptq": (method("gptq", bits=4), "is quantized as gptq"),
    "no method": (method("mxfp4"), "is quantized as mxfp4"),
    "block size": (change_group(group_size=32), "4-bit floats in blocks of 32, and NVFP4 has"),
    "int8": (change_group(num_bits=8, type="int", strategy="channel"), "quantized as 8-bit int"),
    "int4": (change_group(type="int", strategy="group", group_size=128), "as 4-bit int"),
    "zero point": (change_group(symmetric=False), "4-bit floats with a zero point"),
    "fp8 blocks": (
        change_group(num_bits=8, strategy="block", block_structure=[128, 128]),
        r"FP8 in blocks of \[128, 128\]",
    ),
    "fp8 method, blocks": (
        method("fp8", weight_block_size=[128, 128]),
        r"FP8 in blocks of \[128, 128\]",
    ),
    "sparse": (change_config(sparsity_config={"format": "sparse-24-bitmask"}), "is sparse"),
    "rotated": (
        change_config(transform_config={"config_groups": {"R1": {}}}),
        "rotates activations",
    ),
    "no targets": (
        lambda c: c["quantization_config"]["config_groups"]["group_0"].update(targets=[]),
        "config_groups.group_0 .* has no targets",
    ),
    "other algorithm": (method("modelopt", quant_algo="NVFP4_SVD"), "ModelOpt's NVFP4_SVD"),
    "modelopt blocks": (
        method("modelopt", quant_algo="NVFP4", group_size=32),
        "NVFP4 in blocks of 32",
    ),
    "no layers": (
        method("modelopt", quant_algo="MIXED_PRECISION"),
        "lists no quantized_layers; download its hf_quant_config.json",
    ),
}


@pytest.mark.parametrize("case", WHOLE)
def test_checkpoint_of_which_nothing_is_readable_is_refused_at_once(case, llama, tmp_path):
    change, message = WHOLE[case]
    made = publish(llama, tmp_path / "made", "ct-a16")
    config = made.config()
    change(config)
    with pytest.raises(QerlError, match=message) as caught:
        read_layers(made.folder, config, list(made.tensors()))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("model: ")


def repeated(scale, times):
    return scale.view(torch.uint8).repeat(1, times).view(torch.float8_e4m3fn)


def negative(scale):
    byte = scale.view(torch.uint8).clone()
    byte[3, 2] |= 0x80
    return byte.view(torch.float8_e4m3fn)


def nan_scale(scale):
    byte = scale.view(torch.uint8).clone()
    byte[3, 2] = 0x7F
    return byte.view(torch.float8_e4m3fn)


def nan_weight(weight):
    byte = weight.view(torch.uint8).clone()
    byte[5, 7] = 0xFF
    return byte.view(torch.float8_e4m3fn)


P, S, G = (f"{BLOCK0}.weight_{leaf}" for leaf in ("packed", "scale", "global_scale"))
W, S2 = f"{BLOCK0}.weight", f"{BLOCK0}.weight_scale_2"
BAD = {
    # layout, what becomes of the tensors, message
    "no scale": ("ct-a16", lambda t: t.pop(S), "neither NVFP4 nor FP8 by its tensors"),
    "no global": ("ct-a16", lambda t: t.pop(G), r"\(weight_packed U8 \[352, 64\], weight_scale"),
    "fp8, no scale": ("ct-fp8", lambda t: t.pop(S), r"by its tensors .*weight F8_E4M3 \[352"),
    "modelopt, no scale": ("modelopt-w4a4", lambda t: t.pop(S2), "neither NVFP4 nor FP8"),
    "blocks of 8": (
        "ct-a16",
        lambda t: t.update({S: repeated(t[S], 2)}),
        r"\[352, 16\], and NVFP4",
    ),
    "scale type": (
        "ct-a16",
        lambda t: t.update({S: t[S].view(torch.uint8)}),
        r"scales U8 .* has F8_E4M3",
    ),
    "ragged": (
        "ct-a16",
        lambda t: t.update({P: t[P][:, :60].contiguous()}),
        f"layer '{BLOCK0}' .* has 120 inputs, and NVFP4 needs a multiple of 16",
    ),
    "fp8, ragged": ("ct-fp8", lambda t: t.update({W: t[W][:, :120]}), "120 inputs, and FP8 needs"),
    "two globals": ("ct-a16", lambda t: t.update({G: torch.ones(2)}), r"global scale F32 \[2\]"),
    "fp8 blocks": ("ct-fp8", lambda t: t.update({S: torch.ones(3, 1)}), r"scales \[3, 1\]: FP8 in"),
    "e5m2": ("ct-fp8", lambda t: t.update({W: t[W].to(torch.float8_e5m2)}), "neither NVFP4 nor"),
    "not compressed": ("ct-fp8", lambda t: t.update({W: t[W].bfloat16()}), "weight BF16"),
    "3-D": ("ct-a16", lambda t: t.update({P: t[P][None]}), "holds U8 .*, and a layer's weight is"),
    "awq": (
        "modelopt-w4a16",
        lambda t: t.update({f"{BLOCK0}.pre_quant_scale": torch.ones(128)}),
        "also holds pre_quant_scale, which is not understood",
    ),
    "negative": ("ct-a16", lambda t: t.update({S: negative(t[S])}), r"scale \[3, 2\] is -"),
    "nan": ("modelopt-w4a4", lambda t: t.update({S: nan_scale(t[S])}), r"scale \[3, 2\] is nan"),
    "divisor": ("ct-a16", lambda t: t.update({G: -t[G]}), "global scale is -.* must be positive"),
    "multiplier 0": ("modelopt-w4a4", lambda t: t.update({S2: torch.tensor(0.0)}), "scale is inf"),
    "fp8 nan": ("ct-fp8", lambda t: t.update({W: nan_weight(t[W])}), f"{BLOCK0} holds 1 NaN"),
    "fp8 scale": ("ct-fp8", lambda t: t.update({S: -t[S]}), f"scale of {BLOCK0} must be finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_layer_is_named(case, llama, tmp_path):
    layout, change, message = BAD[case]
    made = publish(llama, tmp_path / "made", layout)
    tensors = made.tensors()
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, made.folder / "model.safetensors")
    layers = layers_of(made)
    with pytest.raises(QerlError, match=message) as caught:
        layers.dequantized(tensors.__getitem__, BLOCK0)
    text = str(caught.value)
    assert BLOCK0 in text and "\n" not in text and text.startswith("model: ")
    other = "model.layers.1.mlp.gate_proj"  # the rest stays readable
    assert torch.equal(layers.dequantized(tensors.__getitem__, other), made.weights[other])


CONTRADICTIONS = {
    "ignored": (change_config(ignore=["lm_head", BLOCK0]), "leaves it in 16 bits"),
    "ignored by pattern": (change_config(ignore=["re:.*gate_proj"]), "leaves it in 16 bits"),
    "other kind": (change_group(num_bits=8, strategy="channel", group_size=None), "says FP8"),
    "no group": (
        lambda c: c["quantization_config"]["config_groups"]["group_0"].update(
            targets=["re:.*(q|k|v|o|up|down)_proj$"]
        ),
        "names no group",
    ),
    "no config": (lambda c: c.pop("quantization_config"), "the quantization config is missing"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_files_and_configuration_must_agree(case, llama, tmp_path):
    change, message = CONTRADICTIONS[case]
    made = publish(llama, tmp_path / "made", "ct-a16")
    config = made.config()
    change(config)
    layers = read_layers(made.folder, config, list(made.tensors()))
    with pytest.raises(QerlError, match=f"layer '{BLOCK0}' .*stored as NVFP4.*{message}"):
        layers.kind(BLOCK0)


def test_one_unreadable_group_among_others(llama, tmp_path):
    made = publish(llama, tmp_path / "made", "ct-mixed")
    config = made.config()
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["weights"] |= {"num_bits": 8, "type": "int"}
    tensors = made.tensors()
    name = "model.layers.0.self_attn.q_proj"
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].view(torch.int8)
    save_file(tensors, made.folder / "model.safetensors")
    layers = read_layers(made.folder, config, list(tensors))
    with pytest.raises(QerlError, match=f"layer '{name}' .* is quantized as 8-bit int"):
        layers.kind(name)
    assert layers.kind(BLOCK0) == "nvfp4"


def test_damaged_file_is_named(llama, tmp_path):
    made = publish(llama, tmp_path / "made", "ct-a16")
    names, file = list(made.tensors()), made.folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(QerlError, match=r"model.safetensors' is damaged .*download it again"):
        read_layers(made.folder, made.config(), names)
    made.folder.joinpath("hf_quant_config.json").write_text("{")
    with pytest.raises(QerlError, match=r"hf_quant_config.json' is not JSON"):
        read_layers(made.folder, made.config(), names)
