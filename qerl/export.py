"""Taking a result away: the adapter folder, and a plain checkpoint of the quantized base.

Both are checked or written whole: what is at the new place when these return can be loaded.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qerl.adapter import CONFIG_FILE, WEIGHTS_FILE, copy_adapter, read_tensors
from qerl.base_name import rename_base
from qerl.errors import QerlError
from qerl.files import atomic_dir, check_writable, write_json

if TYPE_CHECKING:
    import torch

FORMAT = "nvfp4-pack-quantized"
SHARD_BYTES = 4 * 2**30
_WEIGHTS = "model.safetensors"
_INDEX = _WEIGHTS + ".index.json"
_COPIED = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
_PACKED, _SCALE, _GLOBAL = "weight_packed", "weight_scale", "weight_global_scale"


@dataclass(frozen=True, slots=True)
class Export:
    """What was exported: the folder, the adapted modules in it and the size of the weights."""

    path: Path
    modules: int
    bytes: int


def export_adapter(
    run_dir: str | Path,
    out: str | Path,
    *,
    which: Literal["best", "last"] = "last",
    base_model: str | None = None,
) -> Export:
    """Copy a run's adapter to `out` and check the copy; never overwrites anything.

    which: "last" is `adapter/`, "best" is `best/` (highest held-out accuracy). base_model: the Hub
    id to name as its base (null: what the run calls it).
    Raises QerlError when the run has no such adapter, `out` is not empty or cannot be written, or
    the adapter is damaged (then nothing is written).
    """
    source = Path(run_dir).expanduser() / {"last": "adapter", "best": "best"}[which]
    if which == "best" and not (source / CONFIG_FILE).is_file():
        raise QerlError(
            f"no best adapter in {run_dir}: it is kept where save.best=true and eval.every is set; "
            "export the last one instead"
        )
    check_adapter(source)
    path = copy_adapter(
        source,
        out,
        replace=False,
        change=lambda folder: rename_base(folder, base_model) if base_model else None,
    )
    return Export(path, check_adapter(path), (path / WEIGHTS_FILE).stat().st_size)


def check_adapter(folder: Path) -> int:
    """Read a saved LoRA adapter back and return its number of modules.

    Raises QerlError unless every module has an A [r, in] and a B [out, r] of the stated rank.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise QerlError(f"no adapter at {folder}: {CONFIG_FILE} is not there (is the run over?)")
    config = read_json(folder / CONFIG_FILE)
    ranks = {config.get("r"), *(config.get("rank_pattern") or {}).values()}
    tensors = read_tensors(folder / WEIGHTS_FILE)
    modules = {re.sub(r"lora_[AB]\.weight$", "", name) for name in tensors}
    for module in sorted(modules):
        a, b = (tensors.get(f"{module}lora_{side}.weight") for side in "AB")
        if a is None or b is None or a.shape[0] != b.shape[1] or a.shape[0] not in ranks:
            raise QerlError(
                f"{folder / WEIGHTS_FILE} is damaged: {module}lora_A and lora_B do not make a "
                f"pair of rank {config.get('r')}: export again from an intact run"
            )
    if not modules:
        raise QerlError(f"{folder / WEIGHTS_FILE} holds no adapter: export from an intact run")
    return len(modules)


