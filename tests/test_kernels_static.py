"""The static compile table: it counts, it catches what it must, and every kernel passes it.

Compilations are real, in a process of their own: no GPU is needed. The full matrix is slow.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from demo_home import shared_home
from typer.testing import CliRunner

from qerl import cli
from qerl.files import locked
from qerl_kernels import static
from qerl_kernels.budgets import FILE, Budgets
from qerl_kernels.variants import ALL_TARGETS

TESTS = Path(__file__).parent
TRITON = "3.7.1"  # what torch pins
ROW = [
    "kernel", "tile", "target", "triton", "registers", "shared_bytes", "spill_bytes",
    "local_bytes", "instructions_per_weight", "budget",
]  # fmt: skip


@pytest.fixture(scope="module")
def toys() -> SimpleNamespace:
    """The table of toy_kernels for sm_90, its rows by kernel, and the progress that was heard."""
    heard: list[str] = []
    path = [TESTS]
    table = static.table(modules=["toy_kernels"], targets=[90], path=path, say=heard.append)
    rows: dict[str, list] = {}
    for row in table["kernels"]:
        rows.setdefault(row["kernel"], []).append(row)
    return SimpleNamespace(rows=rows, problems=table["problems"], heard=heard)


def faults(toys: SimpleNamespace, kernel: str) -> list[str]:
    """What is wrong with a toy, without its name, and without that it has no budget."""
    found = [line.split("): ", 1) for line in toys.problems if line.startswith(f"{kernel} ")]
    return [fault for _, fault in found if "no budget recorded" not in fault]


def test_a_sound_kernel_is_counted(toys: SimpleNamespace):
    row, unrolled = toys.rows["toy"]
    assert list(row) == ROW
    assert (row["target"], row["tile"]) == (90, "16x64x64 w4 s3")
    # Two stages of x [16, 64] and w [64, 64] in 16 bits are held while a third is computed.
    assert row["shared_bytes"] == 2 * 2 * (16 * 64 + 64 * 64)
    assert 16 < row["registers"] < 128
    assert faults(toys, "toy") == []
    # 64 x 64 weights, 128 threads: 32 weights a thread. The 8 products m16n8k16 of a warp, and a
    # load of 8 or 4 registers for each, are the least there can be.
    assert 8 / 32 < row["instructions_per_weight"] < 2
    # Eight weights a thread: ptxas does several passes in one, and the count is of one.
    assert 1 < unrolled["instructions_per_weight"] < 3


def test_spilling_is_caught(toys: SimpleNamespace):
    (row,) = toys.rows["toy_spills"]
    assert row["registers"] == 255
    assert row["spill_bytes"] > 0 and row["local_bytes"] > 0
    assert faults(toys, "toy_spills") == [
        f"spills {row['spill_bytes']} bytes of registers",
        f"uses {row['local_bytes']} bytes of local memory",
    ]


def test_too_much_shared_memory_is_caught(toys: SimpleNamespace):
    assert faults(toys, "toy_large") == ["296960 bytes of shared memory; a block may have 232448"]


def test_a_kernel_that_does_not_compile_is_a_row_and_a_problem(toys: SimpleNamespace):
    (row,) = toys.rows["toy_broken"]
    assert [row[key] for key in ROW[4:]] == [None] * 6
    (fault,) = faults(toys, "toy_broken")
    assert fault.startswith("does not compile: CompilationError: ") and "power of 2" in fault


def test_elements_without_a_loop_are_a_mistake_of_the_variant(toys: SimpleNamespace):
    assert faults(toys, "toy_no_loop") == [
        "does not compile: no loop in the machine code, though the variant states its elements"
    ]


def test_without_elements_nothing_is_counted(toys: SimpleNamespace):
    (row,) = toys.rows["toy_copy/flat"]
    assert row["registers"] > 0
    assert row["instructions_per_weight"] is row["budget"] is None
    assert faults(toys, "toy_copy/flat") == []


def test_progress_is_heard(toys: SimpleNamespace):
    assert toys.heard[-1] == f"compiled {len(toys.heard)} of {len(toys.heard)}"
    assert len(toys.heard) == sum(map(len, toys.rows.values()))


def test_a_result_is_kept_and_found_again(tmp_path: Path):
    wanted = {"modules": ["toy_kernels"], "kernels": ["toy_copy"], "targets": [90]}
    options = {**wanted, "path": [TESTS], "cache": tmp_path / "results"}
    first = static.table(**options)
    (kept,) = (tmp_path / "results").iterdir()
    result = json.loads(kept.read_text())
    kept.write_text(json.dumps(result | {"registers": 77}))
    again = static.table(**options)
    assert again["kernels"] == [first["kernels"][0] | {"registers": 77}]


def test_an_interrupted_table_leaves_no_compiler(monkeypatch: pytest.MonkeyPatch):
    started: list[int] = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self.pid)

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(KeyboardInterrupt):
        static.table(modules=["toy_kernels"], kernels=["toy"], path=[TESTS], say=stop)
    for _ in range(100):  # killed processes vanish when they have been waited for
        try:
            os.killpg(started[0], 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("its processes are still there")


# ---------------------------------------------------------------------------- without compiling


def made(**changes: object):
    from qerl_kernels.offline import Cost

    sound = Cost(registers=64, shared_bytes=1024, spill_bytes=0, local_bytes=0, instructions=2.0)
    return type(sound)(**{name: getattr(sound, name) for name in sound.__slots__} | changes)


@pytest.fixture
def budgets(tmp_path: Path) -> Budgets:
    import triton

    budgets = Budgets(tmp_path / "budgets.json")
    budgets.record(triton.__version__, [("toy", "16x64x64 w4 s3", 80, 2.0)], whole=True)
    return budgets


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"instructions": None}, None),
        ({"instructions": 2.01}, "2.01 instructions a weight; the budget is 2"),
        ({"shared_bytes": 163 * 1024}, None),
        (
            {"shared_bytes": 163 * 1024 + 1},
            "166913 bytes of shared memory; a block may have 166912",
        ),
        ({"spill_bytes": 8}, "spills 8 bytes of registers"),
        ({"local_bytes": 8}, "uses 8 bytes of local memory"),
    ],
)
def test_each_limit(budgets: Budgets, changes: dict, fault: str | None):
    import toy_kernels
    import triton

    from qerl_kernels import compile_table

    variant = next(toy_kernels.variants())
    row, found = compile_table.row((variant, 80), made(**changes), budgets)
    name = f"toy 16x64x64 w4 s3 sm_80 (Triton {triton.__version__})"
    assert found == ([] if fault is None else [f"{name}: {fault}"])
    assert row["budget"] == 2.0
    assert row["instructions_per_weight"] == changes.get("instructions", 2.0)


def test_a_count_without_a_budget_is_a_fault(budgets: Budgets):
    import toy_kernels

    from qerl_kernels import compile_table

    variant = next(toy_kernels.variants())
    _, (fault,) = compile_table.row((variant, 86), made(), budgets)
    assert fault.endswith("2.00 instructions a weight and no budget recorded")


def test_every_target_has_its_limit():
    assert sorted(static.SHARED_LIMIT) == sorted(ALL_TARGETS)


def test_the_log_of_ptxas():
    from qerl_kernels.offline import read_log

    log = """ptxas info    : 11 bytes gmem, 8 bytes cmem[4]
