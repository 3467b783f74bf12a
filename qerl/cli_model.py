"""Commands about a run's result: measure it, ask it, take it away.

As in `qerl.cli_train`, every import that brings torch is inside the command, under `quiet`.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from qerl.cli_options import Best, Json, MaxTokens, RunArgument, Seed, Temperature
from qerl.cli_output import Output, new_file, quiet
from qerl.errors import QerlError
from qerl.files import check_writable

if TYPE_CHECKING:
    from qerl.evaluate import EvalResult
    from qerl.run import Run
    from qerl.run_folder import RunFolder
    from qerl.tasks import Task
    from qerl.types import Completion, Group

Which = Literal["last", "best", "base"]

CHAT_TOKENS = 256


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
    """Measure a run's accuracy on the held-out prompts.

    Answers are greedy; the accuracy comes with its 95% interval. Every completion with its
    rewards is written to the run folder (`eval-last.jsonl`, `-best`, `-base`).

    \b
    qerl eval latest
    qerl eval latest --best
    qerl eval latest --base --out base.jsonl --json base.json
    """
    if best and base:
        raise QerlError("--best and --base: choose one")
    from qerl.run_folder import find_run

    which: Which = "best" if best else "base" if base else "last"
    with Output(json) as out:
        folder = find_run(run)
        path = new_file("--out", out_file or folder.path / f"eval-{which}.jsonl")
        before = _before_training(folder, out)
        with _opened(folder, which, out) as opened:
            label = adapter_label(opened, which)
            prompts = len(opened.session.eval_prompts)
            with quiet(), _counting(f"evaluating {prompts} prompts") as heard:
                result, groups = opened.session.evaluate(heard)
            _write_completions(path, opened.session.task, groups)
        if before is not None and label in ("last", "best"):
            out.say(before)
        for line in _eval_lines(label, result):
            out.say(line)
        out.say(f"every completion: {path}")
        out.report(
            {
                "run": str(folder.path),
                "adapter": label,
                "task": result.task,
                **result.as_dict(),
                "mean_length": result.mean_length,
                "truncated": result.truncated,
                "completions": str(path),
            }
        )


@contextmanager
def _opened(folder: RunFolder, which: Which, out: Output) -> Iterator[Run]:
    """A run with its model, closed after the block."""
    with quiet(), _counting(f"loading {folder.path}"):
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


@contextmanager
def _counting(what: str) -> Iterator[Callable[[int], None]]:
    """On a terminal, one line with the tokens heard so far, gone after the block."""
    from qerl.console import Screen

    tokens = 0
    with Screen(0) as screen:
        screen.status(what)

        def heard(new: int) -> None:
            nonlocal tokens
            tokens += new
            screen.status(f"{what}: {tokens} tokens")

        yield heard


def _before_training(folder: RunFolder, out: Output) -> str | None:
    """The line about the accuracy before training; none for a run that is not over.

    A damaged summary is said, and does not keep anyone from evaluating.
    """
    if not folder.summary.is_file():
        return None
    with quiet():
        from qerl.run import accuracy_line
    try:
        before = json_module.loads(folder.summary.read_text(encoding="utf-8"))["before"]
        return None if before is None else f"before training: {accuracy_line(before)}"
    except (ValueError, TypeError, KeyError):
        out.note(f"'{folder.summary}' is damaged: the accuracy before training is not shown")
        return None


def _eval_lines(label: str, result: EvalResult) -> list[str]:
    from qerl.run import accuracy_line

    names = {
        "last": "last adapter",
        "best": "best adapter",
        "base": "base model",
        "untrained": "untrained adapter (all B are zero: this is the base model)",
    }
    return [
        f"{names[label]}: {accuracy_line(result.as_dict())}",
        f"mean reward {result.mean_reward:.3f}, mean length {result.mean_length:.1f} tokens, "
        f"{result.truncated:.1%} cut at the token limit",
    ]


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
    """Ask a trained model one question.

    The answer alone goes to standard output.
    The recipe's system message, prefix and suffix are put around the question, as in training.

    \b
    qerl generate latest "Which number is the largest: 24, 71, 36, 58?"
    qerl generate latest - --max-tokens 200 < question.txt
    """
    from qerl.run_folder import find_run

    text = sys.stdin.read().strip() if prompt == "-" else prompt
    if not text.strip():
        raise QerlError("PROMPT: it is empty; give it some text")
    with Output(json) as out, _opened(find_run(run), "best" if best else "last", out) as opened:
        with quiet(), _counting("thinking") as heard:
            options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
            answer = opened.complete(text, **options, progress=heard)
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
    """Talk to a trained model.

    It sees the whole conversation, after the recipe's system message; task.prefix and task.suffix
    are for single questions and left out. One message a line. /new starts over, /exit or Ctrl-D
    ends, Ctrl-C stops an answer.

    \b
    qerl chat latest
    qerl chat latest --temperature 0.7
    """
    from qerl.run_folder import find_run

    with Output() as out, _opened(find_run(run), "best" if best else "last", out) as opened:
        system = opened.recipe.task.system
        opening = [] if system is None else [{"role": "system", "content": system}]
        history: list[dict[str, str]] = opening
        if sys.stdin.isatty():
            out.note("One message a line. /new starts over, /exit or Ctrl-D ends.")
        for turn, text in enumerate(_typed()):
            if text == "/new":
                history = opening
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
        with quiet(), _counting("thinking") as heard:
            return run.complete(messages, **options, progress=heard)
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
        except (EOFError, KeyboardInterrupt) as end:
            if terminal:
                print()  # the shell's prompt starts a line of its own
            if isinstance(end, KeyboardInterrupt):
                raise
            return
        if text == "/exit":
            return
        if text:
            yield text


def export(
    run: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="New folder. Default: ./<run>-adapter"),
    ] = None,
    best: Best = False,
    json: Json = None,
) -> None:
    """Copy a run's adapter to a folder of yours, checked.

    peft, vLLM and the Hugging Face Hub understand it.

    \b
    qerl export latest -o my-adapter
    qerl export latest --best
    """
    from qerl.run_folder import find_run

    with Output(json) as out:
        folder = find_run(run)
        target = output or Path(f"{folder.name}-adapter{'-best' if best else ''}")
        check_writable("--output", target.expanduser())
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
