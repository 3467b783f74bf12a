"""Checkpoints as publishers lay them out, made of a small 16-bit one by other people's code.

Codes and scales are compressed-tensors' (its observers' formulas, its compressors), names and
configurations those of the layouts people load: RedHat's and Inferact's uniform ones, unsloth's
mixed groups, NVIDIA's ModelOpt ones, Mistral's FP8. `publish` writes a whole folder.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

from qerl.model.formats import Layers, read_layers

Tensors = dict[str, torch.Tensor]

LINEAR = re.compile(r".*\.(\w+_proj|in_proj_\w+|gate_up_proj|qkv_proj)$|(.*\.)?lm_head$")
ATTENTION = re.compile(
    r".*\.(self_attn\.(q|k|v|o|qkv)_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))$"
)
MLP = re.compile(r".*\.mlp\.(gate|up|down|gate_up)_proj$")
SMALL = re.compile(r".*\.in_proj_(a|b|ba)$")  # a row a head: nobody quantizes those


@dataclass
class Published:
    """A folder; by linear layer its kind and the fp32 weight that its tensors stand for."""

    folder: Path
    kinds: dict[str, str]
    weights: Tensors

    def tensors(self) -> Tensors:
        return tensors_of(self.folder)

    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text())


def layers_of(made: Published) -> Layers:
    return read_layers(made.folder, made.config(), list(made.tensors()))


def tensors_of(folder: Path) -> Tensors:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


# --- one layer -----------------------------------------------------------------------------------


def scheme(preset: str) -> QuantizationScheme:
    """compressed-tensors' own scheme of that name: NVFP4A16, NVFP4, FP8, FP8_DYNAMIC, …"""
    return preset_name_to_scheme(preset, ["Linear"])


def compress(weight: torch.Tensor, preset: str, shared: torch.Tensor | None = None) -> Tensors:
    """A weight [N, K] -> its tensors by local name, by compressed-tensors.

    shared: the absmax of the layers it shares a global scale with.
    """
    with torch.compiler.set_stance("force_eager"):  # it would compile its rounding for seconds
        return _compress(weight, preset, shared)


def _compress(weight: torch.Tensor, preset: str, shared: torch.Tensor | None) -> Tensors:
    weight, how = weight.float(), scheme(preset)
    args = how.weights
    if args.num_bits == 4:
        peak = weight.abs().amax() if shared is None else shared
        whole = generate_gparam(-peak, peak)
        blocks = weight.unflatten(1, (-1, 16))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, whole)
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
        out = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").compress(state, how)
        if how.input_activations is not None:
            out["input_global_scale"] = torch.tensor([321.0])
        return out
    each = args.strategy == "channel"
    low, high = (
        (weight.amin(1, keepdim=True), weight.amax(1, keepdim=True))
        if each
        else (weight.amin().reshape(1), weight.amax().reshape(1))
    )
    scale, _ = calculate_qparams(low, high, args)
    # A scale for each output is bf16 in the checkpoints people load.
    state = {"weight": weight, "weight_scale": scale.bfloat16() if each else scale.float()}
    out = BaseCompressor.get_value_from_registry("float-quantized").compress(state, how)
    if not how.input_activations.dynamic:
        out["input_scale"] = torch.tensor([0.021])
    return out


def meaning(parts: Tensors) -> torch.Tensor:
    """The fp32 weight of a layer in compressed-tensors' names, through float64."""
    if "weight_packed" in parts:
        n, half = parts["weight_packed"].shape
        value = unpack_fp4_from_uint8(parts["weight_packed"], n, 2 * half, torch.float64)
        scale = parts["weight_scale"].double().repeat_interleave(16, 1)
        return (value * scale / parts["weight_global_scale"].double()).float()
    scale = parts["weight_scale"].double().reshape(-1, 1)
    return (parts["weight"].double() * scale).float()


def as_modelopt(parts: Tensors) -> Tensors:
    """A layer of compressed-tensors in ModelOpt's names, scalars without dimensions."""
    if "weight_packed" not in parts:
        scale = parts["weight_scale"].float()
        scale = scale.reshape(()) if scale.numel() == 1 else scale.reshape(-1)
        return {"weight": parts["weight"], "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    out = {
        "weight": parts["weight_packed"],
        "weight_scale": parts["weight_scale"],
        "weight_scale_2": (1 / parts["weight_global_scale"]).reshape(()),
    }
    if "input_global_scale" in parts:
        out["input_scale"] = (1 / parts["input_global_scale"]).reshape(())
    return out


