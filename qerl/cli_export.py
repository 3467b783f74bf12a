"""Taking a run's result away: `qerl export`, as an adapter or merged, to a folder or to the Hub.

As in `qerl.cli_train`, every import that brings torch is inside the command, under `quiet`.
"""

from __future__ import annotations

import json as json_module
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from qerl.cli_options import Best, Json, RunArgument
from qerl.cli_output import Output, quiet
from qerl.cli_run import accuracy_text, counting
from qerl.errors import QerlError
from qerl.files import PARTIAL, check_writable
from qerl.run_folder import RunFolder

if TYPE_CHECKING:
    from qerl.export_merged import Merged


class Merge(StrEnum):
    """The formats that an adapter can be merged into."""

    bf16 = "bf16"
    nvfp4 = "nvfp4"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asks for."""

    folder: RunFolder
    which: Literal["last", "best"]
    merge: Merge | None
    allow_loss: bool
    budget: float
    base_model: str | None

    @property
    def default_name(self) -> str:
        kind = "adapter" if self.merge is None else f"merged-{self.merge.value}"
        return f"{self.folder.name}-{kind}{'-best' if self.which == 'best' else ''}"


@dataclass(frozen=True, slots=True)
class Push:
    """Where to, and how. scored: whether the card gives the score on the 16-bit base."""

    repo: str
    private: bool
    dry_run: bool
    scored: bool


def export(
    run: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="New folder. Default: ./<run>-adapter"),
    ] = None,
    best: Best = False,
    merge: Annotated[
        Merge | None,
        typer.Option("--merge", help="Merge the adapter into its base, in this format."),
    ] = None,
    allow_loss: Annotated[
        bool,
        typer.Option("--allow-loss", help="Keep a merged model that lost over 10% of the gain."),
    ] = False,
    budget: Annotated[
        float,
        typer.Option(
            "--bf16-budget",
            min=0.0,
            max=1.0,
            help="--merge nvfp4: share of the weights that may stay bf16 where it helps.",
        ),
    ] = 0.1,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model",
            metavar="OWNER/NAME",
            help="The base's Hub id, for an adapter trained on a local folder.",
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="USER/NAME", help="Upload to the Hugging Face Hub."),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="--push: make the repository private.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="--push: write the folder that would be pushed, no more."),
    ] = False,
    no_score: Annotated[
        bool,
        typer.Option("--no-score", help="--push: do not score the adapter on the 16-bit base."),
    ] = False,
    json: Json = None,
) -> None:
    """Take a run's result away: its adapter, or a merged model.

    An adapter is copied and checked; peft, vLLM and the Hugging Face Hub understand it.
    A merged model is scored as it lies on the disk, beside the base and the adapter. One that
    keeps less than 90% of the gain is an error, and is not left there. Merging into bf16 keeps all
    of it; into NVFP4, layers that lose most stay bf16, within --bf16-budget.
    --push uploads either with a model card. It logs in as `hf auth login` or HF_TOKEN says, and
    may be repeated: what has arrived is not sent twice.
    For GGUF, merge into bf16 and give the folder to llama.cpp's convert_hf_to_gguf.

    \b
    qerl export latest -o my-adapter
    qerl export latest --best
    qerl export latest --merge bf16 -o my-model
    qerl export latest --push me/my-adapter --dry-run
    """
    from qerl.run_folder import find_run

    given = {"--private": private, "--dry-run": dry_run, "--no-score": no_score}
    if push is None and any(given.values()):
        option = next(name for name, value in given.items() if value)
        raise QerlError(f"{option}: it belongs to --push; add --push USER/NAME")
    if merge is not None and push is None and base_model is not None:
        raise QerlError("--base-model: a merged model has no base to load; leave it out")
    if merge is None and allow_loss:
        raise QerlError("--allow-loss: only a merged model can lose; add --merge bf16 or nvfp4")
    with Output(json) as out:
        wish = Wish(
            find_run(run), "best" if best else "last", merge, allow_loss, budget, base_model
        )
        if base_model is not None:
            _check_base(wish, out)
        if push is not None:
            _push(wish, Push(push, private, dry_run, not no_score), output, out)
            return
        target = output or Path(wish.default_name)
        check_writable("--output", target.expanduser())
        if merge is None:
            _adapter(wish, target, out)
        else:
            made = _merged(wish, target, out)
            out.say(f"{made.path}: {made.bytes:,} bytes, scored")
            out.say(f"\nServe it with vLLM\n  vllm serve {made.path}")
            out.report(made.as_dict())


def _check_base(wish: Wish, out: Output) -> None:
    from qerl.base_name import check_base_id
    from qerl.config import Recipe

    assert wish.base_model is not None
    with quiet():
        check_base_id(wish.base_model, Recipe.load(wish.folder.recipe).model, out.note)


def _adapter(wish: Wish, target: Path, out: Output) -> None:
    with quiet():
        from qerl.export import export_adapter

        made = export_adapter(
            wish.folder.path, target, which=wish.which, base_model=wish.base_model
        )
    out.say(f"{made.path}: {made.modules} adapted modules, {made.bytes:,} bytes, checked")
    if serve := _serve_line(made.path):
        out.say(f"\nServe it with vLLM\n  {serve}")
    out.report({"path": str(made.path), "modules": made.modules, "bytes": made.bytes})


def _serve_line(adapter: Path) -> str | None:
    """The `vllm serve` command for an adapter folder; None for a rank that vLLM does not serve."""
    from qerl.report import VLLM_RANKS, serve_command

    config = json_module.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    if rank > VLLM_RANKS[-1]:
        return None
    return serve_command(config["base_model_name_or_path"], rank, adapter.name, adapter)


def _merged(wish: Wish, target: Path, out: Output) -> Merged:
    """A merged model at `target`; its scores are printed and reported also when it is refused."""
    assert wish.merge is not None
    with quiet():
        from qerl.export_merged import LossError, export_merged

        try:
            with counting(f"merging {wish.folder.path}") as heard:
                made = export_merged(
                    wish.folder.path,
                    target,
                    method=wish.merge.value,
                    which=wish.which,
                    allow_loss=wish.allow_loss,
                    budget=wish.budget,
                    say=out.note,
                    progress=heard,
                )
        except LossError as error:
            _say_scores(error.merged, out)
            out.report({**error.merged.as_dict(), "path": None})
            raise
    _say_scores(made, out)
    return made


def _say_scores(made: Merged, out: Output) -> None:
    rows = [("base", made.base), ("adapter", made.adapter), ("export", made.export)]
    for name, score in rows:
        distance = f"{score.distance:.3f} nats a token from the adapter"
        out.say(f"{name:8} {accuracy_text(score.result.as_dict())}, {distance}")
    by = "accuracy" if made.measure == "accuracy" else "distance (the gain is within chance)"
    wide = f"; {len(made.kept)} layers stayed bf16" if made.kept else ""
    out.say(f"kept {made.share:.0%} of the gain, by {by}{wide}")


def _push(wish: Wish, to: Push, output: Path | None, out: Output) -> None:
    """Prepare the folder (kept where -o or --dry-run asks for it), then upload it."""
    with quiet():
        from qerl.hub import check_repo

        check_repo(to.repo, login=not to.dry_run)
    target = output or (Path(f"{wish.default_name}-hub") if to.dry_run else None)
    if target is not None:
        check_writable("--output", target.expanduser())
    with _space(target, wish.folder) as (made_in, prepared):
        rows: dict[str, Any] = {}
        merged = None
        if wish.merge is not None:
            merged = made_in / wish.default_name
            made = _merged(wish, merged, out)
            rows[f"merged in {wish.merge.value}"] = made.export.result.as_dict()
        elif to.scored:
            rows |= _on_wide_base(wish, out)
        with quiet():
            from qerl.hub import prepare, push

            prepare(
                wish.folder.path,
                prepared,
                which=wish.which,
                merged=merged,
                rows=rows,
                repo=to.repo,
                base_model=wish.base_model,
                say=out.note,
            )
            url = None
            if not to.dry_run:
                url = push(prepared, to.repo, private=to.private, say=out.note)
        files = sorted(file.name for file in prepared.iterdir())
        if target is not None:
            out.say(f"{prepared}: {', '.join(files)}")
        out.say(f"pushed: {url}" if url else "nothing was pushed (--dry-run)")
        kept = None if target is None else str(prepared)
        out.report({"url": url, "repo": to.repo, "path": kept, "files": files, "scores": rows})


@contextmanager
def _space(target: Path | None, folder: RunFolder) -> Iterator[tuple[Path, Path]]:
    """A folder to merge in, gone afterwards, and the place of the folder that is pushed."""
    beside = folder.path if target is None else target.expanduser().absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".export.", suffix=PARTIAL, dir=beside))
    try:
        yield work, target.expanduser() if target is not None else work / "hub"
    finally:
        shutil.rmtree(work)


def _on_wide_base(wish: Wish, out: Output) -> dict[str, Any]:
    """The adapter's score on the 16-bit model that its card names, which was not trained on."""
    with quiet(), counting("scoring the adapter on its 16-bit base") as heard:
        from qerl.rescore import score_on_source

        found = score_on_source(wish.folder, wish.which, say=out.note, progress=heard)
    if found is None:
        return {}
    label, result = found
    label = wish.base_model or label  # the card names it by its Hub id
    out.say(f"on {label} in 16 bits: {accuracy_text(result.as_dict())}")
    return {label: result.as_dict()}
