"""The loop: sample → reward → advantage → loss → step → log → save. Read it from `run_steps` down.

GRPO (arXiv 2402.03300) with DAPO's clip and token mean (2503.14476) on a LoRA adapter, the base
frozen in NVFP4, exploration noise as QeRL's (2510.11696). Left out of the textbook: a reference
model and its KL penalty (DAPO and QeRL have none), a critic, several updates per rollout: with one
the ratio to the clip's anchor is exactly 1, so the clip is in place and never acts; what differs
between sampler and trainer is corrected by the importance weight.

Every random draw of a step is a function of (seed, step), so a step can be broken off anywhere and
done again. Shapes: P prompts, G group, N trained tokens of a micro-batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch

from qerl.algo.advantage import advantages, zero_variance
from qerl.algo.loss import Totals, mismatch_metrics, policy_loss
from qerl.errors import QerlError
from qerl.interrupt import Interrupts
from qerl.metrics import step_metrics
from qerl.noise import sigma_at
from qerl.optim import adapter_parameters, clip_gradients, lr_at
from qerl.pack import MicroBatch, pack
from qerl.reward import score_groups
from qerl.rollout.gate import run_gate
from qerl.session import Session
from qerl.types import Completion, Group, SamplingParams

Report = Callable[[int, dict[str, float]], None]
BAD_UPDATES = 5
CLIP_METRICS = ("clip_ratio/low_mean", "clip_ratio/high_mean")


def run_steps(s: Session, interrupts: Interrupts, report: Report) -> None:
    """Train from `s.progress.step` to the last step, the time limit, or an interrupt."""
    r = s.recipe
    with s.timer("gate"), interrupts.critical():  # the canary must not be left in the adapter
        gate = run_gate(s.engine, s.policy, s.eval_prompts, r.rollout.temperature, gate_noise(s))
    s.metrics.write(s.progress.step, {f"qerl/gate/{k}": v for k, v in gate.numbers().items()})
    if s.evaluation_due():  # the last sitting was stopped in it
        evaluate_and_keep_best(s, interrupts)
    for step in range(s.progress.step + 1, r.train.steps + 1):
        s.timer.lap()  # evaluations and saves in between are no part of a step's time
        groups, cursor = sample(s, step)
        reward(s, groups)
        s.optimizer.zero_grad(set_to_none=True)
        metrics = accumulate(s, step, groups)
        with interrupts.critical():
            metrics |= update(s, step)
            s.progress.skipped_updates += math.isnan(metrics["grad_norm"])
            finish_step(s, step, cursor, groups, metrics, report)
            if r.save.every and step % r.save.every == 0:
                s.save()
        if s.evaluation_due():
            evaluate_and_keep_best(s, interrupts)
        if r.train.max_hours is not None and s.elapsed > 3600 * r.train.max_hours:
            break


def sample(s: Session, step: int) -> tuple[list[Group], int]:
    """P groups of G completions under the step's noise, and the data cursor after them."""
    r = s.recipe.rollout
    prompts, cursor = s.stream.take(s.progress.cursor, r.prompts_per_step)
    params = SamplingParams(
        r.group_size, r.max_completion_tokens, r.temperature, stream_seed(s.recipe.seed, step)
    )
    sigma, _ = sigma_at(step, s.recipe.train.steps, s.recipe.noise)
    with s.timer("rollout"), noise(s, step):
        groups = s.engine.sample(prompts, params)
    for group in groups:
        group.sigma = sigma
    return groups, cursor


def reward(s: Session, groups: list[Group]) -> None:
    """Fill in rewards and advantages."""
    with s.timer("reward"):
        score_groups(groups, s.task.rewards)
    a = s.recipe.algorithm
    rewards_PG = torch.tensor([[c.reward for c in g.completions] for g in groups])
    advantages_PG = advantages(rewards_PG, a.scale_rewards, a.baseline)
    for group, row in zip(groups, advantages_PG.tolist(), strict=True):
        for completion, value in zip(group.completions, row, strict=True):
            completion.advantage = value