# --- whole checkpoints ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """choose(layer, last block's number) -> preset or None; write(config, presets, folder)."""

    choose: Callable[[str, int], str | None]
    write: Callable[[dict[str, Any], dict[str, str | None], Path], None]
    rename: Callable[[Tensors], Tensors] = dict
    cache_scales: str | None = None  # "module" or "projection": where k_scale and v_scale stand


def publish(source: Path, folder: Path, layout: str) -> Published:
    """Write `source`, a 16-bit transformers folder, to `folder` in one of LAYOUTS."""
    plan, tensors = LAYOUTS[layout], tensors_of(source)
    names = [n.removesuffix(".weight") for n in tensors if LINEAR.match(n.removesuffix(".weight"))]
    names = [n for n in names if tensors[f"{n}.weight"].dim() == 2]
    last = max(int(number) for n in names for number in re.findall(r"layers\.(\d+)\.", n))
    presets = {n: None if SMALL.match(n) else plan.choose(n, last) for n in names}
    kinds, weights = {}, {}
    for name, preset in presets.items():
        weight = tensors[f"{name}.weight"]
        kinds[name], weights[name] = "dense", weight.float()
        if preset is None:
            continue
        parts = compress(weight, preset, _shared_peak(tensors, name))
        if plan.rename is as_modelopt and "weight_packed" in parts:
            # The multiplier is what ModelOpt stores: the divisor is its reciprocal, rounded.
            multiplier = 1 / parts["weight_global_scale"]
            weights[name] = meaning({**parts, "weight_global_scale": 1 / multiplier})
        else:
            weights[name] = meaning(parts)
        kinds[name] = "nvfp4" if "weight_packed" in parts else "fp8"
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{leaf}": t for leaf, t in plan.rename(parts).items()}
    tensors |= _cache_scales(names, plan.cache_scales)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    plan.write(config, presets, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return Published(folder, kinds, weights)


def _shared_peak(tensors: Tensors, name: str) -> torch.Tensor | None:
    """Absmax over the layers an engine fuses with this one, where those are still 16-bit."""
    parent, _, leaf = name.rpartition(".")
    for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        if leaf in fused:
            peers = [tensors.get(f"{parent}.{peer}.weight") for peer in fused]
            if all(peer is not None and peer.dtype != torch.uint8 for peer in peers):
                return torch.stack([peer.float().abs().amax() for peer in peers]).amax()
    return None


def _cache_scales(names: list[str], where: str | None) -> Tensors:
    out = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if where and leaf in ("k_proj", "v_proj"):
            owner = parent if where == "module" else name
            out[f"{owner}.{leaf[0]}_scale"] = torch.tensor([0.5])
    return out


def _group(preset: str, targets: list[str], form: str) -> dict[str, Any]:
    group = scheme(preset).model_dump(mode="json")
    return {**group, "targets": targets, "format": form}


def _compressed(form: str, groups: list[dict[str, Any]], ignore: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.17.0",
    }


def _uniform(preset: str) -> Callable[[dict[str, Any], dict[str, str | None], Path], None]:
    def write(config: dict[str, Any], presets: dict[str, str | None], folder: Path) -> None:
        form = "nvfp4-pack-quantized" if "NVFP4" in preset else "float-quantized"
        ignore = [name for name, chosen in presets.items() if chosen is None]
        group = _group(preset, ["Linear"], form)
        config["quantization_config"] = _compressed(form, [group], ignore)

    return write


def _mixed_groups(config: dict[str, Any], presets: dict[str, str | None], folder: Path) -> None:
    """The last block's MLP matches both groups, as in unsloth's."""
    last = max(int(n) for name in presets for n in re.findall(r"layers\.(\d+)\.", name))
    wide = [
        r"re:.*self_attn\.(q|k|v|o|qkv)_proj$",
        r"re:.*linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$",
        rf"re:.*layers\.{last}\.mlp\.(gate|up|down|gate_up)_proj$",
        "lm_head",
    ]
    groups = [
        _group("FP8_DYNAMIC", wide, "float-quantized"),
        _group("NVFP4", [r"re:.*mlp\.(gate|up|down|gate_up)_proj$"], "nvfp4-pack-quantized"),
    ]
    ignore = ["re:.*visual.*", "re:.*mtp.*", r"re:.*in_proj_(a|b)$"]
    config["quantization_config"] = _compressed("mixed-precision", groups, ignore)


def _modelopt(algo: str, in_config: bool) -> Callable[..., None]:
    """hf_quant_config.json, and for newer exports the same in config.json."""

    def write(config: dict[str, Any], presets: dict[str, str | None], folder: Path) -> None:
        excluded = [name for name, chosen in presets.items() if chosen is None]
        said = {
            "quant_algo": algo,
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": [*excluded, "model.embed_tokens", "*visual*", "mtp*"],
        }
        _write_beside(folder, said)
        if in_config:
            weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
            config["quantization_config"] = {
                "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
                "ignore": said["exclude_modules"],
                "quant_algo": algo,
                "producer": {"name": "modelopt", "version": "0.47.0"},
                "quant_method": "modelopt",
            }

    return write


_ALGOS = {
    "NVFP4": "NVFP4",
    "NVFP4A16": "W4A16_NVFP4",
    "FP8": "FP8",
    "FP8_DYNAMIC": "FP8_PER_CHANNEL_PER_TOKEN",
}


def _modelopt_mixed(config: dict[str, Any], presets: dict[str, str | None], folder: Path) -> None:
    """One entry a layer; the cache's setting is in hf_quant_config.json alone."""
    layers = {
        name: {"quant_algo": _ALGOS[preset], **({"group_size": 16} if "NVFP4" in preset else {})}
        for name, preset in presets.items()
        if preset is not None
    }
    layers["mtp.layers.0.mlp.experts"] = {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 128}
    said = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}
    _write_beside(folder, {**said, "quantized_layers": layers})
    config["quantization_config"] = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "ignore": ["model.visual*", "*in_proj_a", "*in_proj_b"],
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quant_method": "modelopt",
    }


