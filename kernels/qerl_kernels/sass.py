"""Machine code as text, read: which loop is a kernel's main loop, and how many instructions it has.

Understands what `nvdisasm -c` prints for sm_80 to sm_121, and PTX as far as loops go.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

_LABEL = re.compile(r"\s*\.?(L_\w+|\$L__BB\w+):")
_SASS = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+([^;&?]*)")
_GUARD = re.compile(r"@!?U?%?!?\w+\s+")
_TARGET = re.compile(r"`\(\.(L_\w+)\)|\bbra\S*\s+(\$L__BB\w+)")
_ALWAYS = re.compile(r"(BRA\S*\s+`|bra\S*\s+\$|EXIT\b|RET\b|ret\b|BPT\.TRAP\b)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """opcode: with its modifiers, "HMMA.16816.F32.BF16". target: the label it may jump to.
    falls: whether the next instruction can follow."""

    opcode: str
    target: str | None
    falls: bool

    @property
    def is_mma(self) -> bool:
        """A tensor-core product: HMMA, HGMMA, QMMA, OMMA, UTCHMMA, ...; in PTX mma, wgmma."""
        base = self.opcode.split(".")[0]
        return (
            base.endswith("MMA")
            or base == "mma"
            or self.opcode.startswith(("wgmma.mma_async", "tcgen05.mma"))
        )

    @property
    def is_uniform(self) -> bool:
        """On the uniform datapath, once a warp and beside the others; tensor-core ones are not."""
        return self.opcode.startswith("U") and not self.opcode.startswith("UTC")


@dataclass(frozen=True, slots=True)
class Program:
    instructions: list[Instruction]
    labels: dict[str, int]  # index of the instruction after each

    def successors(self, i: int) -> list[int]:
        instruction = self.instructions[i]
        found = [i + 1] if instruction.falls else []
        if instruction.target in self.labels:
            found.append(self.labels[instruction.target])
        return [j for j in found if j < len(self.instructions)]


@dataclass(frozen=True, slots=True)
class Loop:
    """instructions: those outside the uniform datapath, one pass. mma: tensor-core products."""

    instructions: int
    mma: int


def parse(text: str) -> Program:
    """The instructions of `nvdisasm -c` output, in order."""
    return _parse(text, lambda line: [found[1]] if (found := _SASS.match(line)) else [])


def parse_ptx(text: str) -> Program:
    """The statements of PTX in order, those of inline assembly among them."""
    return _parse(text, lambda line: line.split("//")[0].strip(" \t{}").split(";")[:-1])


def _parse(text: str, statements: Callable[[str], list[str]]) -> Program:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(instructions)
        else:
            instructions += [_instruction(plain) for s in statements(line) if (plain := s.strip())]
    return Program(instructions, labels)


def _instruction(text: str) -> Instruction:
    guard = _GUARD.match(text)
    plain = text[guard.end() :] if guard else text
    jump = _TARGET.search(plain) if plain.startswith(("BRA", "bra")) else None
    return Instruction(
        opcode=plain.split()[0],
        target=(jump[1] or jump[2]) if jump else None,
        falls=guard is not None or _ALWAYS.match(plain) is None,
    )


def main_loop(program: Program) -> Loop | None:
    """The largest of the innermost loops with a tensor-core product; where there is no such
    product at all, the largest innermost loop; None where there is no loop.

    Waits that the compiler has put out of line, after the loop, are not counted.
    """
    code = program.instructions
    loops = _natural_loops(program)
    with_mma = [loop for loop in loops if any(code[i].is_mma for i in loop)]
    loops = with_mma or loops
    innermost = [loop for loop in loops if not any(other < loop for other in loops)]
    if not innermost:
        return None
    body = [code[i] for i in max(innermost, key=len)]
    return Loop(sum(not i.is_uniform for i in body), sum(i.is_mma for i in body))


def passes(sass: Program, ptx: Program) -> int:
    """How many passes of the source's main loop one pass of the compiled one makes: 1 unless
    ptxas has unrolled it, which shows in the number of tensor-core products."""
    compiled, written = main_loop(sass), main_loop(ptx)
    if compiled is None or written is None or written.mma == 0:
        return 1
    times, rest = divmod(compiled.mma, written.mma)
    return times if rest == 0 and times else 1


def _natural_loops(program: Program) -> list[frozenset[int]]:
    """Every loop as the instructions from which its head is reached again.

    Told by dominance: a jump back from out-of-line code into the middle of a loop is no loop.
    """
    order = _reverse_postorder(program)
    before: dict[int, list[int]] = {i: [] for i in order}
    for i in order:
        for j in program.successors(i):
            before[j].append(i)
    above = _immediate_dominators(order, before)
    latches: dict[int, list[int]] = {}
    for i in order:
        for j in program.successors(i):
            if _dominates(j, i, above):
                latches.setdefault(j, []).append(i)
    return [_body(head, ends, before) for head, ends in latches.items()]


def _body(head: int, latches: list[int], before: dict[int, list[int]]) -> frozenset[int]:
    found, todo = {head}, list(latches)
    while todo:
        i = todo.pop()
        if i not in found:
            found.add(i)
            todo += before[i]
    last = max(latches)
    rotated = last < head  # the block that jumps back is printed first
    return frozenset(i for i in found if rotated or i <= last)


def _reverse_postorder(program: Program) -> list[int]:
    order: list[int] = []
    seen: set[int] = set()
    stack = [(0, False)] if program.instructions else []
    while stack:
        i, done = stack.pop()
        if done:
            order.append(i)
        elif i not in seen:
            seen.add(i)
            stack.append((i, True))
            stack += [(j, False) for j in program.successors(i) if j not in seen]
    return order[::-1]


def _immediate_dominators(order: list[int], before: dict[int, list[int]]) -> dict[int, int]:
    """Cooper, Harvey and Kennedy, A Simple, Fast Dominance Algorithm (2001)."""
    position = {node: k for k, node in enumerate(order)}
    above = {node: node for node in order[:1]}

    def meet(a: int, b: int) -> int:
        while a != b:
            if position[a] > position[b]:
                a = above[a]
            else:
                b = above[b]
        return a

    changed = True
    while changed:
        changed = False
        for node in order[1:]:
            new = reduce(meet, [p for p in before[node] if p in above])
            changed |= above.get(node) != new
            above[node] = new
    return above


def _dominates(head: int, node: int, above: dict[int, int]) -> bool:
    while node != head and above[node] != node:
        node = above[node]
    return node == head
