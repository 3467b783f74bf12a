"""The two layouts a quantized checkpoint is written in: tensor names, and what config.json says.

                 compressed-tensors              ModelOpt
    codes        weight_packed  u8 [N, K/2]      weight  u8 [N, K/2]
    block scale  weight_scale   e4m3 [N, K/16]   the same
    global       weight_global_scale  f32 [1]    weight_scale_2  f32 []
                 divisor, w = v·s/g              multiplier, w = v·s·g

An output head in FP8 (compressed-tensors only: ModelOpt's FP8 layers need scales of activations)
is `weight` e4m3 [N, K] and `weight_scale` f32 [N, 1], a multiplier a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from qerl.quantize import nvfp4
from qerl.quantize.writer import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from qerl.quantize.search import Packed

Format = Literal["compressed-tensors", "modelopt"]
FORMATS: tuple[Format, ...] = ("compressed-tensors", "modelopt")
Head = Literal["keep", "nvfp4", "fp8"]
HEADS: tuple[Head, ...] = ("keep", "nvfp4", "fp8")

_PARTS = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
}


def part_names(name: str, format: Format) -> list[str]:
    """Names of the three tensors of a layer: codes, block scales, global scale."""
    return [f"{name}.{part}" for part in _PARTS[format]]


def packed_specs(name: str, shape: tuple[int, int], format: Format) -> list[Spec]:
    """What `packed_tensors` gives for a weight [N, K]."""
    n, k = shape
    codes, scale, last = part_names(name, format)
    scalar = (1,) if format == "compressed-tensors" else ()
    return [
        Spec(codes, "U8", (n, k // 2)),
        Spec(scale, "F8_E4M3", (n, k // nvfp4.BLOCK)),
        Spec(last, "F32", scalar),
    ]


def packed_tensors(name: str, weight: Packed, format: Format) -> dict[str, Tensor]:
    """A layer's three tensors under their names on disk."""
    codes, scale, last = part_names(name, format)
    g = weight.global_scale.float()
    if format == "modelopt":
        g = g.reciprocal().reshape(())
    return {codes: weight.packed, scale: weight.scale, last: g}


def from_parts(codes: Tensor, scale: Tensor, last: Tensor, format: Format) -> Packed:
    """A layer as the quantizer had it. A ModelOpt global scale comes back within one rounding."""
    from qerl.quantize.search import Packed

    g = last.reshape(1)
    return Packed(codes, scale, g.reciprocal() if format == "modelopt" else g)


def fp8_specs(name: str, shape: tuple[int, int]) -> list[Spec]:
    """What `fp8_tensors` gives for a weight [N, K]."""
    return [
        Spec(f"{name}.weight", "F8_E4M3", shape),
        Spec(f"{name}.weight_scale", "F32", (shape[0], 1)),
    ]


def fp8_tensors(name: str, pieces: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """A weight given as runs of rows [n, K]: each row's largest value lands on 448."""
    import torch

    codes, scales = [], []
    for rows in pieces:
        scale = rows.abs().amax(-1, keepdim=True).float() / 448
        scale = torch.where(scale == 0, 1.0, scale)
        codes.append((rows / scale).clamp_(-448, 448).to(torch.float8_e4m3fn))
        scales.append(scale)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales}


def config_section(format: Format, ignore: list[str], fp8: list[str]) -> dict[str, Any]:
    """config.json's `quantization_config`.

    ignore: linear layers left in 16 bits. fp8: names of those in FP8.
    """
    if format == "modelopt":
        group = {"num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK, "dynamic": False}
        return {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4",
            "kv_cache_scheme": None,
            "group_size": nvfp4.BLOCK,
            "ignore": ignore,
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": group, "input_activations": None}
            },
        }
    section = nvfp4.quantization_config(ignore)
    if fp8:
        weights = {
            "num_bits": 8,
            "type": "float",
            "strategy": "channel",
            "symmetric": True,
            "dynamic": False,
        }
        section["format"] = "mixed-precision"
        section["config_groups"]["group_1"] = {
            "targets": fp8,
            "format": "float-quantized",
            "weights": weights,
            "input_activations": None,
        }
    return section


def modelopt_file(ignore: list[str]) -> dict[str, Any]:
    """The hf_quant_config.json beside a ModelOpt checkpoint; vLLM wants every one of its keys."""
    return {
        "producer": {"name": "qerl"},
        "quantization": {
            "quant_algo": "W4A16_NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": nvfp4.BLOCK,
            "exclude_modules": ignore,
        },
    }
