"""The unpacking assembly, executed: exact for every half-word and every scale.

`ptx_machine` runs the very text that the kernels embed, so it is the assembly's Python model; the
truth is the E2M1 table and torch's E4M3, in float64. L lanes, each with four words and the two
scale words of its group; N rows, G groups.
"""

from __future__ import annotations

import ast
from pathlib import Path

import ml_dtypes
import numpy as np
import ptx_machine
import pytest
import torch
import triton
import triton.language as tl

import qerl_kernels
from qerl_kernels import layout, ptx, repack
from qerl_kernels.device import unpack_tile

KINDS = {"bf16": "bf16", "bf16_fma": "bf16", "fp16": "f16"}
VALUES = np.array(layout.E2M1_VALUES)
SCALES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
LANES = 65536
# The smallest, the largest subnormal and the smallest normal scale, 1, the largest, and between.
EIGHT_SCALES = np.array([0x01, 0x07, 0x08, 0x38, 0x7E, 0x03, 0x55, 0x2A])


def run(text: str, *inputs: int) -> int:
    """$0 after `text`, whose inputs are $1, $2, …"""
    words = [np.array([v], np.uint32) for v in inputs]
    return int(ptx_machine.execute(text, words, 1)[0][0])


def test_permutation_by_hand():
    assert run("prmt.b32 $0, $1, $2, 0x4140;", 0x33221100, 0x77665544) == 0x44114400
    assert run("prmt.b32 $0, $1, $2, 0x0123;", 0x33221100, 0x77665544) == 0x00112233
    assert run("prmt.b32 $0, $1, $2, 0x7654;", 0x33221100, 0x77665544) == 0x77665544
    with pytest.raises(ValueError, match="sign replication"):
        run("prmt.b32 $0, $1, $2, 0x8000;", 1, 2)


def test_every_lop3_table_is_what_it_makes_of_the_manual_s_three_bytes():
    """The PTX manual: immLut = F(0xF0, 0xCC, 0xAA)."""
    for table in range(256):
        assert run(f"lop3.b32 $0, $1, $2, $3, {table};", 0xF0, 0xCC, 0xAA) & 0xFF == table


def test_bits_and_shifts_by_hand():
    assert run("mov.b32 $0, 0x80008000;", 0) == 0x80008000
    assert run("and.b32 $0, $1, 0x81C081C0;", 0xFFFF1234) == 0x81C00000
    assert run("lop3.b32 $0, $1, $2, $3, 0xEA;", 0b1100, 0b1010, 0b0001) == 0b1001  # (a & b) | c
    assert run("lop3.b32 $0, $1, $2, 0x0F, 0xE4;", 0x12, 0x34) == 0x32  # mask ? a : b
    assert run("shl.b32 $0, $1, 4;", 0x80000001) == 0x10
    assert run("shr.u32 $0, $1, 4;", 0x80000001) == 0x08000000
    assert run("shl.b32 $0, $1, 32;", 0x80000001) == run("shr.u32 $0, $1, 33;", 0x80000001) == 0
    assert run("shf.l.wrap.b32 $0, $1, $1, 4;", 0x80000001) == 0x18
    assert run("shf.r.wrap.b32 $0, $1, $1, 4;", 0x80000001) == 0x18000000
    # $2 is the upper word; left gives the upper one of the result, right the lower one.
    assert run("shf.l.wrap.b32 $0, $1, $2, 8;", 0xAA000000, 0x00112233) == 0x112233AA
    assert run("shf.r.wrap.b32 $0, $1, $2, 8;", 0x00112233, 0x000000AA) == 0xAA001122
    assert run("shf.l.wrap.b32 $0, $1, $2, 0;", 1, 2) == 2
    assert run("shf.r.wrap.b32 $0, $1, $2, 32;", 1, 2) == 1


