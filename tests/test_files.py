"""Locks and full disks. (More of atomic writes: test_checkpoint.py, test_run_folder.py.)"""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qerl.errors import QerlError
from qerl.files import atomic_dir

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


@pytest.mark.parametrize("how", ["write", "copytree"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, how: str):
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights").write_bytes(bytes(100_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        message = r"^output: .*made' cannot be written .* free some"
        with pytest.raises(QerlError, match=message), atomic_dir(tmp_path / "made") as folder:
            if how == "copytree":
                shutil.copytree(source, folder, dirs_exist_ok=True)
            (folder / "weights").write_bytes(bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_another_failure_of_a_copy_is_not_called_a_full_disk(tmp_path: Path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(shutil.Error), atomic_dir(tmp_path / "made") as folder:
        shutil.copytree(tmp_path / "source", folder, dirs_exist_ok=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
