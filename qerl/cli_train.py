"""Commands before and during training: demo, train, resume, plan.

Every import that brings torch is inside the command, under `quiet`: a library's warning at import
time goes to a log like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qerl.cli_options import Changes, Json, RecipeArgument, RunArgument
from qerl.cli_output import Output, quiet
from qerl.errors import QerlError

if TYPE_CHECKING:
    from qerl.config import Recipe
    from qerl.run import Run


def demo(changes: Changes = None, json: Json = None) -> None:
    """Train a small real model now, in a few minutes on a CPU.

    The same as `qerl train demo-smollm2`; it asks nothing.

    \b
    qerl demo
    qerl demo train.steps=5 eval.prompts=50
    """
    train("demo-smollm2", changes, json)


def train(recipe: RecipeArgument, changes: Changes = None, json: Json = None) -> None:
    """Train a recipe, with any of its keys changed.

    Ctrl-C stops and saves; `qerl resume` goes on.

    \b
    qerl train demo-smollm2
    qerl train my-task/recipe.yaml train.steps=50 train.lr=2e-5
    qerl train demo-smollm2 --json result.json
    """
    from qerl.config import Recipe
    from qerl.recipes import parse_overrides

    with Output(json) as out:
        loaded = Recipe.load(recipe, overrides=parse_overrides(changes or []))
        with quiet():
            from qerl import run

            finished = run.train(loaded)
        _report_run(out, finished)


def resume(run: RunArgument, changes: Changes = None, json: Json = None) -> None:
    """Continue a stopped run, or a finished one for more steps.

    Begins at the newest checkpoint. Only keys that do not change what is learnt may be given:
    how long it goes on, how often it saves and evaluates.

    \b
    qerl resume latest
    qerl resume runs/demo-smollm2-20260101-120000 train.steps=48
    """
    from qerl.recipes import parse_overrides
    from qerl.run_folder import find_run

    with Output(json) as out:
        overrides = parse_overrides(changes or [])
        folder = find_run(run)
        with quiet():
            from qerl import run as runs

            finished = runs.resume(folder.path, overrides)
        _report_run(out, finished)


def _report_run(out: Output, run: Run) -> None:
    out.report({"run": str(run.folder.path), **run.summary})
    run.close()


def plan(recipe: RecipeArgument, changes: Changes = None, json: Json = None) -> None:
    """Predict the memory of a run from its recipe.

    No weights are loaded, and a plan for a GPU needs no GPU.

    \b
    qerl plan demo-smollm2
    qerl plan my-task/recipe.yaml device=cuda rollout.group_size=16
    """
    from qerl.config import Recipe
    from qerl.recipes import parse_overrides
    from qerl.report import show

    with Output(json) as out:
        loaded = Recipe.load(recipe, overrides=parse_overrides(changes or []))
        with quiet():
            from qerl.memory import plan as predict

            predicted = predict(loaded, _model_config(loaded, out.note))
        show(predicted.table())
        out.report({"recipe": loaded.name, "model": loaded.model, **predicted.as_dict()})


def _model_config(recipe: Recipe, say: Callable[[str], None]) -> Any:
    """The configuration alone: of a Hub id no more than config.json is fetched."""
    from transformers import AutoConfig

    from qerl.adapter import is_hub_id
    from qerl.model.load import first_line, resolve_model

    model, code = recipe.model, recipe.trust_remote_code
    source = model if is_hub_id(model) else resolve_model(model, say)[0]
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=code)
    except (OSError, ValueError) as error:
        raise QerlError(f"model: no configuration of '{model}' ({first_line(error)})") from error
