"""A checkpoint's safetensors files, read a tensor or a piece of one at a time.

Read with plain file reads rather than through a memory map: what is held is what was asked for, and
the pages of a 60 GB file never count as this process's memory.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from qerl.errors import QerlError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 * 1024**3
PIECE_BYTES = 64 * 1024**2

# safetensors' name of a dtype -> torch's name and bytes an element.
DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1),
    "BOOL": ("bool", 1), "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
}  # fmt: skip
NAMES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
_WIDE, _CHECKED = ("F64", "F32"), ("F64", "F32", "F16", "BF16")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Tensors(Protocol):
    """What the quantizer reads from: a safetensors folder, a GGUF file."""

    path: Path
    half: str  # safetensors' name of the 16-bit dtype that wider floats are stored in

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...] | None:
        """None for a tensor that is not there."""
        ...

    def stored(self, name: str) -> str:
        """safetensors' name of the dtype the tensor is kept in where it is not quantized."""
        ...

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor, as the file has it. QerlError for a NaN or an infinity."""
        ...

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Runs of rows of at most about 64 MB, in order. QerlError as in `get`."""
        ...

    def total_bytes(self) -> int: ...
    def fingerprint(self) -> str:
        """Changes when the files do (names, sizes, times): cheap, for going on after a stop."""
        ...


class Entry(NamedTuple):
    """Where a tensor lies: file name, dtype as safetensors calls it, first byte."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int


class Source:
    """The safetensors files of a folder.

    Raises QerlError for a folder with pickles only, a missing or damaged file, an index that is no
    index or names a tensor that its file does not hold.
    """

    def __init__(self, folder: Path):
        self.path = folder
        self._where: dict[str, Entry] = {}
        self._files: dict[str, BinaryIO] = {}
        listed = _index(folder)
        for file in _weight_files(folder, listed):
            self._where.update(_entries(folder / file, file))
        for name, file in (listed or {}).items():
            if name not in self._where or file != self._where[name].file:
                raise QerlError(
                    f"model: '{folder / INDEX}' says that '{name}' is in {file}, which does not "
                    "hold it; download both again"
                )
        floats = {entry.dtype for entry in self._where.values()} & set(_CHECKED)
        self.half = "F16" if "F16" in floats and "BF16" not in floats else "BF16"
        # Among 16-bit tensors an fp32 one was left so on purpose (a recurrence's A_log).
        self._wide_is_meant = bool(floats & {"F16", "BF16"})

    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._where[name].shape if name in self._where else None

    def stored(self, name: str) -> str:
        dtype = self._where[name].dtype
        if dtype == "F32" and self._wide_is_meant:
            return dtype
        return self.half if dtype in _WIDE else dtype

    def get(self, name: str) -> torch.Tensor:
        entry = self._where[name]
        tensor = self._read(name, 0, count(entry.shape)).view(entry.shape)
        check_finite(name, tensor)
        return tensor

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        shape = self._where[name].shape
        rows = shape[0] if shape else 1
        width = count(shape[1:])
        step = rows_a_piece(width * DTYPES[self._where[name].dtype][1])
        for first in range(0, rows, step):
            many = min(step, rows - first)
            piece = self._read(name, first * width, many * width)
            piece = piece.view(many, *shape[1:]) if shape else piece.view(())
            check_finite(name, piece)
            yield piece

    def _read(self, name: str, first: int, elements: int) -> torch.Tensor:
        """`elements` values from the `first` on, one-dimensional, in memory of their own."""
        import torch

        file, dtype, _, start = self._where[name]
        torch_name, size = DTYPES[dtype]
        raw = torch.empty(elements * size, dtype=torch.uint8)
        if file not in self._files:
            self._files[file] = (self.path / file).open("rb", buffering=0)
        read_into(self._files[file], start + first * size, raw, self.path / file)
        return raw.view(getattr(torch, torch_name))

    def total_bytes(self) -> int:
        files = {entry.file for entry in self._where.values()}
        return sum((self.path / file).stat().st_size for file in files)

    def fingerprint(self) -> str:
        files = sorted({entry.file for entry in self._where.values()} | {"config.json"})
        return stamp([self.path / file for file in files])


def stamp(files: list[Path]) -> str:
    """A short hash of files' names, sizes and times of change."""
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def count(shape: tuple[int, ...]) -> int:
    """Elements of a shape; 1 for ()."""
    result = 1
    for size in shape:
        result *= size
    return result


def rows_a_piece(row_bytes: int) -> int:
    return max(1, PIECE_BYTES // max(1, row_bytes))


def read_into(file: BinaryIO, offset: int, raw: torch.Tensor, path: Path) -> None:
    """Fill the uint8 tensor `raw` from the file's byte `offset` on."""
    file.seek(offset)
    view = raw.numpy().data
    while view:
        got = file.readinto(view)  # pyright: ignore[reportAttributeAccessIssue]  (raw files have it)
        if not got:
            raise QerlError(f"model: '{path}' became shorter while it was read; start again")
        view = view[got:]


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """QerlError naming the tensor if a float of at least 16 bits is a NaN or an infinity."""
    import torch

    if not tensor.is_floating_point() or tensor.itemsize < 2 or not tensor.numel():
        return
    if not torch.isfinite(torch.stack(tensor.aminmax())).all():
        layer, _, leaf = name.rpartition(".")
        raise QerlError(
            f"model: layer '{layer}': {leaf} holds a NaN or an infinity; the checkpoint is "
            "damaged, download it again or name another"
        )


def _index(folder: Path) -> dict[str, str] | None:
    """The index's map from tensor to file; None where there is no index."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(file, str) for file in weight_map.values()):
            return weight_map
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # one message for whatever is wrong with it
    raise QerlError(f"model: '{path}' is not an index of tensors; download it again")


def _weight_files(folder: Path, listed: dict[str, str] | None) -> list[str]:
    files = sorted(set(listed.values())) if listed is not None else ["model.safetensors"]
    missing = [file for file in files if not (folder / file).is_file()]
    if not missing:
        return files
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles and not list(folder.glob("*.safetensors")):
        raise QerlError(f"model: '{folder}' holds only pickle files ({pickles[0]}), {PICKLE_FIX}")
    raise QerlError(
        f"model: '{folder}' has no {missing[0]}; only safetensors checkpoints are read, "
        "download the missing file"
    )


PICKLE_FIX = (
    "which can run code when opened and are not read; where you trust them, convert them with "
    "transformers: AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)"
)


def _entries(path: Path, file: str) -> dict[str, Entry]:
    """Where the tensors of one file lie, after the safetensors library has found it whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise QerlError(
            f"model: '{path}' is not a whole safetensors file ({error}); download it again"
        ) from error
    with path.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        header: dict[str, Any] = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    unknown = [name for name, entry in header.items() if entry["dtype"] not in DTYPES]
    if unknown:
        raise QerlError(
            f"model: '{unknown[0]}' in '{path}' is stored as {header[unknown[0]]['dtype']}, which "
            "is not read; start from the 16-bit checkpoint"
        )
    return {
        name: Entry(file, e["dtype"], tuple(e["shape"]), 8 + length + e["data_offsets"][0])
        for name, e in header.items()
    }
