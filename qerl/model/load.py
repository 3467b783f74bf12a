"""A recipe's `model` -> a frozen base, held as its `format` says.

`model` is resolved to a local directory (the demo model, a path, or a Hub id). For `format: nvfp4`
a 16-bit directory is quantized once into the cache; a checkpoint that was published quantized is
taken as it is. The tensors then go one by one into a skeleton (`assemble`): the 16-bit model never
exists in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qerl import demo_model
from qerl.errors import QerlError
from qerl.files import locked
from qerl.home import qerl_home
from qerl.model.assemble import Storage, TensorReader, assemble, raw_config

__all__ = ["Base", "TensorReader", "load_base", "load_dense", "load_network", "load_packed"]

Say = Callable[[str], None]
Format = Literal["nvfp4", "nf4", "bf16"]
Rest = Literal["keep", "nvfp4"]


@dataclass(slots=True)
class Base:
    """A frozen base model, its tokenizer, and where they came from.

    source: the directory that the recipe's `model` is; checkpoint: what was loaded (the NVFP4 copy
    of a 16-bit source, else `source`); hub_id: the name an adapter should give as its base.
    serve: what a server should load.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: Path
    checkpoint: Path
    hub_id: str
    serve: str


def load_base(
    model: str,
    *,
    format: str,
    dtype: torch.dtype,
    device: torch.device,
    rest: str = "keep",
    trust_remote_code: bool = False,
    say: Say = lambda text: None,
) -> Base:
    """Load a recipe's base model, frozen and in eval mode, with attention that packs.

    trust_remote_code: run the Python code that comes with the model.
    Raises QerlError for a model that does not exist or a format it does not have.
    """
    code = trust_remote_code
    _check_dtype(format, dtype, device)  # before anything is fetched
    source, hub_id = resolve_model(model, say, code)
    network, checkpoint = load_network(source, format, rest, dtype, device, say, code)
    on_hub = not Path(model).expanduser().is_dir() and model != demo_model.MODEL_ID
    # On a GPU vLLM reads the NVFP4 copy that was trained on; on a CPU it wants the 16-bit one.
    wide = hub_id if on_hub else str(source)
    serve = str(checkpoint) if device.type == "cuda" and format == "nvfp4" else wide
    return Base(network, load_tokenizer(checkpoint, code), source, checkpoint, hub_id, serve)


def load_network(
    source: Path,
    format: str,
    rest: str,
    dtype: torch.dtype,
    device: torch.device,
    say: Say,
    code: bool = False,
) -> tuple[PreTrainedModel, Path]:
    """A model directory as `format` and `rest` say, and the directory that was read: its NVFP4
    copy, where it was quantized for this. code: as `load_base`'s trust_remote_code.

    Raises QerlError as `load_base` does.
    """
    _check_dtype(format, dtype, device)
    if format == "nvfp4":
        read_config(source, code)  # what is not known is refused before it is quantized
        checkpoint = nvfp4_directory(source, say, code)
        return load_packed(checkpoint, dtype, device, say, rest=rest, code=code), checkpoint
    if quantization_of(source):
        raise QerlError(
            f"format: {format} was asked for, but '{source}' is a quantized checkpoint; "
            "set format: nvfp4, or name its 16-bit original"
        )
    return load_dense(source, dtype, device, say, format=format, code=code), source


def _check_dtype(format: str, dtype: torch.dtype, device: torch.device) -> None:
    if format == "nvfp4" and device.type == "cuda" and dtype == torch.float32:
        raise QerlError(
            "dtype: float32 is not for a packed model on a GPU, whose kernels take 16-bit "
            "activations; set dtype=bfloat16 (or auto)"
        )


def load_packed(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    say: Say = lambda text: None,
    *,
    rest: str = "keep",
    code: bool = False,
) -> PreTrainedModel:
    """A quantized checkpoint, each layer as its publisher left it, everything else in `dtype`.

    rest: what becomes of decoder layers left in 16 bits, "keep" or "nvfp4" (the sweep's scales).
    Raises QerlError as `assemble` does; `say` hears of tensors that are left out.
    """
    assert rest in ("keep", "nvfp4"), rest
    dense: Rest = "nvfp4" if rest == "nvfp4" else "keep"
    return assemble(directory, read_config(directory, code), Storage(dtype, device, dense), say)


