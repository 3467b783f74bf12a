"""`qerl export --merge`: the merged model is written, loaded back and scored before it appears.

A merged model that acts untrained has left other tools without an error. Here the folder takes its
name only after the run's own evaluator has scored it, as it is on the disk, beside the base and
the adapter; one that keeps too little of the gain is not left there unless that is asked for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qerl.errors import QerlError
from qerl.export import Reader, check_adapter
from qerl.files import atomic_dir, check_writable
from qerl.merge import PARTS, Merge
from qerl.quantize.nvfp4 import scale_groups
from qerl.quantize.search import Packed
from qerl.requantize import Loss, live_packed, requantize
from qerl.rescore import (
    Measure,
    Score,
    batches,
    measure_of,
    open_session,
    refer,
    score,
    share_kept,
)
from qerl.run_folder import RunFolder, find_run
from qerl.session import Session
from qerl.types import Group, SamplingParams

Method = Literal["bf16", "nvfp4"]
Say = Callable[[str], None]

LEAST = 0.9  # share of the gain that an export must keep
BUDGET = 0.1  # of the NVFP4 layers' weights may stay bf16
STEPS = (0.0, 0.25, 0.5, 1.0)  # shares of the budget that are tried, one after another
CALIBRATION_PROMPTS = 128  # training prompts whose answers say what the layers are fed with


@dataclass(frozen=True, slots=True)
class Merged:
    """An export and what it scored. share: what is kept of the gain, by `measure`; kept: layers
    that stayed bf16 in an NVFP4 export; bytes: size of the weights."""

    path: Path
    method: Method
    base: Score
    adapter: Score
    export: Score
    kept: tuple[str, ...]
    bytes: int

    @property
    def measure(self) -> Measure:
        return measure_of(self.base, self.adapter)

    @property
    def share(self) -> float:
        return share_kept(self.base, self.adapter, self.export)

    def as_dict(self) -> dict[str, Any]:
        scores = {"base": self.base, "adapter": self.adapter, "export": self.export}
        return {
            "path": str(self.path),
            "merge": self.method,
            **{name: found.as_dict() for name, found in scores.items()},
            "measure": self.measure,
            "share_kept": self.share,
            "kept_bf16": list(self.kept),
            "bytes": self.bytes,
        }


class LossError(QerlError):
    """The export keeps too little; `merged` says what it scored. Nothing is left on the disk."""

    def __init__(self, merged: Merged) -> None:
        self.merged = merged
        better = (
            "use --merge bf16 or serve the adapter unmerged"
            if merged.method == "nvfp4"
            else "serve the adapter unmerged"
        )
        super().__init__(
            f"merge: the {merged.method} export keeps {merged.share:.0%} of the gain, less than "
            f"{LEAST:.0%}, and was removed; {better}, or keep it all the same with --allow-loss"
        )


def export_merged(
    run: str | Path,
    out: str | Path,
    *,
    method: Method,
    which: Literal["last", "best"] = "last",
    allow_loss: bool = False,
    budget: float = BUDGET,
    reward: Any = None,
    say: Say = lambda text: None,
    progress: Callable[[int], None] | None = None,
) -> Merged:
    """Merge a run's adapter into its base, write it to the new folder `out` and score it there.

    method: "bf16", or "nvfp4" with up to `budget` (0 … 1) of the NVFP4 layers' weights left in
    bf16 where less does not keep `LEAST` of the gain. which: the last adapter or the best.
    reward: as for `qerl.train`. say: hears of each stage. progress: of tokens evaluated.
    Raises LossError when less than `LEAST` is kept, unless allow_loss; QerlError when the run has
    no such adapter, it was never trained, the base cannot be merged into, or `out` is not empty or
    cannot be written.
    """
    folder, out = find_run(run), Path(out).expanduser()
    adapter = folder.best if which == "best" else folder.adapter
    check_adapter(adapter)
    check_writable("output:", out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise QerlError(f"output: '{out}' exists and is not empty; name another folder")
    if not 0 <= budget <= 1:
        raise QerlError(f"budget: {budget:g} is no share of the weights; give one from 0 to 1")
    with atomic_dir(out) as partial:
        job = _Job(folder, adapter, method, reward, say, progress)
        made = job.run(partial, budget)
        merged = Merged(out, method, job.base, job.reference.score, *made, _weight_bytes(partial))
        if merged.share < LEAST and not allow_loss:
            raise LossError(merged)
    return merged


class _Job:
    """One export. After `run`: reference (the adapter's answers and score) and base (its score)."""

    def __init__(
        self,
        folder: RunFolder,
        adapter: Path,
        method: Method,
        reward: Any,
        say: Say,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.folder, self.adapter, self.method = folder, adapter, method
        self.reward, self.say, self.progress = reward, say, progress

    def run(self, partial: Path, budget: float) -> tuple[Score, tuple[str, ...]]:
        """Write the export into `partial`; its score, and the layers that stayed bf16."""
        session = open_session(self.folder, adapter=self.adapter, reward=self.reward, say=self.say)
        with _closing(session):
            checkpoint = session.policy.base.checkpoint
            merge = Merge(checkpoint, self.adapter, live_packed(session.policy))
            if merge.delta.is_zero():
                raise QerlError("merge: every B of the adapter is zero: there is nothing to merge")
            self._score_run(session)
            with merge:
                self.say(f"merging into {checkpoint}")
                if self.method == "bf16":
                    merge.write_bf16(partial)
                    losses = []
                else:
                    losses = self._write_nvfp4(merge, session, partial)
        if self.method == "bf16":
            return self._score_export(partial), ()
        return self._within_budget(merge, losses, partial, budget)

    def _score_run(self, session: Session) -> None:
        self.say("scoring the adapter and the base")
        self.reference = refer(session, self.progress)
        with session.policy.adapter_disabled():
            self.base = score(session, self.reference, self.progress)

    def _score_export(self, folder: Path) -> Score:
        self.say("scoring the export")
        session = open_session(self.folder, base=str(folder), reward=self.reward, say=self.say)
        with _closing(session):
            return score(session, self.reference, self.progress)

    # ------------------------------------------------------------------------------------- NVFP4

    def _write_nvfp4(self, merge: Merge, session: Session, partial: Path) -> list[Loss]:
        """The export with every layer in NVFP4, in the first attempt's folder."""
        fed = batches(session, self._answers(session))
        self.say("requantizing the merged layers")
        losses: list[Loss] = []

        def packed() -> Iterator[tuple[str, Packed]]:
            for layer in requantize(merge, session.policy, fed):
                losses.append(Loss(layer.name, layer.loss, layer.weights))
                yield layer.name, layer.packed

        first = _attempt(partial, 0)
        first.mkdir()
        merge.write_nvfp4(first, packed())
        return losses

    def _answers(self, session: Session) -> list[Group]:
        """The adapter's greedy answers to training prompts: none that the export is scored on."""
        count = min(CALIBRATION_PROMPTS, len(session.stream.items))
        prompts, _ = session.stream.take(0, count)
        limit = session.recipe.rollout.max_completion_tokens
        params = SamplingParams(1, limit, 0.0, session.recipe.seed)
        return session.engine.sample(prompts, params, progress=self.progress)

    def _within_budget(
        self, merge: Merge, layers: list[Loss], partial: Path, budget: float
    ) -> tuple[Score, tuple[str, ...]]:
        """Layers of the largest loss go to bf16, more at each step, until enough is kept."""
        best: tuple[float, Path, Score, tuple[str, ...]] | None = None
        tried: set[str] | None = None
        for number, step in enumerate(STEPS):
            keep = worst_layers(layers, step * budget)
            if keep == tried:
                continue
            tried = keep
            attempt = _attempt(partial, number)
            if keep:
                self.say(f"keeping {len(keep)} layers in bf16")
                self._rewrite(merge, _attempt(partial, 0), attempt, keep)
            found = self._score_export(attempt)
            share = share_kept(self.base, self.reference.score, found)
            self.say(f"{share:.0%} of the gain is kept with {len(keep)} layers in bf16")
            if best is None or share > best[0]:
                best = (share, attempt, found, tuple(sorted(keep)))
            if share >= LEAST:
                break
        assert best is not None
        for file in best[1].iterdir():
            file.rename(partial / file.name)
        for attempt in partial.glob("attempt-*"):
            shutil.rmtree(attempt)
        return best[2], best[3]

    def _rewrite(self, merge: Merge, first: Path, attempt: Path, keep: set[str]) -> None:
        """The first attempt with some of its layers merged in bf16 instead."""
        attempt.mkdir()
        reader = Reader(first)
        with merge, reader.opened():
            ends = f".{PARTS[0]}"
            names = [name.removesuffix(ends) for name in reader.where if name.endswith(ends)]
            merge.write_nvfp4(
                attempt,
                (
                    (name, Packed(*(reader.tensor(f"{name}.{part}") for part in PARTS)))
                    for name in names
                    if name not in keep
                ),
            )


def worst_layers(layers: list[Loss], budget: float) -> set[str]:
    """Layers of the largest loss whose weights are at most `budget` (0 … 1) of them all.

    Layers that engines fuse stay together, and a group counts with its worst member.
    """
    by_name = {layer.name: layer for layer in layers}
    room = budget * sum(layer.weights for layer in layers)
    groups = [[by_name[name] for name in group] for group in scale_groups(by_name)]
    groups = [group for group in groups if any(layer.loss for layer in group)]
    keep: set[str] = set()
    for group in sorted(groups, key=lambda group: -max(layer.loss for layer in group)):
        size = sum(layer.weights for layer in group)
        if size <= room:
            room -= size
            keep |= {layer.name for layer in group}
    return keep


def _attempt(partial: Path, number: int) -> Path:
    return partial / f"attempt-{number}"


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@contextmanager
def _closing(session: Session) -> Iterator[Session]:
    """A session that gives its memory back at the end of the block."""
    try:
        yield session
    finally:
        session.close()
