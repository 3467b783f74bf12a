"""A checkpoint's files -> a model, one tensor in memory beside it: each weight goes straight into
the layout it stays in.

A layer is NVFP4, FP8 or 16-bit as its publisher left it (`formats`). What has to be 16-bit here
though it is stored smaller (an output head, an embedding) is dequantized once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from qerl.errors import QerlError
from qerl.model import towers
from qerl.model.formats import Layers, read_layers
from qerl.model.fp8 import FP8Linear
from qerl.model.linear import NVFP4Linear
from qerl.model.nf4 import nf4_linear
from qerl.quantize.nvfp4 import BLOCK, linear_shapes
from qerl.quantize.search import quantize_weight
from qerl.quantize.shards import Source

Say = Callable[[str], None]
Dense = Literal["keep", "nvfp4", "nf4"]


@dataclass(frozen=True, slots=True)
class Storage:
    """How a model is held. dense: what becomes of the linear layers stored in 16 bits or more;
    dtype: of everything that is not packed."""

    dtype: torch.dtype
    device: torch.device
    dense: Dense = "keep"


def raw_config(directory: Path, name: str = "config.json") -> dict[str, Any]:
    """config.json as it is written; QerlError for one that is missing or no JSON object."""
    path = directory / name
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise QerlError(f"model: '{path}' is not JSON ({error}); download it again") from error
    if not isinstance(found, dict):
        raise QerlError(f"model: '{path}' is not a JSON object; download it again")
    return found


class TensorReader:
    """A checkpoint's tensors by name, one at a time, and which of them were read.

    Raises QerlError as `Source` does: a missing or damaged file, an index that names an absent
    tensor, a NaN or an infinity among 16-bit weights.
    """

    def __init__(self, directory: Path) -> None:
        self._source = Source(directory)
        self.names = self._source.names()
        self.used: set[str] = set()

    def __call__(self, name: str) -> torch.Tensor:
        self.used.add(name)
        return self._source.get(name)


def assemble(
    directory: Path, config: PretrainedConfig, storage: Storage, say: Say = lambda text: None
) -> PreTrainedModel:
    """The checkpoint in `directory` as its own architecture class, text tower only, frozen.

    config: transformers' reading of its config.json. `say` hears of tensors that are left out.
    Raises QerlError for an architecture that is not supported, a damaged file, a layer that is not
    readable, a tensor that is missing or has another shape than config.json says.
    """
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):  # ours holds it otherwise than it says
            delattr(part, "quantization_config")
    read = TensorReader(directory)
    layers = read_layers(directory, raw_config(directory), read.names)
    model = towers.skeleton(config, storage.dtype)
    files = towers.file_names(model, read.names)
    towers.leave_out_towers(model)
    loader = _Loader(model, read, layers, files, storage)
    loader.place_linears()
    loader.place_parameters()
    loader.place_buffers()
    model.tie_weights()
    missing = loader.missing()
    if missing:
        raise QerlError(
            f"model: '{directory}' lacks {len(missing)} tensors, the first is {missing[0]}; "
            "download it again"
        )
    if (directory / "generation_config.json").exists():  # it lists every id that ends an answer
        model.generation_config = GenerationConfig.from_pretrained(directory)
    _tell_unused(model, read, layers, say)
    return model.requires_grad_(False).eval()


class _Loader:
    """Fills a skeleton. files: the model's tensor names -> the files' (`towers.file_names`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        read: TensorReader,
        layers: Layers,
        files: dict[str, str],
        storage: Storage,
    ) -> None:
        self.model, self.read, self.layers = model, read, layers
        self.files, self.storage = files, storage
        self.persistent = set(model.state_dict())

    def place_linears(self) -> None:
        """Put packed layers in the place of the skeleton's linears, the output head excepted."""
        head = self.model.get_output_embeddings()
        # Towards four bits go the layers that `qerl quantize` would take.
        candidates = {} if self.storage.dense == "keep" else linear_shapes(self.model)
        for name, module in list(self.model.named_modules()):
            if not isinstance(module, nn.Linear) or module is head:
                continue
            stored = self.files.get(f"{name}.weight")
            if stored is not None:
                packed = self._packed(name, stored.removesuffix(".weight"), name in candidates)
                if packed is not None:
                    self._set_module(name, packed)

    def _packed(self, name: str, layer: str, candidate: bool) -> nn.Module | None:
        """The layer as it is to be held; None for one that stays as the skeleton has it."""
        kind, device = self.layers.kind(layer), self.storage.device
        n, k = self.layers.shape(layer)
        self._check_shape(f"{name}.weight", (n, k))
        if kind == "nvfp4":
            packed = self.layers.nvfp4(self.read, layer)
            return self._nvfp4(name, *(part.to(device) for part in packed))
        if kind == "fp8":
            weight, scale = self.layers.fp8(self.read, layer)
            return FP8Linear(weight.to(device), scale.to(device), self._bias(name))
        if not candidate:
            return None
        if self.storage.dense == "nf4":
            weight = self.read(f"{layer}.weight")
            return nf4_linear(weight, self._bias(name), self.storage.dtype, device)
        if k % BLOCK:
            return None
        return self._nvfp4(name, *quantize_weight(self.read(f"{layer}.weight").to(device), "sweep"))

    def _nvfp4(
        self, name: str, codes: torch.Tensor, scale: torch.Tensor, divisor: torch.Tensor
    ) -> NVFP4Linear:
        linear = NVFP4Linear(codes, scale, divisor, self._bias(name))
        try:
            return linear.repack(name) if self.storage.device.type == "cuda" else linear
        except ValueError as error:
            raise QerlError(f"model: {error}") from error

    def _bias(self, name: str) -> torch.Tensor | None:
        if self.model.get_submodule(name).bias is None:
            return None
        stored = self.files.get(f"{name}.bias")
        if stored is None:
            raise QerlError(f"model: the files lack {name}.bias; download the checkpoint again")
        return self.read(stored).to(device=self.storage.device, dtype=self.storage.dtype)

    def place_parameters(self) -> None:
        """Everything that is not a packed layer, in the compute type."""
        plan = self.model._get_dtype_plan(self.storage.dtype)  # what a class insists on in fp32
        for name, parameter in list(self.model.named_parameters()):
            if not parameter.is_meta or name not in self.files:
                continue
            dtype = torch.float32 if any(key in name for key in plan) else self.storage.dtype
            value = self._value(self.files[name], dtype)
            self._check_shape(name, tuple(value.shape))
            self._set_parameter(name, value.to(device=self.storage.device, dtype=dtype))

    def _value(self, stored: str, dtype: torch.dtype) -> torch.Tensor:
        module, _, leaf = stored.rpartition(".")
        if leaf == "weight" and self.layers.kind(module) != "dense":
            return self.layers.dequantized(self.read, module, dtype)
        return self.read(stored)

    def place_buffers(self) -> None:
        """Computed ones (rotary frequencies) are in no file: transformers' own rule fills them."""
        for module in self.model.modules():
            stranded = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
            for name, buffer in stranded.items():
                module._buffers[name] = torch.empty_like(buffer, device=self.storage.device)
            if stranded:
                self.model._init_weights(module)
        for name, buffer in self.model.named_buffers():
            if name in self.files:
                buffer.copy_(self.read(self.files[name]))

    def missing(self) -> list[str]:
        """Parameters and stored buffers of the model that no file has, once tied ones are tied."""
        found = [name for name, p in self.model.named_parameters() if p.is_meta]
        buffers = {name for name, _ in self.model.named_buffers()} & self.persistent
        return found + sorted(buffers - set(self.files))

    def _check_shape(self, name: str, found: tuple[int, ...]) -> None:
        wanted = tuple(self.model.get_parameter(name).shape)
        if found != wanted:
            raise QerlError(
                f"model: {name} is {list(found)} in the files and {list(wanted)} by config.json; "
                "the two are not of one checkpoint, download both again"
            )

    def _set_module(self, name: str, module: nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, module)

    def _set_parameter(self, name: str, value: torch.Tensor) -> None:
        parent, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(value, requires_grad=False)
        parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
        # Without that mark `_init_weights`, which fills computed buffers, would draw it anew.
        self.model.get_submodule(parent).register_parameter(leaf, parameter)


def _tell_unused(model: PreTrainedModel, read: TensorReader, layers: Layers, say: Say) -> None:
    """Name what the checkpoint holds and the model has no place for, with numbers of tensors."""
    unused = [n for n in read.names if n not in read.used and not layers.understood(n)]
    if model.config.get_text_config().tie_word_embeddings or model.config.tie_word_embeddings:
        unused = [name for name in unused if not name.endswith("lm_head.weight")]
    if not unused:
        return
    parts = Counter(_part(name) for name in unused)
    listed = ", ".join(f"{part} ({count})" for part, count in sorted(parts.items()))
    say(
        f"{len(unused)} tensors of the checkpoint are no part of the language model and were left "
        f"out: {listed}"
    )


def _part(name: str) -> str:
    """model.visual.blocks.0.… -> model.visual; mtp.fc.weight -> mtp"""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "model" and len(parts) > 2 else 1])
