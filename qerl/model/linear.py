"""The frozen linear layer in NVFP4, and the same with a LoRA adapter in PEFT's protocol.

The base weight stays packed (4.5 bits a weight) and is multiplied through `qerl_kernels.ops`; the
adapter's matrices are fp32 masters whatever the compute type. PEFT owns names, initialisation,
saving and loading, so the state dict is PEFT's own; only the forward is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.config import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from qerl_kernels import ops


class NVFP4Linear(nn.Module):
    """y = x Wᵀ + b with W [N, K] in NVFP4; x [..., K] in bf16, fp16 or fp32.

    weight: packed codes u8 [N, K/2], a frozen Parameter because PEFT looks for one by that name.
    weight_scale: E4M3 [N, K/16]. weight_global_scale: f32 [1], a divisor. No gradient reaches them.
    On a GPU codes and scales are repacked for its kernels (`repack`), the only copy there is.
    """

    weight_scale: torch.Tensor
    weight_global_scale: torch.Tensor

    def __init__(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.shape[0], packed.shape[1] * 2
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("weight_global_scale", global_scale)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def packed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The weight as the operators take it: codes, block scales, the tensor's divisor."""
        return self.weight, self.weight_scale, self.weight_global_scale

    def repack(self, name: str = "weight") -> NVFP4Linear:
        """Arrange codes and scales for the kernels of the device they are on, in place.

        Raises ValueError, with `name`, for scales that are negative or not finite.
        """
        codes, scales = ops.repack(*self.packed, name)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale = scales
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.nvfp4_matmul(x, *self.packed, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, nvfp4"


class LoraLinear(nn.Module, LoraLayer):
    """A frozen linear layer (NVFP4 or 16-bit) with an adapter; what PEFT puts in its place."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any):
        nn.Module.__init__(self)
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r=config.r, lora_alpha=config.lora_alpha, config=config)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """x [..., K] -> [..., N]: W x + (alpha/r) B A x (Hu et al. 2021, eq. 3)."""
        names = (
            [] if self.disable_adapters else [n for n in self.active_adapters if n in self.lora_A]
        )
        base = self.base_layer
        if len(names) == 1 and isinstance(base, NVFP4Linear) and not self._drops(names[0]):
            a, b = self._factors(names[0], x.dtype)
            scaling = float(self.scaling[names[0]])
            return ops.nvfp4_lora_matmul(x, *base.packed, base.bias, a, b, scaling)
        y = base(x)
        for name in names:
            y = self._add_adapter(name, x, y)
        return y

    def _drops(self, name: str) -> bool:
        dropout = self.lora_dropout[name]
        return isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0

    def _factors(self, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A [R, K] and B [N, R]; the fp32 masters take the activations' type."""
        a, b = (part[name].get_parameter("weight") for part in (self.lora_A, self.lora_B))
        return a.to(dtype), b.to(dtype)

    def _add_adapter(self, name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The low-rank product is added inside its own GEMM."""
        a, b = self._factors(name, x.dtype)
        flat = self.lora_dropout[name](x).reshape(-1, x.shape[-1])
        y_flat = y.reshape(-1, y.shape[-1])
        return torch.addmm(y_flat, flat @ a.T, b.T, alpha=float(self.scaling[name])).view_as(y)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(
            "an adapter is never merged into the frozen base: rounding to 4 bits would lose it"
        )

    def unmerge(self) -> None:
        raise ValueError("nothing was merged: the base is never written")
