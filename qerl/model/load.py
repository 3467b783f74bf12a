"""Checkpoint -> model: the base, once, packed; then the adapter around it.

A recipe's `model` is resolved to a local directory (the demo model, a path, or a Hub id). For
`format: nvfp4` a 16-bit directory is quantized once into the cache; the NVFP4 checkpoint's tensors
then go straight into a skeleton on the meta device: the 16-bit model never exists in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qerl import demo_model
from qerl.errors import QerlError
from qerl.home import qerl_home
from qerl.model import attention
from qerl.model.linear import NVFP4Linear
from qerl_kernels import ops

Say = Callable[[str], None]
PACKED_BUFFERS = (".weight_scale", ".weight_global_scale")


@dataclass(slots=True)
class Base:
    """A frozen base model, its tokenizer, and where they came from.

    source: the 16-bit model's directory; checkpoint: what was loaded (NVFP4, or `source`);
    hub_id: the name an adapter should give as its base. serve: what a server should load.
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
    say: Say = lambda text: None,
) -> Base:
    """Load a recipe's base model, frozen and in eval mode, with attention that packs.

    Raises QerlError for a model that does not exist or a format it does not have.
    """
    if format == "nvfp4" and device.type == "cuda" and dtype == torch.float32:
        raise QerlError(
            "dtype: float32 is not for a packed model on a GPU, whose kernels take 16-bit "
            "activations; set dtype=bfloat16 (or auto)"
        )
    source, hub_id = resolve_model(model, say)
    checkpoint = nvfp4_directory(source, say) if format == "nvfp4" else source
    if format == "nvfp4":
        network = load_packed(checkpoint, dtype, device, say)
    elif quantization_of(source):
        raise QerlError(f"format: bf16 was asked for, but '{model}' is a quantized checkpoint")
    else:
        network = load_dense(source, dtype, device)
    network.requires_grad_(False).eval()
    on_hub = not Path(model).expanduser().is_dir() and model != demo_model.MODEL_ID
    # On a GPU vLLM reads the NVFP4 copy that was trained on; on a CPU it wants the 16-bit one.
    wide = hub_id if on_hub else str(source)
    serve = str(checkpoint) if device.type == "cuda" and format == "nvfp4" else wide
    return Base(network, load_tokenizer(checkpoint), source, checkpoint, hub_id, serve)