def load_dense(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    say: Say = lambda text: None,
    *,
    format: str = "bf16",
    code: bool = False,
) -> PreTrainedModel:
    """A 16-bit checkpoint as it is (plain LoRA), or with its linears in NF4 (QLoRA).

    Raises QerlError as `assemble` does, and for format "nf4" without bitsandbytes.
    """
    assert format in ("bf16", "nf4"), format
    storage = Storage(dtype, device, "nf4" if format == "nf4" else "keep")
    return assemble(directory, read_config(directory, code), storage, say)


def read_config(directory: Path, code: bool = False) -> PretrainedConfig:
    """transformers' configuration; QerlError for one that is damaged or of an unknown kind.

    code: run the Python code that comes with it, if it is not one of transformers' own.
    """
    raw = raw_config(directory)
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        named = ", ".join(raw.get("architectures") or []) or "no architecture"
        if raw.get("auto_map") and not code:
            raise QerlError(
                f"model: '{directory}' ({named}) needs Python code that comes with it "
                "(trust_remote_code), which is not run unless you ask for it: set "
                "trust_remote_code: true if you trust its authors, or name another model"
            ) from error
        raise QerlError(
            f"model: transformers cannot use '{directory / 'config.json'}', model_type "
            f"'{raw.get('model_type')}', {named} ({first_line(error)}); name another model, or "
            "install a newer transformers"
        ) from error


def load_tokenizer(directory: Path, code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer beside the weights; QerlError if there is none. code: as for `read_config`."""
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=code)
    except (OSError, ValueError) as error:
        raise QerlError(f"model: no tokenizer in '{directory}' ({first_line(error)})") from error


def resolve_model(model: str, say: Say = lambda text: None, code: bool = False) -> tuple[Path, str]:
    """A recipe's `model` -> (local directory, name to publish as the base). code: fetch it too."""
    if model == demo_model.MODEL_ID:
        return demo_model.demo_model_dir(say), demo_model.HUB_ID
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise QerlError(f"model: '{path}' has no config.json; name a transformers directory")
        return path, str(path)
    if path.exists():
        raise QerlError(f"model: '{path}' is a file; name the directory that holds config.json")
    if model.startswith((".", "~", "/")) or model.count("/") != 1:
        raise QerlError(
            f"model: '{model}' does not exist; name a directory, a Hub id such as "
            f"Qwen/Qwen3-0.6B, or {demo_model.MODEL_ID}"
        )
    return download(model, say, code), model


def download(hub_id: str, say: Say, code: bool = False) -> Path:
    """Snapshot of a Hub model's safetensors, config, tokenizer and, if asked, Python files."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    say(f"fetching {hub_id} from the Hugging Face Hub")
    wanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]
    wanted += ["*.py"] * code
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise QerlError(
            f"model: '{hub_id}' is no local directory and could not be fetched from the Hub "
            f"({first_line(error)})"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, for one-line messages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def quantization_of(directory: Path) -> dict[str, Any]:
    """What the checkpoint says of its quantization, or {} for a 16-bit one.

    In config.json, there in the text tower's part, or (older ModelOpt) in hf_quant_config.json.
    """
    config = raw_config(directory)
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if part.get(key):
                return part[key]
    beside = directory / "hf_quant_config.json"
    return raw_config(directory, beside.name).get("quantization", {}) if beside.is_file() else {}


def nvfp4_directory(source: Path, say: Say, code: bool = False) -> Path:
    """The directory itself if it was published quantized, else its NVFP4 copy in the cache."""
    if quantization_of(source):
        return source
    from qerl.quantize.checkpoint import quantize_checkpoint

    target = qerl_home() / "nvfp4" / f"{source.name}-{fingerprint(source)}"
    if (target / "config.json").exists():
        return target
    with locked(target):  # two runs that start together make it once
        if not (target / "config.json").exists():
            say(f"quantizing {source.name} to NVFP4 (once; kept in {target.parent})")
            quantize_checkpoint(source, target, trust_remote_code=code)
    return target


def fingerprint(directory: Path) -> str:
    """Changes with the directory's path, file names, sizes and times: cheap, for a cache key."""
    digest = hashlib.sha256(str(directory.resolve()).encode())
    for file in sorted(directory.iterdir()):
        stat = file.stat()
        digest.update(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]
