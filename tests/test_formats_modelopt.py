"""Checkpoints that NVIDIA's ModelOpt itself exported (on a CPU, a tiny model) read bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle_site import oracle_site
from safetensors.torch import load_file
from tiny import write_tiny_model

from qerl.model.formats import read_layers

VERSION = "nvidia-modelopt==0.47.0"
NEEDS = ["nvidia-ml-py", "omegaconf", "antlr4-python3-runtime==4.9.3", "pulp", "scipy", "ninja"]
PROGRAM = Path(__file__).with_name("modelopt_export.py")
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
RECIPES = {  # kind of attention, kind of MLP
    "NVFP4_DEFAULT_CFG": ("nvfp4", "nvfp4"),
    "W4A16_NVFP4_CFG": ("nvfp4", "nvfp4"),
    "NVFP4_MLP_ONLY_CFG": ("dense", "nvfp4"),
    "FP8_DEFAULT_CFG": ("fp8", "fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": ("fp8", "fp8"),
    "mixed": ("fp8", "nvfp4"),
}


@pytest.fixture(scope="module")
def site() -> Path:
    return oracle_site(VERSION, *NEEDS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("modelopt") / "tiny", num_hidden_layers=2)


@pytest.fixture(scope="module")
def exports(site: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a recipe; all in one process, whose imports take longer than the work."""
    out = tmp_path_factory.mktemp("exports")
    command = [sys.executable, "-P", str(PROGRAM), str(site), str(source), str(out), *RECIPES]
    subprocess.run(command, check=True)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_modelopts_own_export(recipe, exports, source):
    folder = exports / recipe / "checkpoint"
    tensors = load_file(folder / "model.safetensors")
    theirs = load_file(exports / recipe / "dequantized.safetensors")
    config = json.loads((folder / "config.json").read_text())
    layers = read_layers(folder, config, list(tensors))
    assert layers.publisher == "ModelOpt" and layers.kind("lm_head") == "dense"
    read = tensors.__getitem__
    for i in range(2):
        for leaf in ATTENTION + MLP:
            kind = RECIPES[recipe][leaf in MLP]
            where = "mlp" if leaf in MLP else "self_attn"
            name = f"model.layers.{i}.{where}.{leaf}"
            assert layers.kind(name) == kind
            if kind == "nvfp4":
                packed, scale, divisor = layers.nvfp4(read, name)
                assert torch.equal(packed, tensors[f"{name}.weight"])
                stored = tensors[f"{name}.weight_scale"]
                assert torch.equal(scale.view(torch.uint8), stored.view(torch.uint8))
                assert torch.equal(divisor, 1 / tensors[f"{name}.weight_scale_2"].reshape(1))
                # v·(s·m) there, v·s/g with g = 1/m here: two roundings each, and the code's none.
                found = layers.dequantized(read, name)
                torch.testing.assert_close(found, theirs[name], rtol=4 * 2.0**-24, atol=0)
            elif kind == "fp8":
                assert torch.equal(layers.dequantized(read, name), theirs[name])
    quantized = {name for name in layers.quantized() if layers.kind(name) != "dense"}
    assert quantized == set(theirs)
    # Every tensor is the 16-bit model's, read, or one that may be left.
    parts = {part for name in quantized for part in layers.parts(name)}
    plain = set(load_file(source / "model.safetensors"))
    assert all(layers.understood(name) for name in set(tensors) - parts - plain)
    config.pop("quantization_config")  # older exports have hf_quant_config.json alone
    assert read_layers(folder, config, list(tensors)).kind("model.layers.0.mlp.up_proj") != "dense"
