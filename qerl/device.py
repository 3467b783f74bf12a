"""Which device and compute type a run uses; a request that cannot be met is an error up front."""

from __future__ import annotations

import torch

from qerl.errors import QerlError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MIN_CAPABILITY = (8, 0)  # first tensor cores that multiply bf16 (Ampere)


def resolve_device(name: str) -> torch.device:
    """ "auto" takes the GPU if there is one. Raises QerlError for one that is absent or too old."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise QerlError(
            f"device: '{name}' is not a device; use auto, cpu, cuda or cuda:N"
        ) from None
    if device.type == "cuda":
        check_cuda(device)
    elif device.type != "cpu":
        raise QerlError(f"device: '{name}' is not supported; use auto, cpu, cuda or cuda:N")
    return device


def check_cuda(device: torch.device) -> None:
    """Raise QerlError unless the CUDA device exists and has bf16 tensor cores."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        found = f"{count} CUDA device{'s' if count != 1 else ''} found"
        if torch.version.cuda is None and torch.version.hip is None:
            found += " (this PyTorch is built for CPUs only)"
        raise QerlError(f"device: '{device}' was asked for and {found}; use device=cpu or auto")
    if torch.version.hip is not None:
        raise QerlError(f"device: '{device}' is a ROCm device, which is not supported; use cpu")
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        raise QerlError(
            f"device: {torch.cuda.get_device_name(index)} (sm_{capability[0]}{capability[1]}) has "
            f"no bf16 tensor cores; sm_80 (A100, RTX 30) or newer is needed, or device=cpu"
        )


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto": bf16 on a GPU, fp32 on a CPU.

    Even a CPU with bf16 instructions gets fp32: the packed product widens 16-bit operands there
    (one output rounding, whatever the processor), so bf16 would save memory and cost time. Without
    such instructions bf16 products were measured 4 to 7 times slower than fp32 (AVX2).
    """
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if device.type == "cuda" else torch.float32
