"""Quantize a local checkpoint to NVFP4, a few tensors in memory at a time.

Reads safetensors (one file or sharded), writes what compressed-tensors calls
`nvfp4-pack-quantized`: three tensors for each linear layer, everything else as it was. The output
head and the embeddings stay in 16 bits; tied ones stay tied. Left out: mixture-of-experts
checkpoints that store their experts as one 3-D tensor (those are not `nn.Linear` and are refused).
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import QerlError
from qerl.files import atomic_dir, check_writable, write_json
from qerl.quantize import nvfp4
from qerl.quantize.shards import SHARD_BYTES, Source, Writer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Progress = Callable[[int, int, str], None]

# What a tokenizer, a processor and a licence are made of. No code is copied, no weights of others.
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*")


def quantize_checkpoint(
    src: Path,
    dst: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Write `src`, a transformers causal-LM folder, to the new folder `dst` in NVFP4 (absmax).

    progress(done, total, layer) is called once a layer. The folder appears under its name only
    when complete. Returns {"path", "layers", "parameters", "bytes", "source_bytes", "seconds"}:
    parameters counts quantized weights, bytes everything written as tensors.
    Raises QerlError: no config.json or safetensors in `src`, an unknown or already quantized
    model, a layer whose K is not a multiple of 16 or that the files lack, `dst` exists or cannot be
    written.
    """
    src, dst = Path(src), Path(dst)
    began = time.monotonic()
    config = _read_config(src)
    check_writable("output:", dst)
    if dst.exists() and not overwrite:
        raise QerlError(f"output: '{dst}' exists already; name another folder or overwrite it")
    source = Source(src)
    model = _skeleton(src)
    shapes = nvfp4.linear_shapes(model)
    _check_layers(shapes, source, model)
    with atomic_dir(dst) as folder:
        writer = Writer(folder, shard_bytes)
        layers = _Quantizer(source, shapes, progress)
        dropped = _tied_head(model, source)
        for name, tensor in layers.tensors():
            writer.add(name, tensor)
        for name in source.names():
            if name not in layers.consumed and name not in dropped:
                writer.add(name, _narrow(source.get(name)))
        writer.close()
        _write_config(folder, config, model, source)
        _copy_companions(src, folder)
    return {
        "path": str(dst),
        "layers": len(shapes),
        "parameters": sum(n * k for n, k in shapes.values()),
        "bytes": writer.total,
        "source_bytes": source.total_bytes(),
        "seconds": time.monotonic() - began,
    }


def _read_config(src: Path) -> dict[str, Any]:
    path = src / "config.json"
    if not path.is_file():
        raise QerlError(f"model: '{src}' has no config.json; name a transformers model folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise QerlError(f"model: '{path}' is not JSON ({error}); download it again") from error
    if "quantization_config" in config:
        kind = config["quantization_config"].get("quant_method", "an unnamed method")
        raise QerlError(
            f"model: '{src}' is quantized already ({kind}); start from the 16-bit checkpoint"
        )
    return config


def _skeleton(src: Path) -> PreTrainedModel:
    """The model without its weights: structure alone says what is a linear layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(src, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise QerlError(
            f"model: transformers cannot build '{src}' ({reason}); name a causal language model"
        ) from error


def _check_layers(
    shapes: dict[str, tuple[int, int]], source: Source, model: PreTrainedModel
) -> None:
    """Refuse before any work what would fail halfway."""
    if not shapes:
        raise QerlError(f"model: '{source.folder}' has no linear layer to quantize")
    for name, (n, k) in shapes.items():
        if k % nvfp4.BLOCK:
            raise QerlError(
                f"model: layer '{name}' has {k} input features, NVFP4 needs a multiple of "
                f"{nvfp4.BLOCK}; this model cannot be stored in it (format: bf16 can)"
            )
        found = source.shape(f"{name}.weight")
        if found != (n, k):
            raise QerlError(
                f"model: '{source.folder}' should hold '{name}.weight' of shape ({n}, {k}), "
                f"found {found or 'no such tensor'}; the files do not fit config.json"
            )
    for name, tensor in model.named_parameters():
        if tensor.dim() == 3 and "expert" in name:
            raise QerlError(
                f"model: '{name}' holds all experts in one tensor, which is not supported; "
                "name a dense model"
            )


def _tied_head(model: PreTrainedModel, source: Source) -> set[str]:
    """The head's tensor where config.json ties it to the embeddings: it is not written."""
    names = {id(module): name for name, module in model.named_modules()}
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    tied = bool(getattr(model.config, "tie_word_embeddings", False)) and head is not None
    if not tied or source.shape(f"{names[id(embeddings)]}.weight") is None:
        return set()
    return {f"{names[id(head)]}.weight"}


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    """fp32 and fp64 become bf16; everything else is kept."""
    import torch

    return tensor.bfloat16() if tensor.dtype in (torch.float32, torch.float64) else tensor


def _write_config(
    folder: Path, config: dict[str, Any], model: PreTrainedModel, source: Source
) -> None:
    names = {id(module): name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    ignore = [] if head is None else [names[id(head)]]
    out = {k: v for k, v in config.items() if k not in ("torch_dtype", "dtype")}
    out["dtype"] = "float16" if source.is_half() else "bfloat16"
    out["quantization_config"] = nvfp4.quantization_config(ignore)
    write_json(folder / "config.json", out)


def _copy_companions(src: Path, folder: Path) -> None:
    for pattern in _COMPANIONS:
        for file in sorted(src.glob(pattern)):
            if file.name != "config.json" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
    extra = src / "additional_chat_templates"
    if extra.is_dir():
        shutil.copytree(extra, folder / extra.name)


class _Quantizer:
    """Turns linear layers into their three tensors, one group of fused layers at a time."""

    def __init__(
        self, source: Source, shapes: dict[str, tuple[int, int]], progress: Progress | None
    ):
        self.source, self.shapes, self.progress = source, shapes, progress
        self.consumed = {f"{name}.weight" for name in shapes}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        done = 0
        for group in nvfp4.scale_groups(self.shapes):
            shared = self._shared_scale(group)
            for name in group:
                yield from self._layer(name, shared)
                done += 1
                if self.progress is not None:
                    self.progress(done, len(self.shapes), name)

    def _shared_scale(self, group: list[str]) -> torch.Tensor | None:
        import torch

        from qerl_kernels.quantize import global_scale_for

        if len(group) == 1:
            return None
        peaks = [self.source.get(f"{name}.weight").abs().amax().float() for name in group]
        return global_scale_for(torch.stack(peaks).amax())

    def _layer(self, name: str, shared: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
        from qerl_kernels.quantize import quantize_absmax

        try:
            packed, scale, divisor = quantize_absmax(self.source.get(f"{name}.weight"), shared)
        except ValueError as error:
            raise QerlError(f"model: layer '{name}': {error}; the checkpoint is damaged") from error
        yield f"{name}.weight_packed", packed
        yield f"{name}.weight_scale", scale
        yield f"{name}.weight_global_scale", divisor
