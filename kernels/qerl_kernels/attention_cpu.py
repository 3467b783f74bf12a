"""Decode attention over paged keys and values in plain PyTorch, and the checks every path shares.

Shape letters: R rows, P prompt groups, H query heads, J key-value heads, D head size; a page
holds a fixed number of tokens, `pages` of them make the pool.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_kernels.launch import is_batch_invariant

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Paged:
    """The pool, and who reads which of its pages: the arguments of `ops.decode_attention`."""

    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    lengths: Tensor
    group_start: Tensor
    prefix_table: Tensor
    prefix_length: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in self.__slots__}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def check_shapes(q: Tensor, paged: Paged, softcap: float, window: int) -> None:
    """Raise ValueError naming the first argument that does not fit; no device is touched."""
    if q.dim() != 3 or q.dtype not in FLOATS:
        raise ValueError(f"q must be floats [R, H, D], found {q.dtype} {tuple(q.shape)}")
    if paged.k_pages.dim() != 4 or not paged.k_pages.shape[2]:
        raise ValueError(
            f"k_pages must be [pages, page_size, J, D], found {tuple(paged.k_pages.shape)}"
        )
    rows, heads, size = q.shape
    _, page_size, kv_heads, _ = paged.k_pages.shape
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, no multiple of the {kv_heads} of k_pages")
    if not page_size or page_size & (page_size - 1):
        raise ValueError(f"k_pages must have a power of two of tokens a page, found {page_size}")
    pool = (paged.k_pages.shape[0], page_size, kv_heads, size)
    stored = (q.dtype, torch.uint8)
    groups = paged.prefix_length.numel()
    ints = (torch.int32,)
    _expect("k_pages", paged.k_pages, stored, pool)
    _expect("v_pages", paged.v_pages, (paged.k_pages.dtype,), pool)
    _expect("block_table", paged.block_table, ints, (rows, None))
    _expect("lengths", paged.lengths, ints, (rows,))
    _expect("group_start", paged.group_start, ints, (groups + 1,))
    _expect("prefix_table", paged.prefix_table, ints, (groups, None))
    _expect("prefix_length", paged.prefix_length, ints, (groups,))
    for name, scale in (("k_scale", paged.k_scale), ("v_scale", paged.v_scale)):
        if scale is not None:
            per_head = kv_heads if scale.numel() != 1 else 1
            _expect(name, scale, (torch.float32,), (per_head,))
    if softcap < 0:
        raise ValueError(f"softcap must not be negative (0 is none), found {softcap}")
    if window < 0:
        raise ValueError(f"window must not be negative (0 is none), found {window}")


def _expect(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]
) -> None:
    fits = tensor.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype not in dtypes or not fits:
        kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        sizes = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(
            f"{name} must be {kinds} [{sizes}], found {str(tensor.dtype)[6:]} {list(tensor.shape)}"
        )


def decode_attention_cpu(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor,
    group_start: Tensor, prefix_table: Tensor, prefix_length: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None, scale: float, softcap: float, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [R, H, D] in q's dtype, lse [R, H]); 16-bit operands are widened to fp32.

    Raises ValueError as `check_shapes` does, and where groups or lengths leave their tables.
    """
    paged = Paged(
        k_pages, v_pages, block_table, lengths, group_start, prefix_table, prefix_length,
        k_scale, v_scale,
    )  # fmt: skip
    check_shapes(q, paged, softcap, window)
    batch = _Batch.read(q, paged, scale, softcap, window)
    if is_batch_invariant():  # shapes, and so the order of summation, are then a row's own
        runs = [(row, row + 1) for row in range(q.shape[0])]
    else:
        runs = [(0, q.shape[0])]
    if not q.shape[0]:
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=batch.dtype)
    parts = [batch.attend(first, end) for first, end in runs]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