def accumulate(s: Session, step: int, groups: list[Group]) -> dict[str, float]:
    """Gradients of the step's loss, micro-batch by micro-batch."""
    a, policy = s.recipe.algorithm, s.policy
    kept = trained_groups(s, groups)
    batches = pack(kept, s.recipe.train.tokens_per_micro_batch, policy.device)
    totals = step_totals(s, groups, len(batches))
    credit = s.recipe.noise.credit if s.noise is not None else "shared"
    shared = credit == "shared"
    losses, pairs, clipped = [], [], []
    for number, batch in enumerate(batches):
        with s.timer("forward"), noise(s, step, shared), dropout_seed(s, step, number):
            policy.model.train()
            logp, _ = policy.logprobs(batch, s.recipe.rollout.temperature)
            recorded, mask = batch.recorded(), token_mask(s, batch)
            out = policy_loss(
                logp,
                recorded,
                logp.detach(),  # one update per rollout: the clip's anchor is the policy itself
                batch.per_token([c.advantage for c in batch.completions]),
                batch.row,
                mask,
                totals=totals,
                loss=a.loss,
                clip_low=a.clip_low,
                clip_high=a.clip_high,
                correction="none" if credit == "uncorrected" else a.correction,
                correction_max=a.correction_max,
            )
            if not logp.requires_grad:
                raise QerlError(
                    "lora.targets: the output does not depend on the adapter at all; "
                    "name modules of the language model"
                )
            # Inside the noise: activation checkpointing runs the forward again in backward.
            with s.timer("backward"):
                out.loss.backward()
        losses.append(out.loss.detach())
        pairs.append((logp.detach()[mask], recorded[mask]))
        clipped.append({k: out.metrics[k] * len(pairs[-1][0]) for k in CLIP_METRICS})
    metrics = {"loss": float(sum(losses)), "qerl/trained_groups": float(len(kept))}
    if pairs:
        logp, recorded = (torch.cat(side) for side in zip(*pairs, strict=True))
        metrics |= mismatch_metrics(logp, recorded)
        metrics |= {k: sum(part[k] for part in clipped) / len(logp) for k in CLIP_METRICS}
    return metrics


def step_totals(s: Session, groups: list[Group], micro_batches: int) -> Totals:
    """The loss's divisors, over all groups of the step.

    Groups left out for want of variance count too: that saves work and changes no gradient.
    """
    r = s.recipe.rollout
    lengths = [len(c.token_ids) * is_trained(s, c) for g in groups for c in g.completions]
    budget = r.prompts_per_step * r.group_size * r.max_completion_tokens
    return Totals.count(lengths, budget, micro_batches)


def trained_groups(s: Session, groups: list[Group]) -> list[Group]:
    """Groups with something to learn from; the rest have a gradient of exactly zero."""
    rewards_PG = torch.tensor([[c.reward for c in g.completions] for g in groups])
    useless = zero_variance(rewards_PG) & s.recipe.algorithm.skip_zero_variance
    kept = [g for g, skip in zip(groups, useless.tolist(), strict=True) if not skip]
    return [g for g in kept if any(is_trained(s, c) for c in g.completions)]


def is_trained(s: Session, completion: Completion) -> bool:
    return not (s.recipe.algorithm.mask_truncated and completion.finish_reason == "length")


def token_mask(s: Session, batch: MicroBatch) -> torch.Tensor:
    """bool [N]: the same rule as in the totals, so numerator and denominator agree."""
    return batch.per_token([float(is_trained(s, c)) for c in batch.completions]).bool()


def update(s: Session, step: int) -> dict[str, float]:
    """Clip, step, count; a step without gradient or with a non-finite one changes nothing."""
    config = s.recipe.train
    parameters = adapter_parameters(s.policy.model)
    lr = lr_at(step, config, config.steps)
    metrics = {"learning_rate": lr, "grad_norm": 0.0, "qerl/skipped_step": 1.0}
    if not any(p.grad is not None and p.grad.any() for p in parameters.values()):
        return metrics
    with s.timer("optimizer"):
        check_gradients(s, parameters)
        metrics["grad_norm"] = norm = clip_gradients(parameters.values(), config.max_grad_norm)
        if not math.isfinite(norm):
            refuse_divergence(s, lr)
            return metrics | {"grad_norm": math.nan}
        s.progress.bad_in_a_row = 0
        for group in s.optimizer.param_groups:
            group["lr"] = lr
        s.optimizer.step()
    s.policy.version += 1
    s.engine.sync(s.policy.version)
    return metrics | {"qerl/skipped_step": 0.0}


