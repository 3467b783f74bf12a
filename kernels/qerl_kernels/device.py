"""Triton helpers that kernels share, and the one place that knows of the interpreter.

Triton's interpreter multiplies the raw bit patterns of bfloat16 in `tl.dot`, flushes its
subnormals, truncates instead of rounding to it, and knows no inline assembly. `INTERPRET` gates
exactly those four things and is read in this file alone; the kernels are the same either way.
"""
# Inside a kernel constants are Triton's own, which its stubs do not say.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import os

import triton
import triton.language as tl

from qerl_kernels import ptx

INTERPRET: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in fp32 on the tensor core; a and b 16-bit of one type, acc fp32.

    For fp32 operands (CPU-sized checks) the product is IEEE fp32, never TF32.
    """
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """fp32 x in DTYPE, rounded to nearest even."""
    if INTERPRET and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = bits + (0x7FFF + ((bits >> 16) & 1))
        x = ((bits >> 16) << 16).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def scaled_bf16(bits, SCALE: tl.constexpr):
    """The bf16 of uint16 bits, a subnormal perhaps, times a power of two from 2^120 on: exact."""
    if INTERPRET:
        sign = tl.where((bits & 0x8000) != 0, -1.0, 1.0)
        half = ((bits & 0x7FF) << 3).to(tl.float16, bitcast=True)  # v·2⁻¹¹² of bf16's, kept
        return (half.to(tl.float32) * sign * (SCALE * 2.0**-112)).to(tl.bfloat16)
    else:
        return bits.to(tl.bfloat16, bitcast=True) * tl.full((), SCALE, tl.bfloat16)


_ASM_BF16 = tl.constexpr(ptx.unpack_asm("bf16"))
_ASM_BF16_FMA = tl.constexpr(ptx.unpack_asm("bf16_fma"))
_ASM_FP16 = tl.constexpr(ptx.unpack_asm("fp16"))
_CONSTRAINTS = tl.constexpr(ptx.CONSTRAINTS)
_SIXTEEN_WORDS = tl.constexpr((tl.int32,) * 16)
_MASK = tl.constexpr(ptx.MASK)
_SELECT = tl.constexpr(ptx.SELECT)
_OTHERS = tl.constexpr(ptx.SELECT ^ 0xFFFFFFFF)


@triton.jit
def _halves(word, DTYPE: tl.constexpr):
    """The two 16-bit floats of each int32, joined in a new last dimension."""
    low = (word & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    high = ((word >> 16) & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _interpreted_half(bits, scale_byte, DTYPE: tl.constexpr):
    """v·s·2⁻⁸ of one half-word taken out by `ptx`'s masks, through fp16, where nothing flushes."""
    value = (((bits & 0x1C0) << 3) | (bits & 0x8000)).to(tl.uint16).to(tl.float16, bitcast=True)
    code = ((scale_byte & 15) << 4) | (scale_byte >> 4)
    scale = (code << 7).to(tl.uint16).to(tl.float16, bitcast=True)
    return (value.to(tl.float32) * scale.to(tl.float32)).to(DTYPE)


@triton.jit
def _interpreted_halves(word, scales, BYTE: tl.constexpr, DTYPE: tl.constexpr):
    byte = (scales >> (8 * BYTE)) & 255
    low = _interpreted_half(word & 0xFFFF, byte, DTYPE)
    return tl.join(low, _interpreted_half((word >> 16) & 0xFFFF, byte, DTYPE))


