"""Checks of the loaded policy: the gate, and what its first answers look like."""

from __future__ import annotations

import math

from qerl.doctor.context import PROBES, Context
from qerl.doctor.frame import Finding, check

FEW_LEARN = 0.75  # share of groups without variance
MANY_CUT = 0.2  # share of completions cut by the limit


@check("load", "model")
def load(context: Context) -> Finding:
    """The base loads in the recipe's format, with the adapter around it."""
    from qerl.optim import adapter_parameters

    policy = context.policy
    adapter = sum(p.numel() for p in adapter_parameters(policy.model).values())
    name = str(policy.dtype).removeprefix("torch.")
    data = {"checkpoint": str(policy.base.checkpoint), "adapter_parameters": adapter}
    text = (
        f"{context.recipe.format} base on {policy.device} in {name}; {adapter:,} trained parameters"
    )
    return Finding("ok", text, data=data)


@check("gate", "model")
def gate(context: Context) -> Finding:
    """Sampler and trainer give the same log-probs, and the adapter moves them."""
    from qerl.rollout.gate import run_gate

    prompts = context.fitting(context.held_out, PROBES)
    found = run_gate(context.engine, context.policy, prompts, context.recipe.rollout.temperature)
    parity = found.parity_canary
    changed = not math.isfinite(found.moved)  # another token was sampled
    moved = "changed a sampled token" if changed else f"moved log-probs by {found.moved:.2g}"
    text = (
        f"sampler and trainer differ by {parity.max_abs:.1g} at most on {parity.n} tokens "
        f"(KL {parity.kl:.1g}); the canary adapter {moved}"
    )
    data = found.as_dict() | {"moved": None if changed else found.moved}
    return Finding("ok", text, data=data)


@check("base_accuracy", "model")
def base_accuracy(context: Context) -> Finding:
    """What the untrained policy already gets right, greedily, on a few held-out prompts."""
    from qerl.evaluate import evaluate

    prompts = context.fitting(context.held_out, PROBES)
    result, _ = evaluate(context.engine, context.task, prompts, context.recipe)
    low, high = result.ci95
    text = (
        f"{result.accuracy:.0%} of {result.n} held-out prompts right before training "
        f"(95% interval {low:.0%} to {high:.0%}), mean reward {result.mean_reward:.2f}"
    )
    if result.accuracy == 1:
        return Finding("warn", text, "there may be nothing left to learn", result.as_dict())
    return Finding("ok", text, data=result.as_dict())


@check("zero_variance", "model")
def zero_variance(context: Context) -> Finding:
    """Some groups have answers of different reward: only from those is anything learnt."""
    import torch

    from qerl.algo.advantage import zero_variance as without

    rewards_PG = torch.tensor([[c.reward for c in g.completions] for g in context.samples])
    equal, groups = int(without(rewards_PG).sum()), len(rewards_PG)
    data = {"share": equal / groups, "groups": groups, "mean_reward": float(rewards_PG.mean())}
    text = (
        f"{equal} of {groups} groups have equal rewards throughout "
        f"(mean reward {data['mean_reward']:.2f})"
    )
    fix = "easier or mixed prompts, a larger rollout.group_size, or a reward with partial credit"
    if equal == groups:
        return Finding("fail", f"{text}: a step would learn nothing", fix, data)
    if data["share"] >= FEW_LEARN:
        return Finding("warn", text, fix, data)
    return Finding("ok", text, data=data)


@check("truncated", "model")
def truncated(context: Context) -> Finding:
    """Answers end by themselves within rollout.max_completion_tokens."""
    done = [c for group in context.samples for c in group.completions]
    cut = sum(c.finish_reason == "length" for c in done)
    limit = context.recipe.rollout.max_completion_tokens
    data = {"share": cut / len(done), "n": len(done)}
    text = f"{cut} of {len(done)} sampled answers are cut at {limit} tokens"
    fix = "raise rollout.max_completion_tokens, or ask for shorter answers in task.system"
    if cut == len(done) and context.recipe.algorithm.mask_truncated:
        return Finding("fail", f"{text}, and algorithm.mask_truncated leaves them out", fix, data)
    if data["share"] > MANY_CUT:
        return Finding("warn", text, fix, data)
    return Finding("ok", text, data=data)
