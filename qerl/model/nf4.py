"""The frozen linear layer in bitsandbytes' NF4: QLoRA's storage, to compare NVFP4 with.

Dettmers et al. 2023 (arXiv 2305.14314): 4 bits a weight on quantiles of the normal distribution,
one fp32 scale per 64 weights, and those scales in 8 bits once more ("double quantization"):
about 4.13 bits a weight. `pip install qerl[nf4]` brings bitsandbytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qerl.errors import QerlError


def bitsandbytes() -> Any:
    """The package; QerlError where it is not installed or finds no library for this machine."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise QerlError(
            f"format: nf4 needs the package bitsandbytes ({error}); pip install bitsandbytes, or "
            "choose format: nvfp4"
        ) from error
    return bitsandbytes


def nf4_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """A bitsandbytes `Linear4bit` of the weight [N, K], on `device`, computing in `dtype`.

    It is an `nn.Linear`, so that adapters wrap it like one; no gradient reaches the weight.
    """
    package = bitsandbytes()
    n, k = weight.shape
    with torch.device("meta"):
        linear = package.nn.Linear4bit(
            k, n, bias=bias is not None, compute_dtype=dtype, quant_type="nf4"
        )
    stored = package.nn.Params4bit(
        weight.contiguous(), requires_grad=False, quant_type="nf4", compress_statistics=True
    )
    linear.weight = stored.to(device)  # quantizes where it lands
    # On some CPUs a forward without gradients would repack the weight in place, with scales in
    # bf16: the sampler would not be the policy that is trained, and a K that is no multiple of 64
    # fails there.
    linear.support_avx512bf16_for_cpu = False
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(device=device, dtype=dtype), requires_grad=False)
    return linear
