"""Writing a checkpoint whose tensors come in any order, and going on after an interruption.

All names, dtypes and shapes are known before the first number is: the shards are laid out in
advance, headers written, space on the disk taken, and every tensor goes to its place as it comes.
Nothing waits in memory for a shard to fill. Meanwhile the files live in `<name>.unfinished.partial`
beside the target, under names that no loader looks for, with

    manifest.json   what is being made and from what; another manifest means starting again
    journal.jsonl   a line a finished tensor: its name and the CRC-32 of its bytes

After a kill or a power cut, tensors whose bytes still match their journal line are kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qerl.errors import QerlError
from qerl.files import PARTIAL, write_json
from qerl.quantize.shards import DTYPES, INDEX, NAMES, PIECE_BYTES, count

if TYPE_CHECKING:
    import torch

Say = Callable[[str], None]
MANIFEST, JOURNAL, LOCK = "manifest.json", "journal.jsonl", "lock"


class Spec(NamedTuple):
    """A tensor to be written; dtype as safetensors calls it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype][1] * count(self.shape)


class Place(NamedTuple):
    shard: int
    start: int
    spec: Spec


def unfinished(target: Path) -> Path:
    """Where a checkpoint is built before it appears as `target`."""
    return target.with_name(f"{target.name}.unfinished{PARTIAL}")


class Writer:
    """The unfinished checkpoint of `specs`; a context that closes its files.

    limit: bytes of a shard (one larger tensor has a shard of its own). settings: plain JSON values
    that say what is made from what. say: hears when an unfinished checkpoint is gone on with, or
    thrown away because its settings differ.
    Raises QerlError when another process is writing the same one; OSError when the disk is full.
    """

    def __init__(
        self,
        work: Path,
        specs: list[Spec],
        limit: int,
        settings: dict[str, Any],
        say: Say = lambda text: None,
    ) -> None:
        self.work = work
        self.total = sum(spec.nbytes for spec in specs)
        self.shards = _split(specs, limit)
        self._headers = [_header(shard) for shard in self.shards]
        self._places = {
            place.spec.name: place
            for i, shard in enumerate(self.shards)
            for place in _places(i, len(self._headers[i]), shard)
        }
        self._manifest = {"settings": settings, "layout": _digest(self._headers)}
        self._open(say)

    def _open(self, say: Say) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        self._lock = (self.work / LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise QerlError(
                f"output: another process is writing '{self.work}'; wait for it, or name another "
                "folder"
            ) from error
        going_on = self._matches(say)
        if not going_on:
            self._clear()
        self._fds = [os.open(self._part(i), os.O_RDWR | os.O_CREAT) for i in self._numbers()]
        if not going_on:
            self._reserve()
            write_json(self.work / MANIFEST, self._manifest)
        self.done = self._verified() if going_on else set()
        self._journal = (self.work / JOURNAL).open("a", encoding="utf-8")
        if self.done:
            share = sum(self._places[name].spec.nbytes for name in self.done) / max(1, self.total)
            say(f"going on from '{self.work}', {share:.0%} done")

    def _numbers(self) -> range:
        return range(len(self.shards))

    def _part(self, shard: int) -> Path:
        return self.work / f"{shard:05d}.part"

    def _matches(self, say: Say) -> bool:
        path = self.work / MANIFEST
        if not path.is_file():
            return False
        try:
            same = json.loads(path.read_text(encoding="utf-8")) == self._manifest
        except ValueError:
            same = False
        whole = all(
            self._part(i).is_file() and self._part(i).stat().st_size == self._size(i)
            for i in self._numbers()
        )
        if not (same and whole):
            why = "is damaged" if same else "was made from another source or other settings"
            say(f"the unfinished '{self.work}' {why}: starting again")
        return same and whole

    def _clear(self) -> None:
        for path in self.work.iterdir():
            if path.name == LOCK:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _size(self, shard: int) -> int:
        return len(self._headers[shard]) + sum(spec.nbytes for spec in self.shards[shard])

    def _reserve(self) -> None:
        """Headers, and the disk's promise of space: a full disk is known before the work."""
        for i, fd in enumerate(self._fds):
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, self._size(i))
            else:
                os.ftruncate(fd, self._size(i))
            _write_at(fd, 0, self._headers[i])

    def _verified(self) -> set[str]:
        """Names in the journal whose bytes are there."""
        path = self.work / JOURNAL
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        found = {}
        for line in lines:
            try:
                entry = json.loads(line)
                found[entry["name"]] = entry["crc32"]
            except (ValueError, KeyError, TypeError):
                continue  # the line that was being written when the process was killed
        return {n for n, crc in found.items() if n in self._places and self._crc(n) == crc}

    def _crc(self, name: str) -> int:
        shard, start, spec = self._places[name]
        crc, end = 0, start + spec.nbytes
        for at in range(start, end, PIECE_BYTES):
            crc = zlib.crc32(os.pread(self._fds[shard], min(PIECE_BYTES, end - at), at), crc)
        return crc

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        self._journal.close()
        self._lock.close()

    def write(self, name: str, pieces: Iterable[torch.Tensor]) -> None:
        """Put a tensor, given whole or as runs of its rows, in its place."""
        shard, start, spec = self._places[name]
        at, crc = start, 0
        for piece in pieces:
            assert NAMES[str(piece.dtype).removeprefix("torch.")] == spec.dtype, name
            data = _bytes_of(piece)
            _write_at(self._fds[shard], at, data)
            crc = zlib.crc32(data, crc)
            at += len(data)
        assert at == start + spec.nbytes, f"{name}: {at - start} bytes of {spec.nbytes}"
        self._journal.write(json.dumps({"name": name, "crc32": crc}) + "\n")
        self._journal.flush()
        self.done.add(name)

    def read(self, name: str) -> torch.Tensor:
        """A tensor that was written."""
        import torch

        shard, start, spec = self._places[name]
        raw = torch.empty(spec.nbytes, dtype=torch.uint8)
        view = raw.numpy().data
        while view:
            got = os.preadv(self._fds[shard], [view], start)
            view, start = view[got:], start + got
        return raw.view(getattr(torch, DTYPES[spec.dtype][0])).view(spec.shape)

    def move_to(self, folder: Path) -> None:
        """Give every shard its name in `folder` (same file system), with the index if several."""
        left = [name for name in self._places if name not in self.done]
        assert not left, f"not written: {left[:3]}"
        many = len(self.shards)
        if many == 1:
            os.replace(self._part(0), folder / "model.safetensors")
            return
        weight_map = {}
        for i, shard in enumerate(self.shards):
            file = f"model-{i + 1:05d}-of-{many:05d}.safetensors"
            os.replace(self._part(i), folder / file)
            weight_map.update({spec.name: file for spec in shard})
        index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        write_json(folder / INDEX, index)


def _split(specs: list[Spec], limit: int) -> list[list[Spec]]:
    shards: list[list[Spec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    # Wide dtypes first: no tensor may begin at an address that its dtype cannot be read from.
    return [sorted(shard, key=lambda spec: -DTYPES[spec.dtype][1]) for shard in shards]


def _header(specs: list[Spec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in specs:
        end = at + Spec(name, dtype, shape).nbytes
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _places(shard: int, start: int, specs: list[Spec]) -> list[Place]:
    places = []
    for spec in specs:
        places.append(Place(shard, start, spec))
        start += spec.nbytes
    return places


def _digest(headers: list[bytes]) -> str:
    return hashlib.sha256(b"".join(headers)).hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _write_at(fd: int, at: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        wrote = os.pwrite(fd, view, at)
        view, at = view[wrote:], at + wrote
