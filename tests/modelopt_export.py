"""Quantizes and exports a small model with NVIDIA's ModelOpt itself.

A program, not a test: `python modelopt_export.py SITE SOURCE OUT RECIPE…`. SITE: a folder with
nvidia-modelopt and what it needs. Writes OUT/RECIPE/checkpoint, ModelOpt's export, and
OUT/RECIPE/dequantized.safetensors, the fp32 weights that its own tensor classes read from there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
FP8 = {"num_bits": (4, 3), "axis": None}


def recipe(name: str) -> dict:
    """ModelOpt's configuration; "mixed": FP8 attention, weight-only NVFP4 MLP, FP8 cache."""
    import modelopt.torch.quantization as mtq

    if name != "mixed":
        return getattr(mtq, name)
    rules = [
        ("*", None),
        ("*self_attn*_proj.weight_quantizer", FP8),
        ("*self_attn*_proj.input_quantizer", FP8),
        ("*[kv]_bmm_quantizer", FP8),
        ("*mlp*weight_quantizer", NVFP4),
    ]
    listed = [
        {"quantizer_name": pattern, "enable": False}
        if how is None
        else {"quantizer_name": pattern, "cfg": how}
        for pattern, how in rules
    ]
    return {"quant_cfg": listed, "algorithm": "max"}


def main(site: str, source: str, out: str, *names: str) -> None:
    sys.path.append(site)  # behind the environment's own torch and transformers
    for name in names:
        export(source, Path(out) / name, name)


def export(source: str, out: Path, name: str) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    ids = torch.randint(0, model.config.vocab_size, (2, 8))
    mtq.quantize(model, recipe(name), lambda network: network(ids))
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=out / "checkpoint")
    save_file(dequantized(out / "checkpoint"), out / "dequantized.safetensors")


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """By layer; NVFP4 as codes times the product of both scales, in fp32."""
    from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    tensors = load_file(folder / "model.safetensors")
    out = {}
    for key in tensors:
        name, _, leaf = key.rpartition(".")
        if leaf != "weight_scale":
            continue
        weight, scale = tensors[f"{name}.weight"], tensors[key]
        n = weight.shape[0]
        if weight.dtype == torch.uint8:
            stored = NVFP4QTensor(torch.Size([n, 2 * weight.shape[1]]), torch.float32, weight)
            double = tensors[f"{name}.weight_scale_2"]
            out[name] = stored.dequantize(
                torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16}
            )
        else:
            stored = FP8QTensor(weight.shape, torch.float32, weight)
            out[name] = stored.dequantize(torch.float32, scale=scale.reshape(-1, 1))
    return out


if __name__ == "__main__":
    main(*sys.argv[1:])
