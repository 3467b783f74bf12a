"""Commands that load a model, or at least its configuration: train, ask, measure, take away.

Every import that brings torch is inside the command, under `quiet`: a library's warning at import
time goes to a log like any other.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from qerl.cli_output import Output, quiet
from qerl.errors import QerlError

if TYPE_CHECKING:
    from qerl.evaluate import EvalResult
    from qerl.run import Run
    from qerl.tasks import Task
    from qerl.types import Completion, Group

Which = Literal["last", "best", "base"]

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A bundled name (`qerl recipes`) or a .yaml file.")
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Run folder, name below ./runs, or `latest`.")
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changed keys, such as train.lr=2e-5."),
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

CHAT_TOKENS = 256


def demo(changes: Changes = None, json: Json = None) -> None:
    """Train a small real model on this machine, with no further question (a few minutes on a CPU).

    The same as `qerl train demo-smollm2`.

    \b
    qerl demo
    qerl demo train.steps=5 eval.prompts=50
    """
    train("demo-smollm2", changes, json)


def train(recipe: RecipeArgument, changes: Changes = None, json: Json = None) -> None:
    """Train a recipe: a bundled name or a .yaml file, with any keys changed.

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
    """Continue a stopped run from its newest checkpoint, or a finished one for more steps.

    Only keys that do not change what is learnt may be changed: how long it goes on, how often it
    saves and evaluates.

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


def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Directory or Hub id of a 16-bit checkpoint.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="New folder.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an NVFP4 checkpoint already there.")
    ] = False,
    json: Json = None,
) -> None:
    """Write a model's checkpoint in NVFP4 (4.5 bits a weight), in compressed-tensors' layout.

    Training does this by itself, once, into the cache; this is for serving or sharing the result.

    \b
    qerl quantize smollm2-135m-instruct-pypi -o smollm2-nvfp4
    qerl quantize Qwen/Qwen3-0.6B -o qwen3-nvfp4
    """
    output = output.expanduser()
    with Output(json) as out:
        with quiet():
            from qerl.model.load import resolve_model
            from qerl.quantize.checkpoint import quantize_checkpoint

            source, _ = resolve_model(model, out.say)
            if overwrite:
                _check_replaceable(output, source)
            with _bar() as heard:
                made = quantize_checkpoint(source, output, overwrite=overwrite, progress=heard)
        out.say(_quantized(made))
        out.report(made)


def _check_replaceable(folder: Path, source: Path) -> None:
    """Overwriting deletes the folder: only a checkpoint of this kind may be lost by it."""
    from qerl.model.load import quantization_of

    if not folder.exists():
        return
    if folder.resolve() in (source.resolve(), *source.resolve().parents):
        raise QerlError(f"--output '{folder}': the model itself is there; name another folder")
    if folder.is_dir() and not any(folder.iterdir()):
        return
    is_model = (folder / "config.json").is_file()
    if not is_model or quantization_of(folder).get("format") != "nvfp4-pack-quantized":
        raise QerlError(
            f"--output '{folder}': not an NVFP4 checkpoint, so it is not overwritten; "
            "name another folder"
        )


@contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on a terminal; elsewhere nothing, the result line says it all."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console()
    with Progress(
        console=console, transient=True, redirect_stderr=False, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("quantizing", total=None)
        yield lambda done, total, layer: progress.update(task, completed=done, total=total)


def _quantized(made: dict[str, Any]) -> str:
    from qerl.console import human_bytes, human_seconds

    before, after = human_bytes(made["source_bytes"]), human_bytes(made["bytes"])
    return (
        f"{made['path']}: {made['layers']} layers, {made['parameters']:,} weights in NVFP4, "
        f"{before} became {after} in {human_seconds(made['seconds'])}"
    )


def evaluate(
    run: RunArgument,
    best: Best = False,
    base: Annotated[
        bool, typer.Option("--base", help="Measure the base model without the adapter.")
    ] = False,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="PATH", help="Where every completion goes. Default: the run folder."
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Measure a run's accuracy on the held-out prompts, greedily, with its 95% interval.

    Writes every completion with its rewards to eval-last.jsonl, eval-best.jsonl or
    eval-base.jsonl in the run folder.

    \b
    qerl eval latest
    qerl eval latest --best
    qerl eval latest --base --out base.jsonl --json base.json
    """
    if best and base:
        raise QerlError("--best and --base: choose one")
    which: Which = "best" if best else "base" if base else "last"
    with Output(json) as out, _opened(run, which, out) as opened:
        path = out_file.expanduser() if out_file else opened.folder.path / f"eval-{which}.jsonl"
        if not path.parent.is_dir():
            raise QerlError(f"--out '{path}': there is no folder '{path.parent}'; make it first")
        label = adapter_label(opened, which)
        with quiet():
            result, groups = _measure(opened)
        _write_completions(path, opened.session.task, groups)
        for line in _eval_lines(opened, label, result):
            out.say(line)
        out.say(f"every completion: {path}")
        out.report(
            {
                "run": str(opened.folder.path),
                "adapter": label,
                "task": result.task,
                **result.as_dict(),
                "mean_length": result.mean_length,
                "truncated": result.truncated,
                "completions": str(path),
            }
        )