@triton.jit
def _interpreted_two_words(first, second, scales, DTYPE: tl.constexpr):
    """What `ptx._pair_of_words` computes, in the language's own integers."""
    a = first.to(tl.uint32, bitcast=True)
    b = second.to(tl.uint32, bitcast=True)
    mixed = (((a << 2) | (a >> 30)) & _SELECT) | (((b << 4) | (b >> 28)) & _OTHERS)
    a0 = _interpreted_halves(a & _MASK, scales, 0, DTYPE)
    a1 = _interpreted_halves((a << 6) & _MASK, scales, 0, DTYPE)
    a2 = _interpreted_halves(((a >> 4) | (a << 28)) & _MASK, scales, 1, DTYPE)
    a3 = _interpreted_halves(mixed & _MASK, scales, 1, DTYPE)
    b0 = _interpreted_halves(b & _MASK, scales, 2, DTYPE)
    b1 = _interpreted_halves((b << 6) & _MASK, scales, 2, DTYPE)
    b2 = _interpreted_halves(((b >> 4) | (b << 28)) & _MASK, scales, 3, DTYPE)
    b3 = _interpreted_halves((mixed << 6) & _MASK, scales, 3, DTYPE)
    return (
        tl.join(tl.join(a0, a1), tl.join(a2, a3)),
        tl.join(tl.join(b0, b1), tl.join(b2, b3)),
    )


@triton.jit
def unpack_tile(
    words,
    scales,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    DTYPE: tl.constexpr,
    FMA: tl.constexpr,
    WIDE: tl.constexpr,
):
    """v·s·2⁻⁸ [N, 128·GROUPS], exact, in K order; int32 words [N, 16·GROUPS], scales [N, 2·GROUPS].

    FMA: the target has no bf16x2 multiply (before sm_90). WIDE: the lane order (`repack`).
    """
    even, odd = tl.split(words.reshape(N, GROUPS * 4, 2, 2))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    s_low, s_high = tl.split(scales.reshape(N, GROUPS, 2))
    s_low = tl.broadcast_to(s_low[:, :, None], (N, GROUPS, 4)).reshape(N, GROUPS * 4)
    s_high = tl.broadcast_to(s_high[:, :, None], (N, GROUPS, 4)).reshape(N, GROUPS * 4)
    if INTERPRET:
        q0, q1 = _interpreted_two_words(w0, w1, s_low, DTYPE)
        q2, q3 = _interpreted_two_words(w2, w3, s_high, DTYPE)
    else:
        ASM: tl.constexpr = (
            _ASM_FP16 if tl.float16 == DTYPE else _ASM_BF16_FMA if FMA else _ASM_BF16
        )
        r = tl.inline_asm_elementwise(
            ASM,
            _CONSTRAINTS,
            args=[w0, w1, w2, w3, s_low, s_high],
            dtype=_SIXTEEN_WORDS,
            is_pure=True,
            pack=1,
        )
        q0 = tl.join(
            tl.join(_halves(r[0], DTYPE), _halves(r[1], DTYPE)),
            tl.join(_halves(r[2], DTYPE), _halves(r[3], DTYPE)),
        )
        q1 = tl.join(
            tl.join(_halves(r[4], DTYPE), _halves(r[5], DTYPE)),
            tl.join(_halves(r[6], DTYPE), _halves(r[7], DTYPE)),
        )
        q2 = tl.join(
            tl.join(_halves(r[8], DTYPE), _halves(r[9], DTYPE)),
            tl.join(_halves(r[10], DTYPE), _halves(r[11], DTYPE)),
        )
        q3 = tl.join(
            tl.join(_halves(r[12], DTYPE), _halves(r[13], DTYPE)),
            tl.join(_halves(r[14], DTYPE), _halves(r[15], DTYPE)),
        )
    tile = tl.join(tl.join(q0, q1), tl.join(q2, q3))  # n, (g, t), p, h, step, word, pair
    tile = tile.reshape(N, GROUPS, 4, 2, 2, 2, 2, 2)
    if WIDE:
        tile = tile.permute(0, 1, 7, 6, 5, 2, 4, 3)  # n, g, pair, word, step, t, h, p
    else:
        tile = tile.permute(0, 1, 7, 6, 5, 4, 2, 3)  # n, g, pair, word, step, h, t, p
    return tile.reshape(N, 128 * GROUPS)
