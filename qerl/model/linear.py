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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.nvfp4_matmul(
            x, self.weight, self.weight_scale, self.weight_global_scale, self.bias
        )

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
        y = self.base_layer(x)
        if self.disable_adapters:
            return y
        for name in self.active_adapters:
            if name in self.lora_A:
                y = self._add_adapter(name, x, y)
        return y

    def _add_adapter(self, name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The low-rank product is added inside its own GEMM; fp32 masters take x's type."""
        a, b = (
            part[name].get_parameter("weight").to(x.dtype) for part in (self.lora_A, self.lora_B)
        )
        flat = self.lora_dropout[name](x).reshape(-1, x.shape[-1])
        y_flat = y.reshape(-1, y.shape[-1])
        return torch.addmm(y_flat, flat @ a.T, b.T, alpha=float(self.scaling[name])).view_as(y)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(
            "an adapter is never merged into the frozen base: rounding to 4 bits would lose it"
        )

    def unmerge(self) -> None:
        raise ValueError("nothing was merged: the base is never written")