def test_arithmetic_by_hand():
    two, half, tiny, odd = 0x4000, 0x3F00, 0x0001, 0x0003  # bf16; subnormals 1 and 3 · 2⁻¹³³
    assert run("mul.rn.bf16x2 $0, $1, $2;", two << 16 | tiny, half << 16 | two) == 0x3F800002
    # Halves of the last place go to the even side, above and among the subnormals.
    assert run("mul.rn.bf16x2 $0, $1, $2;", odd << 16 | tiny, half << 16 | half) == 0x00020000
    assert run("mul.rn.bf16x2 $0, $1, $2;", 0x3F81 << 16 | 0x3F83, 0x3FC03FC0) == 0x3FC23FC4
    assert run("mul.rn.bf16x2 $0, $1, $2;", 0x80007F7F, 0x40004000) == 0x80007F80  # −0, infinity
    minus_zero = "fma.rn.bf16x2 $0, $1, $2, 0x80008000;"
    assert run(minus_zero, 0x80000000, two << 16 | two) == 0x80000000
    assert run(minus_zero, 0x80010001, half << 16 | half) == 0x80000000
    assert run(minus_zero, two << 16 | tiny, half << 16 | two) == 0x3F800002
    assert run("fma.rn.bf16x2 $0, $1, $2, $3;", two << 16, two << 16, two << 16) == 0x40C00000
    # fp16 1 · 2⁻²⁴ doubled; 3 · 2⁻²⁴ halved, up to 2; −1 · 2⁻²⁴ halved, to −0
    assert run("mul.rn.f16x2 $0, $1, $2;", 0x00010003, 0x40003800) == 0x00020002
    assert run("mul.rn.f16x2 $0, $1, $2;", 0x80010000, 0x38003800) == 0x80000000


def test_rounding_is_done_once():
    """A bit below float32's last place decides; ml_dtypes' own conversion drops it."""
    above, tie = 1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8
    assert ptx_machine.rounded(np.array([above, tie]), "bf16").tolist() == [0x3F81, 0x3F80]
    assert np.array([above]).astype(ml_dtypes.bfloat16).view(np.uint16) == 0x3F80
    with pytest.raises(ValueError, match="rounded twice"):
        run("fma.rn.bf16x2 $0, $1, $2, $3;", 0x3F80, 0x3F80, 0x0001)  # 1 + 2⁻¹³³


def test_the_16_bit_floats_are_ml_dtypes_and_numpy_s():
    """Every pattern widens alike, and float32 numbers of every size round alike."""
    patterns = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    some = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    some = some[np.isfinite(some)].astype(np.float64)
    # Beyond fp16's range too, and down to its subnormals.
    some = np.concatenate([some, np.exp2(np.random.default_rng(1).uniform(-28, 18, 50_000)), -some])
    for kind, dtype in (("bf16", ml_dtypes.bfloat16), ("f16", np.float16)):
        with np.errstate(over="ignore", invalid="ignore"):
            theirs = patterns.view(dtype).astype(np.float64)
            np.testing.assert_array_equal(ptx_machine.widened(patterns, kind), theirs)
            rounded = some.astype(np.float32).astype(dtype).view(np.uint16)
        once = ptx_machine.rounded(some.astype(np.float32).astype(np.float64), kind)
        assert (once == rounded).all()


@pytest.mark.parametrize(
    "text, message",
    [
        ("add.s32 $0, $1, $2;", "unknown instruction: add.s32"),
        ("mul.rn.ftz.f16x2 $0, $1, $2;", "unknown instruction: mul.rn.ftz.f16x2"),
        ("and.b32 $0, $1;", "and.b32 with 1 operands"),
        (".reg .b16 x; mov.b32 x, 1;", "unknown register type: .b16"),
        ("mov.b32 x, 1;", "register x is not declared"),
        ("mov.b32 $1, 1;", r"register \$1 is not declared, or an input"),
        (".reg .b32 x; mov.b32 $0, x;", "register x is read before it is written"),
        ("{ .reg .b32 x; }", r"register \$0 is read before it is written"),
    ],
)
def test_what_the_machine_does_not_know_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        run(text, 1, 2)


