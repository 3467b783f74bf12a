"""`qerl tail`: the newest completions of a run, best, worst and truncated, read while it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from qerl.errors import QerlError
from qerl.report import shorten
from qerl.run_folder import RunFolder

_BLOCK = 1 << 20

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TailReport:
    """step: the newest step with completions, and rows: how many it has. best, worst: of that
    step. truncated: the newest ones cut by the token limit, of the steps that were read.
    half_written: 1 when the last line is not finished, because the run is writing or was killed.
    """

    step: int | None
    rows: int
    best: list[Row] = field(default_factory=list)
    worst: list[Row] = field(default_factory=list)
    truncated: list[Row] = field(default_factory=list)
    half_written: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def tail(run: RunFolder, n: int = 3) -> TailReport:
    """The `n` best and worst completions of the newest step, and the `n` newest truncated ones.

    No completion is shown both as best and as worst. Reads the file backwards, only as far as the
    newest step goes. Raises QerlError when the run has no completions yet.
    """
    rows, half_written = _newest_rows(run.completions)
    if not rows:
        return TailReport(None, 0, half_written=half_written)
    newest = [row for row in rows if row["step"] == rows[-1]["step"]]
    ranked = sorted(newest, key=lambda row: -row["reward"])
    cut = [row for row in reversed(rows) if row["finish_reason"] == "length"]
    best = ranked[:n]
    worst = ranked[n:][::-1][:n]
    return TailReport(rows[-1]["step"], len(newest), best, worst, cut[:n], half_written)


def _newest_rows(path: Path) -> tuple[list[Row], int]:
    """Rows from the end of the file, at least all of the newest step; and half-written lines."""
    if not path.is_file():
        raise QerlError(
            f"{str(path)!r}: no completions yet; the first come with step 1 "
            "(none ever do with output.log_completions=0)"
        )
    block = _BLOCK
    while True:
        lines, half_written, whole = _last_lines(path, block)
        rows = [_parse(path, line) for line in lines if line.strip()]
        if whole or (rows and rows[0]["step"] != rows[-1]["step"]):
            return rows, half_written
        block *= 4


def _last_lines(path: Path, block: int) -> tuple[list[bytes], int, bool]:
    """Complete lines in the last `block` bytes, half-written ones, whether that is all of it."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - block))
        lines = file.read().split(b"\n")
    half_written = int(bool(lines.pop().strip()))
    whole = size <= block
    return (lines if whole else lines[1:]), half_written, whole


def _parse(path: Path, line: bytes) -> Row:
    try:
        return json.loads(line)
    except ValueError as error:
        start = line[:40].decode("utf-8", "replace")
        raise QerlError(
            f"{str(path)!r}: a line is not JSON (it starts {start!r}); delete that line"
        ) from error


def render(report: TailReport, width: int = 400) -> RenderableType:
    """A `TailReport` for a terminal; prompt and completion are cut to `width` characters."""
    parts: list[RenderableType] = []
    if report.step is None:
        parts.append(Text("No finished line yet."))
    else:
        parts.append(Text(f"Step {report.step}, {report.rows} completions logged"))
        parts += _section("Best", report.best, width)
        parts += _section("Worst", report.worst, width)
        parts += _section("Truncated (newest first)", report.truncated, width)
    if report.half_written:
        parts.append(Text("The last line is half written (the run is writing, or was killed)."))
    return Group(*parts)


def _section(title: str, rows: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    if not rows:
        return [Text(f"\n{title}: none", style="bold")]
    out = [Text(f"\n{title}", style="bold")]
    for row in rows:
        parts = " ".join(f"{name}={value}" for name, value in row["rewards"].items())
        head = (
            f"  step {row['step']}  reward {row['reward']:g} ({parts})  advantage "
            f"{row['advantage']:+.3f}  {row['tokens']} tokens, {row['finish_reason']}  "
            f"version {row['version']}  sigma {row['sigma']:.2e}"
        )
        out.append(Text(head))
        out.append(Text(f"    prompt      {shorten(row['prompt'], width)}", style="dim"))
        out.append(Text(f"    completion  {shorten(row['completion'], width)}"))
    return out
