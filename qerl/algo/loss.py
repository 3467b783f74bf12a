"""The policy loss of one packed micro-batch, on completion tokens only.

T: completion tokens of the micro-batch, packed one after another, no padding.
For each token t of completion i, with advantage A_i and log-probabilities of the same token under

    logp     the policy being trained (the only input with a gradient),
    old      the distribution that really sampled it, recorded while sampling,
    anchor   the policy that the clip holds on to, constant during the updates of one rollout,

    r_t = exp(logp_t - anchor_t)                        the ratio (PPO, arXiv 1707.06347, §3)
    w_t = min(exp(anchor_t - old_t), correction_max)    constant: corrects for the sampler
    L_t = -w_t min(r_t A_i, clip(r_t, 1 - clip_low, 1 + clip_high) A_i)
                       PPO, eq. 7; GRPO, 2402.03300, eq. 3; with two bounds DAPO, 2503.14476, eq. 10

    loss = sum_t c_t L_t   with c_t by `loss`:
      dapo     1 / tokens of the step                            DAPO, eq. 12
      grpo     1 / (tokens of completion i * completions)        GRPO, eq. 3
      dr_grpo  1 / (P G max_completion_tokens), a constant       Dr. GRPO, arXiv 2503.20783, §3.2
      bnpo     1 / (tokens of this micro-batch * micro-batches)  TRL's loss_type="bnpo"

Divisors belong to the whole step, so micro-batch losses *add up* to the step's loss, however the
step is split. Only bnpo depends on the split, by its definition.

w_t is truncated importance sampling (Ionides 2008; for mismatched samplers Yao et al. 2025, "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training"); "mask" drops such tokens.

Left out: a KL penalty to a reference policy and an entropy bonus (neither DAPO nor QeRL has them),
and the dual clip of PPO variants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from qerl.types import LossOutput

LossName = Literal["dapo", "grpo", "dr_grpo", "bnpo"]
Correction = Literal["truncate", "mask", "none"]

# exp(20) is far past any clip; without the bound, exp overflows and 0 * inf makes gradients NaN.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Totals:
    """What the whole optimizer step holds; the divisors of the losses.

    tokens: trained tokens. completions: completions with at least one of them.
    budget: P * G * max_completion_tokens. micro_batches: how many make up the step.
    """

    tokens: int
    completions: int
    budget: int
    micro_batches: int = 1

    @classmethod
    def count(cls, lengths: Sequence[int], budget: int, micro_batches: int = 1) -> Totals:
        """From the number of trained tokens of every completion (0 where all are masked)."""
        return cls(sum(lengths), sum(n > 0 for n in lengths), budget, micro_batches)


def policy_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    anchor_logp: torch.Tensor | None,
    advantage: torch.Tensor,
    completion_index: torch.Tensor,
    mask: torch.Tensor,
    *,
    totals: Totals,
    loss: LossName = "dapo",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    correction: Correction = "truncate",
    correction_max: float = 2.0,
) -> LossOutput:
    """Clipped policy-gradient loss of one micro-batch (formulas: head of this file).

    logp, old_logp, advantage: float [T]. completion_index: int64 [T], which completion a token
    belongs to; a completion lies whole in one micro-batch. mask: [T], false or 0 leaves a token
    out of every sum, and `totals` must have been counted without it too.

    anchor_logp: float [T], or None for the recorded `old_logp`. None: the clip works against the
    sampler itself, and w = 1. `logp.detach()`, right with one update per rollout: r = 1, and w
    makes up for a sampler that differs (other kernels, other noise). With several updates per
    rollout: the log-probabilities before the first of them.

    Returns the float32 loss and, where any token is left, `mismatch_metrics` plus
    clip_ratio/low_mean and clip_ratio/high_mean (share of tokens whose gradient the clip removes).
    """
    anchor_logp = old_logp if anchor_logp is None else anchor_logp
    keep = mask.bool()
    completion = completion_index[keep]
    logp, old, anchor, A = (x[keep].float() for x in (logp, old_logp, anchor_logp, advantage))
    old, anchor, A = old.detach(), anchor.detach(), A.detach()

    ratio = (logp - anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    weight = importance_weight(anchor, old, correction, correction_max)
    token_loss = -weight * torch.minimum(ratio * A, clipped * A)
    total = (token_coefficient(completion, loss, totals) * token_loss).sum()

    metrics = mismatch_metrics(logp, old)
    if metrics:
        metrics["clip_ratio/low_mean"] = ((ratio < 1 - clip_low) & (A < 0)).float().mean().item()
        metrics["clip_ratio/high_mean"] = ((ratio > 1 + clip_high) & (A > 0)).float().mean().item()
    return LossOutput(total, metrics)


def importance_weight(
    anchor: torch.Tensor, old: torch.Tensor, correction: Correction, correction_max: float
) -> torch.Tensor:
    """w [T] = exp(anchor - old), cut at correction_max, or 0 above it, or 1 (no correction)."""
    weight = (anchor - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if correction == "truncate":
        return weight.clamp(max=correction_max)
    if correction == "mask":
        return weight * (weight <= correction_max)
    return torch.ones_like(weight)


def token_coefficient(completion: torch.Tensor, loss: LossName, totals: Totals) -> torch.Tensor:
    """c_t [T], what each token's loss is multiplied by. completion: int64 [T], trained tokens."""
    if loss == "grpo":
        lengths = torch.bincount(completion)[completion]
        return 1.0 / (lengths.float() * totals.completions)
    divisor = {
        "dapo": totals.tokens,
        "dr_grpo": totals.budget,
        "bnpo": completion.numel() * totals.micro_batches,
    }[loss]
    return torch.full_like(completion, 1.0 / max(divisor, 1), dtype=torch.float32)


@torch.no_grad()
def mismatch_metrics(
    logp: torch.Tensor, old_logp: torch.Tensor, mask: torch.Tensor | None = None
) -> dict[str, float]:
    """How far the trained policy is from the one that sampled: raw, before any clip or mask.

    All inputs [T]. Call it on the tokens of a whole step for the step's figures: quantiles of
    micro-batches cannot be averaged. Empty when no token is left.

    kl             mean of k3 = (r - 1) - log r, r = exp(logp - old): KL(sampler || policy),
                   Schulman 2020, "Approximating KL Divergence"; log r held within ±20
    qerl/ess       effective share of the samples, (sum r)^2 / (T sum r^2), in (0, 1]
    qerl/ratio_p*  1st, 50th and 99th percentile of r (nearest rank)
    qerl/logp_diff_max  max |log r|
    """
    if mask is not None:
        logp, old_logp = logp[mask.bool()], old_logp[mask.bool()]
    T = logp.numel()
    if T == 0:
        return {}
    raw = logp.float() - old_logp.float()
    held = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    share = held.softmax(0)  # r / sum r, without overflow
    p01, p50, p99 = (raw.sort().values[round(q * (T - 1))].exp() for q in (0.01, 0.5, 0.99))
    values = {
        "kl": (held.exp() - 1 - held).mean(),
        "qerl/ess": 1 / (T * share.square().sum()),
        "qerl/ratio_p01": p01,
        "qerl/ratio_p50": p50,
        "qerl/ratio_p99": p99,
        "qerl/logp_diff_max": raw.abs().max(),
    }
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