def dequantized_base(
    checkpoint_dir: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the plain transformers checkpoint that an NVFP4 one stands for; returns `out`.

    Streams: at most one output shard is in memory. dtype: of the decoded weights (null: the
    checkpoint's own); every other tensor is copied as it is, tied heads stay tied.
    progress(done, total) is called for each tensor. Raises QerlError when the checkpoint is not
    NVFP4 in compressed-tensors' layout, lacks a tensor, or `out` is not empty or not writable.
    """
    import torch

    source, out = Path(checkpoint_dir).expanduser(), Path(out).expanduser()
    config = _nvfp4_config(source)
    check_writable("output:", out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise QerlError(f"cannot write a checkpoint to {out}: it exists; name another folder")
    dtype = dtype or getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    assert isinstance(dtype, torch.dtype), dtype
    with Reader(source).opened() as reader, atomic_dir(out) as folder:
        del config["quantization_config"]
        config.pop("torch_dtype", None)
        write_json(folder / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")})
        copy_side_files(source, folder)
        write_shards(reader.decoded(dtype, progress), folder, shard_bytes)
    return out


class Reader:
    """Tensors of a checkpoint by name, whichever shard they are in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}
        if (folder / _INDEX).is_file():
            self.where: dict[str, str] = read_json(folder / _INDEX)["weight_map"]
        else:
            self.where = {}

    @contextmanager
    def opened(self) -> Iterator[Reader]:
        from contextlib import ExitStack

        from safetensors import SafetensorError, safe_open

        with ExitStack() as stack:
            for name in sorted(set(self.where.values()) or {_WEIGHTS}):
                path = self.folder / name
                if not path.is_file():
                    raise QerlError(f"checkpoint {self.folder} is incomplete: {name} is missing")
                try:
                    self.files[name] = stack.enter_context(safe_open(path, framework="pt"))
                except SafetensorError as error:
                    raise QerlError(f"{path} is damaged ({error}): copy it again") from error
            if not self.where:
                self.where = dict.fromkeys(self.files[_WEIGHTS].keys(), _WEIGHTS)
            yield self

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there; only its header is read."""
        return tuple(self.files[self.where[name]].get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self.where:
            raise QerlError(f"checkpoint {self.folder} is incomplete: {name} is missing")
        return self.files[self.where[name]].get_tensor(name)

    def decoded(
        self, dtype: torch.dtype, progress: Callable[[int, int], None] | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs as a plain checkpoint has them, in name order."""
        from qerl_kernels.quantize import dequantize

        names = sorted(n for n in self.where if not n.endswith((f".{_SCALE}", f".{_GLOBAL}")))
        for done, name in enumerate(names, 1):
            if name.endswith(f".{_PACKED}"):
                stem = name.removesuffix(_PACKED)
                parts = [self.tensor(stem + part) for part in (_PACKED, _SCALE, _GLOBAL)]
                yield stem + "weight", dequantize(*parts, dtype=dtype)
            else:
                yield name, self.tensor(name)
            if progress is not None:
                progress(done, len(names))


def write_shards(
    tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, shard_bytes: int
) -> None:
    """One `model.safetensors`, or numbered shards of at most `shard_bytes` and their index.

    A single tensor larger than that has a shard of its own. Raises QerlError for a full disk.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shard: dict[str, torch.Tensor] = {}
    held, total = 0, 0
    shards: list[list[str]] = []

    def flush() -> None:
        try:
            save_file(shard, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise QerlError(
                f"output: '{folder.parent}' cannot be written ({error}); nothing was left there: "
                "free some space or name another folder"
            ) from error
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > shard_bytes:
            flush()
            held = 0
        shard[name] = tensor.contiguous()
        held, total = held + size, total + size
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / _WEIGHTS)
        return
    where: dict[str, str] = {}
    for i, names in enumerate(shards):  # the count is in the names, so they come last
        final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}").rename(folder / final)
        where.update(dict.fromkeys(names, final))
    write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _nvfp4_config(source: Path) -> dict[str, Any]:
    """The checkpoint's config.json, once it is sure that its weights are NVFP4."""
    if not (source / "config.json").is_file():
        raise QerlError(f"no checkpoint at {source}: config.json is not there")
    config = read_json(source / "config.json")
    quantization = config.get("quantization_config") or {}
    if (found := quantization.get("format")) != FORMAT:
        method = quantization.get("quant_method", "not quantized")
        raise QerlError(
            f"{source} is not an NVFP4 checkpoint in compressed-tensors' layout: format "
            f"{found or method}, wanted {FORMAT}: make one with `qerl quantize`"
        )
    return config


def copy_side_files(source: Path, folder: Path, skip: tuple[str, ...] = ()) -> None:
    """Tokenizer, chat template, generation settings, licence: all that is not weights.

    skip: beginnings of names that are left out.
    """
    for path in sorted(source.iterdir()):
        wanted = path.suffix in _COPIED or path.name.startswith(("LICENSE", "README"))
        weights = path.name in ("config.json", _INDEX)
        if path.is_file() and wanted and not weights and not path.name.startswith(skip or "/"):
            shutil.copy2(path, folder / path.name)


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object; QerlError when it is another value or not JSON."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise QerlError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise QerlError(f"{path} does not hold a JSON object")
    return value
