"""Log-probability, entropy and Jacobian of chosen tokens on CUDA: launcher and tiles.

Tokens go in chunks, and the vocabulary in splits of one tile. A split leaves three sums for each
token, relative to its own largest logit; one kernel adds them up in a fixed order. Where only
log-probabilities are wanted, logits never leave registers. With a Jacobian (or a top-k mass) they
are written in fp32, a vocabulary chunk at a time, become 16-bit probabilities relative to the
largest logit so far, and multiply the head into the fp32 Jacobian, which is rescaled when that
maximum grows. So the head is multiplied twice (recomputing the logits would make it three times)
and scratch has a fixed size: 192 MiB of logits and probabilities, and 24 KiB · S of sums.

Tiles and order of summation depend on no size but H and V: a token's result never depends on its
neighbours, in batch-invariant mode or out of it. Not yet measured on a GPU.
Shape letters: T tokens, C tokens of a chunk, H hidden, V vocabulary, W vocabulary rows of a
chunk, S splits, k most likely tokens.
"""
# Launch options (num_warps, num_stages) are no parameters of a kernel.
# pyright: reportCallIssue=false

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_kernels import launch
from qerl_kernels.logprob import Scaling, check_arguments
from qerl_kernels.logprob_kernels import (
    _combine_kernel,
    _jacobian_kernel,
    _logits_kernel,
    _probabilities_kernel,
    _weighted_rows_kernel,
)
from qerl_kernels.variants import ALL_TARGETS, Variant

_CHUNK = 2048  # C, unless the caller says otherwise
_WIDTH = 16384  # W, a multiple of every tile


@dataclass(frozen=True, slots=True)
class Tile:
    """tokens × columns × depth of a product's tile."""

    tokens: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        shape = f"{self.tokens}x{self.columns}x{self.depth}"
        return f"{shape} w{self.warps} s{self.stages}"


# The first product's tile and the second's; the first one's columns are a split.
_NARROW = Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 3)
_HOPPER = Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3)  # the first would spill if wider
_DATACENTER_BLACKWELL = Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 3)
_FP32 = Tile(64, 64, 32, 4, 2), Tile(64, 64, 32, 4, 2)  # for checks
_BS, _BR = 64, 16  # splits, tokens at a time where sums are added up
_COLUMNS, _SPAN = 256, 4096  # of the probabilities, at a time and a program


def _tiles(target: int) -> tuple[Tile, Tile]:
    return {90: _HOPPER, 100: _DATACENTER_BLACKWELL}.get(target, _NARROW)


def _target(device: torch.device) -> int:
    if device.type != "cuda":
        return 80  # the interpreter
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


