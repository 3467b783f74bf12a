"""Log-probability of given tokens straight from hidden states: the logits never exist in full.

The head is frozen, so all that backward needs is the Jacobian of each token's log-probability,
one row of H numbers. Forward makes it while the probabilities are at hand: two products in all,
nothing recomputed, nothing of size T·V kept. Shape letters: T tokens, H hidden, V vocabulary.
"""

from collections.abc import Iterator

import torch

# A 16-bit head is widened this many rows at a time.
_VOCAB_TILE = 8192


def _tiles(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows in `dtype`) over the head; one already in `dtype` is one tile, no copy."""
    if weight.dtype == dtype:
        yield 0, weight
        return
    for start in range(0, weight.shape[0], _VOCAB_TILE):
        yield start, weight[start : start + _VOCAB_TILE].to(dtype)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    for start, rows in _tiles(weight, hidden.dtype):
        if rows is weight:
            return torch.mm(hidden, weight.t(), out=out)
        out[:, start : start + rows.shape[0]] = hidden @ rows.t()
    return out


def _weighted_rows(p: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """p [C, V] @ weight [V, H], accumulated in p's dtype."""
    total = None
    for start, rows in _tiles(weight, p.dtype):
        part = p[:, start : start + rows.shape[0]] @ rows
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    inv_temperature: float,
    softcap: float,
    with_jacobian: bool,
    buffer: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    z = _logits(hidden, weight, buffer)
    slope = None
    if softcap:
        z.div_(softcap).tanh_()
        slope = 1 - z.square() if with_jacobian else None  # d capped / d logit
        z.mul_(softcap)
    if inv_temperature != 1.0:
        z.mul_(inv_temperature)
    z.sub_(z.amax(-1, keepdim=True))
    p = z.exp()
    total = p.sum(-1)
    # entropy = log Σe^z − E[z]; a batched dot product needs no third [C, V] buffer
    mean_z = torch.bmm(p.unsqueeze(1), z.unsqueeze(2)).flatten() / total
    log_total = total.log()
    logp = z.gather(1, targets[:, None]).squeeze(1) - log_total
    if not with_jacobian:
        return logp, log_total - mean_z, None
    chosen = weight[targets].to(p.dtype)
    if slope is not None:
        p.mul_(slope)
        chosen *= slope.gather(1, targets[:, None])
    jacobian = chosen.sub_(_weighted_rows(p, weight).div_(total[:, None])).mul_(inv_temperature)
    return logp, log_total - mean_z, jacobian


def linear_logprob_forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    inv_temperature: float,
    softcap: float,
    chunk: int,
    with_jacobian: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logp [T], entropy [T], jacobian d logp/d hidden [T, H] (or [0, H] when not asked for).

    fp32 throughout (float64 for float64 hidden states), `chunk` tokens at a time.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    n_tokens = hidden.shape[0]
    logp = hidden.new_empty(n_tokens, dtype=dtype)
    entropy = torch.empty_like(logp)
    rows = n_tokens if with_jacobian else 0
    jacobian = hidden.new_empty(rows, hidden.shape[1], dtype=dtype)
    buffer = hidden.new_empty(min(chunk, n_tokens), weight.shape[0], dtype=dtype)
    for start in range(0, n_tokens, chunk):
        part = slice(start, min(start + chunk, n_tokens))
        logp[part], entropy[part], rows_of_j = _chunk(
            hidden[part].to(dtype),
            weight,
            targets[part],
            inv_temperature,
            softcap,
            with_jacobian,
            buffer[: part.stop - part.start],
        )
        if rows_of_j is not None:
            jacobian[part] = rows_of_j
    return logp, entropy, jacobian
