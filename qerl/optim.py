"""AdamW on the adapter: parameters, learning rate, gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from qerl.config import TrainConfig


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every trainable parameter by name, in module order: the LoRA matrices and nothing else."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert found, "the model has no trainable parameter: was the adapter added?"
    return found


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over `adapter_parameters`, one group, in their order.

    Masters must be float32: at learning rates of 1e-5, bfloat16 would round updates away.
    """
    params = adapter_parameters(model)
    for name, p in params.items():
        assert p.dtype == torch.float32, f"{name} is {p.dtype}; LoRA masters are float32"
    fused = {p.device.type for p in params.values()} <= {"cpu", "cuda"}
    return torch.optim.AdamW(
        params.values(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=fused,
    )


def lr_at(step: int, config: TrainConfig, total_steps: int) -> float:
    """Learning rate of the optimizer step about to be taken; steps count from 1.

    Linear warm-up reaches lr at step `warmup_steps`; then it stays, or falls linearly or by half
    a cosine towards lr * lr_end, which the step after the last one would have: no step is
    wasted on a learning rate of zero.
    """
    assert step >= 1, f"steps count from 1, got {step}"
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    done = (step - 1 - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
    done = min(done, 1.0)
    left = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.lr_end + (1 - config.lr_end) * left)


def clip_gradients(params: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale gradients so that their global 2-norm is at most `max_norm`; returns the norm before.

    A norm that is not finite comes back as inf, with gradients untouched: skip that step.
    """
    params = list(params)
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    value = norm.item()
    if not math.isfinite(value):
        return math.inf
    nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return value
