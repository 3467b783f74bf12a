"""The adapter in PEFT's own layout: what comes out of a run, and what one can start from.

A saved adapter is a folder that plain `peft` + `transformers`, vLLM and SGLang load without this
project, and a valid Hub repository (weights, configuration, tokenizer, chat template, model card).
Keys and shapes are PEFT's; the live tensors stay the ones the optimizer holds, always.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import QerlError
from qerl.files import atomic_dir, check_writable

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel

ADAPTER = "default"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_CARD = """\
LoRA adapter for `{base}`, trained by reinforcement learning with qerl. It needs only `peft` and
`transformers`:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({base!r})
model = PeftModel.from_pretrained(base, {here!r})
tokenizer = AutoTokenizer.from_pretrained({here!r})
```

Rank {rank}, alpha {alpha:g}, {modules} adapted modules.
"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A saved adapter: the folder, and a way to take it elsewhere."""

    path: Path

    def save(self, directory: str | Path) -> Path:
        """Copy the folder to `directory`, replacing an adapter already there; returns the path.

        Raises QerlError when something that is not an adapter is in the way, or `directory`
        cannot be written.
        """
        return copy_adapter(self.path, directory, replace=True)


def adapter_state(model: PeftModel) -> dict[str, torch.Tensor]:
    """The live adapter's tensors under PEFT's file keys; they share storage with the model."""
    from peft import get_peft_model_state_dict

    # "auto" would ask the Hub whether the vocabulary was resized; ours never is.
    return get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)


def checksum(model: PeftModel) -> str:
    """SHA-256 over the live adapter's names, types, shapes and bytes, in name order."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(adapter_state(model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(flat.numpy().data)
    return digest.hexdigest()


def save_adapter(
    model: PeftModel,
    directory: str | Path,
    *,
    base_model: str,
    tokenizer: Any = None,
    readme: str | None = None,
    metadata: dict[str, Any] | None = None,
    trained_on: str | None = None,
) -> Adapter:
    """Write the live adapter as a PEFT folder, all or nothing, replacing an older adapter.

    base_model: Hub id or path of the base, recorded in the configuration. tokenizer: saved with
    its chat template. readme: body of the model card (null: how to load the adapter).
    metadata: entries of the card's front matter (license, datasets, base_model, ...); they win
    over ours. trained_on: a sentence for the end of the card about what it was trained on, where
    that is not `base_model` itself ("Trained on an NVFP4 (4.5 bits a weight) copy of …").
    Tensors keep their type (fp32 for our masters).
    Raises QerlError when `directory` holds something that is not an adapter.
    """
    from safetensors.torch import save_file

    directory = Path(directory).expanduser()
    _refuse_other(directory, replace=True)
    state = {name: tensor.contiguous() for name, tensor in adapter_state(model).items()}
    modules = adapted_modules(model)
    saved = {_module_of(name) for name in state}
    assert len(saved) == len(modules) and len(state) == 2 * len(saved), "adapter state incomplete"
    config = _portable_config(model, modules, base_model)
    card = _model_card(config, directory.name, len(modules), readme, metadata or {})
    if trained_on is not None:
        card = f"{card.rstrip()}\n\n{trained_on}\n"
    with atomic_dir(directory) as folder:
        save_file(state, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        config.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        (folder / "README.md").write_text(card, encoding="utf-8")
    return Adapter(directory)


def load_adapter(model: PeftModel, source: str | Path) -> int:
    """Copy a saved LoRA adapter into the live one, in place; returns the number of modules filled.

    source: a folder, or a Hub id ("owner/name"). Every tensor of the file is used and every live
    tensor is filled, checked before the first byte is written. Raises QerlError naming the key
    when the folder, the method (DoRA, rsLoRA, bias, ...), rank, alpha or targets do not fit.
    """
    import torch

    folder = _locate(source)
    _check_config(_read_config(folder), model, source)
    loaded = read_tensors(folder / WEIGHTS_FILE)
    live = adapter_state(model)
    _check_tensors(loaded, live, source)
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(loaded[name])
    return len(live) // 2


def copy_adapter(source: Path, directory: str | Path, *, replace: bool) -> Path:
    """Copy an adapter folder, all or nothing; see `Adapter.save`. Returns the new folder."""
    import shutil

    directory = Path(directory).expanduser()
    if not (source / CONFIG_FILE).is_file():
        raise QerlError(f"no adapter at {source}: {CONFIG_FILE} is not there (is the run over?)")
    check_writable("adapter folder", directory)
    if directory.exists() and directory.samefile(source):
        raise QerlError(f"the adapter is already at {directory}: name another folder")
    _refuse_other(directory, replace=replace)
    with atomic_dir(directory) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
    return directory


def adapted_modules(model: PeftModel) -> list[str]:
    """Names, within the base model, of the modules that carry the live adapter."""
    from peft.tuners.lora import LoraLayer

    return [
        name
        for name, module in model.get_base_model().named_modules()
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A
    ]


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """A safetensors file as a dict; QerlError when it is missing, cut short or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise QerlError(f"{path} is missing (only safetensors files are read, never .bin or .pt)")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise QerlError(f"{path} is damaged or cut short ({error}): copy it again") from error


def _module_of(key: str) -> str:
    """base_model.model.X.lora_A.weight -> X"""
    return re.sub(r"\.lora_[AB]\.weight$", "", key.removeprefix("base_model.model."))


def _refuse_other(directory: Path, *, replace: bool) -> None:
    """Only an empty folder, or (replace) an adapter, may be in the way."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if replace and (directory / CONFIG_FILE).is_file():
        return
    what = "exists and is not empty" if directory.is_dir() else "is a file"
    raise QerlError(f"cannot write an adapter to {directory}: it {what}; name another folder")


def _portable_config(model: PeftModel, modules: list[str], base_model: str) -> LoraConfig:
    """The live configuration with the modules really adapted as its targets, for inference."""
    config: Any = copy.deepcopy(model.peft_config[ADAPTER])
    suffixes = {name.rpartition(".")[2] for name in modules}
    names = {name for name, _ in model.get_base_model().named_modules()}
    by_suffix = {name for name in names if name.rpartition(".")[2] in suffixes}
    # Suffixes read better, but only where they mean exactly the same modules.
    config.target_modules = sorted(suffixes if by_suffix == set(modules) else modules)
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    config.base_model_name_or_path = base_model
    config.task_type = config.task_type or "CAUSAL_LM"
    config.inference_mode = True
    if config.lora_alpha == int(config.lora_alpha):
        config.lora_alpha = int(config.lora_alpha)  # PEFT and the engines type it as a whole number
    return config


def _model_card(
    config: LoraConfig, name: str, modules: int, readme: str | None, metadata: dict[str, Any]
) -> str:
    """A Hub model card; a local path is left out of `base_model`, which must be a Hub id."""
    import yaml

    base = str(config.base_model_name_or_path)
    front: dict[str, Any] = {"library_name": "peft", "pipeline_tag": "text-generation"}
    if is_hub_id(base):
        front["base_model"] = base
    front["tags"] = ["lora", "grpo", "reinforcement-learning", "qerl"]
    front.update(metadata)
    body = readme or _CARD.format(
        base=front.get("base_model", base),
        here=name,
        rank=config.r,
        alpha=config.lora_alpha,
        modules=modules,
    )
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {name}\n\n{body}"


def is_hub_id(name: str) -> bool:
    """True for "owner/name" that is no local path."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def _locate(source: str | Path) -> Path:
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


def _read_config(folder: Path) -> dict[str, Any]:
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


def _check_config(config: dict[str, Any], model: PeftModel, source: str | Path) -> None:
    """Plain LoRA of our rank and alpha, or a QerlError naming what differs."""
    live: Any = model.peft_config[ADAPTER]
    where = f"lora.init: the adapter at {source}"
    if config.get("peft_type") != "LORA":
        raise QerlError(f"{where} is {config.get('peft_type')}, not LORA: only LoRA can be trained")
    unsupported = {
        "use_dora": "DoRA",
        "use_rslora": "rsLoRA",
        "lora_bias": "a LoRA bias",
        "modules_to_save": "modules_to_save",
        "rank_pattern": "one rank per module (rank_pattern)",
        "alpha_pattern": "one alpha per module (alpha_pattern)",
        "trainable_token_indices": "trained token embeddings",
        "target_parameters": "target_parameters",
    }
    for key, what in unsupported.items():
        if config.get(key):
            raise QerlError(f"{where} uses {what} ({key}): only plain LoRA is supported")
    if config.get("bias", "none") != "none":
        raise QerlError(f"{where} trains biases (bias={config['bias']!r}): only plain LoRA is")
    for key, ours, mine in (("r", "rank", live.r), ("lora_alpha", "alpha", live.lora_alpha)):
        if config.get(key) != mine:
            raise QerlError(
                f"lora.{ours}: {mine:g} here, but the adapter at {source} has {config.get(key)}: "
                f"set lora.{ours}={config.get(key)}"
            )


def _check_tensors(
    loaded: dict[str, torch.Tensor], live: dict[str, torch.Tensor], source: str | Path
) -> None:
    """Same keys, same shapes; else a QerlError naming the first that differs."""
    missing, extra = sorted(live.keys() - loaded.keys()), sorted(loaded.keys() - live.keys())
    if missing or extra:
        what = f"has no {missing[0]}" if missing else f"has {extra[0]}, which is not adapted here"
        targets = sorted({_module_of(name).rpartition(".")[2] for name in loaded})
        raise QerlError(
            f"lora.targets: the adapter at {source} {what}; it adapts {', '.join(targets)}: "
            "set lora.targets to these, or start from another adapter"
        )
    for name, tensor in live.items():
        if loaded[name].shape != tensor.shape:
            found, wanted = list(loaded[name].shape), list(tensor.shape)
            raise QerlError(
                f"lora.init: {name} is {found} in the adapter at {source} and {wanted} here: "
                "it was trained on another base model"
            )
