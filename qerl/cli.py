"""The command line: `qerl COMMAND`. This file: the frame, and the commands that need no model.

A user's mistake is one line on stderr and exit status 2, Ctrl-C is 130, SIGTERM 143; any other
exception keeps its traceback, because it is ours. Nothing heavy is imported before a command needs
it: help answers at once. The others: `qerl.cli_train`, `qerl.cli_model`, `qerl.cli_quantize`,
`qerl.cli_doctor`, `qerl.cli_bench`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from qerl import cli_bench, cli_doctor, cli_model, cli_quantize, cli_train
from qerl.cli_options import Json, RunArgument
from qerl.cli_output import Output
from qerl.errors import QerlError
from qerl.interrupt import Terminated

# Set for this process alone, before torch is imported; what the user has set wins.
ENVIRONMENT = {
    # Idle OpenMP threads sleep rather than spin: on shared cores spinning costs several times the
    # wall time.
    "OMP_WAIT_POLICY": "passive",
    # Tokenizers warn at every fork after they have used their threads; prompts are short.
    "TOKENIZERS_PARALLELISM": "false",
}


# A command line that does not parse. Typer carries its own click, so it is reached through it.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])


class Commands(TyperGroup):
    """The group of commands, with the exit statuses of the module's docstring."""

    def make_context(self, info_name: Any, args: list[str], *rest: Any, **options: Any) -> Any:
        if not args:  # the whole help
            return super().make_context(info_name, args, *rest, **options)
        with _usage_in_one_line():
            return super().make_context(info_name, args, *rest, **options)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _usage_in_one_line():
                return super().invoke(ctx)
        except QerlError as error:
            print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as stop:
            raise typer.Exit(143 if isinstance(stop, Terminated) else 130) from stop


@contextlib.contextmanager
def _usage_in_one_line() -> Iterator[None]:
    """What is wrong with the command line, and where it is explained, without the usage."""
    try:
        yield
    except UsageError as error:
        ctx = error.ctx
        assert ctx is not None, "the parser says where it was"
        text = " ".join(error.format_message().split()).rstrip(".")
        command = f"{ctx.info_name}: " if ctx.parent is not None else ""
        more = "" if text.endswith("?") else f"; see `{ctx.command_path} --help`"
        print(f"error: {command}{text[:1].lower()}{text[1:]}{more}", file=sys.stderr)
        raise typer.Exit(2) from error


app = typer.Typer(
    cls=Commands,
    name="qerl",
    help="Reinforcement learning for large language models on one GPU, or on a CPU to try it.\n\n"
    "\b\nqerl demo                    train a small real model now, no GPU needed\n"
    "qerl init my-task            files for a task of your own\n"
    "qerl train my-task/recipe.yaml\n",
    epilog="`qerl COMMAND --help` shows options and examples. RUN is a run's folder, its name "
    "below ./runs, or `latest`. Files and models are cached in $QERL_HOME (~/.cache/qerl).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main() -> None:
    """The `qerl` program."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    app(prog_name="qerl")


def _version(wanted: bool) -> None:
    if wanted:
        from qerl import __version__

        print(f"qerl {__version__}")
        raise typer.Exit


@app.callback()
def _frame(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def tail(
    run: RunArgument,
    n: Annotated[int, typer.Option("-n", min=1, help="How many of each.")] = 3,
    json: Json = None,
) -> None:
    """Show a run's newest best, worst and truncated completions.

    Works while the run trains.

    \b
    qerl tail latest
    qerl tail runs/demo-smollm2-20260101-120000 -n 10
    """
    from qerl import tail as reader
    from qerl.report import show
    from qerl.run_folder import find_run

    with Output(json) as out:
        folder = find_run(run)
        found = reader.tail(folder, n)
        show(reader.render(found))
        out.report({"run": str(folder.path), **found.as_dict()})


def recipes(
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of a recipe, for editors.")
    ] = False,
    json: Json = None,
) -> None:
    """List the recipes that come with qerl.

    \b
    qerl recipes
    qerl recipes --schema > recipe.schema.json
    """
    from qerl.recipes import json_schema, list_recipes

    with Output("-" if schema and json is None else json) as out:
        if schema:
            out.report(json_schema())
            return
        infos = list_recipes()
        width = max(len(info.name) for info in infos)
        for info in infos:
            out.say(f"{info.name:{width}}  {info.description}")
        out.report(
            [{"name": i.name, "description": i.description, "path": str(i.path)} for i in infos]
        )


def explain(
    key: Annotated[
        str, typer.Argument(metavar="[KEY]", help="A key, a section, or nothing for all keys.")
    ] = "",
    json: Json = None,
) -> None:
    """Say what a recipe key means, with its type and default.

    Names from TRL, Unsloth and verl are answered with the name here.

    \b
    qerl explain rollout.group_size
    qerl explain noise
    qerl explain num_generations
    """
    from qerl.explain import explain as text_of

    with Output(json) as out:
        text = text_of(key)
        out.say(text)
        out.report({"key": key, "text": text})


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to write.")] = Path("."),
    model: Annotated[
        str | None,
        typer.Option(help="Hub id or directory of the model. Default: the demo model."),
    ] = None,
    json: Json = None,
) -> None:
    """Write a recipe, a reward and five rows of data that train as is.

    \b
    qerl init my-task
    qerl init my-task --model Qwen/Qwen3-0.6B
    """
    from qerl.init import write_starter

    with Output(json) as out:
        paths = write_starter(folder, model)
        for path in paths:
            out.say(f"wrote {path}")
        out.say(f"\nNext\n  qerl train {shlex.quote(str(paths[0]))}")
        out.report({"files": [str(path) for path in paths]})


for _command in (
    cli_train.demo, cli_train.train, cli_train.resume, cli_quantize.quantize, cli_model.evaluate,
    cli_model.generate, cli_model.chat, tail, cli_model.export, recipes, explain, init,
    cli_train.plan,
):  # fmt: skip
    app.command("eval" if _command is cli_model.evaluate else _command.__name__)(_command)
cli_doctor.register(app)
cli_bench.register(app)
