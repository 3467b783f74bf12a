"""Log-probability of given tokens straight from hidden states, in plain PyTorch: the CPU path.

The head is frozen, so all that backward needs is the Jacobian of each token's log-probability,
one row of H numbers. Forward makes it while the probabilities are at hand: two products in all,
nothing recomputed. Tokens and vocabulary both go in tiles; sums are kept relative to the largest
logit so far and rescaled when it grows (online softmax), so nothing has a size of T·V.
Shape letters: T tokens, C tokens at a time, H hidden, V vocabulary, W vocabulary rows at a time,
k most likely tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_kernels.launch import is_batch_invariant

# C (unless the caller says otherwise) and W. Their [C, W] buffers stay in a core's cache, which is
# worth more than longer products; a 16-bit head is widened once per C tokens.
_CHUNK = 512
_VOCAB_TILE = 2048


@dataclass(frozen=True, slots=True)
class Scaling:
    """From a product to a logit: z = s · softcap · tanh(x · logit_scale / softcap)."""

    logit_scale: float
    softcap: float  # 0: none, and then z = x · logit_scale · s
    inv_temperature: float  # s

    @property
    def before(self) -> float:
        """The factor ahead of tanh, or the only one."""
        return self.logit_scale / self.softcap if self.softcap else self.slope

    @property
    def after(self) -> float:
        """The factor behind tanh: |z| stays below it."""
        return self.softcap * self.inv_temperature

    @property
    def slope(self) -> float:
        """dz/dx where tanh is linear; elsewhere times 1 − (z/after)²."""
        return self.logit_scale * self.inv_temperature


class _Sums:
    """What is known of C tokens after a part of the vocabulary; e below is exp(z − largest)."""

    def __init__(self, hidden: Tensor, with_jacobian: bool) -> None:
        # Finite, so that (old − new maximum)·0 is 0 for the first tile.
        self.largest = hidden.new_full((hidden.shape[0], 1), torch.finfo(hidden.dtype).min / 2)
        self.total = hidden.new_zeros(hidden.shape[0], 1)  # Σ e
        self.moment = torch.zeros_like(self.total)  # Σ e·(z − largest)
        self.chosen = torch.zeros_like(self.total)  # the target's z
        self.best = hidden.new_empty(hidden.shape[0], 0)  # the k largest z
        self.mean_row = torch.zeros_like(hidden) if with_jacobian else None  # Σ e·slope·row

    def add_best(self, z: Tensor, top_k: int) -> None:
        best = torch.cat((self.best, z.topk(min(top_k, z.shape[1])).values), 1)
        self.best = best.topk(min(top_k, best.shape[1])).values

    def add_chosen(self, z: Tensor, columns: Tensor) -> None:
        """columns [C, 1]: where in z [C, W] the targets are; outside it for other tiles' ones."""
        found = z.gather(1, columns.clamp(0, z.shape[1] - 1))
        self.chosen = torch.where((columns >= 0) & (columns < z.shape[1]), found, self.chosen)

    def add(self, z: Tensor, p: Tensor, rows: Tensor, after: float) -> None:
        """Logits z [C, W] of rows [W, H]. Destroys z; p [C, W] is scratch."""
        largest = torch.maximum(self.largest, z.amax(1, keepdim=True))
        shift, self.largest = self.largest - largest, largest
        decay = shift.exp()
        slope = None
        if after and self.mean_row is not None:
            slope = torch.addcmul(z.new_ones(()), z, z, value=-1 / after**2)
        torch.exp(z.sub_(largest), out=p)
        # A batched dot product needs no third [C, W] buffer.
        moment = torch.bmm(p.unsqueeze(1), z.unsqueeze(2)).squeeze(2)
        self.moment = ((self.moment + shift * self.total) * decay).add_(moment)
        self.total = (self.total * decay).add_(p.sum(1, keepdim=True))
        if self.mean_row is not None:
            p = p if slope is None else p.mul_(slope)
            self.mean_row.mul_(decay).addmm_(p, rows)


