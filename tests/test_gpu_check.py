"""The check for a GPU, as far as it runs without one: kernels interpreted, learning on the CPU."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpretedFunction

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402
import gpu_learn  # noqa: E402
import gpu_numbers  # noqa: E402
import gpu_speed  # noqa: E402

from qerl_kernels import dispatch, ops  # noqa: E402

CPU = torch.device("cpu")


def names(pattern: str) -> list[str]:
    return [name for name, _ in gpu_numbers.checks(CPU) if pattern in name]


def test_numbers_cover_every_tile_in_both_types():
    for direction in ("forward", "backward"):
        tiles = dispatch.tiles(90, direction)
        assert len(names(f"{direction} ")) == 4 * len(tiles)


OTHERS = ["unpack", "layer", "fp8", "norm", "norm_bits", "noisy_norm", "logprob"]
OTHERS += ["attention", "invariance"]


@pytest.mark.parametrize("name", OTHERS)
def test_numbers_pass_under_the_interpreter(name):
    check = dict(gpu_numbers.checks(CPU))[f"{name} bfloat16"]
    with ops.interpreting():
        assert check() <= 1


@pytest.mark.slow
def test_numbers_launch_every_kernel_in_both_of_its_forms(monkeypatch):
    """Kernels by their constexprs: what is masked and what is not, with and without each option."""
    launched: dict[str, list[dict]] = {}
    plain = InterpretedFunction.run

    def counted(self, *args, grid, warmup, **kwargs):
        launched.setdefault(self.fn.__name__, []).append(kwargs)
        return plain(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    with ops.interpreting():
        for name, check in gpu_numbers.checks(CPU):
            if name.endswith(" bfloat16"):
                assert check() <= 1, name
    package = Path(dispatch.__file__).parent
    kernels = {
        node.name
        for file in package.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert kernels - set(launched) == set()
    for kernel, flag in (("_nvfp4_matmul_kernel", "EVEN_K"), ("_nvfp4_matmul_t_kernel", "EVEN")):
        assert {call[flag] for call in launched[kernel]} == {False, True}


def test_a_wrong_product_is_over_its_bound():
    truth = torch.ones(4, 4, dtype=torch.float64)
    right = truth.bfloat16()
    assert gpu_numbers.excess(right, truth, truth, 16) == 0
    assert gpu_numbers.excess(right * 1.01, truth, truth, 16) > 1


def test_it_learns_to_emit_the_token():
    result = gpu_learn.learn(CPU, steps=40, say=lambda text: None)
    assert result["rewards"][0] < 0.1 and result["reached"] and result["rewards"][-1] >= 0.98


def test_advantages_by_hand(monkeypatch):
    monkeypatch.setattr(gpu_learn, "PROMPTS", 2)
    monkeypatch.setattr(gpu_learn, "GROUP", 2)
    found = gpu_learn.advantages(torch.tensor([1.0, 0.0, 0.5, 0.5]))
    share = 0.5 / (0.5**0.5 + 1e-4)
    assert found.tolist() == pytest.approx([share, -share, 0.0, 0.0])


def test_floor_by_hand():
    # 4.5 bits of 1000 × 1000 weights and 2 · 2000 · 2 bytes of x and y at 1e9 bytes/s.
    assert gpu_speed.floor_us(2, 1000, 1000, 4.5, 1e9, 1e15) == pytest.approx(570.5)
    assert gpu_speed.floor_us(1000, 1000, 1000, 4.5, 1e15, 1e12) == pytest.approx(2000)


def test_thresholds_from_made_up_times():
    order = ["small", "large", gpu_speed.UNPACKED]
    one = {
        "small": {1: 1.0, 16: 1.0, 64: 4.0, 512: 30.0},
        "large": {1: 2.0, 16: 2.0, 64: 2.0, 512: 20.0},
        gpu_speed.UNPACKED: {1: 9.0, 16: 9.0, 64: 9.0, 512: 10.0},
    }
    assert gpu_speed.thresholds([one, one], order, [1, 16, 64, 512]) == [16, 64]
    slow = {**one, "small": dict.fromkeys(one["small"], 99.0)}
    assert gpu_speed.thresholds([slow], order, [1, 16, 64, 512]) == [0, 64]


def products() -> list[dict]:
    """Made-up times: each tile the best up to its own `max_m`."""
    rows = []
    for direction in ("forward", "backward"):
        tiles = dispatch.tiles(90, direction)
        for m in gpu_speed.ROWS:
            times = {str(t): 1.0 + (m > t.max_m) * 50 + t.bm / 1000 for t in tiles}
            times |= {gpu_speed.UNPACKED: 10.0, "dense": 3.0}
            best = min(times.values())
            rows.append({"shape": "32B gate", "m": m, "pass": direction, "times_us": times,
                         "us": best, "dense_us": 3 * best, "bandwidth_share": 0.85})  # fmt: skip
    return rows


def test_measured_thresholds_go_into_the_table():
    proposed = gpu_speed.proposal(products(), 90)
    report = {
        "about": {"device": "X", "date": "2026-12-01", "torch": "2.13", "triton": "3.7"},
        "sections": {"speed": {"dispatch": {"90": proposed}}},
    }
    table = gpu_check.with_thresholds(json.loads(gpu_check.DISPATCH.read_text()), report)
    assert "measured on X" in table["source"]
    assert [r["max_m"] for r in table["targets"]["90"]["forward"]] == [16, 32, 64, 512]
    for row in table["targets"]["90"]["backward"]:
        dispatch.Tile(**row)
    index = table["targets"]["90"]["invariant"]["forward"]
    assert table["targets"]["90"]["forward"][index]["max_m"] == 64


def test_goals_are_ratios_of_the_worst():
    rows = products()
    rows[2] |= {"shape": "7B q", "dense_us": 1.5 * rows[2]["us"]}
    found = gpu_speed.goals({"products": rows})
    assert found["decode, share of copy bandwidth / 0.85"]["ratio"] == pytest.approx(1)
    worst = found["decode, times cuBLAS bf16 / 3"]
    assert worst == {"ratio": pytest.approx(0.5), "worst": "7B q forward M 16"}


@pytest.mark.parametrize("error", [AssertionError("off by one"), OutOfResources(9, 8, "shared")])
def test_a_failing_section_is_recorded_and_the_next_one_runs(error, tmp_path, monkeypatch):
    def fails(device, quick, say):
        raise error

    monkeypatch.setattr(
        gpu_check, "SECTIONS", {"numbers": fails, "learn": lambda d, q, s: {"steps": 3}}
    )
    out = tmp_path / "results" / "gpu.json"
    gpu_check.run(CPU, ["numbers", "learn"], out, True, lambda text: None)
    report = json.loads(out.read_text())
    assert report["sections"]["numbers"]["error"] == f"{type(error).__name__}: {error}"
    assert report["sections"]["learn"]["ok"] and report["about"]["torch"] == torch.__version__
    assert list(tmp_path.rglob("*.partial")) == []


def test_a_wrong_or_failing_kernel_does_not_hide_the_others(tmp_path, monkeypatch):
    def fails():
        raise OutOfResources(9, 8, "shared memory")

    results = {"right": 0.5, "wrong": 1.5, "nan": float("nan")}
    checks = [*((name, lambda r=r: r) for name, r in results.items()), ("fails", fails)]
    monkeypatch.setattr(gpu_numbers, "checks", lambda device: iter(checks))
    report = gpu_check.run(CPU, ["numbers"], tmp_path / "gpu.json", False, lambda text: None)
    section = report["sections"]["numbers"]
    assert not section["ok"] and section["error"] == "wrong: wrong, nan, fails"
    assert section["share_of_bound"]["right"] == 0.5
    assert section["share_of_bound"]["fails"].startswith("OutOfResources: out of resource")


def test_without_a_gpu_one_line_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main() == 2
    assert capsys.readouterr().err == "gpu_check needs a CUDA device, and PyTorch sees none\n"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--list"])
    assert gpu_check.main() == 0 and capsys.readouterr().out == "numbers\nspeed\nlearn\n"
