"""Paged decode attention, the parts: one stretch of a table, and the sum over stretches.

Shape letters: in a tile M row-heads and N keys; D head size, DP padded to a power of two.
"""

# What one jit function returns to another has no type outside the compiler.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from qerl_kernels.device import dot, narrow

# Numbers that change from call to call must not each compile a kernel of their own.
VARYING = [
    "groups", "table_stride", "table_tokens", "prefix_tokens", "own_tokens", "splits",
    "kv_heads", "heads", "window", "k_scale_stride", "v_scale_stride",
]  # fmt: skip
# A stretch is cut every 256 tokens, or in 16 splits when that is coarser.
MIN_SPLIT: tl.constexpr = tl.constexpr(256)
MAX_SPLITS: tl.constexpr = tl.constexpr(16)


@triton.jit
def split_size(length):
    """Tokens a split holds; a multiple of every N."""
    size = tl.cdiv(length, MAX_SPLITS)
    return tl.maximum(tl.cdiv(size, 64) * 64, MIN_SPLIT)


@triton.jit
def group_of(index, group_start, groups, PER: tl.constexpr):
    """The group that owns block `index`, blocks of PER rows numbered over all groups.

    Group g's blocks start at number group_start[g] // PER + g: never fewer than it needs, and the
    sum is known from R and P alone. With PER = 0 blocks are rows (and the result P past the last).
    """
    found = -1
    for first in range(0, groups + 1, 128):
        g = first + tl.arange(0, 128)
        start = tl.load(group_start + g, mask=g <= groups, other=2**30)
        number = start // PER + g if PER else start
        found += tl.sum((number <= index).to(tl.int32))
    return found


