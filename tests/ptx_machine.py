"""Executes the few PTX instructions of `qerl_kernels.ptx` on numpy vectors, bit for bit."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np

BITS = np.uint32


def floats(word: np.ndarray, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """The low and high 16-bit float of each word."""
    halves = word.astype(BITS)
    low, high = (halves & 0xFFFF).astype(np.uint16), (halves >> 16).astype(np.uint16)
    return low.view(dtype), high.view(dtype)


def _joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.view(np.uint16).astype(BITS) | (high.view(np.uint16).astype(BITS) << 16)


def _multiply(a: np.ndarray, b: np.ndarray, dtype: type) -> np.ndarray:
    pairs = zip(floats(a, dtype), floats(b, dtype), strict=True)
    low, high = ((x.astype(np.float64) * y.astype(np.float64)).astype(dtype) for x, y in pairs)
    return _joined(low, high)


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray, dtype: type) -> np.ndarray:
    parts = zip(*(floats(v, dtype) for v in (a, b, c)), strict=True)
    low, high = (
        (x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)).astype(dtype)
        for x, y, z in parts
    )
    return _joined(low, high)


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
        assert nibble < 8, "sign replication is not modelled"
        source = a if nibble < 4 else b
        out |= (source >> (8 * (nibble & 3)) & 255) << (8 * place)
    return out


def _rotate_left(a: np.ndarray, b: np.ndarray, by: int) -> np.ndarray:
    """shf.l.wrap: the upper word of (b, a) shifted left."""
    return (b << by) | (a >> (32 - by)) if by else b


def _rotate_right(a: np.ndarray, b: np.ndarray, by: int) -> np.ndarray:
    """shf.r.wrap: the lower word of (b, a) shifted right."""
    return (a >> by) | (b << (32 - by)) if by else a


def execute(text: str, inputs: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """Run PTX whose operands $0…$(outputs−1) are written and the next ones are `inputs`."""
    size = len(inputs[0])
    registers = {f"${outputs + i}": v.astype(BITS) for i, v in enumerate(inputs)}
    for line in re.split(r"[;\n]", text.replace("{", "").replace("}", "")):
        if not (line := line.strip()) or line.startswith(".reg"):
            continue
        name, _, rest = line.partition(" ")
        target, *arguments = (part.strip() for part in rest.split(","))
        registers[target] = _run(name, arguments, registers, size)
    return [registers[f"${i}"] for i in range(outputs)]


def _run(name: str, arguments: list[str], registers: dict, size: int) -> np.ndarray:
    def value(text: str) -> np.ndarray:
        if re.match(r"\d|0x", text):
            return np.full(size, int(text, 0), BITS)
        return registers[text]

    def number(text: str) -> int:
        return int(text, 0)

    match name:
        case "mov.b32":
            return value(arguments[0])
        case "and.b32":
            return value(arguments[0]) & value(arguments[1])
        case "shl.b32":
            return value(arguments[0]) << number(arguments[1])
        case "shr.u32":
            return value(arguments[0]) >> number(arguments[1])
        case "lop3.b32":
            return _lop3(*(value(a) for a in arguments[:3]), number(arguments[3]))
        case "prmt.b32":
            return _prmt(value(arguments[0]), value(arguments[1]), number(arguments[2]))
        case "shf.l.wrap.b32":
            return _rotate_left(value(arguments[0]), value(arguments[1]), number(arguments[2]))
        case "shf.r.wrap.b32":
            return _rotate_right(value(arguments[0]), value(arguments[1]), number(arguments[2]))
        case "mul.rn.bf16x2":
            return _multiply(value(arguments[0]), value(arguments[1]), ml_dtypes.bfloat16)
        case "mul.rn.f16x2":
            return _multiply(value(arguments[0]), value(arguments[1]), np.float16)
        case "fma.rn.bf16x2":
            return _fused(*(value(a) for a in arguments), ml_dtypes.bfloat16)
    raise ValueError(f"unknown instruction: {name}")
