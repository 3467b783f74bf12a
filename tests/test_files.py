"""Locks between processes. (Atomic writes: test_checkpoint.py and test_run_folder.py.)"""

import subprocess
import sys

ADD = """
import sys
from pathlib import Path
from qerl.files import locked

number = Path(sys.argv[1])
for _ in range(100):
    with locked(number):
        number.write_text(str(int(number.read_text()) + 1))
"""


def test_a_lock_keeps_another_process_waiting(tmp_path):
    (tmp_path / "n").write_text("0")
    command = [sys.executable, "-c", ADD, str(tmp_path / "n")]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert (tmp_path / "n").read_text() == "200"