@triton.jit
def _e4m3_pair(word):
    """The E4M3 bytes 1 and 3 of each 32-bit word as fp16, value · 2⁻⁸: bits moved, all exact."""
    halves = (word & 0x80008000) | ((word >> 1) & 0x3F803F80)
    low = (halves & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return low, (halves >> 16).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _e4m3(word, dtype: tl.constexpr):
    """value · 2⁻⁸ of the four E4M3 bytes of each word (subnormals too; no NaN)."""
    word = word.to(tl.uint32, bitcast=True)
    b1, b3 = _e4m3_pair(word)
    b0, b2 = _e4m3_pair(word << 8)
    return b0.to(dtype), b1.to(dtype), b2.to(dtype), b3.to(dtype)


@triton.jit
def _fit_fp16(q):
    """(q / 2ⁿ as fp16, 2ⁿ [M, 1]), 2ⁿ the power of two below a row's largest value.

    What rounds is 2⁻²⁵ of that value or less, the size of fp32 accumulation.
    """
    wide = q.to(tl.float32)
    exponent = (tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    up = (exponent << 23).to(tl.float32, bitcast=True)
    return (wide * down[:, None]).to(tl.float16), up[:, None]


@triton.jit
def _softmax_step(scores, factor, softcap, key, low, high, peak, norm, SOFTCAP: tl.constexpr):
    """Online softmax in base 2 over one tile: (weights, old sums' factor, peak, norm)."""
    scores *= factor
    if SOFTCAP:  # cap · tanh(x / cap), through an exponential that is never above 1
        e = tl.exp2(tl.abs(scores) * (-2.8853900817779268 / softcap))
        bent = softcap * (1.0 - e) / (1.0 + e)
        scores = tl.where(scores < 0, -bent, bent)
    scores *= 1.4426950408889634
    scores = tl.where((key[None, :] >= low) & (key[None, :] < high), scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    return weight, shrink, highest, norm * shrink + tl.sum(weight, 1)


@triton.jit
def _attend_floats(
    q, factor, low, high, start, stop, table, k_pages, v_pages, page_stride, token_stride,
    softcap, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Sum, peak and norm over keys start … stop - 1 of a table; a row sees low ≤ key < high.

    q [M, DP]; factor, low and high scalars or [M, 1].
    """
    d = tl.arange(0, DP)
    peak = tl.full((q.shape[0],), float("-inf"), tl.float32)
    norm = tl.zeros((q.shape[0],), tl.float32)
    total = tl.zeros((q.shape[0], DP), tl.float32)
    none = tl.zeros((q.shape[0], N), tl.float32)
    for first in range(start, stop, N):
        key = first + tl.arange(0, N)
        page = tl.load(table + key // PAGE, mask=key < stop, other=0).to(tl.int64)
        at = (page * page_stride + (key % PAGE) * token_stride)[:, None] + d[None, :]
        real = (key < stop)[:, None] & (d < D)[None, :]
        k = tl.load(k_pages + at, mask=real, other=0.0)
        v = tl.load(v_pages + at, mask=real, other=0.0)
        scores = dot(q, tl.trans(k), none)
        weight, shrink, peak, norm = _softmax_step(
            scores, factor, softcap, key, low, high, peak, norm, SOFTCAP
        )
        total = dot(narrow(weight, v.dtype), v, total * shrink[:, None])
    return total, peak, norm


@triton.jit
def _attend_bytes(
    q, factor, low, high, start, stop, table, k_pages, v_pages, page_stride, token_stride,
    softcap, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The same over words of four E4M3 bytes; strides count words.

    Byte b of every word makes a matrix of its own, and the products with those four add up (or,
    for values, stand side by side): nothing is ever interleaved inside the loop.
    """
    WORDS: tl.constexpr = DP // 4
    c = tl.arange(0, WORDS)
    even, odd = tl.split(tl.reshape(q, (q.shape[0], WORDS, 2, 2)))
    q0, q2 = tl.split(even)
    q1, q3 = tl.split(odd)
    peak = tl.full((q.shape[0],), float("-inf"), tl.float32)
    norm = tl.zeros((q.shape[0],), tl.float32)
    none = tl.zeros((q.shape[0], N), tl.float32)
    t0 = tl.zeros((q.shape[0], WORDS), tl.float32)
    t1, t2, t3 = t0, t0, t0
    for first in range(start, stop, N):
        key = first + tl.arange(0, N)
        page = tl.load(table + key // PAGE, mask=key < stop, other=0).to(tl.int64)
        at = (page * page_stride + (key % PAGE) * token_stride)[:, None] + c[None, :]
        real = (key < stop)[:, None] & (c < D // 4)[None, :]
        k0, k1, k2, k3 = _e4m3(tl.load(k_pages + at, mask=real, other=0), q.dtype)
        v0, v1, v2, v3 = _e4m3(tl.load(v_pages + at, mask=real, other=0), q.dtype)
        scores = dot(q0, tl.trans(k0), none)
        scores = dot(q1, tl.trans(k1), scores)
        scores = dot(q2, tl.trans(k2), scores)
        scores = dot(q3, tl.trans(k3), scores)
        weight, shrink, peak, norm = _softmax_step(
            scores, factor, softcap, key, low, high, peak, norm, SOFTCAP
        )
        weight = narrow(weight, q.dtype)
        t0 = dot(weight, v0, t0 * shrink[:, None])
        t1 = dot(weight, v1, t1 * shrink[:, None])
        t2 = dot(weight, v2, t2 * shrink[:, None])
        t3 = dot(weight, v3, t3 * shrink[:, None])
    total = tl.join(tl.join(t0, t2), tl.join(t1, t3))
    return tl.reshape(total, (q.shape[0], DP)), peak, norm


@triton.jit
def attend(
    q, scale, k_scale, low, high, start, stop, table, k_pages, v_pages, page_stride, kv_heads,
    head, softcap, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """`_attend_floats` for one key-value head, however its keys and values are stored."""
    if k_scale is not None:
        scale *= tl.load(k_scale)
    if k_pages.dtype.element_ty == tl.int32:
        factor = scale * 256.0
        if q.dtype != tl.float32:
            q, up = _fit_fp16(q)
            factor = factor * up
        total, peak, norm = _attend_bytes(
            q, factor, low, high, start, stop, table, k_pages + head * (D // 4),
            v_pages + head * (D // 4), page_stride, kv_heads * (D // 4), softcap, D, DP, N,
            PAGE, SOFTCAP,
        )  # fmt: skip
    else:
        total, peak, norm = _attend_floats(
            q, scale, low, high, start, stop, table, k_pages + head * D, v_pages + head * D,
            page_stride, kv_heads * D, softcap, D, DP, N, PAGE, SOFTCAP,
        )  # fmt: skip
    return total, peak, norm


@triton.jit(do_not_specialize=VARYING)
def merge_attention_kernel(
    sums, peaks, norms, lengths, group_start, prefix_length, v_scale, out, lse, groups,
    prefix_tokens, own_tokens, heads, v_scale_stride, splits, D: tl.constexpr, DP: tl.constexpr,
    REPEAT: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """One (row, head): its splits in order, eight at a time."""
    row, head = tl.program_id(0), tl.program_id(1)
    group = group_of(row, group_start, groups, 0)
    length = tl.load(lengths + row)
    count = 0
    if (group < groups) & (length > 0):
        prefix = tl.minimum(tl.load(prefix_length + group), prefix_tokens)
        own = tl.minimum(tl.maximum(length - prefix, 0), own_tokens)
        count = tl.cdiv(prefix, split_size(prefix)) + tl.cdiv(own, split_size(own))
    d = tl.arange(0, DP)
    place = row.to(tl.int64) * heads + head
    peak = float("-inf")
    norm = 0.0
    total = tl.zeros((DP,), tl.float32)
    for first in range(0, count, 8):
        split = first + tl.arange(0, 8)
        at = place * splits + split
        peak_i = tl.load(peaks + at, mask=split < count, other=float("-inf"))
        norm_i = tl.load(norms + at, mask=split < count, other=0.0)
        sum_i = tl.load(
            sums + at[:, None] * DP + d[None, :], mask=(split < count)[:, None], other=0.0
        )
        highest = tl.maximum(peak, tl.max(peak_i))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(peak_i - base)
        shrink = tl.exp2(peak - base)
        norm = norm * shrink + tl.sum(weight * norm_i)
        total = total * shrink + tl.sum(weight[:, None] * sum_i, 0)
        peak = highest
    norm = tl.where(norm > 0, norm, 1.0)  # nothing seen: total is 0 and peak -inf already
    share = 1.0 / norm
    if BYTES:
        share *= 256.0
    if v_scale is not None:
        share *= tl.load(v_scale + head // REPEAT * v_scale_stride)
    result = narrow(total * share, out.dtype.element_ty)
    tl.store(out + place * D + d, result, mask=d < D)
    tl.store(lse + place, (peak + tl.log2(norm)) * 0.6931471805599453)
