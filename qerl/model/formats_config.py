"""What a checkpoint's configuration says of its quantized layers: the three dialects, one table.

compressed-tensors: `config_groups`, each with targets (module names, `re:` patterns, class names)
and an `ignore` list. ModelOpt: `quant_algo` with `exclude_modules` wildcards, or, for
MIXED_PRECISION, one entry a layer in `quantized_layers`; in config.json, hf_quant_config.json or
both. `quant_method: fp8`: one kind for the whole checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from qerl.errors import QerlError

Kind = Literal["nvfp4", "fp8", "dense"]

BLOCK = 16
READABLE = (
    "name a 16-bit checkpoint, or one in NVFP4 or FP8 (a scale for the tensor or for each output)"
)

# Where `weights` of a compressed-tensors group may say that its tensors are stored.
_FORMATS = ("nvfp4-pack-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_ALGOS: dict[str, Kind] = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
}
_CLASS_NAME = re.compile(r"[A-Z]\w*")
# The same text tower as transformers names it in memory and as it was saved, by version and family.
_TOWERS = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")


@dataclass(frozen=True, slots=True)
class Rule:
    """One group of layers. kind: how they are stored, or None and `reason`, why we cannot read it.

    targets: module names, a parent's name, `re:` patterns or class names.
    """

    kind: Kind | None
    targets: tuple[str, ...]
    reason: str = ""

    def covers(self, name: str) -> bool:
        """Whether the layer is in this group, by any of the names its tower goes by."""
        return any(_matches(target, alias) for target in self.targets for alias in aliases(name))


@dataclass(frozen=True, slots=True)
class Plan:
    """What the configuration says. publisher: the dialect; activations: quantized there too."""

    publisher: str
    rules: tuple[Rule, ...] = ()
    ignore: tuple[str, ...] = ()
    activations: bool = False
    _cache: dict[str, tuple[Rule, ...]] = field(default_factory=dict, repr=False)

    def covering(self, name: str) -> tuple[Rule, ...]:
        """The groups a layer is in; several where a publisher's patterns overlap."""
        if name not in self._cache:
            self._cache[name] = tuple(rule for rule in self.rules if rule.covers(name))
        return self._cache[name]

    def ignores(self, name: str) -> bool:
        """Whether the layer is on the list of those left in 16 bits."""
        return any(_ignored(entry, alias) for entry in self.ignore for alias in aliases(name))


def read_plan(directory: Path, config: dict[str, Any]) -> Plan:
    """The plan of a checkpoint folder, whose config.json is `config`; no rules for a 16-bit one.

    Raises QerlError when no layer could be read: another method, or every group refused.
    """
    beside = _read_json(directory / "hf_quant_config.json")
    quantization = _quantization(config)
    if not quantization and not beside:
        return Plan("16-bit")
    method = str(quantization.get("quant_method", "modelopt" if beside else "unnamed")).lower()
    if method == "compressed-tensors":
        plan = _compressed_tensors(directory, quantization)
    elif method.startswith("modelopt"):
        plan = _modelopt(directory, quantization, beside.get("quantization", {}))
    elif method == "fp8":
        plan = _fp8(quantization)
    else:
        raise QerlError(f"model: '{directory}' is quantized as {method}; {READABLE}")
    readable = [rule for rule in plan.rules if rule.kind not in (None, "dense")]
    refused = [rule.reason for rule in plan.rules if rule.kind is None]
    if refused and not readable:
        raise QerlError(f"model: '{directory}' is quantized as {refused[0]}; {READABLE}")
    return plan


def aliases(name: str) -> Iterator[str]:
    """A module's name, then the names it has under the other prefixes of a text tower."""
    yield name
    tail = next(name.removeprefix(prefix) for prefix in _TOWERS if name.startswith(prefix))
    for prefix in _TOWERS:
        if prefix + tail != name:
            yield prefix + tail


