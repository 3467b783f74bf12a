"""Writes that are whole or absent: a temporary neighbour first, then one rename.

Whoever reads a file or folder written here sees the old one or the new one, never half of either,
wherever the process was killed. Names that end in `.partial` are unfinished and may be deleted.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qerl.errors import QerlError

PARTIAL = ".partial"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a full disk, quota or limit answers


def check_writable(
    option: str, target: Path, *, inside: bool = False, fix: str = "name another folder"
) -> None:
    """Raise QerlError, naming `option`, unless `target` can be made: before the work, not after.

    Folders on the way to it may be missing. inside: `target` is a folder that files go into,
    rather than one made, or replaced, by a rename beside it.
    Tries it out with an empty folder: permission bits do not tell of read-only file systems.
    """
    folder = target if inside else target.parent
    names = [target.name]
    while not os.path.lexists(folder):
        names.append(folder.name)
        folder = folder.parent
    if not os.path.isdir(folder):
        raise QerlError(f"{option} {str(target)!r}: {str(folder)!r} is not a folder; {fix}")
    try:
        longest = max(names, key=len)
        os.rmdir(tempfile.mkdtemp(prefix=f".{longest}.", suffix=PARTIAL, dir=folder))
    except OSError as error:
        reason = f"cannot be written to ({error.strerror})"
        raise QerlError(f"{option} {str(target)!r}: {str(folder)!r} {reason}; {fix}") from error


def atomic_write(path: str | Path, data: str | bytes) -> None:
    """Replace `path` by `data` (text is written as UTF-8) in one step. The folder must exist."""
    path = Path(path)
    raw = data.encode("utf-8") if isinstance(data, str) else data
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with open(partial, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: str | Path, obj: Any) -> None:
    """Write `obj` as indented JSON, atomically. NaN and infinity are refused (ValueError)."""
    text = json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False)
    atomic_write(path, text + "\n")


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Within: no other process is in a block of the same `path`; they wait.

    A hidden file beside it, `.<name>.lock`, stays.
    """
    lock = Path(path).with_name(f".{Path(path).name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, by a kill too
        yield


@contextmanager
def atomic_dir(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`; it becomes `path` when the block ends without error.

    An existing `path` is replaced whole. If the block raises, it is untouched and the unfinished
    folder is removed; a process killed in the block leaves only `<path>.partial`, which the next
    call clears away. Between the two renames of a replacement `path` is absent for an instant: a
    process killed right there leaves the old folder as `<path>.old.partial`, and the next call
    puts it back before it begins. Raises QerlError for a full disk.
    """
    path = Path(path)
    partial = path.with_name(path.name + PARTIAL)
    old = path.with_name(path.name + ".old" + PARTIAL)
    _recover(path, old)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _sync_files(partial)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and (reason := _fullness(error)) is not None:
            raise QerlError(
                f"output: '{path}' cannot be written ({reason}); free some space, or name another "
                "folder"
            ) from error
        raise
    if path.exists():
        os.replace(path, old)
    os.replace(partial, path)
    shutil.rmtree(old, ignore_errors=True)


def _fullness(error: OSError) -> str | None:
    """Which limit an error tells of; None for one of another kind. `shutil.copytree` keeps only
    the texts of the errors it met."""
    told = str(error) if isinstance(error, shutil.Error) else ""
    found = (os.strerror(n) for n in FULL if error.errno == n or os.strerror(n) in told)
    return next(found, None)


def _recover(path: Path, old: Path) -> None:
    if not old.exists():
        return
    if path.exists():
        shutil.rmtree(old)
    else:
        os.replace(old, path)


def _sync_files(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
