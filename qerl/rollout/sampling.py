"""Draws that depend on nothing but (seed, request, position), and sampling with them.

A counter-based generator makes a run repeatable whatever else shares the batch, and makes resuming
free: there is no state to save. One uniform number a token is enough, by inverting the cumulative
distribution.
"""

from __future__ import annotations

import numpy as np
import torch

from qerl.errors import QerlError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def mix64(value: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): uint64 -> well-mixed uint64."""
    value = (value ^ (value >> np.uint64(30))) * _MIX1
    value = (value ^ (value >> np.uint64(27))) * _MIX2
    return value ^ (value >> np.uint64(31))


def uniforms(seed: int, requests: np.ndarray, position: int | np.ndarray) -> np.ndarray:
    """float64 in [0, 1) for each request id at a token position (one, or one each); a pure
    function."""
    with np.errstate(over="ignore"):
        key = mix64(np.array([seed], dtype=np.uint64) * _GOLDEN + np.uint64(1))
        key = mix64(
            key ^ (requests.astype(np.uint64) * _GOLDEN + np.asarray(position, dtype=np.uint64))
        )
        bits = mix64(key + _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


BLOCK = 128


def sample_tokens(
    logits: torch.Tensor, temperature: float, uniform: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits f32 [B, V] -> (token int64 [B], its log-prob f32 [B], entropy f32 [B]).

    Temperature 0 takes the largest logit; its log-prob is then that of temperature 1. Otherwise
    the token is where the cumulative distribution of softmax(logits / temperature) passes the
    uniform number. Raises QerlError for logits that are not finite.
    """
    scaled = logits if temperature in (0.0, 1.0) else logits / temperature
    norm = torch.logsumexp(scaled, -1, keepdim=True)
    if not torch.isfinite(norm).all():
        raise QerlError(
            "train.lr: the model's logits are not finite: the adapter has diverged (lower train.lr "
            "or noise.sigma_start), or the checkpoint is damaged"
        )
    probabilities = (scaled - norm).exp_()
    entropy = norm[:, 0] - torch.linalg.vecdot(probabilities, scaled.clamp_min(-1e30))
    if temperature == 0.0:
        token = logits.argmax(-1)
    else:
        token = invert_cumulative(probabilities, torch.from_numpy(uniform).to(logits.device))
    return token, (scaled.gather(-1, token[:, None]) - norm)[:, 0], entropy


def invert_cumulative(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First token whose cumulative probability passes the number; [B, V], f64 [B] -> int64 [B].

    In two steps, blocks of 128 and then inside the block, with sums in float64: half the memory
    traffic of one long cumulative sum, and no fp32 drift over 150k entries.
    """
    padding = -probabilities.shape[1] % BLOCK
    blocks = torch.nn.functional.pad(probabilities, (0, padding)).unflatten(1, (-1, BLOCK))
    cumulative = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    draw = uniform[:, None] * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, draw, right=True)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_min(0)), 0.0)
    chosen = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    inside = chosen.double().cumsum(-1)
    # Held below the block's end: rounding of the two sums must not step onto an impossible token.
    rest = torch.minimum(draw - before, inside[:, -1:] * (1 - 1e-12))
    return (block * BLOCK + torch.searchsorted(inside, rest, right=True))[:, 0]
