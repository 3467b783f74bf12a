"""A LoRA adapter as PEFT wrote it: found, read, and refused with the reason where it is more.

What can be trained and served is plain LoRA on linear layers: W x + s B A x, with s = alpha/r, or
alpha/sqrt(r) for rsLoRA (arXiv 2312.03732), one rank and alpha for all modules or one per pattern.
Only the configuration and the header of the weights are read here. Imports no torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qerl.errors import QerlError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")

# Keys of a PEFT configuration that mean more than plain LoRA: what it is, and why not here.
_MORE_THAN_LORA = {
    "use_dora": ("DoRA", "its magnitudes need the norm of W + BA, and W stays packed"),
    "lora_bias": ("a LoRA bias", "a bias has no place in the fused product"),
    "modules_to_save": ("whole trained modules", "the base is frozen and stored once"),
    "trainable_token_indices": ("trained token embeddings", "the embeddings are frozen"),
    "target_parameters": ("adapted bare parameters", "only linear layers are adapted"),
    "layer_replication": ("replicated layers", "the base would be another network"),
    "megatron_config": ("Megatron's parallel layers", "there is one GPU"),
    "alora_invocation_tokens": ("activated LoRA", "the adapter is on for every token here"),
    "use_qalora": ("QALoRA", "its A reads pooled inputs"),
    "use_bdlora": ("block-diagonal LoRA", "its matrices are not dense"),
    "arrow_config": ("Arrow routing", "there is one adapter, for every token"),
    "kasa_config": ("KaSA", "its singular values change the base"),
    "velora_config": ("VeLoRA", "it compresses what backward reads"),
    "monteclora_config": ("Monte Carlo LoRA", "its matrices are sampled"),
}
# Initialisations that take something out of the base: A and B belong to what is left of it.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class Shape:
    """What an adapter adapts, and how: everything of it but the numbers.

    targets: names or suffixes of modules, or "all-linear". rank_pattern, alpha_pattern: PEFT's,
    a regular expression on the end of a module's name to its own rank or alpha.
    """

    rank: int
    alpha: float
    targets: str | list[str]
    rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)


def shape_of(source: str | Path) -> Shape:
    """The shape of a saved adapter; its targets are the full names of the modules in the file.

    source: a folder, or a Hub id ("owner/name"). Raises QerlError when there is no adapter or it
    is not plain LoRA.
    """
    folder = locate(source)
    config = read_config(folder)
    refuse_more_than_lora(config, source)
    return Shape(
        rank=_positive(config, "r", source),
        alpha=_positive(config, "lora_alpha", source),
        targets=module_names(tensor_names(folder / WEIGHTS_FILE), source),
        rslora=bool(config.get("use_rslora")),
        rank_pattern=dict(config.get("rank_pattern") or {}),
        alpha_pattern=dict(config.get("alpha_pattern") or {}),
    )


def _positive(config: dict[str, Any], key: str, source: str | Path) -> Any:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise QerlError(
            f"lora.init: the adapter at {source} has {key}={value!r} in {CONFIG_FILE}, wanted a "
            "number above 0: save it again with peft"
        )
    return value


def is_hub_id(name: str) -> bool:
    """True for "owner/name" that is no local path."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def locate(source: str | Path) -> Path:
    """The folder of an adapter, fetched from the Hub when `source` is an id."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(source, Path) or not is_hub_id(source):
        raise QerlError(f"lora.init: no adapter folder at {source}, and it is not a Hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise QerlError(f"lora.init: cannot fetch {source} from the Hub: {reason}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """`adapter_config.json` as a dict; QerlError when it is missing or damaged."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise QerlError(f"lora.init: {folder} is not a PEFT adapter: {CONFIG_FILE} is not there")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise QerlError(f"lora.init: {path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise QerlError(f"lora.init: {path} is not a PEFT configuration")
    return config


def refuse_more_than_lora(config: dict[str, Any], source: str | Path) -> None:
    """Raise QerlError, with the reason, for any method but LoRA (rsLoRA and patterns included)."""
    where = f"lora.init: the adapter at {source}"
    if config.get("peft_type") != "LORA":
        raise QerlError(f"{where} is {config.get('peft_type')}, not LORA: only LoRA can be trained")
    for key, (what, why) in _MORE_THAN_LORA.items():
        if config.get(key):
            raise QerlError(f"{where} uses {what} ({key}): only plain LoRA is supported ({why})")
    if config.get("bias", "none") != "none":
        raise QerlError(f"{where} trains biases (bias={config['bias']!r}): only plain LoRA is")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_CHANGE_THE_BASE):
        raise QerlError(
            f"{where} was initialised by {init} (init_lora_weights), which changes the base: save "
            "it with peft's path_initial_model_for_weight_conversion to get plain LoRA"
        )


def tensor_names(path: Path) -> list[str]:
    """Names in a safetensors file; QerlError when it is missing, cut short or damaged."""
    from safetensors import SafetensorError, safe_open

    check_there(path)
    try:
        with safe_open(path, framework="np") as file:
            return sorted(file.keys())
    except SafetensorError as error:
        raise QerlError(f"{path} is damaged or cut short ({error}): copy it again") from error


def check_there(path: Path) -> None:
    """Raise QerlError unless the safetensors file exists; pickles beside it are not looked at."""
    if not path.is_file():
        raise QerlError(f"{path} is missing (only safetensors files are read, never .bin or .pt)")


def module_names(keys: list[str], source: str | Path) -> list[str]:
    """Full names, in the base model, of the modules whose A and B are among PEFT's `keys`.

    Raises QerlError naming the first tensor that is neither: trained norms, DoRA's magnitudes,
    embeddings.
    """
    found: set[str] = set()
    for key in keys:
        match = _KEY.fullmatch(key)
        if match is None:
            raise QerlError(f"lora.init: the adapter at {source} holds {key}{_reason(key)}")
        found.add(match[1])
    if not found:
        raise QerlError(f"lora.init: {WEIGHTS_FILE} at {source} holds no adapter: save it again")
    return sorted(found)


def _reason(key: str) -> str:
    """Why a tensor that is no A or B of a linear layer is not taken."""
    if "lora_magnitude" in key:
        return ": it is DoRA, and only plain LoRA is supported"
    if "lora_embedding" in key:
        return ": the embeddings are frozen here; adapt linear layers only"
    if "norm" in key.lower():
        return (
            ", a norm trained elsewhere: norms are frozen here, and neither vLLM nor GGUF takes "
            "an adapter with them; merge it into its base and start from the merged model"
        )
    return ", which is no A or B of a linear layer: only plain LoRA is supported"
