"""RMSNorms that can carry noise on their weight, in place of a model's own.

A norm computes  y = (offset + w) * x / sqrt(mean(x²) + eps)  with offset 0 (Llama, Qwen, Mistral)
or 1 (Gemma 2 and 3, Qwen3.5: the checkpoint holds w - 1). Which of the two, and whether the weight
is applied before or after the cast back to the input's type, is found by running the norm, not
from the name of its class. Clean weights are never written to: noise is a separate float32 vector,
so taking it away restores the model bit for bit, and it does not drown in bfloat16 rounding
(around |w| = 1, adding N(0, sigma²) in bfloat16 changes no weight at all below sigma = 5e-4).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from qerl.errors import QerlError
from qerl_kernels.ops import rms_norm, runs_kernel


class NoisyRMSNorm(nn.Module):
    """Stands in for one RMSNorm, under its name and with its own, frozen `weight` object.

    noise: None or float32 [d], Z in y = (offset + w + Z) * x̂, computed in float32 and rounded
        once. Set it with `set_noise`. Without it the forward is the original module's own on CPU,
        and on a GPU a kernel with the original's roundings: there only the last bit of 1/rms may
        differ, as mean(x²) is summed in another order (and Gemma 4 takes its root by a power).
    """

    weight: torch.Tensor
    _original: nn.Module

    def __init__(self, original: nn.Module, name: str = "norm"):
        super().__init__()
        self.offset, self.eps, self.promotes = _arithmetic(original, name)
        # One dictionary of parameters for the two: moving or replacing the weight here moves it
        # there. The original stays out of `_modules`, where it would change parameter names.
        self._parameters = original._parameters
        self._buffers = original._buffers
        object.__setattr__(self, "_original", original)
        self.training = original.training
        self.noise: torch.Tensor | None = None

    def effective_weight(self) -> torch.Tensor:
        """offset + w, what x̂ is multiplied by when there is no noise: float32 [d]."""
        return self.weight.detach().float() + self.offset

    def set_noise(self, noise: torch.Tensor | None) -> None:
        """Carry `noise`, float32 [d], from now on; None takes it away."""
        if noise is not None:
            assert noise.dtype == torch.float32 and noise.shape == self.weight.shape
            noise = noise.to(self.weight.device)
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [*, d]. Returns [*, d] in the type the original returns."""
        if self.noise is None and not runs_kernel(x):
            return self._original.forward(x)
        return rms_norm(x, self.weight, self.noise, None, self.eps, self.offset, self.promotes)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, offset={self.offset}"


def wrap_norms(model: nn.Module, names: Iterable[str]) -> dict[str, NoisyRMSNorm]:
    """Replace the named norms of `model` in place; a norm that is wrapped already is kept.

    Returns them by name. Raises QerlError where a module is not an RMSNorm we know.
    """
    modules = {name: model.get_submodule(name) for name in names}
    wrapped = {
        name: module if isinstance(module, NoisyRMSNorm) else NoisyRMSNorm(module, name)
        for name, module in modules.items()
    }
    for name, norm in wrapped.items():  # only once all of them are known to be fine
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, norm)
    return wrapped


@torch.no_grad()
def _arithmetic(original: nn.Module, name: str) -> tuple[float, float, bool]:
    """(offset, eps, promotes) of a norm, from a float32 copy run on random weights and input.

    promotes: a 16-bit input comes back in the weight's type, since the weight is applied after the
    cast (Llama); Gemma's comes back in the input's own.
    """
    eps = _epsilon(original)
    probe = copy.deepcopy(original).float().cpu()
    generator = torch.Generator().manual_seed(0)
    (weight,) = probe.parameters()
    w = weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
    x = torch.randn(4, w.numel(), generator=generator)
    # The last row is small enough for eps to matter, so that a wrong one does not pass.
    x[3] *= (eps or 1e-6) ** 0.5
    y = probe(x)
    for offset in (0.0, 1.0):
        if torch.allclose(y, F.rms_norm(x, (w.numel(),), w + offset, eps), rtol=1e-4, atol=1e-5):
            return offset, eps, probe(x.bfloat16()).dtype == torch.float32
    raise QerlError(
        f"noise.schedule: {name} ({type(original).__name__}) is not an RMSNorm of the form "
        f"(w or 1 + w) * x / rms(x); set noise.schedule=off for this model"
    )


def _epsilon(norm: nn.Module) -> float:
    """The norm's eps under whichever name it has; torch's RMSNorm may leave it to the type."""
    for attribute in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(norm, attribute, None)
        if isinstance(value, float):
            return value
    return torch.finfo(torch.float32).eps
