"""Executes the few PTX instructions of `qerl_kernels.ptx` on numpy vectors, bit for bit.

Semantics are those of the PTX ISA manual. Anything else is an error: another instruction or
modifier, a register that is not declared or not yet written, a write to an input operand.
"""

from __future__ import annotations

import re

import numpy as np

BITS = np.uint32
# Significant bits, and the exponent of the smallest subnormal, of the 16-bit floats.
PRECISION = {"bf16": (8, -133), "f16": (11, -24)}


def halves(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The low and high 16 bits of each word, uint16."""
    return (word & 0xFFFF).astype(np.uint16), (word >> 16).astype(np.uint16)


def widened(half: np.ndarray, kind: str) -> np.ndarray:
    """16-bit patterns (uint16) as float64, exactly; kind: bf16 or f16."""
    if kind == "f16":
        return half.view(np.float16).astype(np.float64)
    return (half.astype(BITS) << 16).view(np.float32).astype(np.float64)


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """float64 rounded once, to nearest even, as 16-bit patterns; subnormals kept.

    ml_dtypes' bfloat16 goes through float32, so that it rounds a float64 twice; this does not.
    """
    digits, lowest = PRECISION[kind]
    top = (x.view(np.uint64) & np.uint64(0x7FF << 52)).view(np.float64)  # the leading bit
    quantum = np.maximum(top * 2.0 ** (1 - digits), 2.0**lowest)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = np.where(np.isfinite(x), np.rint(x / quantum) * quantum, x)
        if kind == "f16":
            return exact.astype(np.float16).view(np.uint16)
        return (exact.astype(np.float32).view(BITS) >> 16).astype(np.uint16)


def _packed(operation, words: list[np.ndarray], kind: str) -> np.ndarray:
    """`operation` on the low and on the high floats of some words, each result rounded once."""
    columns = zip(*(halves(word) for word in words), strict=True)
    low, high = (
        rounded(operation(*(widened(half, kind) for half in column)), kind).astype(BITS)
        for column in columns
    )
    return low | (high << 16)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a * b  # 22 significant bits at most: exact in float64


def _sum_of_product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a·b + c in float64. Raises ValueError where that is inexact (Knuth's error term)."""
    product = a * b
    total = product + c
    part = total - product
    if ((product - (total - part)) + (c - part) != 0).any():
        raise ValueError("this sum would be rounded twice, which is not modelled")
    return total


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    out = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            out |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return out


def _prmt(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    out = np.zeros_like(a)
    for place in range(4):
        nibble = selector >> (4 * place) & 15
        if nibble > 7:
            raise ValueError("prmt's sign replication is not modelled")
        source = a if nibble < 4 else b
        out |= (source >> (8 * (nibble & 3)) & 255) << (8 * place)
    return out


def _funnel(direction: str, a: np.ndarray, b: np.ndarray, by: int) -> np.ndarray:
    """The 64-bit (b, a) shifted by `by` modulo 32: upper word left, or lower word right."""
    by &= 31
    if direction == "left":
        return (b << by) | (a >> (32 - by))
    return (a >> by) | (b << (32 - by))


class _Registers:
    def __init__(self, inputs: list[np.ndarray], outputs: int):
        self.size = len(inputs[0])
        self.values = {f"${outputs + i}": v.astype(BITS) for i, v in enumerate(inputs)}
        self.writable = {f"${i}" for i in range(outputs)}

    def read(self, text: str) -> np.ndarray:
        if text[0].isdigit():
            return np.full(self.size, int(text, 0), BITS)
        if text not in self.values:
            raise ValueError(f"register {text} is read before it is written")
        return self.values[text]

    def write(self, name: str, value: np.ndarray) -> None:
        if name not in self.writable:
            raise ValueError(f"register {name} is not declared, or an input")
        self.values[name] = value


def execute(text: str, inputs: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """Run PTX whose operands $0…$(outputs−1) are written and the next ones are `inputs`."""
    registers = _Registers(inputs, outputs)
    for statement in re.split(r"[;\n]", text.replace("{", "").replace("}", "")):
        name, _, rest = statement.strip().partition(" ")
        arguments = [part.strip() for part in rest.split(",")]
        if name == ".reg":
            kind, _, arguments[0] = arguments[0].partition(" ")
            if kind != ".b32":
                raise ValueError(f"unknown register type: {kind}")
            registers.writable.update(arguments)
        elif name:
            registers.write(arguments[0], _run(name, arguments[1:], registers))
    return [registers.read(f"${i}") for i in range(outputs)]


def _run(name: str, arguments: list[str], registers: _Registers) -> np.ndarray:
    def values(count: int) -> list[np.ndarray]:
        """The first `count` arguments; one more may be an immediate."""
        return [registers.read(text) for text in arguments[:count]]

    def immediate() -> int:
        return int(arguments[-1], 0)

    match (name, len(arguments)):
        case ("mov.b32", 1):
            return values(1)[0]
        case ("and.b32", 2):
            return np.bitwise_and(*values(2))
        case ("shl.b32", 2):  # 32 and more give 0, in numpy as in PTX
            return values(1)[0] << BITS(immediate())
        case ("shr.u32", 2):
            return values(1)[0] >> BITS(immediate())
        case ("lop3.b32", 4):
            return _lop3(*values(3), table=immediate())
        case ("prmt.b32", 3):
            return _prmt(*values(2), selector=immediate())
        case ("shf.l.wrap.b32", 3):
            return _funnel("left", *values(2), by=immediate())
        case ("shf.r.wrap.b32", 3):
            return _funnel("right", *values(2), by=immediate())
        case ("mul.rn.bf16x2", 2):
            return _packed(_product, values(2), "bf16")
        case ("mul.rn.f16x2", 2):
            return _packed(_product, values(2), "f16")
        case ("fma.rn.bf16x2", 3):
            return _packed(_sum_of_product, values(3), "bf16")
    raise ValueError(f"unknown instruction: {name} with {len(arguments)} operands")