def _write_beside(folder: Path, said: dict[str, Any]) -> None:
    found = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": said}
    (folder / "hf_quant_config.json").write_text(json.dumps(found))


def _mistral(config: dict[str, Any], presets: dict[str, str | None], folder: Path) -> None:
    config["quantization_config"] = {
        "activation_scheme": "static",
        "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": None,
    }


def _as_mistral(parts: Tensors) -> Tensors:
    return {
        "weight": parts["weight"],
        "weight_scale_inv": parts["weight_scale"].reshape(()),
        "activation_scale": torch.tensor(0.02),
    }


def _all_but_head(preset: str) -> Callable[[str, int], str | None]:
    return lambda name, last: None if name.endswith("lm_head") else preset


def _unsloth(name: str, last: int) -> str:
    late = f"layers.{last}." in name
    return "NVFP4" if MLP.match(name) and not late else "FP8_DYNAMIC"


LAYOUTS = {
    "ct-a16": Layout(_all_but_head("NVFP4A16"), _uniform("NVFP4A16")),
    "ct-w4a4": Layout(_all_but_head("NVFP4"), _uniform("NVFP4"), cache_scales="module"),
    "ct-fp8": Layout(_all_but_head("FP8"), _uniform("FP8")),
    "ct-fp8-channel": Layout(_all_but_head("FP8_DYNAMIC"), _uniform("FP8_DYNAMIC")),
    "ct-mixed": Layout(_unsloth, _mixed_groups),
    "modelopt-w4a4": Layout(
        _all_but_head("NVFP4"), _modelopt("NVFP4", False), as_modelopt, "projection"
    ),
    "modelopt-w4a16": Layout(
        _all_but_head("NVFP4A16"), _modelopt("W4A16_NVFP4", True), as_modelopt
    ),
    # Gemma 4's: the MLP alone.
    "modelopt-mlp": Layout(
        lambda name, last: "NVFP4" if MLP.match(name) else None,
        _modelopt("NVFP4", True),
        as_modelopt,
    ),
    # Qwen3.5's: FP8 attention, NVFP4 MLP and head, weight-only.
    "modelopt-mixed": Layout(
        lambda name, last: "FP8" if ATTENTION.match(name) else "NVFP4A16",
        _modelopt_mixed,
        as_modelopt,
        "projection",
    ),
    "mistral-fp8": Layout(_all_but_head("FP8"), _mistral, _as_mistral),
}
