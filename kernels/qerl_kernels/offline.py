"""Compile a kernel for a GPU that is not there, and read what it costs.

Needs Triton, which brings ptxas and nvdisasm, and neither a GPU nor a driver.
"""

import hashlib
import io
import json
import os
import re
import subprocess
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import TritonError

from qerl_kernels import sass
from qerl_kernels.variants import Variant

_NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
WARP = 32
# What the compilation depends on beside its source. The log of ptxas is where spills are told.
ENVIRONMENT = {
    "TRITON_DUMP_PTXAS_LOG": "1",
    "TRITON_ALWAYS_COMPILE": "1",  # from its cache there is no log
    "TRITON_DEFAULT_FP_FUSION": "1",  # the default, which Triton 3.9 warns is about to change
}


class CompileError(Exception):
    """A kernel does not compile, or not to what its variant states."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one compilation takes: registers and bytes a thread, shared bytes a block.

    spill_bytes: stored plus loaded. local_bytes: the stack frame. instructions: of the main loop
    outside the uniform datapath for each of `Variant.elements`; None where that is.
    """

    registers: int
    shared_bytes: int
    spill_bytes: int
    local_bytes: int
    instructions: float | None


def cost(variant: Variant, target: int, cache: Path | None = None) -> Cost:
    """Compile `variant` for compute capability `target`. cache: a folder of earlier results.

    Raises CompileError; ValueError for a Variant that does not name its function's arguments.
    """
    source = _source(variant)
    if cache is None:
        return _compile(variant, source, target)
    path = cache / f"{_key(variant, source, target)}.json"
    if path.is_file():
        return Cost(**json.loads(path.read_text()))
    found = _compile(variant, source, target)
    cache.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps(asdict(found)))
    whole.replace(path)
    return found


def _source(variant: Variant) -> ASTSource:
    names = variant.function.arg_names
    given = [*variant.types, *variant.constexprs]
    if sorted(names) != sorted(given):
        raise ValueError(
            f"{variant.kernel} {variant.tile}: types and constexprs must name each of {names} "
            f"once, found {given}"
        )
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    aligned = [
        i for i, n in enumerate(names) if signature[n].startswith("*") or n in variant.divisible
    ]
    return ASTSource(
        fn=variant.function,
        signature=signature,
        constexprs=dict(variant.constexprs),
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )


def _key(variant: Variant, source: ASTSource, target: int) -> str:
    """Everything the result depends on: the kernel and what it calls, the compiler, the reader."""
    reader = "".join(Path(file).read_text() for file in (__file__, sass.__file__))
    parts = triton.__version__, source.hash(), target, *_options(variant).values(), reader
    text = repr((*parts, variant.elements))
    return hashlib.sha256(text.encode()).hexdigest()


def _options(variant: Variant) -> dict[str, int]:
    return {"num_warps": variant.num_warps, "num_stages": variant.num_stages}


def _compile(variant: Variant, source: ASTSource, target: int) -> Cost:
    log = io.StringIO()
    try:
        with redirect_stdout(log):
            gpu = GPUTarget("cuda", target, WARP)
            made = triton.compile(source, target=gpu, options=_options(variant))
    except (TritonError, RuntimeError) as error:  # a pass of MLIR that fails is a RuntimeError
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise CompileError(
            f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
        ) from error
    instructions = None
    if variant.elements is not None:
        instructions = _instructions(variant, made.asm["cubin"], made.asm["ptx"], target)
    return read_log(log.getvalue(), made.metadata.shared, instructions)


def read_log(log: str, shared: int, instructions: float | None = None) -> Cost:
    """The cost from what `ptxas -v` says; shared: what is asked for at launch."""

    def total(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, log)))

    if "bytes spill stores" not in log:
        raise RuntimeError(f"ptxas says nothing of spills:\n{log}")
    return Cost(
        registers=total(r"Used (\d+) registers"),
        shared_bytes=max(shared, total(r"(\d+) bytes smem")),
        spill_bytes=total(r"(\d+) bytes spill stores") + total(r"(\d+) bytes spill loads"),
        local_bytes=total(r"(\d+) bytes stack frame"),
        instructions=instructions,
    )


def _instructions(variant: Variant, cubin: bytes, ptx: str, target: int) -> float:
    assert variant.elements is not None
    program = sass.parse(disassemble(cubin, target))
    loop = sass.main_loop(program)
    if loop is None:
        raise CompileError("no loop in the machine code, though the variant states its elements")
    elements = variant.elements * sass.passes(program, sass.parse_ptx(ptx))
    return round(loop.instructions * variant.num_warps * WARP / elements, 4)


def disassemble(cubin: bytes, target: int) -> str:
    """The machine code as text, by the nvdisasm of the installed Triton.

    That of Triton 3.6 refuses sm_121, whose instruction set is sm_120's: it is called that.
    """
    if target == 121:
        flags = 49  # the second byte of e_flags in the 64-bit ELF header holds the architecture
        assert cubin[flags] == 121
        cubin = cubin[:flags] + bytes([120]) + cubin[flags + 1 :]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_NVDISASM), "-c", "-ndf", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