def unpacked(kind: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Products of lanes with words [L, 4] and scale words [L, 2], float64 [L, 32].

    Register by register, so [L, word 4, step 2, h 2, p 2].
    """
    assert ptx.CONSTRAINTS.split(",") == ["=&r"] * 16 + ["r"] * 6
    out = ptx_machine.execute(ptx.unpack_asm(kind), [*codes.T, *scales.T], 16)
    halves = [half for register in out for half in ptx_machine.halves(register)]
    return np.stack([ptx_machine.widened(half, KINDS[kind]) for half in halves], 1)


def in_k_order(lanes: np.ndarray, order: str) -> np.ndarray:
    """What four lanes times G groups have, [4·G·N, 32], as [N·G, 128] along K."""
    split = lanes.reshape(-1, 4, 4, 2, 2, 2)  # t, word, step, h, p
    if order == "paired":  # k = 32·word + 16·step + 8·h + 2·t + p
        return split.transpose(0, 2, 3, 4, 1, 5).reshape(-1, 128)
    return split.transpose(0, 2, 3, 1, 4, 5).reshape(-1, 128)  # … + 4·t + 2·h + p


def per_lane(codes: torch.Tensor, scales: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A repacked weight's words [L, 4] and scale words [L, 2], lane after lane of each group."""
    words = codes.numpy().view(np.uint32).reshape(-1, 4)
    return words, scales.numpy().view(np.uint32).reshape(-1, 2).repeat(4, axis=0)


def same(found: np.ndarray, truth: np.ndarray) -> bool:
    """Equal bit for bit as float64: −0 is not +0."""
    return bool((found.view(np.uint64) == truth.view(np.uint64)).all())


@pytest.mark.parametrize("order", repack.ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_repacked_weight_unpacks_to_its_values(kind, order):
    """Every byte under every scale, zero included, whose blocks give +0; K ends within a group."""
    k = 256 * 2 + 16
    packed = torch.arange(k // 2).remainder(256).to(torch.uint8).repeat(127, 1)
    byte = (torch.arange(127)[:, None] + torch.arange(k // 16)).remainder(127).to(torch.uint8)
    scales = SCALES[byte.numpy()].repeat(16, axis=1)
    truth = np.where(scales == 0, 0.0, VALUES[layout.unpack(packed).numpy()] * scales / 256)
    weight = repack.repack(packed, byte.view(torch.float8_e4m3fn), order=order)
    found = in_k_order(unpacked(kind, *per_lane(*weight)), order).reshape(127, -1)
    assert same(found[:, :k].copy(), truth) and (found[:, k:] == 0).all()


def every_half_word(seed: int = 0) -> np.ndarray:
    """Words [65536, 4] with every half-word once in each of the eight positions, unrelated."""
    rng = np.random.default_rng(seed)
    halves = np.stack([rng.permutation(LANES) for _ in range(8)], 1).astype(np.uint32)
    return halves[:, 0::2] | halves[:, 1::2] << 16


def values_of(codes: np.ndarray) -> np.ndarray:
    """E2M1 values [L, block 8, 4] by `repack`'s own inverse, in the order of the registers."""
    words = torch.from_numpy(codes.view(np.int32).reshape(-1, 16).copy())
    ones = torch.from_numpy(stored_scales(np.full((len(words), 8), 0x38)).view(np.int32).copy())
    packed, _ = repack.unrepack(words, ones, 128)
    k_major = VALUES[layout.unpack(packed).numpy()].reshape(-1, 8, 2, 4, 2)  # block, h, t, p
    return np.ascontiguousarray(k_major.transpose(0, 3, 1, 2, 4)).reshape(-1, 8, 4)


def stored_scales(byte: np.ndarray) -> np.ndarray:
    """Two scale words [L, 2] of E4M3 bytes [L, 8]."""
    e4m3 = torch.from_numpy(np.array(byte, np.uint8, order="C")).view(torch.float8_e4m3fn)
    return repack.encode_scales(e4m3).view(torch.int32).numpy().view(np.uint32)


def check(kind: str, codes: np.ndarray, values: np.ndarray, byte: np.ndarray) -> None:
    """codes [L, 4] that hold `values` [L, 8, 4], under scale bytes [8] or [L, 8]."""
    byte = np.broadcast_to(byte, (len(codes), 8))
    truth = (values * (SCALES[byte] / 256)[:, :, None]).reshape(-1, 32)
    assert same(unpacked(kind, codes, stored_scales(byte)), truth)


@pytest.mark.parametrize("kind", KINDS)
def test_every_half_word_under_eight_scales(kind):
    """In every position, under each of the eight, and no two blocks under the same."""
    codes = every_half_word()
    values = values_of(codes)
    for turn in range(8):
        check(kind, codes, values, np.roll(EIGHT_SCALES, turn))


@pytest.mark.parametrize("kind", KINDS)
def test_every_scale_over_random_words(kind):
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 2**32, (127 * 64, 4), dtype=np.uint32)
    byte = 1 + (np.arange(127 * 64)[:, None] + rng.permutation(126)[:8]) % 126
    assert all(set(column) == set(range(1, 127)) for column in byte.T)
    check(kind, codes, values_of(codes), byte)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_half_word_times_every_scale(kind):
    """65,536 × 126 in each of the eight positions; scale 0 goes with zero codes (below)."""
    codes = every_half_word(2)
    values = values_of(codes)
    for turn in range(126):
        check(kind, codes, values, 1 + (turn + 16 * np.arange(8)) % 126)


@pytest.mark.parametrize("kind", KINDS)
def test_a_zero_scale_gives_zero(kind):
    """Its stored byte and its codes are zero, whatever the neighbours that share the words are."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (64, 64), dtype=torch.uint8, generator=generator)
    byte = torch.randint(1, 127, (64, 8), dtype=torch.uint8, generator=generator)
    zero = torch.rand(64, 8, generator=generator) < 0.5
    zero[0], zero[1] = True, False
    signed = torch.arange(64).remainder(2).mul(128).to(torch.uint8)[:, None].expand(64, 8)
    scale = torch.where(zero, signed, byte).view(torch.float8_e4m3fn)
    codes, scales = repack.repack(packed, scale)
    assert (scales.view(torch.uint8)[zero] == 0).all() and (codes[0] == 0).all()
    found = in_k_order(unpacked(kind, *per_lane(codes, scales)), "paired")
    truth = VALUES[layout.unpack(packed).numpy()] * SCALES[byte.numpy()].repeat(16, axis=1) / 256
    assert same(found, np.where(zero.numpy().repeat(16, axis=1), 0.0, truth))


@triton.jit
def _unpack_tile_kernel(
    codes_ptr, scales_ptr, w_ptr, N: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr
):
    rows = tl.program_id(0) * N + tl.arange(0, N)[:, None]
    words = tl.load(codes_ptr + rows * (16 * G) + tl.arange(0, 16 * G)[None, :])
    scales = tl.load(scales_ptr + rows * (2 * G) + tl.arange(0, 2 * G)[None, :])
    w = unpack_tile(words, scales, N, G, w_ptr.dtype.element_ty, False, WIDE)
    tl.store(w_ptr + rows * (128 * G) + tl.arange(0, 128 * G)[None, :], w)


@pytest.mark.parametrize("order", repack.ORDERS)
@pytest.mark.parametrize("groups, lanes", [(1, 4096), (2, LANES)])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_the_interpreter_s_arithmetic_is_the_assembly_s(kind, groups, lanes, order):
    """Bit for bit, every half-word in every position, and the lanes where the order puts them."""
    n, words = lanes // 4 // groups, every_half_word()[:lanes]
    byte = 1 + np.arange(n * groups * 8).reshape(-1, 8) % 126
    codes = torch.from_numpy(words.view(np.int32).reshape(n, 16 * groups))
    scales = torch.from_numpy(stored_scales(byte).view(np.int32).reshape(n, 2 * groups).copy())
    w = torch.empty(n, 128 * groups, dtype=torch.float16 if kind == "fp16" else torch.bfloat16)
    _unpack_tile_kernel[(4,)](codes, scales, w, N=n // 4, G=groups, WIDE=order == "wide")
    executed = in_k_order(unpacked(kind, *per_lane(codes, scales)), order)
    assert same(w.double().numpy().reshape(-1, 128), executed)


def reads_of(name: str, path: Path) -> set[tuple[str, str]]:
    """(file, enclosing function) of every read of a global name, or of a module's attribute."""
    found = set()

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        is_name = isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        is_attribute = isinstance(node, ast.Attribute) and node.attr == name
        is_import = isinstance(node, ast.alias) and node.name == name
        if is_name or is_attribute or is_import:
            found.add((path.name, function))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(path.read_text()), "")
    return found


def test_the_interpreter_is_gated_in_one_file():
    folder = Path(qerl_kernels.__file__).parent
    reads = {read for path in folder.rglob("*.py") for read in reads_of("INTERPRET", path)}
    gated = ("dot", "narrow", "scaled_bf16", "unpack_tile")
    assert reads == {("device.py", name) for name in gated}
