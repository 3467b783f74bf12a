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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import QerlError
from qerl.files import atomic_dir, check_writable
from qerl.model.peft_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_there,
    is_hub_id,
    locate,
    module_names,
    read_config,
    refuse_more_than_lora,
    shape_of,
)

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel

    from qerl.config import Recipe

ADAPTER = "default"
BASE_SHA256 = "base_sha256"  # entry of the weights' metadata, see `save_adapter`

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
    base_sha256: str | None = None,
) -> Adapter:
    """Write the live adapter as a PEFT folder, all or nothing, replacing an older adapter.

    base_model: Hub id or path of the base, recorded in the configuration. tokenizer: saved with
    its chat template. readme: body of the model card (null: how to load the adapter).
    metadata: entries of the card's front matter (license, datasets, base_model, ...); they win
    over ours. trained_on: a sentence for the end of the card about what it was trained on, where
    that is not `base_model` itself ("Trained on an NVFP4 (4.5 bits a weight) copy of …").
    base_sha256: hash of the frozen base (`qerl.policy.base_sha256`), kept in the metadata of the
    weights so that a misfit later can be told from another quantization of the same model.
    Tensors keep their type (fp32 for our masters).
    Raises QerlError when `directory` holds something that is not an adapter.
    """
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
    file_metadata = {"format": "pt"} | ({BASE_SHA256: base_sha256} if base_sha256 else {})
    with atomic_dir(directory) as folder:
        _save_weights(state, folder / WEIGHTS_FILE, file_metadata)
        config.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        (folder / "README.md").write_text(card, encoding="utf-8")
    return Adapter(directory)


def load_adapter(model: PeftModel, source: str | Path) -> int:
    """Copy a saved LoRA adapter into the live one, in place; returns the number of modules filled.

    source: a folder, or a Hub id ("owner/name"). Every tensor of the file is used and every live
    tensor is filled, checked before the first byte is written. Raises QerlError naming the key
    when the folder, the method (DoRA, bias, ...), rank, alpha, rsLoRA, patterns or targets do not
    fit, a tensor is no A or B of a linear layer, or a number is not finite.
    """
    import torch

    folder = locate(source)
    config = read_config(folder)
    _check_config(config, model, source)
    loaded = read_tensors(folder / WEIGHTS_FILE)
    live = adapter_state(model)
    module_names(sorted(loaded), source)
    _check_keys(loaded, live, source)
    _check_shapes(loaded, live, source, lambda: _two_bases(config, folder, model))
    _check_finite(loaded, source)
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(loaded[name])
    return len(live) // 2


def adopted(recipe: Recipe) -> Recipe:
    """The recipe with the rank, alpha, scaling and targets of the adapter that lora.init names.

    For a run's own recipe.yaml: what is resumed or opened later must be of the same shape, and
    lora.init may be gone by then. Without lora.init the recipe comes back as it is.
    Raises QerlError when there is no such adapter, or it is not plain LoRA.
    """
    if recipe.lora.init is None:
        return recipe
    shape = shape_of(recipe.lora.init)
    changed = recipe.model_copy(deep=True)
    for key in ("rank", "alpha", "targets", "rslora", "rank_pattern", "alpha_pattern"):
        setattr(changed.lora, key, getattr(shape, key))
    return changed


