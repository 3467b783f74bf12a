"""The live line, the plain lines, and the silence of everyone else."""

import io
import logging
import os
import subprocess
import sys
import warnings

import pytest

from qerl.console import Screen, format_line, human_bytes, human_seconds, quiet_third_party

METRICS = {
    "reward": 0.5,
    "qerl/accuracy": 0.25,
    "entropy": 1.2345,
    "qerl/sigma": 0.01,
    "qerl/tokens_per_second": 812.4,
    "qerl/peak_bytes": 1_234_567_890,
}


def test_format_line_has_every_number():
    line = format_line(3, 20, METRICS, eta=75)
    assert line == (
        "step 3/20 · reward 0.500 · accuracy 25.0% · entropy 1.234 · sigma 1.0e-02"
        " · tok/s 812 · memory 1.2 GB · ETA 1m15s"
    )
    assert format_line(1, 2, {"reward": 1.0}) == "step 1/2 · reward 1.000"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (3e12, "3.0 TB")],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.4, "4s"), (59.6, "1m00s"), (75, "1m15s"), (3725, "1h02m")]
)
def test_human_seconds(seconds, text):
    assert human_seconds(seconds) == text


def test_plain_lines_when_not_a_terminal():
    out = io.StringIO()
    with Screen(2, file=out) as screen:
        assert not screen.live
        screen.status("sampling")
        screen.step(1, METRICS)
        screen.message("saved")
        screen.step(2, METRICS)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step 1/2") and lines[1] == "saved"
    assert "ETA 0s" in lines[2]
    assert "\x1b" not in out.getvalue()


def test_eta_follows_the_pace(monkeypatch):
    clock = iter([10.0, 12.0, 14.0])
    monkeypatch.setattr("qerl.console.time.monotonic", lambda: next(clock))
    screen = Screen(10, file=io.StringIO())
    assert [screen._eta(step) for step in (1, 2, 3)] == [None, 16.0, 14.0]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_live_line_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    out = Terminal()
    with Screen(2, file=out) as screen:
        assert screen.live
        screen.step(1, METRICS)
        screen.status("sampling")
        screen.step(2, {"reward": 0.875})
    shown = out.getvalue()
    assert "step 1/2" in shown and "\x1b[2K" in shown  # redrawn in place
    assert shown.rindex("reward 0.875") > shown.rindex("step 1/2")  # the last line stays


def test_narrow_terminal_keeps_every_number(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    with Screen(1000, file=out) as screen:
        monkeypatch.setattr(screen, "_eta", lambda step: 75)
        screen.step(117, METRICS)
        shown = out.getvalue()
    wanted = "117/1000  rew 0.500  acc 25.0%  H 1.234  σ 1.0e-02  t/s 812  1.2GB  ETA 1m15s"
    assert wanted in shown and len(wanted) < 80


def test_user_text_is_not_markup():
    out = io.StringIO()
    with Screen(1, file=out) as screen:
        screen.message("[bold]plain[/bold] 12")
    assert out.getvalue() == "[bold]plain[/bold] 12\n"


def test_noise_goes_to_the_log(tmp_path, capfd):
    log = tmp_path / "log.txt"
    logger = logging.getLogger("transformers")
    handlers = logger.handlers[:]
    with quiet_third_party(log):
        warnings.warn("old thing", stacklevel=1)
        logging.getLogger("transformers.models.x").warning("new model")
        print("stray", file=sys.stderr)
        os.write(2, b"from C\n")
        subprocess.run([sys.executable, "-c", "import os; os.write(2, b'child\\n')"], check=True)
        print("mine")
    text = log.read_text()
    for piece in ("old thing", "new model", "stray", "from C", "child"):
        assert piece in text, piece
    out, err = capfd.readouterr()
    assert out == "mine\n" and err == ""
    assert logger.handlers == handlers


def test_everything_is_restored_after_an_error(tmp_path, capfd):
    shower, stderr = warnings.showwarning, sys.stderr
    with pytest.raises(ZeroDivisionError), quiet_third_party(tmp_path / "log.txt"):
        _ = 1 / 0
    assert warnings.showwarning is shower and sys.stderr is stderr
    os.write(2, b"heard\n")
    assert capfd.readouterr().err == "heard\n"


def test_handler_made_meanwhile_outlives_the_log(tmp_path, capfd):
    """A library imported within the context builds its handler on the stderr of that moment."""
    logger = logging.getLogger("peft.late")
    logger.propagate = False
    with quiet_third_party(tmp_path / "log.txt"):
        handler = logging.StreamHandler()
        logger.addHandler(handler)
        logger.warning("inside")
    logger.warning("outside")
    logger.removeHandler(handler)
    assert "inside" in (tmp_path / "log.txt").read_text()
    assert capfd.readouterr().err == "outside\n"  # and no complaint about a closed file


def test_log_is_appended_to(tmp_path):
    log = tmp_path / "log.txt"
    for word in ("one", "two"):
        with quiet_third_party(log):
            print(word, file=sys.stderr)
    assert log.read_text() == "one\ntwo\n"