class _Launch:
    """One call: what its kernels share."""

    def __init__(self, weight: Tensor, scaling: Scaling, top_k: int, with_jacobian: bool) -> None:
        self.weight, self.scaling = weight, scaling
        self.top_k, self.with_jacobian = top_k, with_jacobian
        self.n_vocab, self.n_hidden = weight.shape
        fp32 = weight.dtype == torch.float32
        self.tile, self.rows_tile = _FP32 if fp32 else _tiles(_target(weight.device))
        self.n_splits = _ceil(self.n_vocab, self.tile.columns)
        self.capped = scaling.softcap != 0

    def chunk(self, hidden: Tensor, targets: Tensor, out: tuple[Tensor, ...], scratch) -> None:
        """All of it for C tokens, into their part of each output."""
        logp, entropy, mass, jacobian = out
        n = hidden.shape[0]
        sums = logp.new_empty(3, self.n_splits, n)
        chosen, total = torch.empty_like(logp), torch.empty_like(logp)
        best = logp.new_empty(n, 0)
        if scratch is None:
            self._logits(hidden, targets, logp, sums, chosen, 0, self.n_vocab, store=False)
        else:
            z, p = scratch
            steps = _ceil(self.n_vocab, _WIDTH)
            running = logp.new_full((steps + 1, n), float("-inf"))
            for step, first in enumerate(range(0, self.n_vocab, _WIDTH)):
                rows = min(_WIDTH, self.n_vocab - first)
                self._logits(hidden, targets, z, sums, chosen, first, rows, store=True)
                if self.top_k:
                    best = self._best(best, z[:n, :rows])
                if self.with_jacobian:
                    self._add_rows(z, p, targets, sums, running[step:], jacobian, first, rows)
        _combine_kernel[(_ceil(n, _BR),)](
            sums, chosen, best, targets, logp, entropy, mass, total,
            n, self.n_vocab, self.n_splits, self.top_k,
            BR=_BR, BS=_BS, BEST=self.top_k > 0, num_warps=4,
        )  # fmt: skip
        if self.with_jacobian:
            _jacobian_kernel[(n,)](
                jacobian, self.weight, targets, logp, total, chosen,
                self.n_vocab, self.n_hidden, self.scaling.slope, self.scaling.after,
                BH=1024, CAPPED=self.capped, num_warps=4,
            )  # fmt: skip

    def _logits(self, hidden, targets, z, sums, chosen, first, rows, store: bool) -> None:
        n, tile = hidden.shape[0], self.tile
        grid = (_ceil(n, tile.tokens), _ceil(rows, tile.columns))
        _logits_kernel[grid](
            hidden, self.weight, targets, z, sums, chosen,
            n, self.n_vocab, self.n_hidden, first, self.n_splits,
            self.scaling.before, self.scaling.after,
            BT=tile.tokens, BV=tile.columns, BK=tile.depth, WIDTH=_WIDTH,
            CAPPED=self.capped, STORE=store, EVEN=self.n_hidden % tile.depth == 0,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def _best(self, best: Tensor, z: Tensor) -> Tensor:
        best = torch.cat((best, z.topk(min(self.top_k, z.shape[1])).values), 1)
        return best.topk(min(self.top_k, best.shape[1])).values

    def _add_rows(self, z, p, targets, sums, running, jacobian, first: int, rows: int) -> None:
        n, split, tile = jacobian.shape[0], self.tile.columns, self.rows_tile
        _probabilities_kernel[(_ceil(n, _BR), _ceil(rows, _SPAN))](
            z, p, sums, running, targets,
            n, first, rows, first // split, _ceil(rows, split),
            self.scaling.after,
            BR=_BR, BC=_COLUMNS, BS=_BS, SPAN=_SPAN, WIDTH=_WIDTH, CAPPED=self.capped,
            num_warps=8,
        )  # fmt: skip
        grid = (_ceil(n, tile.tokens), _ceil(self.n_hidden, tile.columns))
        _weighted_rows_kernel[grid](
            p, self.weight[first:], running, jacobian, n, self.n_hidden, rows,
            BT=tile.tokens, BH=tile.columns, BK=tile.depth, WIDTH=_WIDTH,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def _check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    floats = (torch.bfloat16, torch.float16, torch.float32)
    launch.check("hidden", hidden, dtype=floats)
    launch.check("weight", weight, dtype=hidden.dtype, like=hidden)
    launch.check("targets", targets, like=hidden)
    if hidden.shape[1] % 16:
        raise ValueError(f"hidden must have a multiple of 16 features, found {hidden.shape[1]}")


def linear_logprob(
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
    """logp [T], entropy [T], top-k mass ([T] or [0]), d logp/d hidden ([T, H] or [0, H]), fp32.

    hidden [T, H] and weight [V, H] bf16 or fp16 (fp32 for checks), H a multiple of 16; targets
    int64 [T], NaN results for one outside the vocabulary. chunk: tokens at a time; scratch is
    `chunk` · 16384 · 6 bytes. The Jacobian's probabilities are rounded to the weight's dtype, each
    relative to itself, and summed in fp32. Raises ValueError naming the argument that does not fit.
    """
    check_arguments(hidden, weight, targets, softcap, top_k, chunk)
    _check(hidden, weight, targets)
    n_tokens, n_hidden = hidden.shape
    call = _Launch(weight, Scaling(logit_scale, softcap, inv_temperature), top_k, with_jacobian)
    logp = hidden.new_empty(n_tokens, dtype=torch.float32)
    entropy = torch.empty_like(logp)
    mass = logp.new_empty(n_tokens if top_k else 0)
    jacobian = logp.new_zeros(n_tokens if with_jacobian else 0, n_hidden)
    chunk = min(chunk or _CHUNK, n_tokens)
    scratch = None
    if top_k or with_jacobian:
        z = logp.new_empty(chunk, _WIDTH)
        scratch = z, torch.empty_like(z if with_jacobian else z[:0], dtype=weight.dtype)
    for first in range(0, n_tokens, max(chunk, 1)):
        part = slice(first, first + chunk)
        out = (logp[part], entropy[part], mass[part], jacobian[part])
        call.chunk(hidden[part], targets[part], out, scratch)
    return logp, entropy, mass, jacobian


def variants() -> Iterator[Variant]:
    """What the launcher can choose, for H a multiple of 64; the soft-cap in bf16 alone."""
    for target in ALL_TARGETS:
        first, second = _tiles(target)
        for store in (False, True):
            yield _logits_variant(first, "bf16", True, store, (target,))
            for dtype in ("bf16", "fp16"):
                yield _logits_variant(first, dtype, False, store, (target,))
        for dtype in ("bf16", "fp16"):
            yield _weighted_rows_variant(second, dtype, (target,))
    for capped in (False, True):
        yield _probabilities_variant("bf16", capped)
        yield _jacobian_variant("bf16", capped)
    for best in (False, True):
        yield _combine_variant(best)


def _type(name: str, dtype: str) -> str:
    """Triton's type of the run-time argument `name`."""
    if name in ("hidden_ptr", "weight_ptr", "p_ptr"):
        return f"*{dtype}"
    if name == "targets_ptr":
        return "*i64"
    if name.endswith("_ptr"):
        return "*fp32"
    return "fp32" if name in ("before", "after", "scale") else "i32"


def _variant(function, kernel: str, tile: str, dtype: str, constexprs, **options) -> Variant:
    defaults = {"num_warps": 4, "num_stages": 3, "elements": None}
    names = [name for name in function.arg_names if name not in constexprs]
    return Variant(
        kernel=kernel, tile=tile, function=function, types={n: _type(n, dtype) for n in names},
        constexprs=constexprs, divisible=frozenset({"n_hidden"}), **{**defaults, **options},
    )  # fmt: skip


def _logits_variant(tile: Tile, dtype: str, capped: bool, store: bool, targets) -> Variant:
    name = f"{tile} {dtype}{' capped' if capped else ''}{' stored' if store else ''}"
    constexprs = {
        "BT": tile.tokens, "BV": tile.columns, "BK": tile.depth, "WIDTH": _WIDTH,
        "CAPPED": capped, "STORE": store, "EVEN": True,
    }  # fmt: skip
    return _variant(
        _logits_kernel, "linear_logprob", name, dtype, constexprs, num_warps=tile.warps,
        num_stages=tile.stages, elements=tile.columns * tile.depth, targets=targets,
    )  # fmt: skip


def _weighted_rows_variant(tile: Tile, dtype: str, targets) -> Variant:
    constexprs = {
        "BT": tile.tokens, "BH": tile.columns, "BK": tile.depth, "WIDTH": _WIDTH,
    }  # fmt: skip
    return _variant(
        _weighted_rows_kernel, "linear_logprob_rows", f"{tile} {dtype}", dtype, constexprs,
        num_warps=tile.warps, num_stages=tile.stages, elements=tile.columns * tile.depth,
        targets=targets,
    )  # fmt: skip


def _probabilities_variant(dtype: str, capped: bool) -> Variant:
    constexprs = {
        "BR": _BR, "BC": _COLUMNS, "BS": _BS, "SPAN": _SPAN, "WIDTH": _WIDTH, "CAPPED": capped,
    }  # fmt: skip
    tile = f"{_BR}x{_COLUMNS} w8 {dtype}{' capped' if capped else ''}"
    return _variant(_probabilities_kernel, "linear_logprob_p", tile, dtype, constexprs, num_warps=8)


def _jacobian_variant(dtype: str, capped: bool) -> Variant:
    tile = f"1x1024 w4 {dtype}{' capped' if capped else ''}"
    constexprs = {"BH": 1024, "CAPPED": capped}
    return _variant(_jacobian_kernel, "linear_logprob_jacobian", tile, dtype, constexprs)


def _combine_variant(best: bool) -> Variant:
    tile = f"{_BS}x{_BR} w4{' top-k' if best else ''}"
    constexprs = {"BR": _BR, "BS": _BS, "BEST": best}
    return _variant(_combine_kernel, "linear_logprob_combine", tile, "bf16", constexprs)
