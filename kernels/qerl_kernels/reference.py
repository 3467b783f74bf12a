"""The slow truth in float64, which tests and benchmarks compare everything with.

Written for reading, not speed, and sharing no arithmetic with the fast path.
"""

import torch

from qerl_kernels import layout


def dequantize(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor
) -> torch.Tensor:
    """v·s/g as float64 [N, K] from codes [N, K/2], scales [N, K/16] and the divisor g [1]."""
    low, high = packed & 0x0F, (packed & 0xF0) >> 4
    codes = torch.empty(packed.shape[0], packed.shape[1] * 2, dtype=torch.long)
    codes[:, 0::2], codes[:, 1::2] = low.long(), high.long()
    values = torch.tensor(layout.E2M1_VALUES, dtype=torch.float64)[codes]
    return values * scale.double().repeat_interleave(layout.BLOCK, dim=1) / global_scale.double()


def matmul(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [*, K] times the transposed weight, plus bias [N]: float64 [*, N]."""
    out = x.double() @ dequantize(packed, scale, global_scale).T
    return out if bias is None else out + bias.double()


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    inv_temperature: float = 1.0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy, float64 [T], through the full logits [T, V]."""
    logits = hidden.double() @ weight.double().T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits * inv_temperature, dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy
