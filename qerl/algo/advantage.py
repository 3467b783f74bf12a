"""Rewards to advantages. Shape letters: P prompts, G group.

    A_ij = (r_ij - b_ij) / (s_i + eps)

baseline  mean           b_ij = mean of group i                GRPO, arXiv 2402.03300, §4.1.2
          leave_one_out  b_ij = mean of the others of group i  RLOO, arXiv 2402.14740
scale     group          s_i = std of group i                  GRPO, §4.1.2
          batch          s_i = std of all rewards of the step  TRL's scale_rewards="batch"
          none           A_ij = r_ij - b_ij                    Dr. GRPO, arXiv 2503.20783, §3.2

The standard deviation is the unbiased one (divisor n - 1) and eps is 1e-4: TRL's convention.
"""

from __future__ import annotations

from typing import Literal

import torch

EQUAL_WITHIN = 1e-8


def zero_variance(rewards: torch.Tensor) -> torch.Tensor:
    """Groups whose rewards are all equal (within 1e-8): their policy gradient is zero.

    rewards: [P, G]. Returns bool [P]; a group of one is always True.
    """
    return rewards.amax(dim=1) - rewards.amin(dim=1) <= EQUAL_WITHIN


def advantages(
    rewards: torch.Tensor,
    scale: Literal["group", "batch", "none"] = "group",
    baseline: Literal["mean", "leave_one_out"] = "mean",
    eps: float = 1e-4,
) -> torch.Tensor:
    """Advantages of P groups of G completions (formulas: head of this file).

    rewards: finite, float [P, G]. Returns float32 [P, G]. A group without variance, and so a
    group of one, gets exactly 0: rounding of its mean must not be blown up by 1 / eps.
    """
    assert rewards.ndim == 2, f"rewards must be [P, G], got {list(rewards.shape)}"
    assert torch.isfinite(rewards).all(), "rewards must be finite"
    rewards = rewards.float()
    G = rewards.shape[1]
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if baseline == "leave_one_out" and G > 1:
        centred = centred * (G / (G - 1))  # r_j - mean of the others, in terms of the group's mean
    if scale != "none":
        centred = centred / (_std(rewards, scale) + eps)
    return centred.masked_fill(zero_variance(rewards)[:, None], 0.0)


def _std(rewards: torch.Tensor, scale: str) -> torch.Tensor:
    """Unbiased standard deviation: [P, 1] by group, [1, 1] by batch, 0 for a single reward."""
    rows = rewards if scale == "group" else rewards.reshape(1, -1)
    return rows.std(dim=1, keepdim=True) if rows.shape[1] > 1 else torch.zeros_like(rows)
