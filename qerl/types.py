"""The values that flow between the rooms of the house; one type for each, and no tensor code.

Shape letters: P prompts, G group size, B = P·G completions, T tokens.

A step reads: `Prompt` -> engine -> `Group` (G `Completion`s) -> rewards and advantages filled in
-> packed micro-batches (`qerl.pack`) -> `LossOutput`. Token ids are made once, from the chat
template, and travel as ids: no text is ever tokenized again between sampling and training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a task, ready to sample from.

    index: position in the task's row order (identifies the row in logs and in random streams).
    messages: the conversation handed to the chat template, TRL's conversational format.
    text: the rendered template (what the model reads), for logs and rewards.
    token_ids: `text` as ids, with BOS handled once by the template or tokenizer.
    columns: every other column of the row; rewards receive them by name.
    """

    index: int
    messages: tuple[dict[str, str], ...]
    text: str
    token_ids: tuple[int, ...]
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Completion:
    """One sampled answer. The four lists run in parallel, one entry per sampled token.

    token_ids: sampled ids; a terminating EOS is included (it is trained on).
    logprobs: natural log-probability under the distribution really sampled (temperature included).
    entropies: entropy of that distribution, in nats.
    versions: adapter version (number of optimizer steps) that sampled each token.
    finish_reason: "stop" (an EOS id was sampled) or "length" (max_completion_tokens reached).
    text: decoded without special tokens.
    rewards: each reward function's value by name; None means "not applicable".
    reward: weighted sum of the applicable ones. advantage: filled in by `qerl.algo.advantage`.
    """

    token_ids: list[int]
    logprobs: list[float]
    entropies: list[float]
    versions: list[int]
    finish_reason: FinishReason
    text: str = ""
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0


@dataclass(slots=True)
class Group:
    """G completions of one prompt, with the noise level they were sampled under."""

    prompt: Prompt
    completions: list[Completion]
    sigma: float = 0.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. temperature 0 is greedy; seed keys a counter-based generator.

    The same (seed, request, position) gives the same draw whatever else is in the batch.
    """

    n: int
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0


@dataclass(slots=True)
class LossOutput:
    """A scalar to call backward on, and detached numbers to log (keys are metric names)."""

    loss: torch.Tensor
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What the evaluator found, over n prompts.

    accuracy: share of prompts whose greedy answer scores at least the task's `solved_at`.
    ci95: Wilson score interval of `accuracy` (lower, upper).
    """

    task: str
    accuracy: float
    mean_reward: float
    ci95: tuple[float, float]
    n: int
    mean_length: float = 0.0
    truncated: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy,
            "mean_reward": self.mean_reward,
            "ci95": list(self.ci95),
            "n": self.n,
        }
