"""The demo model as llm-compressor quantizes it, read bit for bit and computing the same."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import transformers
from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer
from demo_home import shared_home
from oracle_site import oracle_site
from published import tensors_of

from qerl.demo_model import demo_model_dir
from qerl.model.formats import read_layers
from qerl.model.linear import NVFP4Linear

VERSION = "llmcompressor==0.14.0.1"
NEEDS = ["compressed-tensors==0.19.0", "auto-round==0.15.1", "loguru", "nvidia-ml-py"]
PROGRAM = """
import sys
site, source, out = sys.argv[1:]
sys.path.insert(0, site)  # its compressed-tensors, not this environment's
from llmcompressor import model_free_ptq
if __name__ == "__main__":
    skip = ["lm_head", "re:.*embed_tokens$"]
    model_free_ptq(source, out, scheme="NVFP4A16", ignore=skip, device="cpu", max_workers=1)
"""


@pytest.mark.slow
def test_llm_compressors_demo_model(tmp_path):
    with shared_home():
        source = demo_model_dir(print)
    site, program, out = oracle_site(VERSION, *NEEDS), tmp_path / "quantize.py", tmp_path / "out"
    program.write_text(PROGRAM)
    subprocess.run(
        [sys.executable, "-P", str(program), str(site), str(source), str(out)], check=True
    )
    tensors = tensors_of(out)
    config = json.loads((out / "config.json").read_text())
    layers = read_layers(out, config, list(tensors))
    theirs = CompressedTensorsDequantizer(str(out), ignore=["re:.*embed_tokens$"]).process(
        tensors_of(out)
    )
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    packed = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    names = layers.quantized()
    assert len(names) == 7 * plain.config.num_hidden_layers
    for name in names:
        assert layers.kind(name) == "nvfp4"
        ours = layers.dequantized(tensors.__getitem__, name, torch.bfloat16)
        assert torch.equal(ours, theirs[f"{name}.weight"]), name
        weight = layers.dequantized(tensors.__getitem__, name)
        plain.get_submodule(name).weight.data = weight
        packed.set_submodule(name, NVFP4Linear(*layers.nvfp4(tensors.__getitem__, name)))
    ids = torch.arange(100, 124).reshape(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(packed(ids).logits, plain(ids).logits, rtol=0, atol=1e-3)