def copy_adapter(
    source: Path,
    directory: str | Path,
    *,
    replace: bool,
    change: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Copy an adapter folder, all or nothing; see `Adapter.save`. Returns the new folder.

    change: is given the copy before it appears under its name.
    """
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
        change(folder)
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

    check_there(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise QerlError(f"{path} is damaged or cut short ({error}): copy it again") from error


def _save_weights(state: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """A safetensors file whose bytes depend on nothing but its content, as a hash of it should.

    The library writes its metadata in an order that is another each time; here they are sorted.
    """
    from safetensors.torch import save_file

    save_file(state, path, metadata=metadata)
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "the same entries"
        file.seek(8)
        file.write(text.ljust(length))


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
    from qerl.model.towers import modules_left_out

    config: Any = copy.deepcopy(model.peft_config[ADAPTER])
    suffixes = {name.rpartition(".")[2] for name in modules}
    base = model.get_base_model()
    # A vision tower left out here is there where the adapter is loaded, with a q_proj of its own.
    names = {name for name, _ in base.named_modules()} | set(modules_left_out(base))
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


def _check_config(config: dict[str, Any], model: PeftModel, source: str | Path) -> None:
    """LoRA of our rank, alpha, scaling and patterns, or a QerlError naming what differs."""
    refuse_more_than_lora(config, source)
    live: Any = model.peft_config[ADAPTER]
    for key, ours, mine in (("r", "rank", live.r), ("lora_alpha", "alpha", live.lora_alpha)):
        if config.get(key) != mine:
            raise QerlError(
                f"lora.{ours}: {mine:g} here, but the adapter at {source} has {config.get(key)}: "
                f"set lora.{ours}={config.get(key)}"
            )
    for key, what in (
        ("use_rslora", "rsLoRA"),
        ("rank_pattern", "one rank per module"),
        ("alpha_pattern", "one alpha per module"),
    ):
        theirs, mine = config.get(key) or None, getattr(live, key) or None
        if theirs != mine:
            raise QerlError(
                f"lora.init: the adapter at {source} uses {what} ({key}: {theirs or 'none'}) and "
                f"the one here has {mine or 'none'}: start a run from it with lora.init"
            )


def _check_keys(
    loaded: dict[str, torch.Tensor], live: dict[str, torch.Tensor], source: str | Path
) -> None:
    """Same keys; else a QerlError naming the first that differs."""
    missing, extra = sorted(live.keys() - loaded.keys()), sorted(loaded.keys() - live.keys())
    if missing or extra:
        what = f"has no {missing[0]}" if missing else f"has {extra[0]}, which is not adapted here"
        targets = sorted({_module_of(name).rpartition(".")[2] for name in loaded})
        raise QerlError(
            f"lora.targets: the adapter at {source} {what}; it adapts {', '.join(targets)}: "
            "set lora.targets to these, or start from another adapter"
        )


def _check_shapes(
    loaded: dict[str, torch.Tensor],
    live: dict[str, torch.Tensor],
    source: str | Path,
    bases: Callable[[], str],
) -> None:
    """Same shapes, or a QerlError naming the first that differs. bases: said of another base."""
    for name, tensor in live.items():
        found, wanted = list(loaded[name].shape), list(tensor.shape)
        if found == wanted:
            continue
        where = f"lora.init: {name} is {found} in the adapter at {source} and {wanted} here"
        width = 1 if ".lora_A." in name else 0  # A [R, K], B [N, R]
        if len(found) == 2 and found[width] == wanted[width]:
            raise QerlError(
                f"{where}: its {CONFIG_FILE} says rank {wanted[1 - width]} and is not of these "
                "weights; copy both again"
            )
        raise QerlError(f"{where}: it was trained on another base model ({bases()})")


def _two_bases(config: dict[str, Any], folder: Path, model: PeftModel) -> str:
    """Names and, where the file has one, hashes of the adapter's base and of the one here."""
    from safetensors import safe_open

    from qerl.policy import base_sha256

    named = config.get("base_model_name_or_path") or "no base"
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        sha256 = (file.metadata() or {}).get(BASE_SHA256)
    theirs = f"SHA-256 {sha256[:12]}" if sha256 else "no hash of it"
    here = base_sha256(model.get_base_model())
    return f"it names {named}, {theirs}; here SHA-256 {here[:12]}"


def _check_finite(loaded: dict[str, torch.Tensor], source: str | Path) -> None:
    """Raise QerlError naming the first tensor with a NaN or an infinity in it."""
    for name, tensor in loaded.items():
        if not bool(tensor.isfinite().all()):
            raise QerlError(
                f"lora.init: {name} in the adapter at {source} is not finite (NaN or infinity): "
                "its training diverged; start from an earlier checkpoint of it"
            )
