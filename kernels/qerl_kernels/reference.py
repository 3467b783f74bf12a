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
    logit_scale: float = 1.0,
    top_k: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability of each target, entropy, mass of the k likeliest tokens: float64 [T] each.

    Through the full logits [T, V], scaled, then capped, then divided by the temperature.
    """
    logits = hidden.double() @ weight.double().T * logit_scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits * inv_temperature, dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    mass = logp.exp().sort(-1, descending=True).values[:, :top_k].sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy, mass


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    noise: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> torch.Tensor:
    """(offset + w + Z) · x / sqrt(mean(x²) + eps), float64 [*, d]; Z is [d] or rows of [n, d]."""
    total = weight.double() + offset
    if noise is not None:
        total = total + (noise if row_index is None else noise[row_index].view(x.shape)).double()
    return total * x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    group_start: torch.Tensor,
    prefix_table: torch.Tensor,
    prefix_length: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's softmax over its visible tokens, one by one: float64 [R, H, D] and lse [R, H]."""
    page_size, kv_heads = k_pages.shape[1:3]
    repeat = q.shape[1] // kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for group in range(len(prefix_length)):
        prefix = int(prefix_length[group])
        for row in range(int(group_start[group]), int(group_start[group + 1])):
            length = int(lengths[row])
            if not length:
                continue
            keys, values = [], []
            for at in range(max(length - window, 0) if window else 0, length):
                table, place = prefix_table[group], at
                if at >= prefix:
                    table, place = block_table[row], at - prefix
                page = int(table[place // page_size])
                keys.append(k_pages[page, place % page_size])
                values.append(v_pages[page, place % page_size])
            key, value = (
                (x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x).double()
                for x in (torch.stack(keys), torch.stack(values))
            )
            if k_scale is not None:
                key = key * k_scale.double()[:, None]
            if v_scale is not None:
                value = value * v_scale.double()[:, None]
            for head in range(q.shape[1]):
                scores = key[:, head // repeat] @ q[row, head].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                lse[row, head] = torch.logsumexp(scores, 0)
                out[row, head] = torch.softmax(scores, 0) @ value[:, head // repeat]
    return out, lse


def fp8_dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """v·scale as float64 [N, K] from E4M3 numbers or their bytes and a scale [1], [N] or [N, 1]."""
    byte = weight.view(torch.uint8).long()
    exponent, fraction = (byte >> 3) & 15, (byte & 7).double() / 8
    normal = torch.exp2((exponent - 7).double()) * (1 + fraction)
    value = torch.where(exponent == 0, fraction / 64, normal)
    return torch.where(byte > 127, -value, value) * scale.double().reshape(-1, 1)


def fp8_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [*, K] times the transposed E4M3 weight [N, K], plus bias [N]: float64 [*, N]."""
    out = x.double() @ fp8_dequantize(weight, scale).T
    return out if bias is None else out + bias.double()


def fp8_matmul_t(dy: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """dy [*, N] times the E4M3 weight [N, K]: float64 [*, K]."""
    return dy.double() @ fp8_dequantize(weight, scale)
