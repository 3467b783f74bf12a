"""Arguments and options that several commands share, so that they read alike everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A bundled name (`qerl recipes`) or a .yaml file.")
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Run folder, name below ./runs, or `latest`.")
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changed keys, such as train.lr=2e-5."),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="PATH", help="Write the result as JSON to a file; - is standard output."
    ),
]
Best = Annotated[
    bool, typer.Option("--best", help="Use best/, the adapter with the best held-out accuracy.")
]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Longest answer. Default: as in training.")
]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="0 takes the most likely token each time.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the sampling, for a temperature above 0.")]
