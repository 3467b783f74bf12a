"""The unpacking assembly, executed: exact for every half-word and every scale.

`ptx_machine` runs the very text that the kernels embed, so it is the assembly's Python model; the
truth is the E2M1 table and torch's E4M3, in float64.
"""

from __future__ import annotations

import ast
from pathlib import Path

import ml_dtypes
import numpy as np
import ptx_machine
import pytest
import torch

import qerl_kernels
from qerl_kernels import layout, ptx, repack

KINDS = {"bf16": ml_dtypes.bfloat16, "bf16_fma": ml_dtypes.bfloat16, "fp16": np.float16}
VALUES = np.array(layout.E2M1_VALUES)
SCALES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


def words(*values: int) -> list[np.ndarray]:
    return [np.array([v], np.uint32) for v in values]


def test_the_machine_by_hand():
    def one(text: str, *inputs: int) -> int:
        return int(ptx_machine.execute(text, words(*inputs), 1)[0][0])

    assert one("prmt.b32 $0, $1, $2, 0x4140;", 0x33221100, 0x77665544) == 0x44114400
    assert one("lop3.b32 $0, $1, $2, $3, 0xEA;", 0b1100, 0b1010, 0b0001) == 0b1001  # (a & b) | c
    assert one("lop3.b32 $0, $1, $2, 0x0F, 0xE4;", 0x12, 0x34) == 0x32  # mask ? a : b
    assert one("shf.l.wrap.b32 $0, $1, $1, 4;", 0x80000001) == 0x18
    assert one("shf.r.wrap.b32 $0, $1, $1, 4;", 0x80000001) == 0x18000000
    two, half, tiny = 0x4000, 0x3F00, 0x0001  # bf16 2, 0.5 and the smallest subnormal
    assert one("mul.rn.bf16x2 $0, $1, $2;", two << 16 | tiny, half << 16 | two) == 0x3F800002
    assert one("fma.rn.bf16x2 $0, $1, $2, 0x80008000;", 0x80000000, two << 16 | two) == 0x80000000
    with pytest.raises(ValueError, match="unknown instruction: add.s32"):
        one("add.s32 $0, $1, $2;", 1, 2)


def unpacked(kind: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Products [L, 16·2] of L lanes' four words and two scale words, as float64."""
    out = ptx_machine.execute(
        ptx.unpack_asm(kind), [*codes.T.astype(np.uint32), *scales.T.astype(np.uint32)], 16
    )
    halves = [h for register in out for h in ptx_machine.floats(register, KINDS[kind])]
    return np.stack(halves, 1).astype(np.float64)


def expected(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The same from `repack`'s own inverse: v·s·2⁻⁸ in the order of the registers.

    A lane's words are placed as lane 0 of a group; k = 32·word + 16·step + 8·h + p.
    """
    group = np.zeros((len(codes), 4, 4), np.uint32)
    group[:, 0] = codes
    packed, stored = repack.unrepack(
        torch.from_numpy(group.view(np.int32).reshape(-1, 16).copy()),
        torch.from_numpy(scales.astype(np.uint32).view(np.int32).copy()),
        128,
    )
    values = VALUES[layout.unpack(packed).numpy()]
    full = values * np.repeat(stored.double().numpy(), 16, axis=1) / 256
    return full.reshape(-1, 4, 2, 2, 4, 2)[:, :, :, :, 0].reshape(len(codes), 32)


def stored_scales(byte: np.ndarray) -> np.ndarray:
    e4m3 = torch.from_numpy(byte.astype(np.uint8)).view(torch.float8_e4m3fn)
    return repack.encode_scales(e4m3).view(torch.int32).numpy().view(np.uint32)


def check(kind: str, codes: np.ndarray, byte: np.ndarray) -> None:
    """codes [L, 4] words, byte [L, 8] E4M3 scale bytes."""
    scales = stored_scales(byte)
    assert (unpacked(kind, codes, scales) == expected(codes, scales)).all()


def sweep(position: int, rng: np.random.Generator) -> np.ndarray:
    """All 65,536 half-words at one of the eight positions of four words, the rest random."""
    codes = rng.integers(0, 2**32, (65536, 4), dtype=np.uint64).astype(np.uint32)
    word, shift = position // 2, 16 * (position % 2)
    keep = np.uint32(0xFFFF << (16 - shift))
    codes[:, word] = codes[:, word] & keep | np.arange(65536, dtype=np.uint32) << shift
    return codes


@pytest.mark.parametrize("kind, positions", [("bf16", 8), ("bf16_fma", 2), ("fp16", 2)])
def test_every_half_word_and_every_scale(kind, positions):
    """Every half-word under some scale, every scale over many words, none alone in its lane."""
    rng = np.random.default_rng(0)
    for position in range(positions):
        byte = rng.integers(1, 127, (65536, 8))
        byte[:126] = np.arange(1, 127)[:, None]
        check(kind, sweep(position, rng), byte)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_half_word_times_every_scale(kind):
    """65,536 × 126, each scale at one of the eight positions."""
    rng = np.random.default_rng(0)
    ones = stored_scales(np.full((65536, 8), 0x38))
    for position in range(8):
        codes = sweep(position, rng)
        values = expected(codes, ones)
        for byte in range(1 + position, 127, 8):
            found = unpacked(kind, codes, stored_scales(np.full((65536, 8), byte)))
            assert (found == values * SCALES[byte]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_zero_scale_gives_zero(kind):
    """Its stored byte is 0 and its codes are zero; the scale it decodes to is finite."""
    assert stored_scales(np.zeros((1, 8)))[0].tolist() == [0, 0]
    assert (unpacked(kind, np.zeros((1, 4)), np.zeros((1, 2))) == 0).all()


def test_the_interpreter_is_gated_in_one_file():
    folder = Path(qerl_kernels.__file__).parent
    reads = {
        (path.name, function.name)
        for path in folder.rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(n, ast.Name) and n.id == "INTERPRET" for n in ast.walk(function))
    }
    assert reads == {
        ("device.py", name) for name in ("dot", "narrow", "scaled_bf16", "unpack_tile")
    }
