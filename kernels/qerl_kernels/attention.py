"""Decode attention over a paged cache whose prompts are stored once for a group of rows.

Three kernels. Prefix: a program takes a block of rows of one group, with all query heads that
share a key-value head, and reads each tile of the group's prompt once for all of them. Own pages:
a program takes one row. Both cut a long stretch into splits and leave (sum, max, norm) of each,
which the third adds up in a fixed order (Dao et al., flash-decoding; online softmax in base 2).

The cut is a function of the stretch's length, tiles start at multiples of their size, and a tile
that a row sees nothing of leaves its sums as they were to the bit: a row's result depends on that
row and its group's prefix alone. So this is batch-invariant always, mode or no mode.

Not yet measured on a GPU. Shape letters: R rows, P prompt groups, H query heads, J key-value
heads, D head size, S splits; in a tile M row-heads and N keys.
"""

# Launch options (num_warps) are no parameters of the kernel.
# pyright: reportCallIssue=false

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_kernels.attention_cpu import Paged, check_shapes
from qerl_kernels.attention_tile import (
    MAX_SPLITS,
    MIN_SPLIT,
    VARYING,
    attend,
    group_of,
    merge_attention_kernel,
    split_size,
)  # fmt: skip
from qerl_kernels.launch import check, check_device
from qerl_kernels.variants import Variant

_NO_WINDOW = 2**30
# Query heads a key-value head: more would need a taller tile, and those spill.
MAX_REPEAT = 16


