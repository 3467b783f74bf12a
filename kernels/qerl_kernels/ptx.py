"""The inline assembly that unpacks NVFP4, as text: no Triton here, so a test can execute it.

Input: two 32-bit words hold 16 codes of one row (two MMA steps of 16 along K for one lane of a
quad), four such words and eight scales make the lane's share of a 128-group (see `repack`).
Output: sixteen registers of two 16-bit floats, each v·s·2⁻⁸, exact.

How a register comes out in two or three instructions. A bf16 with sign, then the code's three
magnitude bits at bits 8…6 and zeros elsewhere is v·2⁻¹²⁶ (subnormals included). `repack` stores
bits so that three of a word's four code pairs appear by one shift or rotation and one mask
(`TAKE`), and the fourth pairs of two words interleave into one more word X (one rotation each, one
bit select), which yields both. No 16-bit pattern allows four pairs by shifts alone: {6, 7, 8, 15}
does not tile the residues modulo 16.

A scale byte is a 5-bit exponent and 3-bit fraction with its nibbles swapped, so that masking four
of them at once gives the high and low bytes of four bf16 scales s·2¹¹⁸, and one byte permutation
each makes the pair. fp16: the same bits moved (v·2⁻¹⁴ and s·2⁶), the same factor 2⁻⁸.
"""

SCALE_SHIFT = 8  # products leave as v·s·2⁻⁸; the epilogue multiplies by 2⁸/g
MASK = 0x81C081C0  # sign and magnitude of a pair of codes, in place
SELECT = 0x80C180C1  # bits of X that come from the first word; the others from the second
X_FIRST, X_SECOND = 2, 4  # left rotations that bring the two words' leftovers into X
LSHIFT, RROTATE = 6, 4  # second pair: shift left; third pair: rotate right


def _take(kind: str, out: str, word: str, shift: str) -> list[str]:
    """The code pair that `shift` brings into place: sign and magnitude where the float has them.

    fp16's magnitude sits three bits higher, beside a sign that does not move.
    """
    moved, raised = {
        "none": (None, f"shl.b32 t, {word}, 3;"),
        "left": (f"shl.b32 y, {word}, {LSHIFT};", f"shl.b32 t, {word}, {LSHIFT + 3};"),
        "right": (
            f"shf.r.wrap.b32 y, {word}, {word}, {RROTATE};",
            f"shr.u32 t, {word}, {RROTATE - 3};",
        ),
    }[shift]
    lines, source = ([moved], "y") if moved else ([], word)
    if kind != "fp16":
        return [*lines, f"and.b32 {out}, {source}, m;"]
    select = f"lop3.b32 {out}, {source}, 0x80008000, t, 0xEA;"  # (a & b) | c
    return [*lines, raised, "and.b32 t, t, 0x0E000E00;", select]


def _product(kind: str, register: str, scale: str) -> str:
    if kind == "bf16":
        return f"mul.rn.bf16x2 {register}, {register}, {scale};"
    if kind == "bf16_fma":  # before sm_90 there is only the fused form; adding −0 keeps every bit
        return f"fma.rn.bf16x2 {register}, {register}, {scale}, nz;"
    return f"mul.rn.f16x2 {register}, {register}, {scale};"


def _scale_bytes(kind: str, scales: str) -> list[str]:
    """Low and high bytes (lo, hi) of the four scales of a word, as the 16-bit floats have them."""
    if kind == "fp16":  # s·2⁶ = code << 7
        return [
            f"shl.b32 t, {scales}, 3;",
            "and.b32 lo, t, 0x80808080;",
            "and.b32 t, t, 0x78787878;",
            f"shr.u32 hi, {scales}, 5;",
            "lop3.b32 hi, hi, 0x07070707, t, 0xEA;",
        ]
    return [
        f"and.b32 lo, {scales}, 0xF0F0F0F0;",
        f"lop3.b32 hi, {scales}, 0x0F0F0F0F, 0x70707070, 0xEA;",
    ]


def _scale(register: str, byte: int) -> str:
    selector = (4 + byte) << 12 | byte << 8 | (4 + byte) << 4 | byte
    return f"prmt.b32 {register}, lo, hi, 0x{selector:04X};"


def _pair_of_words(kind: str, out: list[str], first: str, second: str, scales: str) -> list[str]:
    """Unpack two words: registers out[0:4] from the first, out[4:8] from the second."""
    lines = _scale_bytes(kind, scales)
    for index, word in enumerate((first, second)):
        last = f"l{index}"  # scale of this word's second block, used again for its fourth pair
        a, b, c = out[4 * index : 4 * index + 3]
        lines += [
            _scale("s", 2 * index),
            _scale(last, 2 * index + 1),
            *_take(kind, a, word, "none"),
            *_take(kind, b, word, "left"),
            *_take(kind, c, word, "right"),
            _product(kind, a, "s"),
            _product(kind, b, "s"),
            _product(kind, c, last),
        ]
    return [
        *lines,
        f"shf.l.wrap.b32 x, {first}, {first}, {X_FIRST};",
        f"shf.l.wrap.b32 y, {second}, {second}, {X_SECOND};",
        f"lop3.b32 x, x, y, 0x{SELECT:08X}, 0xE4;",  # (a & c) | (b & ~c)
        *_take(kind, out[3], "x", "none"),
        *_take(kind, out[7], "x", "left"),
        _product(kind, out[3], "l0"),
        _product(kind, out[7], "l1"),
    ]


def unpack_asm(kind: str) -> str:
    """PTX with outputs $0…$15, words $16…$19 and scales $20, $21; kind: bf16, bf16_fma or fp16."""
    lines = [
        "{ .reg .b32 x, y, t, lo, hi, s, l0, l1, m, nz;",
        f"mov.b32 m, 0x{MASK:08X};",
        "mov.b32 nz, 0x80008000;",
    ]
    for half in range(2):
        out = [f"${8 * half + i}" for i in range(8)]
        first, second = (f"${16 + 2 * half + word}" for word in range(2))
        lines += _pair_of_words(kind, out, first, second, f"${20 + half}")
    return "\n".join([*lines, "}"])


CONSTRAINTS = ",".join(["=&r"] * 16 + ["r"] * 6)
