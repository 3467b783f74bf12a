"""summary.json and the last screen."""

import io
import json
import shlex

import pytest
from rich.console import Console

from qerl import report
from qerl.errors import QerlError
from qerl.types import Completion, EvalResult, Group, Prompt

BEFORE = EvalResult("numbers", 0.17, 0.2, (0.125, 0.228), 200).as_dict()
AFTER = EvalResult("numbers", 0.88, 0.89, (0.828, 0.918), 200).as_dict()


def summary(**changes):
    values = {
        "task": "numbers",
        "seed": 7,
        "steps": 18,
        "before": BEFORE,
        "after": AFTER,
        "seconds": {"rollout": 30.0, "loss": 60.0, "evaluate": 10.0},
        "peak_bytes": 1_500_000_000,
        "base_sha256": ("ab", "ab"),
        "adapter": "runs/demo/adapter",
    }
    return report.build_summary(**(values | changes))


def printed(renderable):
    out = io.StringIO()
    report.show(renderable, Console(file=out, width=100, highlight=False))
    return out.getvalue()


def test_summary_has_exactly_the_documented_keys():
    built = summary()
    assert list(built) == [
        "task", "seed", "steps", "before", "after", "seconds", "peak_bytes", "base_sha256",
        "adapter", "versions",
    ]  # fmt: skip
    assert set(built["before"]) == {"accuracy", "mean_reward", "ci95", "n"}
    assert built["after"]["ci95"] == [0.828, 0.918]
    assert built["base_sha256"] == {"before": "ab", "after": "ab"}
    assert built["versions"]["torch"]
    assert json.loads(json.dumps(built)) == built


def test_skipped_evaluation_is_null():
    built = summary(before=None)
    assert built["before"] is None
    text = printed(report.render(built, "runs/demo", base="b", rank=16, name="demo"))
    assert "not measured" in text and "Change" not in text


def test_skipped_updates_are_told_when_there_were_any():
    built = summary(skipped_updates=3)
    assert built["skipped_updates"] == 3
    text = printed(report.render(built, "runs/demo", base="b", rank=16, name="demo"))
    assert "3 of 18 updates skipped: their gradient was not finite" in text
    text = printed(report.render(summary(), "runs/demo", base="b", rank=16, name="demo"))
    assert "skipped" not in text


def test_rendered_report():
    rows = report.samples([group(i) for i in range(10)])
    text = printed(
        report.render(
            summary(), "runs/my demo", base="HF/base", rank=16, name="demo", sample_rows=rows
        )
    )
    for piece in ("17.0%", "12.5% – 22.8%", "88.0%", "82.8% – 91.8%", "+71.0 points", "apart"):
        assert piece in text, piece
    assert "question 0" in text and "question 3" in text and "question 6" in text
    assert text.index("loss") < text.index("rollout") < text.index("evaluate")
    assert "60%" in text and "1m40s" in text and "1.5 GB" in text
    assert "qerl generate 'runs/my demo'" in text and "qerl export 'runs/my demo'" in text


def group(i):
    answer = Completion([1], [0.0], [0.0], [0], "length", text=f"answer {i}", reward=0.1)
    prompt = Prompt(i, ({"role": "user", "content": f"question {i}"},), "<template>", (1,))
    return Group(prompt, [answer])


def test_samples_are_chosen_by_position():
    picked = report.samples([group(i) for i in range(200)])
    assert [row["prompt"] for row in picked] == ["question 0", "question 66", "question 133"]
    assert [row["prompt"] for row in report.samples([group(0), group(1)])] == [
        "question 0",
        "question 1",
    ]
    assert len(report.samples([group(0)])) == 1 and report.samples([]) == []


def test_overlapping_intervals_are_called_chance():
    built = summary(after=EvalResult("numbers", 0.2, 0.2, (0.15, 0.26), 200).as_dict())
    assert "may be chance" in report.change_sentence(built["before"], built["after"])
    worse = summary(after=EvalResult("numbers", 0.05, 0.1, (0.03, 0.09), 200).as_dict())
    sentence = report.change_sentence(worse["before"], worse["after"])
    assert sentence == "Change: -12.0 points; the intervals are apart."


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (4, 8), (16, 16), (17, 32), (500, 512)])
def test_rank_is_rounded_up_to_what_vllm_takes(rank, served):
    assert report.vllm_rank(rank) == served


def test_serve_command_survives_a_shell():
    line = report.serve_command("/my models/base", 16, "my run!", "/runs/my run/adapter")
    assert shlex.split(line) == [
        "vllm", "serve", "/my models/base", "--enable-lora", "--max-lora-rank", "16",
        "--lora-modules", "my-run=/runs/my run/adapter",
    ]  # fmt: skip


def test_rank_that_vllm_does_not_serve():
    with pytest.raises(QerlError, match="lora.rank 513"):
        report.vllm_rank(513)
    assert not any("vllm" in c for c in report.next_commands("r", "a", base="b", rank=513, name=""))


def test_long_and_wild_text_is_tamed():
    assert report.shorten("a\nb", 10) == "a ⏎ b"
    cut = report.shorten("x" * 50 + "y" * 50, 21)
    assert cut == "x" * 9 + " … " + "y" * 9
    assert "\x1b" not in report.shorten("\x1b[2J", 10)


def test_commands_are_never_wrapped():
    long = "/a/" + "very-long-folder/" * 12 + "adapter"
    built = summary(adapter=long)
    text = printed(report.render(built, "runs/demo", base="b", rank=16, name="demo"))
    assert any(line.endswith(f"demo={long}") for line in text.splitlines())
