"""`qerl bench`: what the kernels cost. Imports nothing heavy until it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from qerl.cli_options import Json
from qerl.cli_output import Output
from qerl.errors import QerlError

bench = typer.Typer(
    name="bench", help="Show what the kernels cost.\n\n\b\nqerl bench kernels --static\n"
)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(bench)
    bench.command("kernels")(kernels)


@bench.callback()
def _frame() -> None:
    """Keeps `kernels` a command of its own while it is the only one."""


def kernels(
    static: Annotated[
        bool, typer.Option("--static", help="Compile and count; needs no GPU.")
    ] = False,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", metavar="NAME", help="This kernel alone (may be repeated)."),
    ] = None,
    target: Annotated[
        list[int] | None,
        typer.Option("--target", metavar="CC", help="90 for sm_90 (may be repeated)."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Compilations at a time.")] = 2,
    json: Json = None,
) -> None:
    """Compile every kernel for every GPU and count.

    Registers and spilled bytes of a thread, shared memory of a block, and instructions for each
    weight in the main loop beside what is allowed. The installed Triton compiles. Exits with 1 if
    a kernel spills, asks for too much or costs more than is allowed.

    \b
    qerl bench kernels --static
    qerl bench kernels --static --kernel nvfp4_matmul --target 90 --json table.json
    """
    if not static:
        raise QerlError("bench kernels: give --static; timings on a GPU are not measured here")
    with Output(json) as out:
        from qerl.console import Screen
        from qerl.home import qerl_home
        from qerl_kernels.static import StaticError, lines, table

        try:
            with Screen(0) as screen:
                document = table(
                    kernels=kernel or [],
                    targets=target or [],
                    jobs=jobs,
                    cache=qerl_home() / "compiled",
                    say=screen.status,
                )
        except StaticError as error:
            raise QerlError(str(error)) from error
        for line in lines(document):
            out.say(line)
        out.report(document)
    if document["problems"]:
        raise typer.Exit(1)