@triton.jit(do_not_specialize=VARYING)
def _prefix_attention_kernel(
    q, k_pages, v_pages, lengths, group_start, prefix_table, prefix_length, k_scale, sums,
    peaks, norms, groups, table_stride, table_tokens, page_stride, kv_heads, k_scale_stride,
    splits, scale, softcap, window, D: tl.constexpr, DP: tl.constexpr, REPEAT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    block, split, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    PER: tl.constexpr = M // REPEAT
    group = group_of(block, group_start, groups, PER)
    if group >= groups:  # the grid has room for rows past the last group, which are in none
        return
    group_first = tl.load(group_start + group)
    end = tl.load(group_start + group + 1)
    first = group_first + (block - group_first // PER - group) * PER
    prefix = tl.minimum(tl.load(prefix_length + group), table_tokens)
    size = split_size(prefix)
    begin = split * size
    if (first >= end) | (begin >= prefix):
        return
    m = tl.arange(0, M)
    row = first + m // REPEAT
    live = (row < end) & (m < PER * REPEAT)
    length = tl.load(lengths + row, mask=live, other=0)
    high = tl.minimum(length, prefix)
    low = length - window
    lowest = tl.min(tl.where(live, low, prefix))
    start = begin + tl.maximum(lowest - begin, 0) // N * N
    stop = tl.minimum(begin + size, tl.max(high))
    d = tl.arange(0, DP)
    wide_row = row.to(tl.int64) * kv_heads + head
    place = wide_row * REPEAT + m % REPEAT
    q_tile = tl.load(
        q + place[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0
    )
    if k_scale is not None:
        k_scale += head * k_scale_stride
    total, peak, norm = attend(
        q_tile, scale, k_scale, low[:, None], high[:, None], start, stop,
        prefix_table + group.to(tl.int64) * table_stride, k_pages, v_pages, page_stride,
        kv_heads, head, softcap, D, DP, N, PAGE, SOFTCAP,
    )  # fmt: skip
    at = place * splits + split
    tl.store(sums + at[:, None] * DP + d[None, :], total, mask=live[:, None])
    tl.store(peaks + at, peak, mask=live)
    tl.store(norms + at, norm, mask=live)


@triton.jit(do_not_specialize=VARYING)
def _own_attention_kernel(
    q, k_pages, v_pages, block_table, lengths, group_start, prefix_length, k_scale, sums, peaks,
    norms, groups, prefix_tokens, table_stride, table_tokens, page_stride, kv_heads,
    k_scale_stride, splits, scale, softcap, window, D: tl.constexpr, DP: tl.constexpr,
    REPEAT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    row, split, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    group = group_of(row, group_start, groups, 0)
    if (group >= groups) | (length <= split * MIN_SPLIT):
        return
    prefix = tl.minimum(tl.load(prefix_length + group), prefix_tokens)
    own = tl.minimum(length - prefix, table_tokens)
    size = split_size(own)
    begin = split * size
    if begin >= own:
        return
    low = length - window - prefix
    start = begin + tl.maximum(low - begin, 0) // N * N
    stop = tl.minimum(begin + size, own)
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    live = m < REPEAT
    place = (row.to(tl.int64) * kv_heads + head) * REPEAT + m
    q_tile = tl.load(
        q + place[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0
    )
    if k_scale is not None:
        k_scale += head * k_scale_stride
    total, peak, norm = attend(
        q_tile, scale, k_scale, low, own, start, stop,
        block_table + row.to(tl.int64) * table_stride, k_pages, v_pages, page_stride, kv_heads,
        head, softcap, D, DP, N, PAGE, SOFTCAP,
    )  # fmt: skip
    at = place * splits + tl.cdiv(prefix, split_size(prefix)) + split
    tl.store(sums + at[:, None] * DP + d[None, :], total, mask=live[:, None])
    tl.store(peaks + at, peak, mask=live)
    tl.store(norms + at, norm, mask=live)


@dataclass(frozen=True, slots=True)
class _Tile:
    """M row-heads by N keys; the same on every device, in every batch."""

    m: int
    n: int
    warps: int
    stages: int


def _tiles(dtype: torch.dtype, stored: torch.dtype, size: int) -> tuple[_Tile, _Tile]:
    """(prefix, own) for head size `size` and up to `MAX_REPEAT` query heads a key-value head.

    Chosen by registers and instructions of the compiled kernels. M is below 64 where it can be: a
    tile that wide goes to wgmma or tcgen05, whose set-up outweighs such small products. With bytes
    it is 16 and for D = 64 one warp: warps would each decode the whole tile.
    """
    n = 64 if size in (64, 128) else 32  # masks of a padded head take registers
    if dtype == torch.float32:
        return _Tile(16, 16, 4, 1), _Tile(16, 16, 4, 1)
    if stored != torch.uint8:
        if size > 128:  # 32 rows spill on some cards
            return _Tile(16, n, 4, 2), _Tile(16, n, 4, 3)
        return _Tile(32, n, 4, 2 if size <= 64 else 1), _Tile(16, n, 4, 3)
    tile = _Tile(16, 32, 1, 3) if size <= 64 else _Tile(16, n, 4, 2)
    return tile if size <= 128 else _Tile(16, n, 4, 1), tile


def _splits(tokens: int) -> int:
    """The most splits a stretch of up to `tokens` tokens is cut into."""
    return min(MAX_SPLITS.value, -(-tokens // MIN_SPLIT.value))


def _check_memory(q: Tensor, paged: Paged) -> None:
    """Devices and strides; shapes and dtypes are `check_shapes`' business."""
    check("q", q, dtype=(torch.bfloat16, torch.float16, torch.float32))
    if q.shape[2] > 256:
        raise ValueError(f"q must have a head size of at most 256, found {q.shape[2]}")
    if (repeat := q.shape[1] // paged.k_pages.shape[2]) > MAX_REPEAT:
        raise ValueError(
            f"q must have at most {MAX_REPEAT} heads for each of k_pages' heads, found {repeat}"
        )
    for name, tensor in paged.tensors().items():
        pool, table = name in ("k_pages", "v_pages"), name in ("block_table", "prefix_table")
        check(name, tensor, like=q, contiguous=not (pool or table))
        if pool and tensor.shape[0] and not tensor[0].is_contiguous():
            raise ValueError(
                f"{name} must be contiguous within a page, found strides {tensor.stride()}"
            )
    if paged.v_pages.stride(0) != paged.k_pages.stride(0):
        raise ValueError(
            f"v_pages must have the page stride of k_pages, {paged.k_pages.stride(0)}, found "
            f"{paged.v_pages.stride(0)}"
        )
    for name, pool in (("k_pages", paged.k_pages), ("v_pages", paged.v_pages)):
        places = (pool.shape[3], pool.stride(0), pool.storage_offset())
        if pool.dtype == torch.uint8 and any(place % 4 for place in places):
            raise ValueError(
                f"{name} must have a head size, page stride and offset of whole 4-byte words, "
                f"found {places}"
            )


def decode_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor,
    group_start: Tensor, prefix_table: Tensor, prefix_length: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None, scale: float, softcap: float, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [R, H, D] in q's dtype, lse fp32 [R, H]) on the GPU; see `ops.decode_attention`.

    Grid, tiles and workspace (R · H · S · D fp32, S at most 32) follow from shapes, never from
    values: nothing is read back, and a CUDA graph can hold it. Raises ValueError for a shape,
    dtype, device or stride that does not fit, for a head size above 256, and for more than 16 query
    heads a key-value head.
    """
    paged = Paged(
        k_pages, v_pages, block_table, lengths, group_start, prefix_table, prefix_length,
        k_scale, v_scale,
    )  # fmt: skip
    check_device("q", q)
    check_shapes(q, paged, softcap, window)
    _check_memory(q, paged)
    call = _Call.plan(q, paged, scale, softcap, window or _NO_WINDOW)
    call.prefix()
    call.own()
    return call.merge()


def _stride(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else 1


@dataclass(frozen=True, slots=True)
class _Call:
    """One call's tensors and numbers, shared by its three launches."""

    q: Tensor
    paged: Paged
    sums: Tensor
    peaks: Tensor
    norms: Tensor
    scale: float
    softcap: float
    window: int

    @classmethod
    def plan(cls, q: Tensor, paged: Paged, scale: float, softcap: float, window: int) -> "_Call":
        rows, heads, size = q.shape
        page_size = paged.k_pages.shape[1]
        splits = _splits(paged.prefix_table.shape[1] * page_size)
        splits += _splits(paged.block_table.shape[1] * page_size)
        padded = _padded(size)
        sums = q.new_empty(rows, heads, splits, padded, dtype=torch.float32)
        peaks, norms = q.new_empty(2, rows, heads, splits, dtype=torch.float32)
        return cls(q, paged, sums, peaks, norms, scale, softcap, window)

    @property
    def repeat(self) -> int:
        return self.q.shape[1] // self.paged.k_pages.shape[2]

    @property
    def tiles(self) -> tuple[_Tile, _Tile]:
        stored = self.paged.k_pages.dtype
        return _tiles(self.q.dtype, stored, self.q.shape[2])

    def tokens(self, table: Tensor) -> int:
        return table.shape[1] * self.paged.k_pages.shape[1]

    def prefix(self) -> None:
        rows, table = self.q.shape[0], self.paged.prefix_table
        tile = self.tiles[0]
        groups, splits = table.shape[0], _splits(self.tokens(table))
        blocks = rows // (tile.m // self.repeat) + groups
        grid = (blocks, splits, self.paged.k_pages.shape[2])
        if groups and splits and rows:
            self._launch(_prefix_attention_kernel, grid, tile, prefix_table=table)

    def own(self) -> None:
        rows, table = self.q.shape[0], self.paged.block_table
        tile = self.tiles[1]
        grid = (rows, _splits(self.tokens(table)), self.paged.k_pages.shape[2])
        if rows and grid[1]:
            self._launch(
                _own_attention_kernel,
                grid,
                tile,
                block_table=table,
                prefix_tokens=self.tokens(self.paged.prefix_table),
            )

    def _launch(self, kernel, grid: tuple[int, int, int], tile: _Tile, **named) -> None:
        """The arguments both attending kernels take; the table is the one in `named`."""
        paged = self.paged
        k_pages, v_pages = (
            pool.view(torch.int32) if pool.dtype == torch.uint8 else pool
            for pool in (paged.k_pages, paged.v_pages)
        )
        table = named.get("prefix_table", named.get("block_table"))
        assert table is not None
        kernel[grid](
            q=self.q, k_pages=k_pages, v_pages=v_pages, lengths=paged.lengths,
            group_start=paged.group_start, prefix_length=paged.prefix_length,
            k_scale=paged.k_scale, sums=self.sums, peaks=self.peaks, norms=self.norms,
            groups=paged.prefix_length.shape[0], table_stride=table.stride(0),
            table_tokens=self.tokens(table), page_stride=k_pages.stride(0),
            kv_heads=paged.k_pages.shape[2], k_scale_stride=_stride(paged.k_scale),
            splits=self.sums.shape[2], scale=self.scale, softcap=self.softcap,
            window=self.window, D=self.q.shape[2], DP=self.sums.shape[3], REPEAT=self.repeat,
            M=tile.m, N=tile.n, PAGE=paged.k_pages.shape[1], SOFTCAP=self.softcap > 0,
            num_warps=tile.warps, num_stages=tile.stages, **named,
        )  # fmt: skip

    def merge(self) -> tuple[Tensor, Tensor]:
        q, paged = self.q, self.paged
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        if not lse.numel():
            return out, lse
        merge_attention_kernel[q.shape[:2]](
            sums=self.sums, peaks=self.peaks, norms=self.norms, lengths=paged.lengths,
            group_start=paged.group_start, prefix_length=paged.prefix_length,
            v_scale=paged.v_scale, out=out, lse=lse, groups=paged.prefix_length.shape[0],
            prefix_tokens=self.tokens(paged.prefix_table),
            own_tokens=self.tokens(paged.block_table), heads=q.shape[1],
            v_scale_stride=_stride(paged.v_scale), splits=self.sums.shape[2], D=q.shape[2],
            DP=self.sums.shape[3], REPEAT=self.repeat, BYTES=paged.k_pages.dtype == torch.uint8,
            num_warps=1,
        )  # fmt: skip
        return out, lse


def _padded(size: int) -> int:
    return max(64, _power_of_two(size))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_POINTERS = {
    "block_table": "*i32", "lengths": "*i32", "group_start": "*i32", "prefix_table": "*i32",
    "prefix_length": "*i32", "k_scale": "*fp32", "v_scale": "*fp32", "sums": "*fp32",
    "peaks": "*fp32", "norms": "*fp32", "lse": "*fp32", "scale": "fp32", "softcap": "fp32",
}  # fmt: skip


def _types(function, stored: str, kind: str, constexprs: dict) -> dict[str, str]:
    known = _POINTERS | {"q": f"*{kind}", "out": f"*{kind}"}
    known |= {"k_pages": f"*{stored}", "v_pages": f"*{stored}"}
    names = [name for name in function.arg_names if name not in constexprs]
    return {name: known.get(name, "i32") for name in names}


def variants() -> Iterator[Variant]:
    """Pages of 16 tokens; 4 query heads a key-value head, once 16, the most; no fp32 (checks)."""
    for size, kind, softcap, repeat in (
        (64, "bf16", False, 4),
        (128, "bf16", False, 4),
        (128, "fp16", False, 4),
        (256, "bf16", True, 4),
        (256, "bf16", True, 16),
    ):
        for stored in (kind, "i32"):
            yield from _variants(size, kind, stored, softcap, repeat)


def _variants(size: int, kind: str, stored: str, softcap: bool, repeat: int) -> Iterator[Variant]:
    dtype = _TYPES[kind]
    pool = torch.uint8 if stored == "i32" else dtype
    tiles = _tiles(dtype, pool, size)
    kernels = ("prefix", _prefix_attention_kernel), ("own", _own_attention_kernel)
    for (part, function), tile in zip(kernels, tiles, strict=True):
        constexprs: dict[str, int | None] = dict(
            D=size, DP=_padded(size), REPEAT=repeat, M=tile.m, N=tile.n, PAGE=16, SOFTCAP=softcap
        )
        if stored != "i32":
            constexprs["k_scale"] = None
        shape = f"{tile.m}x{tile.n}x{size} w{tile.warps} s{tile.stages}"
        yield Variant(
            kernel=f"decode_attention/{part}",
            tile=f"{shape} {kind} {stored}{' cap' * softcap}{f' of {repeat}' * (repeat > 4)}",
            function=function,
            types=_types(function, stored, kind, constexprs),
            constexprs=constexprs,
            divisible=frozenset({"page_stride"}),
            num_warps=tile.warps,
            num_stages=tile.stages,
            elements=2 * tile.n * size,
        )
    if kind != "bf16" or repeat > 4:  # merging is the same in all
        return
    constexprs = dict(D=size, DP=_padded(size), REPEAT=4, BYTES=stored == "i32")
    if stored != "i32":
        constexprs |= {"v_scale": None}
    yield Variant(
        kernel="decode_attention/merge",
        tile=f"{size} {kind} {stored}",
        function=merge_attention_kernel,
        types=_types(merge_attention_kernel, stored, kind, constexprs),
        constexprs=constexprs,
        divisible=frozenset(),
        num_warps=1,
        num_stages=3,
        elements=None,
    )
