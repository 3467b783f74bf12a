"""Triton bodies behind `logprob_triton`, which says how they fit together.

Shape letters: C tokens of a chunk, H hidden, W vocabulary rows of a chunk, S splits of the
vocabulary, k most likely tokens.
"""
# `tl.split` and `tl.reshape` are typed for the compiler, not for a reader of Python.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from qerl_kernels.device import dot

# Whatever changes from call to call is not specialized on: one compilation a model.
_NOT_SPECIALIZED = [
    "n_tokens", "n_vocab", "first_row", "n_rows", "n_splits", "first_split", "top_k"
]  # fmt: skip


@triton.jit
def _quarter_sums(
    x, z_ptr, column, in_chunk, n_rows, before, after,
    BT: tl.constexpr, BV: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """Of the products x [BT, BV]: largest logit, its two sums, and that of `column` [BT], or 0."""
    v = tl.arange(0, BV)[None, :]
    z = x * before
    if CAPPED:
        z = (2 * tl.sigmoid(2 * z) - 1) * after
    if STORE:
        at = (z_ptr + tl.arange(0, BT)[:, None] * WIDTH) + v
        tl.store(at, z, mask=in_chunk[:, None] & (v < n_rows))
    chosen = tl.sum(tl.where(v == column[:, None], z, 0.0), 1)
    z = tl.where(v < n_rows, z, -1e30)  # finite: 0 · shift is 0
    largest = tl.max(z, 1)
    z -= largest[:, None]
    p = tl.exp(z)
    return largest, tl.sum(p, 1), tl.sum(p * z, 1), chosen


@triton.jit
def _merged(largest_a, total_a, moment_a, chosen_a, largest_b, total_b, moment_b, chosen_b):
    largest = tl.maximum(largest_a, largest_b)
    shift_a, shift_b = largest_a - largest, largest_b - largest
    decay_a, decay_b = tl.exp(shift_a), tl.exp(shift_b)
    total = total_a * decay_a + total_b * decay_b
    moment = (moment_a + shift_a * total_a) * decay_a + (moment_b + shift_b * total_b) * decay_b
    return largest, total, moment, chosen_a + chosen_b


@triton.jit
def _half_sums(
    x, z_ptr, column, in_chunk, n_rows, before, after,
    BT: tl.constexpr, BV: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    Q: tl.constexpr = BV // 2
    left, right = tl.split(x.reshape(BT, 2, Q).permute(0, 2, 1))
    largest_l, total_l, moment_l, chosen_l = _quarter_sums(
        left, z_ptr, column, in_chunk, n_rows, before, after, BT, Q, WIDTH, CAPPED, STORE
    )
    largest_r, total_r, moment_r, chosen_r = _quarter_sums(
        right, z_ptr + Q, column - Q, in_chunk, n_rows - Q, before, after,
        BT, Q, WIDTH, CAPPED, STORE,
    )  # fmt: skip
    return _merged(
        largest_l, total_l, moment_l, chosen_l, largest_r, total_r, moment_r, chosen_r
    )  # fmt: skip


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _logits_kernel(
    hidden_ptr, weight_ptr, targets_ptr, z_ptr, sums_ptr, chosen_ptr,
    n_tokens, n_vocab, n_hidden, first_row, n_splits, before, after,
    BT: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr,
    CAPPED: tl.constexpr, STORE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Sums [3, S, C] of one split, the target's logit [C] and, if STORE, the logits z [C, W].

    The sums are: largest z, Σ e^(z − largest), Σ e^(z − largest)·(z − largest). The split begins
    at vocabulary row first_row + BV · program; z begins at first_row.
    """
    # 64-bit offsets are scalars, 32-bit ones tensors.
    first_token = tl.program_id(0) * BT
    begin = first_row + tl.program_id(1) * BV
    hidden_ptr += first_token.to(tl.int64) * n_hidden
    weight_ptr += begin.to(tl.int64) * n_hidden
    z_ptr += first_token.to(tl.int64) * WIDTH + (begin - first_row)
    n_left, n_rows = n_tokens - first_token, n_vocab - begin
    # A row past the end repeats the last one: it is computed and not stored.
    row = tl.minimum(tl.arange(0, BT), n_left - 1)
    v = tl.minimum(tl.arange(0, BV), n_rows - 1)
    k = tl.arange(0, BK)
    x_ptrs = hidden_ptr + (row[:, None] * n_hidden + k[None, :])
    w_ptrs = weight_ptr + (v[None, :] * n_hidden + k[:, None])
    acc = tl.zeros((BT, BV), tl.float32)
    for k0 in range(0, n_hidden, BK):
        if EVEN:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=k[None, :] < n_hidden - k0, other=0.0)
            w = tl.load(w_ptrs, mask=k[:, None] < n_hidden - k0, other=0.0)
        acc = dot(x, w, acc)
        x_ptrs += BK
        w_ptrs += BK
    in_chunk = tl.arange(0, BT) < n_left
    targets = tl.load(targets_ptr + first_token + row)
    here = (targets >= begin) & (targets < begin + tl.minimum(BV, n_rows))
    column = tl.where(here, targets - begin, -1).to(tl.int32)
    # In quarters, so that the temporaries of one at a time are in registers.
    HALF: tl.constexpr = BV // 2
    left, right = tl.split(acc.reshape(BT, 2, HALF).permute(0, 2, 1))
    largest_l, total_l, moment_l, chosen_l = _half_sums(
        left, z_ptr, column, in_chunk, n_rows, before, after, BT, HALF, WIDTH, CAPPED, STORE
    )
    largest_r, total_r, moment_r, chosen_r = _half_sums(
        right, z_ptr + HALF, column - HALF, in_chunk, n_rows - HALF, before, after,
        BT, HALF, WIDTH, CAPPED, STORE,
    )  # fmt: skip
    largest, total, moment, chosen = _merged(
        largest_l, total_l, moment_l, chosen_l, largest_r, total_r, moment_r, chosen_r
    )
    sums = sums_ptr + (begin // BV) * n_tokens + first_token + row
    tl.store(sums, largest, mask=in_chunk)
    tl.store(sums + n_splits * n_tokens, total, mask=in_chunk)
    tl.store(sums + 2 * n_splits * n_tokens, moment, mask=in_chunk)
    tl.store(chosen_ptr + first_token + row, chosen, mask=in_chunk & here)


@triton.jit
def _largest(sums_ptr, rows, n_tokens, first, last, BR: tl.constexpr, BS: tl.constexpr):
    """Largest logit [BR] of rows (all inside the chunk) over splits first … last − 1."""
    largest = tl.full((BR,), float("-inf"), tl.float32)
    for start in range(first, last, BS):
        splits = start + tl.arange(0, BS)[:, None]
        at = sums_ptr + splits * n_tokens + rows[None, :]
        found = tl.load(at, mask=splits < last, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(found, 0))
    return largest


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _probabilities_kernel(
    z_ptr, p_ptr, sums_ptr, running_ptr, targets_ptr,
    n_tokens, first_row, n_rows, first_split, n_splits, after,
    BR: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, SPAN: tl.constexpr,
    WIDTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """p [C, W] = e^(z − largest so far) · slope, 0 at the target.

    running [2, C]: the largest logit before these n_splits splits, and (written here) with them.
    The target's part is left out because 1 − p of a likely token would drown in p's rounding.
    Columns from n_rows on are 0, as far as a span reaches.
    """
    rows = tl.minimum(tl.program_id(0) * BR + tl.arange(0, BR), n_tokens - 1)
    found = _largest(sums_ptr, rows, n_tokens, first_split, first_split + n_splits, BR, BS)
    largest = tl.maximum(tl.load(running_ptr + rows), found)
    if tl.program_id(1) == 0:
        tl.store(running_ptr + n_tokens + rows, largest)
    targets = tl.load(targets_ptr + rows)[:, None] - first_row
    for start in range(0, SPAN, BC):
        column = tl.program_id(1) * SPAN + start + tl.arange(0, BC)[None, :]
        at = rows.to(tl.int64)[:, None] * WIDTH + column
        z = tl.load(z_ptr + at, mask=column < n_rows, other=0.0)
        p = tl.exp(z - largest[:, None])
        if CAPPED:
            ratio = z / after
            p *= 1 - ratio * ratio
        p = tl.where((column == targets) | (column >= n_rows), 0.0, p)
        tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty))


@triton.jit
def _add_to(out_ptr, acc, decay, n_rows, n_columns, stride, BR: tl.constexpr, BC: tl.constexpr):
    row, column = tl.arange(0, BR)[:, None], tl.arange(0, BC)[None, :]
    out = out_ptr + (row * stride + column)
    mask = (row < n_rows) & (column < n_columns)
    tl.store(out, tl.load(out, mask=mask, other=0.0) * decay[:, None] + acc, mask=mask)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _weighted_rows_kernel(
    p_ptr, weight_ptr, running_ptr, out_ptr, n_tokens, n_hidden, n_rows,
    BT: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [C, H] = out · e^(old − new maximum) + p [C, W] @ weight [W, H], all sums in fp32.

    running [2, C]: the old and the new maximum.
    """
    first_token, first_column = tl.program_id(0) * BT, tl.program_id(1) * BH
    n_left, n_columns = n_tokens - first_token, n_hidden - first_column
    row = tl.minimum(tl.arange(0, BT), n_left - 1)
    h = tl.arange(0, BH)[None, :]
    k = tl.arange(0, BK)
    p_ptrs = p_ptr + first_token.to(tl.int64) * WIDTH + (row[:, None] * WIDTH + k[None, :])
    w_ptrs = weight_ptr + first_column + (k[:, None] * n_hidden + h)
    acc = tl.zeros((BT, BH), tl.float32)
    for k0 in range(0, n_rows, BK):
        p = tl.load(p_ptrs)  # 0 past n_rows, as far as a span reaches
        w = tl.load(w_ptrs, mask=(k[:, None] < n_rows - k0) & (h < n_columns), other=0.0)
        acc = dot(p, w, acc)
        p_ptrs += BK
        w_ptrs += BK * n_hidden
    running = running_ptr + first_token + row
    decay = tl.exp(tl.load(running) - tl.load(running + n_tokens))
    HALF: tl.constexpr = BH // 2
    left, right = tl.split(acc.reshape(BT, 2, HALF).permute(0, 2, 1))
    out_ptr += first_token.to(tl.int64) * n_hidden + first_column
    _add_to(out_ptr, left, decay, n_left, n_columns, n_hidden, BT, HALF)
    _add_to(out_ptr + HALF, right, decay, n_left, n_columns - HALF, n_hidden, BT, HALF)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _combine_kernel(
    sums_ptr, chosen_ptr, best_ptr, targets_ptr, logp_ptr, entropy_ptr, mass_ptr, total_ptr,
    n_tokens, n_vocab, n_splits, top_k,
    BR: tl.constexpr, BS: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    """logp, entropy and Σ e^(z − largest), [C] each, and the mass [C] of best [C, k] if BEST."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    in_chunk = rows < n_tokens
    rows = tl.minimum(rows, n_tokens - 1)
    largest = _largest(sums_ptr, rows, n_tokens, 0, n_splits, BR, BS)
    total = tl.zeros((BR,), tl.float32)
    moment = tl.zeros((BR,), tl.float32)
    for start in range(0, n_splits, BS):
        splits = start + tl.arange(0, BS)[:, None]
        mask = splits < n_splits
        at = sums_ptr + splits * n_tokens + rows[None, :]
        shift = tl.load(at, mask=mask, other=-1e38) - largest[None, :]
        part = tl.load(at + n_splits * n_tokens, mask=mask, other=0.0)
        part_moment = tl.load(at + 2 * n_splits * n_tokens, mask=mask, other=0.0)
        decay = tl.exp(shift)
        total += tl.sum(part * decay, 0)
        moment += tl.sum((part_moment + shift * part) * decay, 0)
    log_total = tl.log(total)
    targets = tl.load(targets_ptr + rows)
    known = (targets >= 0) & (targets < n_vocab)
    chosen = tl.load(chosen_ptr + rows, mask=known, other=float("nan"))
    tl.store(logp_ptr + rows, chosen - largest - log_total, mask=in_chunk)
    tl.store(entropy_ptr + rows, log_total - moment / total, mask=in_chunk)
    tl.store(total_ptr + rows, total, mask=in_chunk)
    if BEST:
        mass = tl.zeros((BR,), tl.float32)
        for start in range(0, top_k, BS):
            rank = start + tl.arange(0, BS)[:, None]
            at = best_ptr + rows[None, :].to(tl.int64) * top_k + rank
            z = tl.load(at, mask=rank < top_k, other=float("-inf"))
            mass += tl.sum(tl.exp(z - largest[None, :]), 0)
        tl.store(mass_ptr + rows, mass / total, mask=in_chunk)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _jacobian_kernel(
    jacobian_ptr, weight_ptr, targets_ptr, logp_ptr, total_ptr, chosen_ptr,
    n_vocab, n_hidden, scale, after,
    BH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """jacobian [C, H], Σ over the other tokens until now, becomes d logp / d hidden."""
    row = tl.program_id(0).to(tl.int64)
    # Any row will do for a target outside the vocabulary: its logp is NaN.
    target = tl.minimum(tl.maximum(tl.load(targets_ptr + row), 0), n_vocab - 1)
    own = 1 - tl.exp(tl.load(logp_ptr + row))
    if CAPPED:
        ratio = tl.load(chosen_ptr + row) / after
        own *= 1 - ratio * ratio
    inverse = 1 / tl.load(total_ptr + row)
    for start in range(0, n_hidden, BH):
        h = start + tl.arange(0, BH)
        mask = h < n_hidden
        w = tl.load(weight_ptr + target * n_hidden + h, mask=mask, other=0.0)
        others = tl.load(jacobian_ptr + row * n_hidden + h, mask=mask, other=0.0)
        result = (own * w.to(tl.float32) - others * inverse) * scale
        tl.store(jacobian_ptr + row * n_hidden + h, result, mask=mask)
