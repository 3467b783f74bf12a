"""What a user holds: `train` and `resume` make a `Run`, `open_run` comes back to an old one.

A run keeps its model in memory so that it can be evaluated and asked; starting another one in the
same process closes it first, so running a notebook cell again needs no more memory than once.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from rich.console import RenderableType

from qerl.adapter import Adapter, adopted, load_adapter
from qerl.checkpoint import latest, recover, step_of
from qerl.config import Recipe
from qerl.console import Screen, quiet_third_party
from qerl.errors import QerlError
from qerl.files import atomic_write, write_json
from qerl.interrupt import Interrupts
from qerl.loop import run_steps
from qerl.policy import Policy, base_sha256
from qerl.recipes import absolute_paths, changed_keys
from qerl.report import build_summary, render, samples, show
from qerl.run_folder import RunFolder, find_run
from qerl.session import Session
from qerl.types import Completion, EvalResult, Group, SamplingParams
from qerl_kernels import ops

# Keys a resumed run may change: how long it goes on and what it writes, never what it learns from.
RESUMABLE = ("train.steps", "train.max_hours", "eval.every", "save.", "output.log_completions")

_open: Run | None = None


class Run:
    """A run with its model. Attributes: folder, recipe, adapter (when saved), summary (when over).

    Close it, or use it in a `with` block, to give its memory back.
    """

    def __init__(self, folder: RunFolder, recipe: Recipe, session: Session) -> None:
        global _open
        if _open is not None:
            _open.close()
        self.folder, self.recipe = folder, recipe
        self.summary: dict[str, Any] = {}
        self.samples: list[Group] = []
        self._session: Session | None = session
        _open = self

    @property
    def session(self) -> Session:
        if self._session is None:
            raise QerlError(
                f"run '{self.folder.path}' is closed (a newer run closes it): "
                f"qerl.open_run('{self.folder.path}') loads it again"
            )
        return self._session

    @property
    def adapter(self) -> Adapter:
        """The saved adapter; `run.adapter.save(folder)` copies it."""
        return Adapter(self.folder.adapter)

    def evaluate(self) -> EvalResult:
        """Greedy accuracy on the held-out prompts, now."""
        with quiet_third_party(self.folder.log):
            return self.session.evaluate()[0]

    def generate(
        self,
        prompt: str | list[dict[str, str]],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """The trained model's answer to a question, put as the task puts its own, or to messages.

        prompt: a text (the demo's task puts its worked example before it), or a list of messages,
        which is taken as it is.
        """
        options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        return self.complete(prompt, **options).text

    def complete(
        self,
        prompt: str | list[dict[str, str]],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> Completion:
        """As `generate`, with the tokens, their log-probs and why it ended.

        max_tokens: null takes the recipe's rollout.max_completion_tokens.
        progress: hears how many new tokens there are.
        """
        from qerl.tasks import make_question

        s = self.session
        limit = max_tokens or self.recipe.rollout.max_completion_tokens
        tokenizer, context = s.policy.tokenizer, s.policy.context
        question = make_question(prompt, s.task, tokenizer, self.recipe, context, max_tokens)
        params = SamplingParams(1, limit, temperature, seed)
        return s.engine.sample([question], params, progress=progress)[0].completions[0]

    def close(self) -> None:
        """Give the memory back. The folder stays; closing twice is fine."""
        global _open
        if self._session is not None:
            self._session.close()
            self._session = None
        if _open is self:
            _open = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def train(recipe: Recipe | str | Path, reward: Any = None, *, report: bool = True) -> Run:
    """Train a recipe to its end and return the run.

    recipe: a Recipe, a bundled name or a YAML path. reward: a function with the signature
    `reward(prompts, completions, **columns) -> list[float | None]` (sync or async; `qerl.per_row`
    wraps one that scores a single row), or a list of them; null: the recipe's own.
    report: print progress and the final table.
    Raises QerlError for a user's mistake; KeyboardInterrupt after saving when interrupted.
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    recipe.check()
    recipe = adopted(absolute_paths(recipe))
    close_open_run()
    folder = RunFolder.create(recipe.output.dir, recipe.output.name or recipe.name, recipe)
    return _run(folder, recipe, reward, report=report, fresh=True)


def resume(
    run: str | Path, overrides: dict[str, Any] | None = None, reward: Any = None, *, report=True
) -> Run:
    """Continue a run from its newest checkpoint.

    overrides: may change how long it goes on and what it writes (`train.steps`, `save.every`, …);
    any other changed key is refused by name, since the run would no longer be one experiment.
    """
    folder = find_run(run)
    old = Recipe.load(folder.recipe)
    recipe = Recipe.load(folder.recipe, overrides=overrides or {})
    refused = [key for key in changed_keys(old, recipe) if not key.startswith(RESUMABLE)]
    if refused:
        raise QerlError(
            f"{refused[0]}: a resumed run cannot change it (only {', '.join(RESUMABLE)}…); "
            f"start a new run with `qerl train`"
        )
    recover(folder.checkpoints)
    newest = latest(folder.checkpoints)
    if newest is None:
        raise QerlError(
            f"run '{folder.path}': no checkpoint yet, nothing to resume; start again with "
            f"`qerl train {folder.recipe}` (and set save.every to checkpoint more often)"
        )
    if recipe.train.steps < step_of(newest):
        raise QerlError(
            f"train.steps: {recipe.train.steps}, but run '{folder.path}' has done "
            f"{step_of(newest)} steps already; give as many or more"
        )
    close_open_run()
    return _run(folder, recipe, reward, report=report, fresh=False)


def open_run(
    run: str | Path,
    reward: Any = None,
    *,
    which: Literal["last", "best", "base"] = "last",
    say: Callable[[str], None] = lambda text: None,
) -> Run:
    """A finished or stopped run with its adapter, to evaluate or to ask.

    which: the `last` or the `best` adapter, or the `base` model without any.
    say: hears what takes long, such as quantizing a base that is not in the cache.
    """
    folder = find_run(run)
    recipe = Recipe.load(folder.recipe)
    source = folder.best if which == "best" else folder.adapter
    if which != "base" and not source.is_dir():
        raise QerlError(f"run '{folder.path}': it has no {source.name}/ yet; finish or resume it")
    close_open_run()
    with quiet_third_party(folder.log):
        session = _fresh_session(recipe, folder, reward, say)
        if which != "base":
            load_adapter(session.policy.model, source)
    return Run(folder, recipe, session)


def _fresh_session(
    recipe: Recipe, folder: RunFolder, reward: Any, say: Callable[[str], None]
) -> Session:
    """A session whose adapter adds nothing yet, for one that is loaded into it next.

    What lora.init names is not read: it may be gone by now. The recipe keeps the name.
    """
    bare = recipe.model_copy(deep=True)
    bare.lora.init = None
    session = Session(bare, folder, reward, say)
    session.recipe = recipe
    return session


def close_open_run() -> None:
    """Close the run this process still holds, if any."""
    if _open is not None:
        _open.close()


def _run(folder: RunFolder, recipe: Recipe, reward: Any, *, report: bool, fresh: bool) -> Run:
    """Build the session, train, finish; on any way out nothing is lost and memory is given back.

    A notebook keeps the last traceback; its frames would keep the model, so they are emptied where
    they say nothing: after an interrupt and after a user's mistake.
    """
    with Interrupts() as interrupts, _screen(folder, recipe, report) as screen:
        screen.status(f"loading {recipe.model}")
        with _folder_removed_on_error(folder, fresh):
            build = Session if fresh else _fresh_session
            session = build(recipe, folder, reward, screen.message)
        if not fresh:
            _restore(session, screen)
        run = Run(folder, recipe, session)
        screen.message(f"run folder: {folder.path}")
        try:
            _train(run, interrupts, screen)
        except BaseException as error:
            _save_what_there_is(run, interrupts, screen, error)
            run.close()
            if isinstance(error, (KeyboardInterrupt, QerlError)):
                traceback.clear_frames(error.__traceback__)
            raise
    if report:
        show(final_report(run))
    return run


def _restore(session: Session, screen: Screen) -> None:
    """Continue from the newest checkpoint, or close the session: it holds neither run's state."""
    checkpoint = latest(session.folder.checkpoints)
    assert checkpoint is not None
    try:
        session.restore(checkpoint)
    except BaseException:
        session.close()
        raise
    atomic_write(session.folder.recipe, session.recipe.to_yaml())
    screen.message(f"resumed from {checkpoint}")


def _train(run: Run, interrupts: Interrupts, screen: Screen) -> None:
    s = run.session
    if run.recipe.eval.at_start and s.progress.before is None:
        before, _ = s.evaluate(_eval_progress(screen, "evaluating the base"))
        s.progress.before = before.as_dict()
        screen.message(f"before training: {accuracy_line(s.progress.before)}")
    screen.status(f"comparing sampler and trainer, then step {s.progress.step + 1}")
    run_steps(s, interrupts, screen.step)
    after = None
    if run.recipe.eval.at_end:
        after, run.samples = s.evaluate(_eval_progress(screen, "evaluating the result"))
    with interrupts.critical():
        _finish(run, after)


def _finish(run: Run, after: EvalResult | None) -> None:
    """Check the base, then write checkpoint, adapter and summary."""
    s, recipe, p = run.session, run.recipe, run.session.progress
    sha = _check_base(s.policy, p.base_sha256)
    if after is not None and recipe.save.best and after.accuracy > p.best_accuracy:
        p.best_accuracy = after.accuracy
        s.save_adapter(run.folder.best)
    s.save()
    s.save_adapter(run.folder.adapter)
    run.summary = build_summary(
        task=s.task.name,
        seed=recipe.seed,
        steps=p.step,
        before=p.before,
        after=after.as_dict() if after else None,
        seconds=s.seconds(),
        peak_bytes=s.meter.peak_bytes(),
        base_sha256=(p.base_sha256, sha),
        adapter=run.folder.adapter,
        skipped_updates=p.skipped_updates,
    )
    write_json(run.folder.summary, run.summary)


def _check_base(policy: Policy, before: str) -> str:
    """SHA-256 of the frozen base, which must be `before`, and so must its unpacked copies.

    On a CPU products use those copies: the hash of the packed weights alone would prove nothing.
    """
    sha = base_sha256(policy.network)
    assert sha == before, "the frozen base has changed during the run"
    changed = ops.verify_cache()
    tensors = [*policy.network.named_parameters(), *policy.network.named_buffers()]
    names = [name for name, tensor in tensors if any(tensor is c for c in changed)]
    assert not changed, f"{len(changed)} unpacked weights have changed during the run: {names[:3]}"
    return sha


def _save_what_there_is(
    run: Run, interrupts: Interrupts, screen: Screen, error: BaseException
) -> None:
    """On an interrupt or a user's mistake in mid-run: save the last step done, say how to go on.

    An error of ours is not answered by writing files from a state that may be wrong: the newest
    checkpoint is named instead.
    """
    s = run.session
    how = f"Go on with:\n  qerl resume {shlex.quote(str(run.folder.path))}"
    if not isinstance(error, (KeyboardInterrupt, QerlError)):
        newest = latest(run.folder.checkpoints)
        where = f"the newest checkpoint is {newest}. {how}" if newest else "there is no checkpoint"
        screen.message(f"{type(error).__name__} after step {s.progress.step}; {where}")
        return
    if s.progress.step == 0 and isinstance(error, QerlError):
        return
    with contextlib.suppress(KeyboardInterrupt), interrupts.critical():
        s.save()
        s.save_adapter(run.folder.adapter)
    screen.message(f"stopped after step {s.progress.step}; everything is saved. {how}")


def final_report(run: Run) -> RenderableType:
    """The table printed at the end."""
    return render(
        run.summary,
        run.folder.path,
        base=run.session.policy.base.serve,
        rank=run.recipe.lora.largest_rank,
        name=run.recipe.name,
        sample_rows=samples(run.samples),
    )


def accuracy_line(result: dict[str, Any]) -> str:
    low, high = result["ci95"]
    interval = f"95% interval {low:.1%} to {high:.1%}"
    return f"{result['accuracy']:.1%} correct ({interval}, n = {result['n']})"


def _eval_progress(screen: Screen, what: str) -> Callable[[int], None]:
    done = 0

    def heard(tokens: int) -> None:
        nonlocal done
        done += tokens
        screen.status(f"{what}: {done} tokens")

    return heard


@contextlib.contextmanager
def _screen(folder: RunFolder, recipe: Recipe, report: bool) -> Iterator[Screen]:
    """The screen of a run, or one that writes nowhere; other libraries' talk goes to log.txt."""
    with contextlib.ExitStack() as stack:
        if report:
            file, live = None, None
        else:
            file, live = stack.enter_context(open(os.devnull, "w")), False
        stack.enter_context(quiet_third_party(folder.log))
        yield stack.enter_context(Screen(recipe.train.steps, file=file, live=live))


@contextlib.contextmanager
def _folder_removed_on_error(folder: RunFolder, fresh: bool) -> Iterator[None]:
    """A run that could not even be built leaves no folder behind."""
    try:
        yield
    except BaseException:
        if fresh:
            shutil.rmtree(folder.path)
        raise
