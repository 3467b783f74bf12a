"""Scoring a run's result where it is going to be used: on another base, or merged into one.

The evaluator is the one of training: the same prompts, greedy, the same rewards. Beside the score
stands a distance that notices far smaller changes: the mean |difference| of log-probs, in nats a
token, on the answers the run's own adapter gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from qerl.config import Recipe
from qerl.model.load import quantization_of, resolve_model
from qerl.model.peft_folder import is_hub_id
from qerl.pack import MicroBatch, pack
from qerl.policy import Policy
from qerl.run_folder import RunFolder
from qerl.session import Session
from qerl.types import EvalResult, Group

Say = Callable[[str], None]
Measure = Literal["accuracy", "distance"]


@dataclass(frozen=True, slots=True)
class Score:
    """How good a model is: the evaluator's result, and its distance (nats a token) to the run's
    own adapter on that one's answers."""

    result: EvalResult
    distance: float

    def as_dict(self) -> dict[str, Any]:
        return {**self.result.as_dict(), "distance": self.distance}


@dataclass(frozen=True, slots=True)
class Reference:
    """The run's adapter on the run's base. logprobs: f64 [N] of all its answers' tokens."""

    score: Score
    groups: list[Group]
    logprobs: torch.Tensor


def open_session(
    folder: RunFolder,
    *,
    base: str | None = None,
    adapter: Path | None = None,
    reward: Any = None,
    say: Say = lambda text: None,
) -> Session:
    """The run's task and evaluator around a model; close it after use.

    base: a directory or Hub id to take in place of the recipe's model, as it is stored: quantized
    stays quantized, 16 bits stay 16 bits. adapter: a folder; null: the base alone.
    reward: as for `qerl.train`, for a run whose recipe names none.
    Raises QerlError when there is no such base, or the adapter does not fit it.
    """
    recipe = Recipe.load(folder.recipe).model_copy(deep=True)
    recipe.lora.init = None if adapter is None else str(adapter)
    if base is not None:
        directory, _ = resolve_model(base, say, recipe.trust_remote_code)
        recipe.model, recipe.rest = base, "keep"
        recipe.format = "nvfp4" if quantization_of(directory) else "bf16"
    return Session(recipe, folder, reward, say)


def score_on_source(
    folder: RunFolder,
    which: Literal["last", "best"],
    *,
    reward: Any = None,
    say: Say = lambda text: None,
    progress: Callable[[int], None] | None = None,
) -> tuple[str, EvalResult] | None:
    """The adapter's score on the 16-bit model its base was quantized from, and that one's name.

    The name is a Hub id where there is one. None where no other 16-bit model is known: the run
    trained on 16 bits, or its base was published quantized.
    """
    recipe = Recipe.load(folder.recipe)
    directory, name = resolve_model(recipe.model, say, recipe.trust_remote_code)
    if recipe.format == "bf16" or quantization_of(directory):
        return None
    adapter = folder.best if which == "best" else folder.adapter
    session = open_session(folder, base=recipe.model, adapter=adapter, reward=reward, say=say)
    try:
        result, _ = session.evaluate(progress)
    finally:
        session.close()
    return (name if is_hub_id(name) else Path(name).name), result


def refer(session: Session, progress: Callable[[int], None] | None = None) -> Reference:
    """Score the adapter that a session holds; everything else is measured against it."""
    result, groups = session.evaluate(progress)
    found = answer_logprobs(session.policy, batches(session, groups))
    return Reference(Score(result, 0.0), groups, found)


def score(
    session: Session, reference: Reference, progress: Callable[[int], None] | None = None
) -> Score:
    """Score another model on the same prompts, and its distance on the reference's answers."""
    result, _ = session.evaluate(progress)
    found = answer_logprobs(session.policy, batches(session, reference.groups))
    return Score(result, float((found - reference.logprobs).abs().mean()))


def batches(session: Session, groups: Sequence[Group]) -> list[MicroBatch]:
    """Answers as the trainer packs them."""
    return pack(groups, session.recipe.train.tokens_per_micro_batch, session.policy.device)


@torch.no_grad()
def answer_logprobs(policy: Policy, packed: Sequence[MicroBatch]) -> torch.Tensor:
    """Log-probs f64 [N] of the answers' tokens at temperature 1, in packed order."""
    policy.model.eval()  # without LoRA dropout
    return torch.cat([policy.logprobs(batch, 1.0)[0].double().cpu() for batch in packed])


def measure_of(base: Score, adapter: Score) -> Measure:
    """What a loss can be seen by: accuracy where the adapter's gain is beyond chance.

    Two intervals that overlap make the gain one of a few prompts, and the share of it that is kept
    a matter of luck; the distance is then the better witness.
    """
    apart = adapter.result.ci95[0] > base.result.ci95[1]
    return "accuracy" if apart else "distance"


def share_kept(base: Score, adapter: Score, export: Score) -> float:
    """The share of what the adapter brought that an export still has; 1 is all of it.

    By accuracy: (export - base) / (adapter - base). By distance: 1 - export's / base's, so that 1
    is the adapter itself and 0 as far from it as the base.
    """
    if measure_of(base, adapter) == "accuracy":
        gain = adapter.result.accuracy - base.result.accuracy
        return (export.result.accuracy - base.result.accuracy) / gain
    assert base.distance > 0, "an adapter that changes nothing is refused before"
    return 1 - export.distance / base.distance
