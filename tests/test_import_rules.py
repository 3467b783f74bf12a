"""Imports point one way, and asking for help loads no torch. See `violations` for the rules."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A recipe and everything that reads, writes or explains one.
RECIPE_ROOM = {
    "qerl.config",
    "qerl.section",
    "qerl.recipe_sections",
    "qerl.recipes",
    "qerl.recipe_errors",
    "qerl.aliases",
    "qerl.explain",
    "qerl.init",
}
LEAVES = {"qerl.errors", "qerl.types", "qerl.files", "qerl.stats", "qerl.home"}
LIGHT = RECIPE_ROOM | LEAVES  # these never name a heavy package, not even inside a function
HEAVY = {"torch", "transformers", "peft", "triton", "datasets", "accelerate", "numpy"}
# Nobody below imports these: the command line, the loop, the public door.
COMMANDS = {f"qerl.cli{part}" for part in ("", "_bench", "_doctor", "_export", "_model", "_train")}
COMMANDS |= {"qerl.cli_quantize", "qerl.cli_run"}
TOP = COMMANDS | {"qerl.run", "qerl.loop", "qerl.doctor", "qerl"}
# What the model room may stand on (with LIGHT and the kernels).
BELOW_MODEL = {"qerl.model", "qerl.quantize", "qerl.demo_model", "qerl.device"}
ABOVE_QUANTIZE = {"qerl.quantize", "qerl_kernels"}
PURE_ALGO = {"qerl.algo"}


def sources() -> dict[str, Path]:
    found = {}
    for base, package in ((ROOT, "qerl"), (ROOT / "kernels", "qerl_kernels")):
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imported(tree: ast.AST, modules: set[str], lazy: bool = True) -> set[str]:
    """Modules a file imports: ours in full, others by package. TYPE_CHECKING blocks are not code.

    lazy: also those inside functions.
    """
    names: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not lazy:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = inner & modules
            names |= submodules
            if len(submodules) < len(inner):
                names.add(node.module)
        elif isinstance(node, ast.ImportFrom):
            names.add("a relative import")
        else:
            names |= imported(node, modules, lazy)
    ours = ("qerl", "qerl_kernels")
    return {name if name.split(".")[0] in ours else name.split(".")[0] for name in names}


def room(name: str) -> str:
    """`qerl.model.load` is in `qerl.model`; a module at the top is a room of its own."""
    return ".".join(name.split(".")[:2]) if name.startswith("qerl.") else name.split(".")[0]


def allowed(module: str, target: str) -> bool:
    """Whether `module` may import `target`, anywhere in its code."""
    here, there = room(module), room(target)
    if target == "a relative import":
        return False
    if here == "qerl_kernels":
        return there not in TOP and not there.startswith("qerl.")
    if module in LEAVES:
        ours = there.startswith("qerl") and there != "qerl.errors"
        return there not in HEAVY and not ours
    if module in RECIPE_ROOM:
        return there not in HEAVY and (not there.startswith("qerl") or there in LIGHT)
    if there == "triton":
        return False  # only the kernels know it
    if here not in TOP and there in TOP:
        return False
    if not there.startswith("qerl"):
        return True
    if here in PURE_ALGO:
        return there in LIGHT | PURE_ALGO
    if here == "qerl.quantize":
        return there in LIGHT | ABOVE_QUANTIZE
    if here == "qerl.model":
        return there in LIGHT | BELOW_MODEL | {"qerl_kernels"}
    return True


def violations(files: dict[str, ast.AST]) -> list[str]:
    """Broken rules as "a imports b".

    The kernels know nothing of qerl; leaves import nothing of ours but errors; the recipe room
    only itself and leaves; algo is pure; model stands on quantize and kernels; nothing imports the
    top.
    """
    modules = set(files)
    return [
        f"{module} imports {target}"
        for module, tree in files.items()
        for target in sorted(imported(tree, modules))
        if not allowed(module, target)
    ]


def test_imports_point_one_way():
    assert violations({name: ast.parse(path.read_text()) for name, path in sources().items()}) == []


def test_no_import_cycle():
    """At module level: a cycle would make the result depend on who is imported first."""
    files = {name: ast.parse(path.read_text()) for name, path in sources().items()}
    graph = {
        name: {target for target in imported(tree, set(files), lazy=False) if target in files}
        for name, tree in files.items()
    }
    for name in graph:
        graph[name].discard(name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


@pytest.mark.parametrize(
    ("module", "code", "found"),
    [
        ("qerl_kernels.ops", "from qerl.errors import QerlError", "qerl.errors"),
        ("qerl_kernels.ops", "import qerl", "qerl"),
        ("qerl.types", "def f():\n    import torch", "torch"),
        ("qerl.config", "import numpy.random", "numpy"),
        ("qerl.config", "def f():\n    from qerl import optim", "qerl.optim"),
        ("qerl.errors", "from qerl import types", "qerl.types"),
        ("qerl.files", "from qerl import types", "qerl.types"),
        ("qerl.model.load", "from qerl.rollout.native import x", "qerl.rollout.native"),
        ("qerl.algo.loss", "from qerl.policy import x", "qerl.policy"),
        ("qerl.optim", "import qerl", "qerl"),
        ("qerl.optim", "from qerl.run import train", "qerl.run"),
        ("qerl.optim", "import triton.language as tl", "triton"),
        ("qerl.optim", "from . import types", "a relative import"),
    ],
)
def test_the_rules_catch(module: str, code: str, found: str):
    others = dict.fromkeys(("qerl.types", "qerl.optim", "qerl.errors"), ast.parse(""))
    assert violations(others | {module: ast.parse(code)}) == [f"{module} imports {found}"]


def test_type_checking_blocks_are_not_imports():
    code = "if TYPE_CHECKING:\n    import torch"
    assert violations({"qerl.types": ast.parse(code)}) == []


HELP = "import sys; sys.argv = ['qerl', '--help']\ntry:\n    import qerl.cli; qerl.cli.main()\n"
HELP += "except SystemExit as stop:\n    assert not stop.code, stop.code\n"


@pytest.mark.parametrize(
    "code",
    [
        "import qerl",
        "import qerl.config; qerl.config.Recipe.load('demo-smollm2')",
        "import qerl.explain, qerl.init, qerl.types; qerl.explain.explain()",
        HELP,
    ],
    ids=["qerl", "config", "explain", "help"],
)
def test_light_imports_load_nothing_heavy(code: str):
    heavy = sorted(HEAVY)
    check = (
        f"\nimport sys\nfound = [m for m in {heavy} if m in sys.modules]\nassert not found, found"
    )
    run = subprocess.run(
        [sys.executable, "-c", code + check], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