def _tiles(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows in `dtype`) over the head; no copy of one already in `dtype`."""
    for first in range(0, weight.shape[0], _VOCAB_TILE):
        yield first, weight[first : first + _VOCAB_TILE].to(dtype)


def _logits(hidden: Tensor, rows: Tensor, scaling: Scaling, out: Tensor) -> Tensor:
    z = torch.mm(hidden, rows.t(), out=out)
    if scaling.softcap:
        return z.mul_(scaling.before).tanh_().mul_(scaling.after)
    return z if scaling.before == 1.0 else z.mul_(scaling.before)


def _walk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scaling: Scaling,
    top_k: int,
    with_jacobian: bool,
    buffers: Tensor,
) -> _Sums:
    """All of the vocabulary for C tokens. buffers [2, C·W] is scratch."""
    sums = _Sums(hidden, with_jacobian)
    for first, rows in _tiles(weight, hidden.dtype):
        shape = (hidden.shape[0], rows.shape[0])
        z, p = (b[: shape[0] * shape[1]].view(shape) for b in buffers)
        _logits(hidden, rows, scaling, z)
        sums.add_chosen(z, targets[:, None] - first)
        if top_k:
            sums.add_best(z, top_k)
        sums.add(z, p, rows, scaling.after)
    return sums


def _jacobian(sums: _Sums, chosen_rows: Tensor, scaling: Scaling) -> Tensor:
    """d logp / d hidden [C, H] = dz_t/dx·row_t − Σ p·dz/dx·row."""
    assert sums.mean_row is not None
    if scaling.softcap:
        chosen_rows = chosen_rows * (1 - (sums.chosen / scaling.after).square())
    return (chosen_rows - sums.mean_row.div_(sums.total)).mul_(scaling.slope)


def _results(sums: _Sums, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """logp [C], entropy [C] = log Σe^z − E[z], and top-k mass ([C], or [0])."""
    log_total = sums.total.log()
    logp = sums.chosen - sums.largest - log_total
    entropy = log_total - sums.moment / sums.total
    mass = (sums.best - sums.largest).exp_().sum(1) / sums.total.squeeze(1)
    return logp.squeeze(1), entropy.squeeze(1), mass if top_k else mass[:0]


def check_arguments(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, top_k: int, chunk: int | None
) -> None:
    """Raise ValueError for what no device takes."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "hidden must be [T, H] and weight [V, H], found "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if targets.dtype != torch.int64 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"targets must be int64 [{hidden.shape[0]}], found {targets.dtype} "
            f"{tuple(targets.shape)}"
        )
    if softcap < 0:
        raise ValueError(f"softcap must be positive, or 0 for none, found {softcap}")
    if not 0 <= top_k <= weight.shape[0]:
        raise ValueError(f"top_k must be 0 to {weight.shape[0]}, found {top_k}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, found {chunk}")


def linear_logprob_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    logit_scale: float,
    softcap: float,
    inv_temperature: float,
    top_k: int,
    chunk: int | None,
    with_jacobian: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp [T], entropy [T], top-k mass [T], Jacobian d logp/d hidden [T, H].

    The last two are [0] and [0, H] when not asked for. fp32 throughout (float64 for float64 hidden
    states). Batch-invariant mode goes token by token: BLAS sums in another order for other shapes.
    Raises ValueError for shapes, dtypes or token ids that do not fit together.
    """
    check_arguments(hidden, weight, targets, softcap, top_k, chunk)
    n_tokens, n_vocab = hidden.shape[0], weight.shape[0]
    if n_tokens and not bool(((targets >= 0) & (targets < n_vocab)).all()):
        raise ValueError(
            f"targets must be ids from 0 to {n_vocab - 1}, found {targets.min().item()} "
            f"to {targets.max().item()}"
        )
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    chunk = 1 if is_batch_invariant() else max(1, min(chunk or _CHUNK, n_tokens))
    scaling = Scaling(logit_scale, softcap, inv_temperature)
    logp = hidden.new_empty(n_tokens, dtype=dtype)
    entropy = torch.empty_like(logp)
    mass = logp.new_empty(n_tokens if top_k else 0)
    jacobian = logp.new_empty(n_tokens if with_jacobian else 0, hidden.shape[1])
    buffers = logp.new_empty(2, chunk * min(_VOCAB_TILE, n_vocab))
    for first in range(0, n_tokens, chunk):
        part = slice(first, first + chunk)
        # A copy, because BLAS may sum in another order at another alignment.
        rows = hidden[part].to(dtype, copy=True)
        sums = _walk(rows, weight, targets[part], scaling, top_k, with_jacobian, buffers)
        logp[part], entropy[part], mass[part] = _results(sums, top_k)
        if with_jacobian:
            jacobian[part] = _jacobian(sums, weight[targets[part]].to(dtype), scaling)
    return logp, entropy, mass, jacobian
