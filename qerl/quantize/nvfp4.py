"""Which weights become NVFP4, and which of them share one global scale.

Inference engines fuse q/k/v and gate/up into one matrix with one global scale, and silently use
one shard's if they differ: sharing it from the start costs no accuracy (the block scales adapt).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from qerl.errors import QerlError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = "nvfp4-pack-quantized"
BLOCK = 16

# By last name; w1/w3 are the gate and up projections of Mixtral-style experts, in_proj_* those of
# Qwen3.5's recurrent layers.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
# Decay and write strength of a gated delta rule, one number a head: too few rows for 4-bit kernels
# (which want multiples of 64), a thousandth of the weights, and every later state depends on them.
GATES = ("in_proj_a", "in_proj_b")


def scale_groups(names: Iterable[str]) -> list[list[str]]:
    """Split module names into lists that share a global scale, in order of first appearance."""
    groups: dict[tuple[str, object], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        fused = next((f for f in FUSED if leaf in f), leaf)
        groups.setdefault((parent, fused), []).append(name)
    return list(groups.values())


def linear_shapes(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Name and weight shape [N, K] of the decoder's `nn.Linear` layers, gates excepted.

    The output head is not among them, nor are vision and audio towers.
    """
    prefix = decoder_prefix(model)
    return {
        name: shape
        for name, shape in _linears(model).items()
        if name.startswith(prefix) and name.rpartition(".")[2] not in GATES
    }


def other_linears(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers that `linear_shapes` leaves out, but for the output head."""
    inside = linear_shapes(model)
    return [name for name in _linears(model) if name not in inside]


def _linears(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    from torch import nn

    head = model.get_output_embeddings()
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def decoder_prefix(model: PreTrainedModel) -> str:
    """What the names of the text decoder's modules begin with; "" if it is the whole model."""
    names = {id(module): name for name, module in model.named_modules()}
    name = names.get(id(model.get_decoder()), "")
    return f"{name}." if name else ""


def kept_layers(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """The layers that patterns keep in 16 bits: shell patterns, or `re:` and a regex to search for.

    Raises QerlError for a pattern that matches nothing, a broken regex, or patterns that keep some
    of the layers that engines fuse but not the others.
    """
    names = list(names)
    kept: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if _matches(pattern, name)}
        if not found:
            raise QerlError(
                f"keep: '{pattern}' matches no linear layer; names look like '{names[-1]}', "
                "patterns like '*.layers.0.*' or 're:down_proj$'"
            )
        kept |= found
    for group in scale_groups(names):
        inside = [name for name in group if name in kept]
        if inside and len(inside) < len(group):
            rest = next(name for name in group if name not in kept)
            raise QerlError(
                f"keep: '{inside[0]}' is kept but '{rest}' is not, and inference engines fuse the "
                "two; keep both or neither"
            )
    return kept


def _matches(pattern: str, name: str) -> bool:
    if not pattern.startswith("re:"):
        return fnmatch.fnmatchcase(name, pattern)
    try:
        return re.search(pattern[3:], name) is not None
    except re.error as error:
        raise QerlError(
            f"keep: '{pattern}' is no regular expression ({error}); correct it"
        ) from error


def weights_scheme() -> dict[str, Any]:
    """compressed-tensors' description of NVFP4 weights."""
    return {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }


def quantization_config(ignore: list[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json that compressed-tensors and vLLM read: W4A16."""
    group = {
        "targets": ["Linear"],
        "format": FORMAT,
        "weights": weights_scheme(),
        "input_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }
