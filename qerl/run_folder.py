"""The run folder: where every file of a run lives, and how one is found again.

runs/<name>-<UTC yyyymmdd-HHMMSS>/
  recipe.yaml  env.json  log.txt  metrics.jsonl  completions.jsonl  summary.json
  checkpoints/step-000100/  best/  adapter/
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol

from qerl import environment
from qerl.errors import QerlError
from qerl.files import atomic_write, write_json

NEWEST = 3  # runs that a message lists

_REQUIRED = ("recipe.yaml", "env.json")


class _Recipe(Protocol):
    def to_yaml(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names of a run's files. Make one with `create`, come back to one with `open`."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def env(self) -> Path:
        return self.path / "env.json"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def completions(self) -> Path:
        return self.path / "completions.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        return self.path / "best"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    @classmethod
    def create(cls, root: str | Path, name: str, recipe: _Recipe) -> RunFolder:
        """Make a new folder below `root` with recipe.yaml and env.json in it.

        Never reuses a folder: two runs started in one second get `…-2` at the end. Characters
        that a file name or a shell would trip over become dashes.
        Raises QerlError when `root` cannot be written to.
        """
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        safe = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
        run = cls(_make_unique(Path(root).expanduser(), f"{safe}-{stamp}"))
        run.checkpoints.mkdir()
        write_json(run.env, environment.describe())
        atomic_write(run.recipe, recipe.to_yaml())
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run. Raises QerlError when `path` is not one, naming what is missing."""
        path = Path(path).expanduser()
        if not path.is_dir():
            raise QerlError(f"run {str(path)!r}: no such folder; `ls runs` lists yours")
        missing = [name for name in _REQUIRED if not (path / name).is_file()]
        if missing:
            raise QerlError(
                f"run {str(path)!r}: not a run folder ({', '.join(missing)} missing); "
                "give a folder that `qerl train` made"
            )
        return cls(path)


def _make_unique(root: Path, base: str) -> Path:
    attempt = 1
    while True:
        path = root / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError as error:
            if not path.is_dir():
                raise QerlError(f"output.dir {str(root)!r}: not a folder; name another") from error
            attempt += 1
        except OSError as error:
            raise QerlError(
                f"output.dir {str(root)!r}: cannot be written ({error.strerror}); "
                "set output.dir to a folder of yours"
            ) from error


def list_runs(root: str | Path = "runs") -> list[RunFolder]:
    """The complete run folders directly below `root`, newest first."""
    root = Path(root).expanduser()
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    runs = [RunFolder(path) for path in folders if all((path / n).is_file() for n in _REQUIRED)]
    return sorted(runs, key=lambda run: (run.env.stat().st_mtime_ns, run.name), reverse=True)


def find_run(arg: str | Path, root: str | Path = "runs") -> RunFolder:
    """A run by path, by its name below `root`, or the newest one for "latest".

    Raises QerlError naming the nearest or the newest runs when there is no such run.
    """
    text = str(arg)
    path = Path(text).expanduser()
    if path.is_dir():
        return RunFolder.open(path)
    runs = list_runs(root)
    if text == "latest":
        if not runs:
            raise QerlError(f"run 'latest': no run below {str(root)!r}; start one: qerl demo")
        return runs[0]
    if (Path(root).expanduser() / text).is_dir():
        return RunFolder.open(Path(root).expanduser() / text)
    near = get_close_matches(text, [run.name for run in runs], n=3, cutoff=0.3)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif runs:
        newest = ", ".join(run.name for run in runs[:NEWEST])
        hint = f"the newest below {str(root)!r}: {newest}; or give a path"
    else:
        hint = f"there are no runs below {str(root)!r} either; give a path, or start one: qerl demo"
    raise QerlError(f"run {text!r}: no such folder; {hint}")
