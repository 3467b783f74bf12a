"""Commands about a run's result: measure it, ask it. (`qerl.cli_export` takes it away.)

As in `qerl.cli_train`, every import that brings torch is inside the command, under `quiet`.
"""

from __future__ import annotations

import json as json_module
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

# `qerl.cli` takes the command from here.
from qerl.cli_export import export as export
from qerl.cli_options import Best, Json, MaxTokens, RunArgument, Seed, Temperature
from qerl.cli_output import Output, new_file, quiet
from qerl.cli_run import Which, adapter_label, counting
from qerl.cli_run import opened as opened_run
from qerl.errors import QerlError

if TYPE_CHECKING:
    from qerl.evaluate import EvalResult
    from qerl.run import Run
    from qerl.run_folder import RunFolder
    from qerl.session import Session
    from qerl.tasks import Task
    from qerl.types import Completion, Group

CHAT_TOKENS = 256


def evaluate(
    run: RunArgument,
    best: Best = False,
    base_only: Annotated[
        bool, typer.Option("--base-only", help="Measure the base model without the adapter.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="Another base, as it is stored: a directory or a Hub id.",
        ),
    ] = None,
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
    With --base the adapter is measured on the model that it will be served on: 16 bits, FP8,
    another NVFP4.

    \b
    qerl eval latest
    qerl eval latest --best
    qerl eval latest --base Qwen/Qwen3-0.6B
    qerl eval latest --base-only --out base.jsonl --json base.json
    """
    if best and base_only:
        raise QerlError("--best and --base-only: choose one")
    from qerl.run_folder import find_run

    which: Which = "best" if best else "base" if base_only else "last"
    with Output(json) as out:
        folder = find_run(run)
        path = new_file("--out", out_file or folder.path / f"eval-{_eval_name(which, base)}.jsonl")
        before = _before_training(folder, out)
        with _session(folder, which, base, out) as session:
            label = adapter_label(session.policy, which)
            prompts = len(session.eval_prompts)
            with quiet(), counting(f"evaluating {prompts} prompts") as heard:
                result, groups = session.evaluate(heard)
            _write_completions(path, session.task, groups)
        if before is not None and label in ("last", "best"):
            out.say(before)
        for line in _eval_lines(label, base, result):
            out.say(line)
        out.say(f"every completion: {path}")
        out.report(
            {
                "run": str(folder.path),
                "adapter": label,
                **({} if base is None else {"base": base}),
                "task": result.task,
                **result.as_dict(),
                "mean_length": result.mean_length,
                "truncated": result.truncated,
                "completions": str(path),
            }
        )


def _eval_name(which: Which, base: str | None) -> str:
    """The completions' file name: another base must not overwrite what the run's own gave."""
    if base is None:
        return which
    return f"{which}-on-{re.sub(r'[^A-Za-z0-9.-]+', '-', base).strip('-.')[-80:]}"


@contextmanager
def _session(folder: RunFolder, which: Which, base: str | None, out: Output) -> Iterator[Session]:
    """The run's evaluator around its own base, or around another one; closed after the block."""
    if base is None:
        with opened_run(folder, which, out) as run:
            yield run.session
        return
    with quiet(), counting(f"loading {base}"):
        from qerl.rescore import open_session

        adapter = {"last": folder.adapter, "best": folder.best, "base": None}[which]
        if adapter is not None and not adapter.is_dir():
            raise QerlError(f"run '{folder.path}': it has no {adapter.name}/; finish or resume it")
        session = open_session(folder, base=base, adapter=adapter, say=out.note)
    try:
        yield session
    finally:
        session.close()


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


def _eval_lines(label: str, base: str | None, result: EvalResult) -> list[str]:
    from qerl.run import accuracy_line

    names = {
        "last": "last adapter",
        "best": "best adapter",
        "base": "base model",
        "untrained": "untrained adapter (all B are zero: this is the base model)",
    }
    where = "" if base is None else f" on {base}"
    return [
        f"{names[label]}{where}: {accuracy_line(result.as_dict())}",
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
    with Output(json) as out, opened_run(find_run(run), "best" if best else "last", out) as opened:
        with quiet(), counting("thinking") as heard:
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

    with Output() as out, opened_run(find_run(run), "best" if best else "last", out) as opened:
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
        with quiet(), counting("thinking") as heard:
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
