"""Adaptive quantization noise (QeRL, arXiv 2510.11696, §3.3 and appendix G).

Each step adds Z ~ N(0, sigma²) to the weight of the RMSNorms in front of the attention and MLP
projections, always to the clean weight. sigma falls in stages over the run; in stage 0 there is
none, and the quantization error alone makes the policy explore.

Unlike the reference code: the norms are found by where their output goes, and finding none is an
error; Z is float32 and reaches the model unrounded; it comes from a generator of its own, keyed by
(seed, optimizer step), so a draw can be had again at any time, for the training forward or after a
resume; the noise does not depend on how the weights are stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from qerl.config import NoiseConfig
from qerl.errors import QerlError
from qerl.model.norms import NoisyRMSNorm, wrap_norms

Scale = Literal["absolute", "relative"]


def sigma_at(step: int, total_steps: int, config: NoiseConfig) -> tuple[float, int]:
    """(sigma, stage) for optimizer step `step` of `total_steps`; steps count from 1.

    K stages of equal length. Stage 0 has sigma 0; stage i + 1, i = 0 … K - 2, has
    sigma_start * (sigma_end / sigma_start)^(i / (K - 2)), which starts and ends on the two
    exactly; the paper's exponent, (k - 1) / (K - 1), stops short of sigma_end. K = 2 has one noisy
    stage, at sigma_start. A run of fewer than K steps skips stages, never stage 0.
    """
    assert step >= 1, f"steps count from 1, got {step}"
    if config.schedule == "off":
        return 0.0, 0
    K = config.stages
    stage = min((step - 1) * K // total_steps, K - 1)
    if stage == 0 or config.sigma_start == 0:
        return 0.0, stage
    exponent = (stage - 1) / max(K - 2, 1)
    return config.sigma_start * (config.sigma_end / config.sigma_start) ** exponent, stage


def draw(
    norms: Mapping[str, NoisyRMSNorm], sigma: float, seed: int, step: int, scale: Scale = "absolute"
) -> dict[str, torch.Tensor]:
    """Z for every norm, float32 [d] on the CPU; the same for the same (norm names, seed, step).

    scale: absolute, Z ~ N(0, sigma²); relative, sigma is multiplied by |w| (or |1 + w|).
    """
    key = hashlib.sha256(f"qerl noise {seed} {step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    noise = {}
    for name in sorted(norms):
        weight = norms[name].effective_weight()
        noise[name] = sigma * torch.randn(weight.shape, generator=generator)
        if scale == "relative":
            noise[name] *= weight.abs().cpu()
    return noise


class Noise:
    """The noisy norms of one model, and a way to switch their noise on for a while.

    norms: the NoisyRMSNorms by name; wrapping happens here, once, in place.
    """

    def __init__(self, model: nn.Module, *, seed: int = 0, scale: Scale = "absolute"):
        """Raises QerlError when no norm of the model feeds a linear layer."""
        self.seed = seed
        self.scale: Scale = scale
        self.norms = wrap_norms(model, find_norms(model))

    @contextmanager
    def applied(self, sigma: float, step: int) -> Iterator[None]:
        """Within: the model with the noise of (sigma, step). After: the clean model, exactly.

        The same (sigma, step) again gives the same noise: once to sample, once to train.
        """
        assert all(norm.noise is None for norm in self.norms.values()), "noise is already applied"
        try:
            if sigma > 0:
                for name, z in draw(self.norms, sigma, self.seed, step, self.scale).items():
                    self.norms[name].set_noise(z)
            yield
        finally:
            for norm in self.norms.values():
                norm.set_noise(None)


def find_norms(model: nn.Module) -> list[str]:
    """Names of the norms whose output is what a projection of a decoder layer reads.

    Found by running two tokens through the model and comparing storage: a norm counts when its
    one input is a hidden state and its output goes, as it is or reshaped, into a weight matrix
    that is not the output head. That leaves out the final norm, norms of queries and keys, norms
    of an attention's or MLP's output (Gemma), and gated norms inside a recurrent mixer.

    Raises QerlError, naming the norms looked at, when there is none.
    """
    matrices = _matrices(model)
    norms = {name: module for name, module in model.named_modules() if _may_be_norm(module)}
    outputs: dict[str, torch.Tensor] = {}
    inputs: list[torch.Tensor] = []

    def keep_output(name: str):
        def hook(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if len(args) == 1 and isinstance(output, torch.Tensor):
                outputs[name] = output

        return hook

    def keep_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.extend(x for x in [*args, *kwargs.values()] if isinstance(x, torch.Tensor))

    handles = [module.register_forward_hook(keep_output(name)) for name, module in norms.items()]
    handles += [m.register_forward_pre_hook(keep_input, with_kwargs=True) for m in matrices]
    try:
        width = _run_two_tokens(model)
    finally:
        for handle in handles:
            handle.remove()
    # Every tensor is still alive here, so equal addresses mean equal storage.
    read = {_address(x) for x in inputs}
    found = [n for n, y in outputs.items() if y.shape[-1] == width and _address(y) in read]
    if not found:
        raise QerlError(_none_found(model, norms))
    return found


def _matrices(model: nn.Module) -> list[nn.Module]:
    """What multiplies hidden states by a weight matrix: linears, MoE routers and fused experts.

    The outermost module stands for what it wraps (LoRA around a linear). Not the output head.
    """
    head = _output_head(model)
    found: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if _is_matrix(module):
            inside = (*inside, name + ".")
            if head is None or all(part is not head for part in module.modules()):
                found[name] = module
    return list(found.values())


def _is_matrix(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        return False
    linear = hasattr(module, "in_features") and hasattr(module, "out_features")
    return linear or any(p.ndim >= 2 for p in module.parameters(recurse=False))


def _output_head(model: nn.Module) -> nn.Module | None:
    """transformers' output head; None for a model that has no such thing."""
    get = getattr(model, "get_output_embeddings", None)
    return get() if get is not None else None


def _may_be_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    own = list(module.parameters())
    return len(own) == 1 and own[0] is weight and own[0].ndim == 1


@torch.no_grad()
def _run_two_tokens(model: nn.Module) -> int:
    """One forward in evaluation mode; returns the hidden size."""
    embeddings = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for module in training:
            module.training = True
    return embeddings.weight.shape[1]


def _address(x: torch.Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.numel()


def _none_found(model: nn.Module, norms: Mapping[str, nn.Module]) -> str:
    looked = [f"{name} ({type(module).__name__})" for name, module in norms.items()]
    shown = ", ".join(looked[:8]) + (f" and {len(looked) - 8} more" if len(looked) > 8 else "")
    return (
        f"noise.schedule: no norm of {type(model).__name__} feeds a linear layer, so there is "
        f"nothing to add noise to; looked at: {shown or 'nothing'}; set noise.schedule=off"
    )