def load_dense(directory: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A 16-bit checkpoint as it is: the plain LoRA baseline."""
    attention.register()
    read_config(directory)
    tensor_names(directory)  # a damaged or missing file is one line here, a traceback below
    network = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation=attention.NAME,
        use_safetensors=True,
        trust_remote_code=False,
    )
    return network.to(device)  # pyright: ignore[reportArgumentType]  (transformers wraps the method)


def read_config(directory: Path) -> PretrainedConfig:
    """transformers' configuration; QerlError for one that is damaged or of an unknown kind."""
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise QerlError(
            f"model: transformers cannot use '{directory / 'config.json'}' ({first_line(error)}); "
            f"name another model, or download this one again"
        ) from error


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside the weights; QerlError if there is none."""
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise QerlError(f"model: no tokenizer in '{directory}' ({first_line(error)})") from error


def resolve_model(model: str, say: Say = lambda text: None) -> tuple[Path, str]:
    """A recipe's `model` -> (local directory, name to publish as the base)."""
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
    return download(model, say), model


def download(hub_id: str, say: Say) -> Path:
    """Snapshot of a Hub model's safetensors, config and tokenizer."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    say(f"fetching {hub_id} from the Hugging Face Hub")
    wanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]
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
    """config.json's `quantization_config`, or {}."""
    path = directory / "config.json"
    try:
        return json.loads(path.read_text()).get("quantization_config") or {}
    except ValueError as error:
        raise QerlError(f"model: '{path}' is not JSON ({error}); download it again") from error


def nvfp4_directory(source: Path, say: Say) -> Path:
    """The directory itself if it is NVFP4 already, else its quantized copy in the cache."""
    quantization = quantization_of(source)
    if quantization.get("format") == "nvfp4-pack-quantized":
        return source
    if quantization:
        kind = quantization.get("format") or quantization.get("quant_method")
        raise QerlError(
            f"model: '{source}' is quantized as {kind}; name a 16-bit checkpoint or a "
            f"compressed-tensors nvfp4-pack-quantized one"
        )
    from qerl.quantize.checkpoint import quantize_checkpoint

    target = qerl_home() / "nvfp4" / f"{source.name}-{fingerprint(source)}"
    if not (target / "config.json").exists():
        say(f"quantizing {source.name} to NVFP4 (once; kept in {target.parent})")
        quantize_checkpoint(source, target)
    return target


def fingerprint(directory: Path) -> str:
    """Changes with the directory's path, file names, sizes and times: cheap, for a cache key."""
    digest = hashlib.sha256(str(directory.resolve()).encode())
    for file in sorted(directory.iterdir()):
        stat = file.stat()
        digest.update(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]


def load_packed(
    directory: Path, dtype: torch.dtype, device: torch.device, say: Say = lambda text: None
) -> PreTrainedModel:
    """An NVFP4 checkpoint -> model with NVFP4Linear layers, everything else in `dtype`.

    Raises QerlError for a damaged file or a tensor that is missing; `say` hears of tensors that
    are no part of the language model.
    """
    config = read_config(directory)
    delattr(config, "quantization_config")  # transformers' own reader would unpack to 16 bits
    model = skeleton(config, dtype)
    tensors = tensor_names(directory)
    with TensorReader(tensors) as read:
        for name in [n.removesuffix(".weight_packed") for n in tensors if "weight_packed" in n]:
            set_module(model, name, packed_linear(read, name, dtype, device))
        for name, parameter in list(model.named_parameters()):
            if parameter.is_meta and name in tensors:
                value = read(name).to(device=device, dtype=dtype)
                set_parameter(model, name, value)
        initialise_buffers(model, device)
        for name, buffer in model.named_buffers():
            if name in tensors and not name.endswith(PACKED_BUFFERS):
                buffer.copy_(read(name))
        tell_unused(model, read, say)
    model.tie_weights()
    if (directory / "generation_config.json").exists():  # it lists every id that ends an answer
        model.generation_config = GenerationConfig.from_pretrained(directory)
    missing = [name for name, p in model.named_parameters() if p.is_meta]
    if missing:
        raise QerlError(
            f"model: '{directory}' lacks {len(missing)} tensors, the first is {missing[0]}"
        )
    return model


def skeleton(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The architecture on the meta device: no memory, no initialisation."""
    attention.register()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention.NAME
        )


def weight_files(directory: Path) -> list[Path]:
    """The checkpoint's safetensors files; QerlError if there are none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise QerlError(f"model: '{directory}' has no .safetensors file (pickles are not read)")
    return files


def tensor_names(directory: Path) -> dict[str, Path]:
    """Every tensor of the checkpoint and its file; QerlError for a damaged file."""
    found = {}
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="pt") as handle:
                found |= dict.fromkeys(handle.keys(), file)
        except SafetensorError as error:
            raise QerlError(
                f"model: '{file}' is damaged ({first_line(error)}); download it again"
            ) from error
    return found


def tell_unused(model: PreTrainedModel, read: TensorReader, say: Say) -> None:
    """Name what the checkpoint holds and the model has no place for, such as a vision tower."""
    unused = sorted(set(read.files) - read.used)
    if model.config.tie_word_embeddings:
        unused = [name for name in unused if not name.endswith("lm_head.weight")]
    if unused:
        say(
            f"{len(unused)} tensors of the checkpoint are no part of the language model and were "
            f"left out: {', '.join(unused[:3])}{', …' if len(unused) > 3 else ''}"
        )


class TensorReader:
    """Reads tensors by name out of several safetensors files, one at a time."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files
        self.used: set[str] = set()
        self.handles = {path: safe_open(path, framework="pt") for path in set(files.values())}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.handles.clear()

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __call__(self, name: str) -> torch.Tensor:
        self.used.add(name)
        return self.handles[self.files[name]].get_tensor(name)


def packed_linear(
    read: TensorReader, name: str, dtype: torch.dtype, device: torch.device
) -> NVFP4Linear:
    """One NVFP4Linear from its tensors on disk (facts about the layout: qerl_kernels.layout)."""
    bias = read(f"{name}.bias").to(device=device, dtype=dtype) if f"{name}.bias" in read else None
    linear = NVFP4Linear(
        read(f"{name}.weight_packed").to(device),
        read(f"{name}.weight_scale").to(device),
        read(f"{name}.weight_global_scale").to(device=device, dtype=torch.float32),
        bias,
    )
    try:
        ops.check_values(*linear.packed[1:], name)
        return linear.repack(name) if device.type == "cuda" else linear
    except ValueError as error:
        raise QerlError(f"model: {error}") from error


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def set_parameter(model: nn.Module, name: str, value: torch.Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent)
    owner.register_parameter(leaf, nn.Parameter(value, requires_grad=False))


def initialise_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Computed buffers (rotary frequencies) are in no file: transformers' own rule fills them."""
    for module in model.modules():
        stranded = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
        for name, buffer in stranded.items():
            module._buffers[name] = torch.empty_like(buffer, device=device)
        if stranded:
            model._init_weights(module)
