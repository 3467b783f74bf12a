"""GPTQ on fixed scales: each rounding error is made up for by the columns still to come.

Frantar et al. 2023, with the columns in the order of their importance. Scales belong to blocks of
columns as stored and never change, so any order gives a plain checkpoint (`actorder=static`).

Left out: scales found again after each update. They are chosen for the weights that came in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.quantize.search import Packed
from qerl_kernels import layout, quantize

DAMPING = 0.01  # of the mean of the Hessian's diagonal; the paper's
COLUMNS = 128  # updates go to the rest of the matrix once per so many columns


@torch.no_grad()
def gptq_round(
    weight: Tensor, scale: Tensor, global_scale: Tensor, hessian: Tensor, damping: float = DAMPING
) -> Packed:
    """Codes for a weight [N, K] under scales [N, K/16] that keep X Wᵀ close to what it was.

    hessian: XᵀX [K, K] in fp32 (any multiple of it) over the layer's inputs.
    Needs about two more matrices of the hessian's size and three of the weight's, in fp32.
    Raises ValueError for a hessian that is not finite or not positive definite with its damping.
    """
    k = weight.shape[1]
    if hessian.shape != (k, k):
        raise ValueError(f"hessian must be [{k}, {k}], found {tuple(hessian.shape)}")
    order = torch.argsort(hessian.diagonal(), descending=True)
    factor = _inverse_factor(hessian, order, damping)
    values = weight.float()[:, order]
    steps = (scale.float() / global_scale)[:, order // layout.BLOCK]
    codes = _round_columns(values, steps, factor)
    stored = torch.empty_like(codes)
    stored[:, order] = codes
    return Packed(layout.pack(stored), scale, global_scale.reshape(1).clone())


def _inverse_factor(hessian: Tensor, order: Tensor, damping: float) -> Tensor:
    """The upper triangular U with UᵀU = H⁻¹, for H damped and its columns in the given order.

    Row i, divided by U[i, i], says how the later columns make up for an error in column i. Through
    the Cholesky factor of H reversed, whose inverse, reversed back, is U: H⁻¹ itself is never made.
    An input that is always zero is uncoupled and so rounds to nearest.
    """
    mean = hessian.diagonal().mean()
    if not torch.isfinite(mean):
        raise ValueError("the hessian holds a NaN or an infinity")
    backwards = order.flip(0)
    matrix = hessian[backwards[:, None], backwards]
    matrix.diagonal().add_(damping * mean if mean > 0 else 1.0)
    lower, info = torch.linalg.cholesky_ex(matrix)
    del matrix
    if info.any() or not torch.isfinite(lower).all():
        raise ValueError("the hessian is not positive definite; raise the damping")
    eye = torch.eye(lower.shape[0], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, eye, upper=False).flip(0, 1)


def _round_columns(values: Tensor, steps: Tensor, factor: Tensor) -> Tensor:
    """uint8 codes [N, K]; `values` [N, K] is overwritten with what is left to round."""
    table = torch.tensor(layout.E2M1_VALUES, device=values.device)
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    for start in range(0, values.shape[1], COLUMNS):
        stop = min(start + COLUMNS, values.shape[1])
        errors = torch.empty(stop - start, values.shape[0], device=values.device)
        # Column by column in memory: a strided column costs a cache line a number.
        part = values[:, start:stop].T.contiguous()
        step_part = steps[:, start:stop].T.contiguous()
        inner = factor[start:stop, start:stop]
        for i in range(stop - start):
            step = step_part[i]
            column = quantize.encode(part[i] / step)
            codes[:, start + i] = column
            errors[i] = (part[i] - table[column.int()] * step) / inner[i, i]
            part[i + 1 :].addr_(inner[i, i + 1 :], errors[i], alpha=-1)
        values[:, stop:].addmm_(errors.T, factor[start:stop, stop:], alpha=-1)
    return codes
