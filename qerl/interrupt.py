"""Ctrl-C and SIGTERM: stop at once while sampling, but never in the middle of an update.

All random streams of a step are functions of (seed, step), so a step broken off leaves no trace
and is simply done again after a resume. What must not be cut is the update with its bookkeeping
and the writing of files: `critical()` holds a signal back until that is over.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; handled like Ctrl-C."""


class Interrupts:
    """Handlers for SIGINT and SIGTERM inside a `with` block; the old ones come back after it.

    Outside the main thread Python allows no handlers: there the block changes nothing.
    """

    def __init__(self) -> None:
        self._old: dict[int, Any] = {}
        self._critical = False
        self._pending: type[KeyboardInterrupt] | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        kind = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if self._critical:
            self._pending = kind
        else:
            raise kind

    @contextmanager
    def critical(self) -> Iterator[None]:
        """A signal inside is raised at the end of the block."""
        self._critical = True
        try:
            yield
        finally:
            self._critical = False
        if self._pending is not None:
            kind, self._pending = self._pending, None
            raise kind
