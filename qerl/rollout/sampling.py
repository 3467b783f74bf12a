"""Draws that depend on nothing but (seed, request, position), and sampling with them.

A counter-based generator makes a run repeatable whatever else shares the batch, and makes resuming
free: there is no state to save. One uniform number a token is enough, by inverting the cumulative
distribution.
"""

from __future__ import annotations

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def mix64(value: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): uint64 -> well-mixed uint64."""
    value = (value ^ (value >> np.uint64(30))) * _MIX1
    value = (value ^ (value >> np.uint64(27))) * _MIX2
    return value ^ (value >> np.uint64(31))


def uniforms(seed: int, requests: np.ndarray, position: int) -> np.ndarray:
    """float64 in [0, 1) for each request id at one token position; a pure function."""
    with np.errstate(over="ignore"):
        key = mix64(np.uint64(seed) * _GOLDEN + np.uint64(1))
        key = mix64(key ^ (requests.astype(np.uint64) * _GOLDEN + np.uint64(position)))
        bits = mix64(key + _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample_tokens(
    logits: torch.Tensor, temperature: float, uniform: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits f32 [B, V] -> (token int64 [B], its log-prob f32 [B], entropy f32 [B]).

    Temperature 0 takes the largest logit; its log-prob is then that of temperature 1. Otherwise
    the token is where the cumulative distribution of softmax(logits / temperature) passes the
    uniform number (float64: at 150k entries fp32 sums would bias the tail).
    """
    scaled = logits if temperature in (0.0, 1.0) else logits / temperature
    logp = torch.log_softmax(scaled, dim=-1)
    probabilities = logp.exp()
    if temperature == 0.0:
        token = logits.argmax(-1)
    else:
        cumulative = probabilities.double().cumsum(-1)
        draw = torch.from_numpy(uniform).to(logits.device)[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, draw, right=True)[:, 0]
        token = token.clamp_max(logits.shape[-1] - 1)
    entropy = -(probabilities * logp.clamp_min(-1e4)).sum(-1)
    return token, logp.gather(-1, token[:, None])[:, 0], entropy
