"""The frozen linear layer in FP8, as mixed checkpoints keep attention beside NVFP4's MLP.

A byte a weight, multiplied through `qerl_kernels.ops`; activations stay in 16 bits. With an
adapter it is `qerl.model.linear.LoraLinear`, which takes any base layer.
"""

from __future__ import annotations

import torch
from torch import nn

from qerl_kernels import ops


class FP8Linear(nn.Module):
    """y = x Wᵀ + b with W [N, K] in E4M3; x [..., K] in bf16 or fp16, on a CPU also fp32.

    weight: the E4M3 numbers' bytes u8 [N, K], a frozen Parameter because PEFT looks for one by
    that name; bytes, because PEFT and `Module.to` would cast a floating-point one and adapters
    to its type. weight_scale: f32 [1], or [N] for each output, a multiplier. No gradient
    reaches them.
    """

    weight_scale: torch.Tensor

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """weight: float8_e4m3fn [N, K] or its bytes; scale: one number, [N] or [N, 1], any float.

        Values are not looked at: `formats.Layers.fp8` has refused NaN and negative scales.
        """
        super().__init__()
        scale = scale.float().reshape(-1).contiguous()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.view(torch.uint8), requires_grad=False)
        self.register_buffer("weight_scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.fp8_matmul(x, self.weight, self.weight_scale, self.bias)

    def extra_repr(self) -> str:
        scale = "tensor" if self.weight_scale.numel() == 1 else "channel"
        return f"in_features={self.in_features}, out_features={self.out_features}, fp8 a {scale}"
