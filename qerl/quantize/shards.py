"""A checkpoint's safetensors files: read lazily, written a shard at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import QerlError
from qerl.files import write_json

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 * 1024**3


class Source:
    """The safetensors files of a folder, read lazily (memory-mapped)."""

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for file in _weight_files(folder):
            try:
                handle = safe_open(folder / file, framework="pt")
            except SafetensorError as error:
                raise QerlError(
                    f"model: '{folder / file}' is not a whole safetensors file ({error}); "
                    "download it again"
                ) from error
            self._files[file] = handle
            self._where.update(dict.fromkeys(handle.keys(), file))

    def names(self) -> list[str]:
        return list(self._where)

    def get(self, name: str) -> torch.Tensor:
        return self._files[self._where[name]].get_tensor(name)

    def _slice(self, name: str) -> Any:
        return self._files[self._where[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._slice(name).get_shape()) if name in self._where else None

    def is_half(self) -> bool:
        """Whether the checkpoint's tensors are float16, which are kept so."""
        return all(self._slice(name).get_dtype() == "F16" for name in self._where)

    def total_bytes(self) -> int:
        return sum((self.folder / file).stat().st_size for file in self._files)


def _weight_files(folder: Path) -> list[str]:
    index = folder / INDEX
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise QerlError(
            f"model: '{folder}' has no {missing[0]}; only safetensors checkpoints are read, "
            "download the missing file"
        )
    return files


class Writer:
    """Collects tensors and writes a shard whenever `limit` bytes are reached."""

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        self.total = 0
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self.limit:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        from safetensors.torch import save_file

        path = self.folder / f"shard-{len(self._shards)}.safetensors"
        save_file(self._pending, path, metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def close(self) -> None:
        """Write the rest; give the shards their names, known only now, and the index."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            (self.folder / "shard-0.safetensors").rename(self.folder / "model.safetensors")
            return
        weight_map = {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / f"shard-{i}.safetensors").rename(self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        write_json(
            self.folder / INDEX,
            {"metadata": {"total_size": self.total}, "weight_map": weight_map},
        )