def _matches(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    # A class is not known from tensors; of all stored quantized layers "Linear" means each.
    return name == target or name.startswith(target + ".") or bool(_CLASS_NAME.fullmatch(target))


def _ignored(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return fnmatchcase(name, entry)  # ModelOpt's entries are wildcards; a plain name is one too


def _quantization(config: dict[str, Any]) -> dict[str, Any]:
    """`quantization_config` of config.json, or of its text tower, or by its older name."""
    text = config.get("text_config") or {}
    for holder in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if holder.get(key):
                return holder[key]
    return {}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise QerlError(f"model: '{path}' is not JSON ({error}); download it again") from error
    if not isinstance(found, dict):
        raise QerlError(f"model: '{path}' is not a JSON object; download it again")
    return found


# --- compressed-tensors --------------------------------------------------------------------------


def _compressed_tensors(directory: Path, quantization: dict[str, Any]) -> Plan:
    _refuse_other_steps(directory, quantization)
    groups = quantization.get("config_groups") or {}
    rules, activations = [], False
    for name, group in groups.items():
        if not isinstance(group, dict) or not group.get("targets"):
            raise QerlError(
                f"model: config_groups.{name} of '{directory / 'config.json'}' has no targets; "
                "quantize the model again"
            )
        rules.append(_group_rule(group, quantization.get("format")))
        activations |= bool(group.get("input_activations"))
    ignore = tuple(quantization.get("ignore") or ())
    return Plan("compressed-tensors", tuple(rules), ignore, activations)


def _refuse_other_steps(directory: Path, quantization: dict[str, Any]) -> None:
    """What changes a layer's input or drops weights cannot be seen from its tensors alone."""
    sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise QerlError(f"model: '{directory}' is sparse ({sparsity}); {READABLE}")
    transforms = (quantization.get("transform_config") or {}).get("config_groups")
    if transforms:
        raise QerlError(
            f"model: '{directory}' rotates activations (transform_config), which is not "
            f"supported; {READABLE}"
        )


def _group_rule(group: dict[str, Any], default_format: str | None) -> Rule:
    targets = tuple(group["targets"])
    weights = group.get("weights")
    if not weights:  # a group that quantizes only activations, such as the cache's
        return Rule("dense", targets)
    kind, reason = _weights_kind(weights)
    where = group.get("format") or default_format
    if kind and where not in (None, *_FORMATS):
        kind, reason = None, f"the format {where}"
    return Rule(kind, targets, reason)


def _weights_kind(weights: dict[str, Any]) -> tuple[Kind | None, str]:
    """The kind of a group's weights, or None and what they are."""
    bits, number = weights.get("num_bits"), weights.get("type")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if number != "float" or bits not in (4, 8):
        return None, f"{bits}-bit {number or 'numbers'}"
    if weights.get("symmetric") is False:
        return None, f"{bits}-bit floats with a zero point"
    if bits == 4:
        if size != BLOCK:
            return None, f"4-bit floats in blocks of {size}, and NVFP4 has blocks of {BLOCK}"
        return ("nvfp4", "") if strategy == "tensor_group" else (None, f"4-bit floats, {strategy}")
    if strategy in ("tensor", "channel"):
        return "fp8", ""
    block = weights.get("block_structure") or size
    return None, f"FP8 in blocks of {block}" if block else f"FP8, {strategy}"


# --- ModelOpt ------------------------------------------------------------------------------------


def _modelopt(directory: Path, quantization: dict[str, Any], beside: dict[str, Any]) -> Plan:
    """config.json wins (engines read it first); hf_quant_config.json fills what it leaves out."""
    inner = quantization.get("quantization")
    said = inner if isinstance(inner, dict) else quantization
    algo = str(said.get("quant_algo") or beside.get("quant_algo") or "").upper()
    ignore = said.get("exclude_modules") or said.get("ignore") or beside.get("exclude_modules")
    if algo == "MIXED_PRECISION":
        layers = said.get("quantized_layers") or beside.get("quantized_layers")
        if not isinstance(layers, dict) or not layers:
            raise QerlError(
                f"model: '{directory}' says MIXED_PRECISION and lists no quantized_layers; "
                "download its hf_quant_config.json too"
            )
        rules = _mixed_rules(layers)
    else:
        size = said.get("group_size") or beside.get("group_size")
        rules = [_algo_rule(algo, size or _size_of_groups(said), ("Linear",))]
        layers = {"": {"quant_algo": algo}}
    activations = any(
        not str(layer.get("quant_algo")).upper().startswith("W4A16") for layer in layers.values()
    )
    return Plan("ModelOpt", tuple(rules), tuple(ignore or ()), activations)


def _size_of_groups(said: dict[str, Any]) -> int | None:
    """group_size as ModelOpt writes it in config.json: inside each config group's weights."""
    for group in (said.get("config_groups") or {}).values():
        if (group.get("weights") or {}).get("group_size"):
            return group["weights"]["group_size"]
    return None


def _mixed_rules(layers: dict[str, dict[str, Any]]) -> list[Rule]:
    names: dict[tuple[str, int | None], list[str]] = {}
    for name, layer in layers.items():
        key = (str(layer.get("quant_algo")).upper(), layer.get("group_size"))
        names.setdefault(key, []).append(name)
    return [_algo_rule(algo, size, tuple(group)) for (algo, size), group in names.items()]


def _algo_rule(algo: str, size: int | None, targets: tuple[str, ...]) -> Rule:
    kind = _ALGOS.get(algo)
    if kind == "nvfp4" and size not in (None, 0, BLOCK):  # 0: the exporter did not record it
        return Rule(None, targets, f"{algo} in blocks of {size}, and NVFP4 has blocks of {BLOCK}")
    return Rule(kind, targets, "" if kind else f"ModelOpt's {algo or 'unnamed algorithm'}")


# --- transformers' own FP8 -----------------------------------------------------------------------


def _fp8(quantization: dict[str, Any]) -> Plan:
    """One rule; modules_to_not_convert is not needed, for what is not FP8 is stored in 16 bits."""
    block = quantization.get("weight_block_size")
    rule = (
        Rule(None, ("Linear",), f"FP8 in blocks of {block}") if block else Rule("fp8", ("Linear",))
    )
    return Plan("fp8", (rule,), (), activations=True)
