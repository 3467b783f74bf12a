"""Which weights become NVFP4, and which of them share one global scale.

Inference engines fuse q/k/v and gate/up into one matrix with one global scale, and silently use
one shard's if they differ: sharing it from the start costs no accuracy (the block scales adapt).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = "nvfp4-pack-quantized"
BLOCK = 16

# By last name; w1/w3 are the gate and up projections of Mixtral-style experts.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def scale_groups(names: Iterable[str]) -> list[list[str]]:
    """Split module names into lists that share a global scale, in order of first appearance."""
    groups: dict[tuple[str, object], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        fused = next((f for f in FUSED if leaf in f), leaf)
        groups.setdefault((parent, fused), []).append(name)
    return list(groups.values())


def linear_shapes(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Name and weight shape [N, K] of every `nn.Linear` of a model but its output head."""
    from torch import nn

    head = model.get_output_embeddings()
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def quantization_config(ignore: list[str]) -> dict:
    """The `quantization_config` of config.json that compressed-tensors and vLLM read: W4A16."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = {
        "targets": ["Linear"],
        "format": FORMAT,
        "weights": weights,
        "input_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }
