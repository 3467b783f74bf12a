"""`qerl doctor`: try a recipe out before a run. Imports no torch until it runs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("doctor")(doctor)


def doctor(
    recipe: Annotated[str, typer.Argument(help="A bundled recipe's name or a YAML file.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changed keys, such as train.lr=2e-5."),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Use nothing from the network.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Run this check alone (may be repeated).")
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="PATH", help="Write the report there as JSON (-: here)."),
    ] = None,
) -> None:
    """Find what would waste a night, in a minute: machine, model, prompts, reward, first answers.

    Exits with 1 if a check fails. What could not be checked is said, and never called ok.
    """
    from rich.console import Console

    from qerl.config import Recipe
    from qerl.console import quiet_third_party
    from qerl.doctor import run_checks
    from qerl.recipes import parse_overrides

    loaded = Recipe.load(recipe, parse_overrides(changes or []))
    console = Console(stderr=True)
    with tempfile.NamedTemporaryFile(suffix=".log") as log, console.status("doctor") as status:
        with quiet_third_party(log.name):
            report = run_checks(loaded, offline=offline, only=only or None, say=status.update)
    if json_path == "-":
        typer.echo(as_json(report.as_dict()))
    else:
        Console().print(report.table())
    if json_path not in (None, "-"):
        write_report(Path(json_path), report.as_dict())
    if report.failed:
        raise typer.Exit(1)


def as_json(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)


def write_report(path: Path, report: dict[str, Any]) -> None:
    from qerl.files import atomic_write

    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, as_json(report) + "\n")
