"""What every launcher needs: argument checks, lazy kernels, and two process-wide modes.

Nothing here imports Triton, so that importing the operators costs a machine without a GPU nothing.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Kernels address a tile's rows with 32-bit offsets: 64-bit ones cost registers on every card.
MAX_OFFSET = 2**31 - 1


class _Modes:
    interpreting = False
    batch_invariant = False


@contextmanager
def interpreting() -> Iterator[None]:
    """Run CPU tensors through the CUDA launchers, kernels in Triton's interpreter: for tests.

    Raises ValueError unless TRITON_INTERPRET=1 was in the environment before Triton was imported.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("set TRITON_INTERPRET=1 before importing triton to interpret kernels")
    before, _Modes.interpreting = _Modes.interpreting, True
    try:
        yield
    finally:
        _Modes.interpreting = before


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Within it, a row's result depends on that row alone: not on its neighbours, not on M.

    One tile shape and one order of summation for every M, no split along the reduction that varies
    with the batch, no BLAS that picks its own. Slower (see benchmarks): for tests, and for runs
    whose sampling and training log-probabilities must agree bit for bit.
    """
    before, _Modes.batch_invariant = _Modes.batch_invariant, enabled
    try:
        yield
    finally:
        _Modes.batch_invariant = before


def is_interpreting() -> bool:
    """Whether CPU tensors go through the launchers."""
    return _Modes.interpreting


def is_batch_invariant() -> bool:
    """Whether `batch_invariant` is in force."""
    return _Modes.batch_invariant


def lazy(module: str, name: str) -> Callable:
    """`qerl_kernels.<module>.<name>`, imported (and Triton with it) at the first call.

    Runs on the device of the first argument, whichever is current: Triton launches on the current.
    """
    found: list[Callable] = []

    def call(*args):
        if not found:
            found.append(getattr(importlib.import_module(f"qerl_kernels.{module}"), name))
        first = args[0]
        if isinstance(first, Tensor) and first.is_cuda:
            with torch.cuda.device(first.device):
                return found[0](*args)
        return found[0](*args)

    return call


def cpu_or_interpreter(cpu: Callable, cuda: Callable) -> Callable:
    """The CPU implementation, except under `interpreting`, where the CUDA launcher is called."""

    def call(*args):
        return cuda(*args) if _Modes.interpreting else cpu(*args)

    return call


def row_slices(m: int, width: int) -> Iterator[slice]:
    """Parts of m rows of `width` elements, each small enough for 32-bit offsets."""
    step = max(1, MAX_OFFSET // width)
    return (slice(start, min(start + step, m)) for start in range(0, m, step))


def check_device(name: str, tensor: Tensor, like: Tensor | None = None) -> None:
    """Raise ValueError unless `tensor` is on a CUDA device (`like`'s, if given)."""
    if tensor.device.type != "cuda" and not _Modes.interpreting:
        raise ValueError(f"{name} must be on a CUDA device, found {tensor.device}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, found {tensor.device}")


def check(
    name: str,
    tensor: Tensor,
    *,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    shape: tuple[int | None, ...] | None = None,
    like: Tensor | None = None,
    contiguous: bool = True,
) -> None:
    """Raise ValueError naming the argument unless it is what a kernel takes.

    shape: None entries match anything. like: a tensor whose device it must share. contiguous:
    row-major without gaps; otherwise only the last dimension must have stride 1.
    """
    check_device(name, tensor, like)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if dtype is not None and tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} must be {wanted}, found {str(tensor.dtype)[6:]}")
    if shape is not None and (
        tensor.dim() != len(shape)
        or any(
            want is not None and want != have
            for want, have in zip(shape, tensor.shape, strict=True)
        )
    ):
        wanted = "[" + ", ".join("*" if n is None else str(n) for n in shape) + "]"
        raise ValueError(f"{name} must be {wanted}, found {list(tensor.shape)}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, found strides {tensor.stride()}")
    if not contiguous and tensor.dim() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} must have stride 1 in its last dimension, found {tensor.stride()}"
        )
