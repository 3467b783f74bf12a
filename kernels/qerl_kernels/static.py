"""The static compile table: every kernel for every target, compiled and counted without a GPU.

    python -m qerl_kernels.static                  the table, with the installed Triton
    python -m qerl_kernels.static --write-budgets  the same, and its counts become the budgets

Another Triton is chosen by PYTHONPATH. `table` is the same for a program, in a process of its own:
where TRITON_INTERPRET is set, this one cannot compile. Importing this file imports no Triton.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

MODULES = (
    "matmul", "backward", "unpack", "gemm", "fp8", "norm", "attention", "logprob_triton",
)  # fmt: skip
JOBS = 2
KIB = 1024
# Shared memory that one block may ask for (CUDA C++ Programming Guide, technical specifications
# per compute capability). Triton checks it at launch alone.
SHARED_LIMIT = {
    80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB,
    121: 99 * KIB,
}  # fmt: skip
_PROGRESS = "compiled "


class StaticError(Exception):
    """The table cannot be made; the message says what to do."""


def table(
    *,
    modules: Iterable[str] = (),
    kernels: Iterable[str] = (),
    targets: Iterable[int] = (),
    jobs: int = JOBS,
    cache: Path | None = None,
    path: Iterable[Path] = (),
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The table as {"kernels": [row, ...], "problems": [line, ...]}, made in another process.

    Nothing given means all. modules: dotted names. kernels: `Variant.kernel`, or what is before
    its "/". targets: compute capabilities, 90. cache: a folder for results. path: folders searched
    first, for another Triton. say: hears the progress.

    A row has kernel, tile, target, triton, registers (a thread's), shared_bytes (a block's),
    spill_bytes (stored plus loaded), local_bytes, instructions_per_weight and budget. The last two
    are None where there is nothing to count, all numbers are for a kernel that does not compile.

    Raises StaticError for an unknown kernel or target and where there is no Triton.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "table.json")
        command = [sys.executable, "-P", "-m", "qerl_kernels.static", "--json", str(result)]
        command += [f"--module={name}" for name in modules]
        command += [f"--kernel={name}" for name in kernels]
        command += [f"--target={number}" for number in targets]
        command += [f"--jobs={jobs}", *([] if cache is None else [f"--cache={cache}"])]
        _run(command, _environment(path) | {"TMPDIR": folder}, say)
        return json.loads(result.read_text())


def _environment(path: Iterable[Path]) -> dict[str, str]:
    """This process's, without what changes how Triton compiles."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    search = os.pathsep.join([*map(str, path), *filter(None, before)])
    kept = {name: v for name, v in os.environ.items() if not name.startswith("TRITON_")}
    return kept | {"PYTHONPATH": search}


def _run(command: list[str], env: dict[str, str], say: Callable[[str], None]) -> None:
    # A session of its own: its compilers end with it, however this process is interrupted.
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    heard = ""
    try:
        for line in process.stderr:
            if line.startswith(_PROGRESS):
                say(line.strip())
            else:
                heard += line
        status = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if status == 2:
        raise StaticError(heard.splitlines()[-1].removeprefix("error: "))
    if status not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}: exit status {status}\n{heard}")


def lines(document: dict[str, Any]) -> Iterator[str]:
    """The table for people, then its problems."""
    names = {
        "kernel": "kernel", "tile": "tile", "target": "sm", "registers": "regs",
        "shared_bytes": "shared", "spill_bytes": "spill", "local_bytes": "local",
        "instructions_per_weight": "instr/weight", "budget": "budget",
    }  # fmt: skip
    rows = [names] + [{key: _cell(row[key]) for key in names} for row in document["kernels"]]
    width = {key: max(len(row[key]) for row in rows) for key in names}
    for row in rows:
        text = (f"{row[k]:{'<' if k in ('kernel', 'tile') else '>'}{width[k]}}" for k in names)
        yield "  ".join(text).rstrip()
    for problem in document["problems"]:
        yield f"problem: {problem}"


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m qerl_kernels.static`: 0; 1 when the table has problems; 2 for a mistake."""
    options = _parser().parse_args(arguments)
    try:
        document = _document(options)
    except StaticError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is None:
        print("\n".join(lines(document)))
    elif options.json == "-":
        print(json.dumps(document, indent=2))
    else:
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n")
    return 1 if document["problems"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m qerl_kernels.static")
    parser.add_argument("--module", action="append", help="default: all of the package")
    parser.add_argument("--kernel", action="append", default=[])
    parser.add_argument("--target", action="append", default=[], type=int)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--cache", type=Path, help="folder for results")
    parser.add_argument("--json", metavar="PATH", help="- is standard output")
    parser.add_argument("--write-budgets", action="store_true")
    return parser


def _document(options: argparse.Namespace) -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        raise StaticError("compiling kernels needs Triton: pip install triton==3.7.1")
    with tempfile.TemporaryDirectory() as folder:
        # Triton reads these when it is imported and when a kernel is decorated.
        os.environ.pop("TRITON_INTERPRET", None)
        os.environ["TRITON_CACHE_DIR"] = folder
        from qerl_kernels import compile_table, offline
        from qerl_kernels.budgets import Budgets

        os.environ.update(offline.ENVIRONMENT)
        modules = options.module or [f"qerl_kernels.{name}" for name in MODULES]
        todo = compile_table.tasks(modules, options.kernel, options.target)
        made = compile_table.costs(todo, options.jobs, options.cache, _say)
    budgets = Budgets()
    if options.write_budgets:
        whole = not (options.module or options.kernel or options.target)
        compile_table.record(todo, made, budgets, whole)
    rows = [compile_table.row(*pair, budgets) for pair in zip(todo, made, strict=True)]
    faults = [fault for _, found in rows for fault in found]
    return {"kernels": [row for row, _ in rows], "problems": faults}


def _say(line: str) -> None:
    print(f"{_PROGRESS}{line}", file=sys.stderr)


if __name__ == "__main__":
    # Not this file's second copy: `compile_table` raises the errors of the module of this name.
    from qerl_kernels import static

    sys.exit(static.main())
