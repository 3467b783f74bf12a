"""Machine code as text: what is a loop, which loop is the main one, which instructions count."""

from __future__ import annotations

import pytest

from qerl_kernels import sass
from qerl_kernels.sass import Loop, main_loop, parse, parse_ptx, passes

# Cut down from what nvdisasm prints for sm_90: a loop with uniform instructions (ULEA, UMOV,
# @UP0 UIADD3), predicated ones (@P0 IMAD, @!P1 LDGSTS) and two products; then a smaller one.
HOPPER = """
	.section	.text._kernel,"ax",@progbits
_kernel:
.text._kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0020*/                   ULEA UR6, UR4, UR6, 0x18 ;
        /*0030*/              @P0  IMAD.MOV.U32 R2, RZ, RZ, R3 ;
        /*0040*/                   LOP3.LUT R5, R2, 0x81c081c0, RZ, 0xc0, !PT ;
        /*0050*/             @!P1  LDGSTS.E.BYPASS.128 [R7], desc[UR8][R4.64] ;
        /*0060*/                   HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR12], R24, gsb0 ;
        /*0070*/             @UP0  UIADD3 UR4, UR4, 0x1, URZ ;
        /*0080*/                   HGMMA.64x16x16.F32.BF16 R24, R12, gdesc[UR12], R24, gsb0 ;
        /*0090*/                   UMOV UR7, URZ ;
        /*00a0*/              @P0  BRA `(.L_x_0) ;
.L_x_1:
        /*00b0*/                   FADD R3, R3, R4 ;
.L_x_2:
        /*00c0*/                   HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR12], R24, gsb0 ;
        /*00d0*/              @P2  BRA `(.L_x_2) ;
        /*00e0*/                   EXIT ;
.L_x_3:
        /*00f0*/                   BRA `(.L_x_3);
        /*0100*/                   NOP;
"""

# sm_100: scheduling notes after the instruction, a branch on a uniform predicate, and a wait whose
# retry lies after the end and jumps back into the loop: not a loop over everything in between.
BLACKWELL = """
        /*0000*/                   LDC R1, c[0x0][0x37c]                    &wr=0x0  ?trans1;
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2]  &wr=0x1  ?trans1;
        /*0020*/              @!P0 BRA `(.L_x_4)                            &req={1} ?trans5;
.L_x_1:
        /*0030*/                   LDS.128 R4, [R8]                         &wr=0x0  ?trans1;
        /*0040*/               @P1 BRA `(.L_x_2)                                     ?trans5;
        /*0050*/                   UTCHMMA gdesc[UR18], gdesc[UR20], tmem[UR37], tmem[UR44], !UPT ;
        /*0060*/                   UTCBAR [UR6], URZ                                 ?trans1;
.L_x_2:
        /*0070*/                   BRA.U !UP1, `(.L_x_0)                             ?trans5;
        /*0080*/                   UTCHMMA gdesc[UR18], gdesc[UR20], tmem[UR37], tmem[UR44], !UPT ;
        /*0090*/                   FADD R3, R3, R4                                   ?trans1;
        /*00a0*/                   FADD R3, R3, R5                                   ?trans1;
        /*00b0*/                   EXIT                                              ?trans5;
.L_x_4:
        /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2]  &wr=0x1  ?trans1;
        /*00d0*/              @!P0 BRA `(.L_x_4)                            &req={1} ?trans5;
        /*00e0*/                   BRA `(.L_x_1)                                     ?trans5;
"""


def code(*lines: str) -> str:
    """Instructions and labels as nvdisasm prints them."""
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * i:04x}*/   {line} ;"
        for i, line in enumerate(lines)
    )


def test_the_main_loop_is_the_larger_and_uniform_instructions_do_not_count():
    assert main_loop(parse(HOPPER)) == Loop(instructions=6, mma=2)


def test_a_retry_after_the_end_is_neither_a_loop_nor_counted():
    # SYNCS, BRA, LDS, BRA, UTCHMMA, UTCBAR, BRA.U
    assert main_loop(parse(BLACKWELL)) == Loop(instructions=7, mma=1)


def test_scheduling_notes_predicates_and_padding_are_not_opcodes():
    opcodes = [i.opcode for i in parse(BLACKWELL).instructions]
    assert opcodes[:3] == ["LDC", "SYNCS.PHASECHK.TRANS64.TRYWAIT", "BRA"]
    assert [i.opcode for i in parse(HOPPER).instructions][-2:] == ["BRA", "NOP"]


