"""Where a command's words go: text for people, JSON for programs, other libraries' talk to a log.

Imports nothing heavy: the help and the recipes are printed through here too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from qerl.errors import QerlError
from qerl.files import atomic_write, check_writable
from qerl.home import qerl_home

LOG_LIMIT = 1_000_000  # bytes; a larger log is begun anew


class Output:
    """What one command prints: `with Output(json) as out`.

    json: None, a file to write the report to, or "-": then standard output carries the JSON and
    nothing else (not even what a reward function prints) and text for people goes to stderr.
    Raises QerlError at once for a file that cannot be written, not after an hour of training.
    """

    def __init__(self, json: str | None = None) -> None:
        self.to_stdout = json == "-"
        self.path = None
        if json is not None and not self.to_stdout:
            self.path = new_file("--json", json, "name a file, or - for standard output")
        self.wanted = json is not None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Output:
        self._stdout = sys.stdout
        self._stderr = self._stack.enter_context(own_stderr())
        if self.to_stdout:
            self._stack.enter_context(contextlib.redirect_stdout(self._stderr))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def say(self, text: str) -> None:
        """A line for people: standard output, unless that is for JSON."""
        print(text, flush=True)

    def note(self, text: str) -> None:
        """A remark beside the answer: stderr, so that a pipe carries the answer alone."""
        print(text, file=self._stderr, flush=True)

    def answer(self, text: str) -> None:
        """A model's text: as it is, except that on a terminal it must not move the cursor."""
        self.say(printable(text) if sys.stdout.isatty() else text)

    def report(self, value: Any) -> None:
        """Write `value` as JSON where the caller asked for it, if they did."""
        if not self.wanted:
            return
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        if self.path is not None:
            atomic_write(self.path, text)
            return
        self._stdout.write(text)
        self._stdout.flush()


def new_file(option: str, name: str | Path, fix: str = "name another file") -> Path:
    """The path of a file that can be written; QerlError naming the option otherwise."""
    path = Path(name).expanduser()
    if os.path.isdir(path):
        raise QerlError(f"{option} {str(name)!r}: is a folder; {fix}")
    if not os.path.lexists(path.parent):
        raise QerlError(f"{option} {str(name)!r}: there is no folder {str(path.parent)!r}; {fix}")
    check_writable(option, path, fix=fix)
    return path


@contextlib.contextmanager
def own_stderr() -> Iterator[TextIO]:
    """The caller's stderr, by a handle of its own that `quiet` does not turn away."""
    try:
        number = sys.stderr.fileno()
    except OSError:  # a stand-in without a descriptor: nothing redirects that object
        yield sys.stderr
        return
    with open(os.dup(number), "w", buffering=1, encoding=sys.stderr.encoding) as stream:
        yield stream


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Send other libraries' warnings and stderr to `<cache>/log.txt` inside the block."""
    from qerl.console import quiet_third_party

    log = qerl_home() / "log.txt"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > LOG_LIMIT:
            log.unlink()
        log.touch()
    except OSError as error:
        raise QerlError(
            f"QERL_HOME {str(log.parent)!r}: cannot be written ({error.strerror}); "
            "set it to a folder of yours"
        ) from error
    with quiet_third_party(log):
        yield


def printable(text: str) -> str:
    """Control characters other than newline and tab as �."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