ptxas info    : Function properties for _prefix_attention_kernel
    16 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size, 8 bytes smem
"""
    assert read_log(log, shared=24576) == made(
        registers=168, shared_bytes=24576, spill_bytes=36, local_bytes=16, instructions=None
    )
    assert read_log(log, shared=0).shared_bytes == 8
    with pytest.raises(RuntimeError, match="says nothing of spills"):
        read_log("", shared=0)


def test_two_variants_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch):
    import toy_kernels

    from qerl_kernels import compile_table

    toy = next(toy_kernels.variants())
    monkeypatch.setattr(toy_kernels, "variants", lambda: [toy, toy])
    with pytest.raises(static.StaticError, match="two variants are called toy '16x64x64 w4 s3'"):
        compile_table.tasks(["toy_kernels"], [], [])


def test_a_variant_is_compiled_for_its_targets(monkeypatch):
    from dataclasses import replace

    import toy_kernels

    from qerl_kernels import compile_table

    toy = next(toy_kernels.variants())
    few = replace(toy, tile="few", targets=(90, 120))
    monkeypatch.setattr(toy_kernels, "variants", lambda: [few])
    assert compile_table.tasks(["toy_kernels"], [], []) == [(few, 90), (few, 120)]
    assert compile_table.tasks(["toy_kernels"], ["toy"], [80, 90]) == [(few, 90)]


def test_a_variant_must_name_every_argument():
    from dataclasses import replace

    import toy_kernels

    from qerl_kernels.offline import cost

    toy = next(toy_kernels.variants())
    short = replace(toy, types={"x_ptr": "*bf16"})
    with pytest.raises(ValueError, match=r"toy 16x64x64 w4 s3: types and constexprs must name"):
        cost(short, 90)


# ------------------------------------------------------------------------------------- budgets


def test_budgets_are_rounded_up_and_read_back(tmp_path: Path):
    path = tmp_path / "b.json"
    costs = [("a", "t", 80, 2.0), ("a", "t", 120, 2.051), ("a", "u", 90, 3.96), ("b", "t", 80, 1.3)]
    Budgets(path).record("3.7.1", costs, whole=True)
    read = Budgets(path)
    assert [read.get(k, t, n, "3.7.9") for k, t, n, _ in costs] == [2.0, 2.1, 4.0, 1.3]
    assert read.get("a", "t", 80, "3.6.0") is None
    assert read.get("a", "t", 86, "3.7.1") is None
    assert path.read_text() == (
        '{\n  "tritons": ["3.7"],\n  "kernels": {\n    "a": {\n'
        '      "t": {"80": 2.0, "120": 2.1},\n      "u": {"90": 4.0}\n    },\n'
        '    "b": {\n      "t": {"80": 1.3}\n    }\n  }\n}\n'
    )


def test_one_tritons_budgets_leave_the_others(tmp_path: Path):
    path = tmp_path / "b.json"
    Budgets(path).record("3.10.0", [("a", "t", 80, 2.0), ("a", "t", 90, 3.0)], whole=True)
    Budgets(path).record("3.9.0", [("a", "t", 80, 2.0), ("a", "t", 90, 2.5)], whole=True)
    data = json.loads(path.read_text())
    assert data["tritons"] == ["3.9", "3.10"]
    assert data["kernels"]["a"]["t"] == {"80": 2.0, "90": {"3.9": 2.5, "3.10": 3.0}}
    Budgets(path).record("3.9.0", [("a", "t", 80, 2.2)], whole=False)
    assert Budgets(path).get("a", "t", 90, "3.9.0") == 2.5
    Budgets(path).record("3.9.0", [("a", "t", 80, 2.2)], whole=True)
    assert Budgets(path).get("a", "t", 90, "3.9.0") is None
    assert Budgets(path).get("a", "t", 90, "3.10.0") == 3.0


def test_the_recorded_budgets_are_written_as_this_code_writes_them(tmp_path: Path):
    budgets = Budgets(FILE)
    assert budgets.tritons == ["3.6", "3.7", "3.9"]
    budgets.path = tmp_path / "b.json"
    budgets.record(TRITON, [], whole=False)
    assert budgets.path.read_text() == FILE.read_text()


# ------------------------------------------------------------------------------ the command line


def qerl(*arguments: object, code: int = 0) -> SimpleNamespace:
    result = CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return SimpleNamespace(out=result.stdout, err=result.stderr)


def test_bench_prints_the_table_or_json():
    chosen = ["kernels", "--static", "--kernel", "nvfp4_unpack", "--target", 90]
    document = json.loads(qerl(*chosen, "--json", "-").out)
    assert document["problems"] == []
    assert {(r["kernel"], r["target"]) for r in document["kernels"]} == {("nvfp4_unpack", 90)}
    assert all(list(row) == ROW for row in document["kernels"])
    head, *rows = qerl(*chosen).out.splitlines()
    assert head.split()[:4] == ["kernel", "tile", "sm", "regs"]
    assert len(rows) == len(document["kernels"])


def test_bench_exits_with_1_where_there_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    row = dict.fromkeys(ROW, None) | {"kernel": "toy", "tile": "t", "target": 90, "triton": TRITON}
    answer = {"kernels": [row], "problems": ["toy t sm_90 (Triton 3.7.1): spills"]}
    monkeypatch.setattr(static, "table", lambda **_: answer)
    assert qerl("kernels", "--static", code=1).out.splitlines()[-1] == (
        "problem: toy t sm_90 (Triton 3.7.1): spills"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("kernels", "bench kernels: give --static"),
        ("kernels --static --kernel nope", "--kernel 'nope': there are "),
        ("kernels --static --target 75", "--target 75: there are 80, 86, 89, 90, 100, 120, 121"),
        ("", "bench: missing command; see `qerl bench --help`"),
    ],
)
def test_bench_refuses_in_one_line(arguments: str, message: str):
    result = qerl(*arguments.split(), code=2)
    assert result.out == ""
    assert result.err.startswith(f"error: {message}")
    assert result.err.count("\n") == 1


def test_bench_shows_an_example():
    assert "\n  qerl bench kernels --static" in qerl("--help").out
    assert "\n  qerl bench kernels --static" in qerl("kernels", "--help").out


def test_without_triton_it_says_what_to_install():
    code = (
        "import importlib.util, sys\n"
        "importlib.util.find_spec = lambda name: None\n"
        "from qerl_kernels import static\n"
        "sys.exit(static.main([]))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr == "error: compiling kernels needs Triton: pip install triton==3.7.1\n"


# ---------------------------------------------------------------------------- the kernels of ours


def test_the_matmul_keeps_its_budget():
    found = static.table(kernels=["nvfp4_matmul"], targets=[90])  # the others: in the slow test
    assert found["problems"] == []
    rows = [row for row in found["kernels"] if row["kernel"] == "nvfp4_matmul"]  # /sum has no loop
    assert rows and all(row["instructions_per_weight"] is not None for row in rows)


@pytest.fixture(scope="module")
def home():
    with shared_home() as folder:
        yield folder


def triton_folder(version: str, home: Path) -> Path:
    """A folder with that Triton, installed there once a machine."""
    folder = home / "tritons" / f"{version}-py{sys.version_info.major}{sys.version_info.minor}"
    with locked(folder):
        if not folder.exists():
            half = folder.with_suffix(".half")
            shutil.rmtree(half, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            subprocess.run([*pip, "--no-deps", "--target", half, f"triton=={version}"], check=True)
            half.rename(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.7.1", "3.6.0", "3.9.0"])
def test_every_kernel_on_every_target_keeps_its_budget(version: str, home: Path):
    """No spill, no local memory, shared memory and instructions within limits, all of them.

    3.7.1 is what torch 2.13 brings, 3.6 the oldest; of 3.9 the products with NVFP4 are held.
    """
    newest = ["nvfp4_matmul", "nvfp4_matmul_t", "nvfp4_unpack"] if version == "3.9.0" else []
    found = static.table(
        path=[triton_folder(version, home)],
        kernels=newest,
        jobs=os.cpu_count() or 1,
        cache=home / "compiled",
    )
    assert found["problems"] == []
    assert {row["triton"] for row in found["kernels"]} == {version}
    assert {row["target"] for row in found["kernels"]} == set(ALL_TARGETS)