@contextmanager
def _opened(run: str, which: Which, out: Output) -> Iterator[Run]:
    """A run with its model, closed after the block."""
    from qerl.run_folder import find_run

    folder = find_run(run)
    with quiet():
        from qerl.run import open_run

        opened = open_run(folder.path, which=which, say=out.note)
    with opened:
        yield opened


def adapter_label(run: Run, which: Which) -> str:
    """What is measured. An adapter whose every B is zero changes nothing and is called untrained:
    its accuracy is the base's and must not pass for a result."""
    from qerl.adapter import adapter_state

    if which == "base":
        return "base"
    state = adapter_state(run.session.policy.model)
    trained = any(bool(tensor.any()) for name, tensor in state.items() if "lora_B" in name)
    return which if trained else "untrained"


def _measure(run: Run) -> tuple[EvalResult, list[Group]]:
    """Evaluate with a counter on the terminal."""
    from qerl.console import Screen

    tokens = 0
    with Screen(0) as screen:

        def heard(new: int) -> None:
            nonlocal tokens
            tokens += new
            screen.status(f"evaluating {len(run.session.eval_prompts)} prompts: {tokens} tokens")

        return run.session.evaluate(heard)


def _eval_lines(run: Run, label: str, result: EvalResult) -> list[str]:
    """Accuracy now; under it what was measured before training, where there is such a number."""
    from qerl.run import accuracy_line

    names = {
        "last": "last adapter",
        "best": "best adapter",
        "base": "base model",
        "untrained": "untrained adapter (all B are zero: this is the base model)",
    }
    lines = [f"{names[label]}: {accuracy_line(result.as_dict())}"]
    lines.append(
        f"mean reward {result.mean_reward:.3f}, mean length {result.mean_length:.1f} tokens, "
        f"{result.truncated:.1%} cut at the token limit"
    )
    before = _summary(run.folder.summary).get("before")
    if before is not None and label in ("last", "best"):
        lines.insert(0, f"before training: {accuracy_line(before)}")
    return lines


