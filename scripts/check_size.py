"""Keep the code readable: files of at most 400 lines, short functions. Run by `make lint`.

Triton bodies (functions under a `jit` decorator) are exempt: their length is the kernel's.
"""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES, FILE_MEDIAN, FUNCTION_MEDIAN, FUNCTION_P90 = 400, 200, 12, 40


def functions(path: Path) -> list[tuple[int, str]]:
    """(lines, where) of every function in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            found.append((lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    return found


def problems() -> list[str]:
    """What is over budget, one line each."""
    files = sorted(p for top in ("qerl", "kernels", "scripts") for p in (ROOT / top).rglob("*.py"))
    lengths = {p: len(p.read_text().splitlines()) for p in files}
    sizes = sorted(n for path in files for n in functions(path))
    found = [
        f"{path.relative_to(ROOT)}: {n} lines, at most {FILE_LINES}"
        for path, n in lengths.items()
        if n > FILE_LINES
    ]
    p90 = sizes[int(0.9 * (len(sizes) - 1))]
    for what, value, limit in (
        ("median file", statistics.median(lengths.values()), FILE_MEDIAN),
        ("median function", statistics.median(n for n, _ in sizes), FUNCTION_MEDIAN),
        (f"90th percentile of functions ({p90[1]})", p90[0], FUNCTION_P90),
    ):
        if value > limit:
            found.append(f"{what}: {value} lines, at most {limit}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or 0)
