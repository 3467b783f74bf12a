"""`qerl doctor`: try a recipe out before a run. Imports nothing heavy until it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from qerl.cli_options import Changes, Json, RecipeArgument
from qerl.cli_output import Output, quiet


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("doctor")(doctor)


def doctor(
    recipe: RecipeArgument,
    changes: Changes = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Use nothing from the network.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="CHECK", help="Run this check alone (may be repeated)."),
    ] = None,
    json: Json = None,
) -> None:
    """Find what would waste a night, in a minute, before a run.

    Looks at the machine, the model, prompts, reward and the first answers. Exits with 1 if a check
    fails; what could not be checked is said, and never called ok.

    \b
    qerl doctor demo-smollm2
    qerl doctor recipe.yaml train.lr=2e-5 --offline --json report.json
    """
    with Output(json) as out:
        from rich.console import Console

        from qerl.config import Recipe
        from qerl.doctor import run_checks
        from qerl.recipes import parse_overrides

        loaded = Recipe.load(recipe, parse_overrides(changes or []))
        console = Console(file=sys.stdout)
        with console.status("doctor") as status, quiet():
            report = run_checks(loaded, offline=offline, only=only or None, say=status.update)
        console.print(report.table())
        out.report(report.as_dict())
    if report.failed:
        raise typer.Exit(1)