def refuse_divergence(s: Session, lr: float) -> None:
    """One non-finite gradient may be bad luck; BAD_UPDATES in a row are a run that is lost."""
    s.progress.bad_in_a_row += 1
    if s.progress.bad_in_a_row >= BAD_UPDATES:
        raise QerlError(
            f"train.lr: gradients were not finite {BAD_UPDATES} steps in a row (learning rate "
            f"{lr:.2g}); lower train.lr or train.max_grad_norm"
        )


def check_gradients(s: Session, parameters: dict[str, torch.nn.Parameter]) -> None:
    """At the first update every B must have a gradient, at the second every A (B = 0 hides them).

    A matrix that gets none would never be trained, and nobody would notice.
    """
    if s.policy.version > 1 or s.recipe.lora.init is not None:
        return
    part = "lora_B" if s.policy.version == 0 else "lora_A"
    dead = [n for n, p in parameters.items() if part in n and (p.grad is None or not p.grad.any())]
    if dead:
        raise QerlError(
            f"lora.targets: no gradient reaches {len(dead)} adapter matrices, the first is "
            f"{dead[0]}; leave that module out of lora.targets"
        )


def finish_step(
    s: Session,
    step: int,
    cursor: int,
    groups: list[Group],
    metrics: dict[str, float],
    report: Report,
) -> None:
    """Count the step and write its lines."""
    p = s.progress
    seconds = s.timer.lap()
    numbers = step_metrics(
        groups,
        solved_at=s.task.solved_at,
        tokens_before=p.tokens,
        seconds=seconds,
        peak_bytes=s.meter.peak_bytes(),
    )
    p.step, p.cursor, p.version = step, cursor, s.policy.version
    p.tokens = int(numbers["num_tokens"])
    numbers |= metrics | {"qerl/version": float(p.version)}
    numbers["qerl/noise_stage"] = float(sigma_at(step, s.recipe.train.steps, s.recipe.noise)[1])
    s.metrics.write(step, numbers)
    s.completions.write(step, groups, s.recipe.output.log_completions)
    report(step, numbers)


def evaluate_and_keep_best(s: Session, interrupts: Interrupts) -> None:
    """Held-out accuracy now; the best adapter so far is kept in best/.

    The step's checkpoint, written before so that a failing evaluation loses no step, is written
    again: it must know of this evaluation. A new best one gets a checkpoint too, or a run resumed
    from an older one would take a worse adapter for the best.
    """
    result, _ = s.evaluate()
    save, p = s.recipe.save, s.progress
    with interrupts.critical():
        s.metrics.write(p.step, {f"eval/{k}": v for k, v in flat(result).items()})
        p.evaluated = p.step
        better = save.best and result.accuracy > p.best_accuracy
        if better:
            p.best_accuracy = result.accuracy
            s.save_adapter(s.folder.best)
        if (better and save.every) or s.folder.checkpoint(p.step).is_dir():
            s.save()


def flat(result: object) -> dict[str, float]:
    """The numbers of an EvalResult."""
    names = ("accuracy", "mean_reward", "mean_length", "truncated", "n")
    return {name: float(getattr(result, name)) for name in names}


def stream_seed(seed: int, step: int) -> int:
    """One sampling seed a step; the engine mixes it further."""
    return (seed << 32) + step


def noise(s: Session, step: int, on: bool = True) -> contextlib.AbstractContextManager[None]:
    """The model with the step's noise inside the block, and exactly clean after it."""
    sigma, _ = sigma_at(step, s.recipe.train.steps, s.recipe.noise)
    if s.noise is None or not on:
        return contextlib.nullcontext()
    return s.noise.applied(sigma, step)


def gate_noise(s: Session) -> contextlib.AbstractContextManager[None] | None:
    """The run's strongest noise, for the gate; a draw that no step uses."""
    return None if s.noise is None else s.noise.applied(s.recipe.noise.sigma_start, step=0)


@contextlib.contextmanager
def dropout_seed(s: Session, step: int, number: int) -> Iterator[None]:
    """LoRA dropout draws from the global generator: make it a function of the step too."""
    if s.recipe.lora.dropout == 0:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed((stream_seed(s.recipe.seed, step) * 1009 + number) % 2**63)
        yield