def _summary(path: Path) -> dict[str, Any]:
    """summary.json, or nothing for a run that is not over."""
    return json_module.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write_completions(path: Path, task: Task, groups: list[Group]) -> None:
    from qerl.evaluate import is_solved
    from qerl.files import atomic_write

    rows = (
        {
            "index": group.prompt.index,
            "prompt": group.prompt.text,
            "completion": completion.text,
            "solved": is_solved(task, completion),
            "reward": completion.reward,
            "rewards": completion.rewards,
            "finish_reason": completion.finish_reason,
            "tokens": len(completion.token_ids),
            "columns": group.prompt.columns,
        }
        for group in groups
        for completion in group.completions
    )
    # A dataset's columns may hold dates and the like: as text.
    lines = [json_module.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
    atomic_write(path, "".join(lines))


def generate(
    run: RunArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The question; - reads stdin.")],
    best: Best = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Ask a trained model one question. The answer alone goes to standard output.

    The recipe's system message, prefix and suffix are put around the question, as in training.

    \b
    qerl generate latest "Which number is the largest: 24, 71, 36, 58?"
    qerl generate latest - --max-tokens 200 < question.txt
    """
    text = sys.stdin.read().strip() if prompt == "-" else prompt
    with Output(json) as out, _opened(run, "best" if best else "last", out) as opened:
        with quiet():
            answer = opened.complete(
                text, max_tokens=max_tokens, temperature=temperature, seed=seed
            )
        out.answer(answer.text)
        _note_cut(out, answer)
        out.report(
            {
                "run": str(opened.folder.path),
                "prompt": text,
                "completion": answer.text,
                "finish_reason": answer.finish_reason,
                "tokens": len(answer.token_ids),
                "logprob": sum(answer.logprobs),
            }
        )


def _note_cut(out: Output, answer: Completion) -> None:
    if answer.finish_reason == "length":
        count = len(answer.token_ids)
        out.note(f"[cut at {count} token{'s' * (count != 1)}; --max-tokens N allows more]")


def chat(
    run: RunArgument,
    best: Best = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = CHAT_TOKENS,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
) -> None:
    """Talk to a trained model; it sees the whole conversation.

    One message a line. /new starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer.

    \b
    qerl chat latest
    qerl chat latest --temperature 0.7
    """
    with Output() as out, _opened(run, "best" if best else "last", out) as opened:
        history: list[dict[str, str]] = []
        if sys.stdin.isatty():
            out.note("One message a line. /new starts over, /exit or Ctrl-D ends.")
        for turn, text in enumerate(_typed()):
            if text == "/new":
                history.clear()
                continue
            options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed + turn}
            asked = [*history, {"role": "user", "content": text}]
            answer = _reply(out, opened, asked, options)
            if answer is not None:
                history = [*asked, {"role": "assistant", "content": answer.text}]
                out.answer(answer.text)
                _note_cut(out, answer)


def _reply(
    out: Output, run: Run, messages: list[dict[str, str]], options: dict[str, Any]
) -> Completion | None:
    """The answer; None when it was stopped or cannot be given (too long a conversation)."""
    try:
        with quiet():
            return run.complete(messages, **options)
    except KeyboardInterrupt:
        out.note("\n[stopped]")
    except QerlError as error:
        out.note(f"error: {error} (/new starts over)")
    return None


def _typed() -> Iterator[str]:
    """Messages from the terminal, with line editing, or from a pipe."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401 - importing it gives `input` history and editing
    while True:
        try:
            text = input("> " if terminal else "").strip()
        except EOFError:
            if terminal:
                print()
            return
        if text == "/exit":
            return
        if text:
            yield text


def plan(recipe: RecipeArgument, changes: Changes = None, json: Json = None) -> None:
    """Predict the memory of a run from its recipe; no weights are loaded, no GPU is needed.

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

            predicted = predict(loaded, _model_config(loaded.model, out.note))
        show(predicted.table())
        out.report({"recipe": loaded.name, "model": loaded.model, **predicted.as_dict()})


def _model_config(model: str, say: Callable[[str], None]) -> Any:
    """The configuration alone: of a Hub id no more than config.json is fetched."""
    from transformers import AutoConfig

    from qerl.adapter import is_hub_id
    from qerl.model.load import first_line, resolve_model

    source = model if is_hub_id(model) else resolve_model(model, say)[0]
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise QerlError(f"model: no configuration of '{model}' ({first_line(error)})") from error


def export(
    run: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="New folder. Default: ./<run>-adapter"),
    ] = None,
    best: Best = False,
    json: Json = None,
) -> None:
    """Copy a run's adapter to a folder that peft, vLLM and the Hugging Face Hub understand.

    \b
    qerl export latest -o my-adapter
    qerl export latest --best
    """
    from qerl.run_folder import find_run

    with Output(json) as out:
        folder = find_run(run)
        target = output or Path(f"{folder.name}-adapter{'-best' if best else ''}")
        with quiet():
            from qerl.export import export_adapter

            made = export_adapter(folder.path, target, which="best" if best else "last")
        out.say(f"{made.path}: {made.modules} adapted modules, {made.bytes:,} bytes, checked")
        if serve := _serve_line(made.path):
            out.say(f"\nServe it with vLLM\n  {serve}")
        out.report({"path": str(made.path), "modules": made.modules, "bytes": made.bytes})


def _serve_line(adapter: Path) -> str | None:
    """The `vllm serve` command for an adapter folder; None for a rank that vLLM does not serve."""
    from qerl.report import VLLM_RANKS, serve_command

    config = json_module.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    if config["r"] > VLLM_RANKS[-1]:
        return None
    return serve_command(config["base_model_name_or_path"], config["r"], adapter.name, adapter)