def test_the_inner_of_two_nested_loops():
    text = code(
        ".L_x_0:", "FADD R1, R1, R2", ".L_x_1:", "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        "@P0 BRA `(.L_x_1)", "FADD R1, R1, R2", "FADD R1, R1, R2", "@P1 BRA `(.L_x_0)", "EXIT",
    )  # fmt: skip
    assert main_loop(parse(text)) == Loop(instructions=2, mma=1)


def test_a_larger_loop_without_a_product_is_not_the_main_one_unless_no_loop_has_one():
    copy = [".L_x_0:", *["FADD R1, R1, R2"] * 9, "@P0 BRA `(.L_x_0)"]
    product = [".L_x_1:", "QMMA.16832.F32.E4M3.E4M3 R4, R8, R12, R4", "@P0 BRA `(.L_x_1)"]
    assert main_loop(parse(code(*copy, *product, "EXIT"))) == Loop(instructions=2, mma=1)
    assert main_loop(parse(code(*copy, "EXIT"))) == Loop(instructions=10, mma=0)
    assert main_loop(parse(code("FADD R1, R1, R2", "EXIT"))) is None
    assert main_loop(parse("")) is None


def test_a_loop_that_is_entered_in_its_middle():
    text = code(
        "BRA `(.L_x_1)", ".L_x_0:", "FADD R1, R1, R2", ".L_x_1:",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4", "@P0 BRA `(.L_x_0)", "EXIT",
    )  # fmt: skip
    assert main_loop(parse(text)) == Loop(instructions=3, mma=1)


@pytest.mark.parametrize("ends", ["EXIT", "RET.REL.NODEC R2 `(_kernel)", "BPT.TRAP 0x1"])
def test_nothing_falls_through_an_end_but_a_predicated_one(ends: str):
    loop = ["HMMA.16816.F32 R4, R8, R12, R4", "@P0 BRA `(.L_x_0)", "EXIT"]
    assert main_loop(parse(code(ends, ".L_x_0:", *loop))) is None
    assert main_loop(parse(code(f"@P1 {ends}", ".L_x_0:", *loop))) == Loop(2, 1)


@pytest.mark.parametrize(
    ("opcode", "mma", "uniform"),
    [
        ("HMMA.16816.F32.BF16", True, False),
        ("HGMMA.64x16x16.F32", True, False),
        ("QMMA.16832.F32.E4M3.E4M3", True, False),
        ("OMMA.SF.16864.F32", True, False),
        ("UTCHMMA.2CTA", True, False),
        ("UTCBAR", False, False),
        ("UIADD3", False, True),
        ("HFMA2.MMA.BF16_V2", False, False),  # an ordinary multiply-add despite its name
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", True, False),
        ("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16", True, False),
        ("wgmma.commit_group.sync.aligned", False, False),
        ("tcgen05.mma.cta_group::1.kind::f16", True, False),
        ("tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64", False, False),
    ],
)
def test_which_instructions_are_products_and_which_uniform(opcode: str, mma: bool, uniform: bool):
    instruction = sass.Instruction(opcode, None, True)
    assert (instruction.is_mma, instruction.is_uniform) == (mma, uniform)


PTX = """
.version 8.7
.target sm_90a
.visible .entry _kernel(
	.param .u64 .ptr .global .align 1 _kernel_param_0
)
{
	.reg .pred 	%p<3>;
	@%p1 bra 	$L__BB0_3;
$L__BB0_2:                              // =>This Inner Loop Header: Depth=1
	.loc	1 141 20                        // kernels.py:141:20; in the loop
	// begin inline asm
	{ .reg .b32 t; and.b32 t, %r1, 7; shr.u32 %r2, t, 1; }
	// end inline asm
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r3 }, { %r4 }, { %r5 }, { %r3 };
	@!%p2 bra 	$L__BB0_2;
$L__BB0_3:
	ret;
}
"""


def test_ptx_is_read_by_the_statement():
    assert main_loop(parse_ptx(PTX)) == Loop(instructions=5, mma=1)


def test_passes_of_an_unrolled_loop():
    def loop(products: int) -> sass.Program:
        body = ["HMMA.16816.F32.BF16 R4, R8, R12, R4"] * products
        return parse(code(".L_x_0:", *body, "@P0 BRA `(.L_x_0)", "EXIT"))

    assert [passes(loop(n), parse_ptx(PTX)) for n in (1, 2, 4)] == [1, 2, 4]
    assert passes(parse(code("EXIT")), parse_ptx(PTX)) == 1