@dataclass(frozen=True, slots=True)
class _Batch:
    """The arguments, with what is needed of them on the host as Python numbers.

    prefix: tokens of its group's prefix per row; groups: (first row, end row, group) of all that
    have rows. dtype: what is computed in.
    """

    q: Tensor
    paged: Paged
    scale: float
    softcap: float
    window: int
    prefix: Tensor
    groups: list[tuple[int, int, int]]
    dtype: torch.dtype

    @classmethod
    def read(cls, q: Tensor, paged: Paged, scale: float, softcap: float, window: int) -> "_Batch":
        starts = paged.group_start.tolist()
        page_size = paged.k_pages.shape[1]
        if starts[0] or starts != sorted(starts) or starts[-1] > q.shape[0]:
            raise ValueError(
                f"group_start must rise from 0 to at most {q.shape[0]} rows, found {starts}"
            )
        prefix = torch.zeros_like(paged.lengths)
        prefix[: starts[-1]] = paged.prefix_length.repeat_interleave(paged.group_start.diff())
        _within("prefix_length", paged.prefix_length, paged.prefix_table.shape[1] * page_size)
        own = (paged.lengths - prefix)[: starts[-1]]
        _within("lengths beyond the prefix", own, paged.block_table.shape[1] * page_size)
        groups = [
            (first, end, g)
            for g, (first, end) in enumerate(zip(starts, starts[1:], strict=False))
            if first < end
        ]
        dtype = torch.promote_types(q.dtype, torch.float32)
        return cls(q, paged, scale, softcap, window, prefix, groups, dtype)

    def attend(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Rows first … end - 1: partial results over prefixes and own pages, then their merge."""
        kv_heads = self.paged.k_pages.shape[2]
        q = self.q[first:end].to(self.dtype).unflatten(1, (kv_heads, -1))  # [r, J, H/J, D]
        parts = [self._own(q, first, end), self._prefixes(q, first, end)]
        highest = torch.maximum(parts[0][1], parts[1][1])
        weights = [(top - highest.clamp_min(-1e30)).exp() for _, top, _ in parts]
        total = sum(w * norm for w, (_, _, norm) in zip(weights, parts, strict=True))
        out = sum(w[..., None] * o for w, (o, _, _) in zip(weights, parts, strict=True))
        assert isinstance(total, Tensor) and isinstance(out, Tensor)
        out = out / total.clamp_min(torch.finfo(self.dtype).tiny)[..., None]
        if self.paged.v_scale is not None:
            out = out * self.paged.v_scale.to(self.dtype)[:, None, None]
        lse = highest + total.log()
        return out.flatten(1, 2).to(self.q.dtype), lse.flatten(1)

    def _own(self, q: Tensor, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        lengths, prefix = self.paged.lengths[first:end], self.prefix[first:end]
        covered = self.groups[-1][1] if self.groups else 0  # rows past the last group see nothing
        lengths = lengths.masked_fill(torch.arange(first, end) >= covered, 0)
        longest = max(int((lengths - prefix).amax()), 0)
        key, value = self._gather(self.paged.block_table[first:end], longest)
        place = prefix[:, None] + torch.arange(longest)
        return self._part(q, key, value, self._visible(lengths, place))

    def _prefixes(self, q: Tensor, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Each group's rows at once against the one copy of its prefix."""
        out = torch.zeros_like(q)
        top, norm = q.new_full(q.shape[:3], -torch.inf), q.new_zeros(q.shape[:3])
        for start, stop, group in self.groups:
            rows = slice(max(start, first) - first, min(stop, end) - first)
            length = int(self.paged.prefix_length[group])
            if rows.start >= rows.stop or not length:
                continue
            key, value = self._gather(self.paged.prefix_table[group : group + 1], length)
            visible = self._visible(self.paged.lengths[first:end][rows], torch.arange(length)[None])
            stacked = q[rows].transpose(0, 1).flatten(1, 2)[None]  # [1, J, r·H/J, D]
            mask = visible.repeat_interleave(q.shape[2], 0)[None, None]
            found = self._part(stacked, key, value, mask)
            for whole, part in zip((out, top, norm), found, strict=True):
                whole[rows] = part[0].unflatten(1, (-1, q.shape[2])).transpose(0, 1)
        return out, top, norm

    def _gather(self, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values of each table row: [r, J, length, D]."""
        page_size = self.paged.k_pages.shape[1]
        pages = table[:, : -(-length // page_size)].long()
        # What lies beyond a row's own length is masked later; its page number may be anything.
        pages = pages.clamp(0, max(self.paged.k_pages.shape[0] - 1, 0))
        key, value = (
            self._widen(pool[pages].flatten(1, 2)[:, :length]).transpose(1, 2)
            for pool in (self.paged.k_pages, self.paged.v_pages)
        )
        return key, value

    def _widen(self, stored: Tensor) -> Tensor:
        if stored.dtype == torch.uint8:
            stored = stored.view(torch.float8_e4m3fn)
        return stored.to(self.dtype)

    def _visible(self, lengths: Tensor, place: Tensor) -> Tensor:
        """bool [r, keys]: whether the query, the last of `lengths` tokens, sees position `place`"""
        seen = place < lengths[:, None]
        return seen & (place >= lengths[:, None] - self.window) if self.window else seen

    def _part(
        self, q: Tensor, key: Tensor, value: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Σ weight·value, the largest score and Σ weight; nothing visible: 0, -inf, 0."""
        if not key.shape[2]:
            return (
                torch.zeros_like(q),
                q.new_full(q.shape[:3], -torch.inf),
                q.new_zeros(q.shape[:3]),
            )
        scores = (q @ key.transpose(-1, -2)).mul_(self.scale)
        if self.paged.k_scale is not None:
            scores *= self.paged.k_scale.to(self.dtype)[:, None, None]
        if self.softcap:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if visible.dim() == 2:
            visible = visible[:, None, None]
        scores.masked_fill_(~visible, -torch.inf)
        top = scores.amax(-1)
        weights = scores.sub_(top.clamp_min(-1e30)[..., None]).exp_()
        # A hidden value may be uninitialised memory: 0 · NaN must not reach the sum.
        hidden = ~visible.any(-2)[..., None]
        return weights @ value.masked_fill(hidden, 0), top, weights.sum(-1)


def _within(name: str, lengths: Tensor, capacity: int) -> None:
    longest = int(lengths.amax()) if lengths.numel() else 0
    if longest > capacity:
        raise ValueError(f"{name} reaches {longest} tokens, its table has room for {capacity}")
