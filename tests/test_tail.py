"""`tail`: best, worst and truncated, on a file that is being written."""

import io
import json

import pytest
from rich.console import Console

from qerl import tail as tail_module
from qerl.errors import QerlError
from qerl.run_folder import RunFolder
from qerl.tail import render, tail


def row(step, reward, *, reason="stop", text="done"):
    return {
        "step": step,
        "prompt": f"prompt {step}",
        "completion": text,
        "rewards": {"exact": reward},
        "reward": reward,
        "advantage": reward - 0.5,
        "finish_reason": reason,
        "version": step - 1,
        "sigma": 0.01,
        "tokens": 3,
    }


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path)


def fill(run, rows, extra=""):
    run.completions.write_text("".join(json.dumps(r) + "\n" for r in rows) + extra)


def printed(report):
    out = io.StringIO()
    Console(file=out, width=200).print(render(report))
    return out.getvalue()


def test_best_and_worst_of_the_newest_step(run):
    fill(run, [row(1, 9.0), row(1, -9.0)] + [row(2, r) for r in (0.1, 0.9, 0.5, 0.3)])
    report = tail(run, 2)
    assert (report.step, report.rows) == (2, 4)
    assert [r["reward"] for r in report.best] == [0.9, 0.5]
    assert [r["reward"] for r in report.worst] == [0.1, 0.3]
    assert report.truncated == [] and report.half_written == 0


def test_nothing_is_shown_twice(run):
    fill(run, [row(1, 1.0, text="a"), row(1, 1.0, text="b"), row(1, 1.0, text="c")])
    report = tail(run, 2)
    assert [r["completion"] for r in report.best] == ["a", "b"]
    assert [r["completion"] for r in report.worst] == ["c"]


def test_truncated_newest_first_across_steps(run):
    cut = [row(s, 0.0, reason="length", text=f"cut {s}") for s in (1, 2, 3)]
    fill(run, [*cut, row(4, 1.0)])
    assert [r["completion"] for r in tail(run, 2).truncated] == ["cut 3", "cut 2"]


def test_half_written_last_line_is_counted_and_said(run):
    fill(run, [row(1, 1.0)], extra='{"step": 2, "prompt": "unfin')
    report = tail(run)
    assert report.half_written == 1 and report.step == 1
    assert "last line is half written" in printed(report)
    assert "half written" not in printed(tail_of(run, [row(1, 1.0)]))


def tail_of(run, rows):
    fill(run, rows)
    return tail(run)


def test_only_a_half_line_yet(run):
    fill(run, [], extra='{"st')
    report = tail(run)
    assert report.step is None and report.half_written == 1
    assert "No finished line yet" in printed(report)


def test_reads_backwards_until_the_step_is_whole(run, monkeypatch):
    rows = [row(s, i / 10) for s in (1, 2) for i in range(10)]
    fill(run, rows)
    monkeypatch.setattr(tail_module, "_BLOCK", 300)
    report = tail(run, 3)
    assert report.rows == 10
    assert [r["reward"] for r in report.best] == [0.9, 0.8, 0.7]


def test_does_not_read_the_whole_of_a_long_file(run, monkeypatch):
    fill(run, [row(s, 0.0) for s in range(1, 2000)])
    seen = []
    monkeypatch.setattr(tail_module, "_BLOCK", 4096)
    parse = tail_module._parse
    monkeypatch.setattr(tail_module, "_parse", lambda p, line: seen.append(1) or parse(p, line))
    assert tail(run).step == 1999
    assert len(seen) < 50


def test_report_is_json_and_shows_the_numbers(run):
    fill(run, [row(3, 0.5, reason="length", text="one\ntwo \x1b[31m")])
    report = tail(run)
    assert json.loads(json.dumps(report.as_dict()))["best"][0]["reward"] == 0.5
    text = printed(report)
    for piece in ("Step 3", "one ⏎ two", "exact=0.5", "3 tokens, length", "version 2", "1.00e-02"):
        assert piece in text, piece
    assert "\x1b[31m" not in text


def test_errors(run):
    with pytest.raises(QerlError, match="no completions yet"):
        tail(run)
    fill(run, [row(1, 1.0)], extra="garbage\n")
    with pytest.raises(QerlError, match="not JSON .it starts 'garbage'"):
        tail(run)
