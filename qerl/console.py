"""The screen while a run goes on: one live line on a terminal, a plain line a step elsewhere.

Third-party noise (warnings, library loggers, anything written to stderr) goes to the run's log
file instead, see `quiet_third_party`.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

LIBRARIES = (
    "transformers", "peft", "torch", "accelerate", "datasets", "huggingface_hub", "py.warnings",
)  # fmt: skip


def human_bytes(count: float) -> str:
    """1_234_567 -> "1.2 MB": powers of 1000, one decimal from a kilobyte up."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float) -> str:
    """75 -> "1m15s"; 3725 -> "1h02m"."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"


_FIELDS = (
    ("reward", "reward", "{:.3f}"),
    ("qerl/accuracy", "accuracy", "{:.1%}"),
    ("entropy", "entropy", "{:.3f}"),
    ("qerl/sigma", "sigma", "{:.1e}"),
    ("qerl/tokens_per_second", "tok/s", "{:.0f}"),
)


def format_line(
    step: int, total: int, metrics: Mapping[str, float], eta: float | None = None
) -> str:
    """The line for one step. Metrics that are missing are left out of it."""
    parts = [f"step {step}/{total}"]
    for key, label, form in _FIELDS:
        if metrics.get(key) is not None:
            parts.append(f"{label} {form.format(metrics[key])}")
    if metrics.get("qerl/peak_bytes") is not None:
        parts.append(f"memory {human_bytes(metrics['qerl/peak_bytes'])}")
    if eta is not None:
        parts.append(f"ETA {human_seconds(eta)}")
    return " · ".join(parts)


_SHORT = (
    (" · ", "  "), ("step ", ""), ("reward", "rew"), ("accuracy", "acc"), ("entropy", "H"),
    ("sigma", "σ"), ("tok/s", "t/s"), ("memory ", ""), (" GB", "GB"), (" MB", "MB"),
)  # fmt: skip


def shorten_line(line: str) -> str:
    """The same numbers in under 80 columns, for a narrow terminal."""
    for long, short in _SHORT:
        line = line.replace(long, short)
    return line


class Screen:
    """Shows progress on standard output: `with Screen(total) as screen: screen.step(i, metrics)`.

    total: number of the last step. file: where to write (default: the standard output of now).
    live: redraw one line in place; None means "when `file` is a terminal".
    Between steps `status` replaces the line on a terminal and is silent elsewhere; `message` prints
    a line that stays, on both.
    """

    def __init__(self, total: int, *, file: TextIO | None = None, live: bool | None = None):
        self.total = total
        # In a notebook too: plain lines on its standard output, not one HTML block a step.
        out = file or sys.stdout
        self._console = Console(file=out, soft_wrap=True, highlight=False, force_jupyter=False)
        self.live = self._console.is_terminal if live is None else live
        self._live: Live | None = None
        self._line = ""
        self._seen: list[tuple[int, float]] = []

    def __enter__(self) -> Screen:
        if self.live:
            # stderr is left alone: `quiet_third_party` owns it.
            self._live = Live(
                Text(""),
                console=self._console,
                redirect_stderr=False,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            if self._line:
                self.message(self._line)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the numbers of a finished step."""
        self._line = format_line(step, self.total, metrics, self._eta(step))
        if self._live is not None:
            self._redraw(self._line)
        elif not self.live:
            self.message(self._line)

    def status(self, text: str) -> None:
        """Show what is going on within a step (live only): the last numbers, then `text`."""
        if self._live is not None:
            self._redraw(f"{self._line} · {text}" if self._line else text)

    def _redraw(self, line: str) -> None:
        assert self._live is not None
        if len(line) > self._console.width:
            line = shorten_line(line)
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def message(self, text: str) -> None:
        """Print a line that stays, above the live line."""
        self._console.print(Text(text))

    def _eta(self, step: int) -> float | None:
        """Seconds left, from the pace of the last ten steps; None for the first one seen."""
        self._seen = [*self._seen[-10:], (step, time.monotonic())]
        (first, begun), (last, now) = self._seen[0], self._seen[-1]
        return (now - begun) / (last - first) * (self.total - step) if last > first else None


class _Stray(io.TextIOBase):
    """Stands in for stderr. Log handlers made meanwhile keep a reference to it after the context
    ends, so it then forwards to the real stderr instead of a closed file."""

    def __init__(self, target: TextIO):
        self.target = target

    def write(self, s: str) -> int:
        return self.target.write(s)

    def flush(self) -> None:
        self.target.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False


@contextmanager
def quiet_third_party(log_path: str | Path) -> Iterator[None]:
    """Send Python warnings, library loggers and everything on stderr to `log_path` (appended).

    Both the Python object and file descriptor 2 are redirected, so that C++ code is quiet too.
    Everything is restored on exit, also after an exception: a traceback reaches the screen.
    """
    with open(log_path, "a", encoding="utf-8", buffering=1) as log:
        stray = _Stray(log)
        with _descriptor(log), _python_stderr(stray), _loggers(stray), _showwarning(stray):
            yield


@contextmanager
def _descriptor(log: TextIO) -> Iterator[None]:
    sys.stderr.flush()
    saved = os.dup(2)
    os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        log.flush()
        os.dup2(saved, 2)
        os.close(saved)


@contextmanager
def _python_stderr(stray: _Stray) -> Iterator[None]:
    saved, sys.stderr = sys.stderr, stray
    try:
        yield
    finally:
        stray.flush()
        stray.target = sys.stderr = saved


@contextmanager
def _loggers(stray: _Stray) -> Iterator[None]:
    handler = logging.StreamHandler(stray)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    # The root logger's handlers may hold the real stderr: nothing travels up to them.
    saved = [(logger, logger.handlers[:], logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        for logger, handlers, propagate in saved:
            added = [h for h in logger.handlers if h is not handler and h not in handlers]
            logger.handlers, logger.propagate = handlers + added, propagate


@contextmanager
def _showwarning(stray: _Stray) -> Iterator[None]:
    def show(message, category, filename, lineno, file=None, line=None):
        text = warnings.formatwarning(message, category, filename, lineno, line)
        (file or stray).write(text)

    saved, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = saved
