"""Checkpoints: everything a run needs to continue as if it had never stopped.

One folder a step, `checkpoints/step-000100/`, with three files and no pickle:

  tensors.safetensors   adapter, optimizer moments, tensor-valued random states
  state.json            step, cursors, optimizer hyperparameters, the other random states
  SHA256SUMS            of the two above (`sha256sum -c SHA256SUMS` checks them by hand)

It is written aside and renamed, so an interrupted save leaves nothing that could be loaded.
Loading checks everything before it touches a live object.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.adapter import adapter_state, read_tensors
from qerl.errors import QerlError
from qerl.files import PARTIAL, atomic_dir

if TYPE_CHECKING:
    import torch
    from peft import PeftModel

FORMAT = 1
STATE, TENSORS, SUMS = "state.json", "tensors.safetensors", "SHA256SUMS"
_NAME = re.compile(r"step-(\d{6,})")
_DELETED = ".deleted"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint restores besides the live model, optimizer and random generators.

    step: optimizer steps taken. cursors: positions in the data, adapter version, noise stage:
    whatever the loop counts. extra: anything else that was saved (JSON).
    """

    path: Path
    step: int
    cursors: dict[str, Any]
    extra: dict[str, Any]


def checkpoint_dir(root: str | Path, step: int) -> Path:
    """The folder of a step below the run's `checkpoints` folder."""
    return Path(root) / f"step-{step:06d}"


def save_checkpoint(
    directory: str | Path,
    *,
    step: int,
    model: PeftModel,
    optimizer: torch.optim.Optimizer,
    cursors: dict[str, Any],
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write the whole training state, all or nothing; the global random states are included.

    cursors, extra: JSON values. Optimizer state is filed under parameter names, so it survives
    another order of the parameters. Returns the folder.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    tensors = {f"adapter/{name}": tensor for name, tensor in adapter_state(model).items()}
    state: dict[str, Any] = {"format": FORMAT, "step": step, "cursors": cursors}
    state["extra"] = extra or {}
    state["optimizer"] = _optimizer_state(optimizer, model, tensors)
    state["rng"] = _random_state(tensors)
    text = json.dumps(state, indent=1)  # before any file is made: a cursor may not be JSON
    with atomic_dir(directory) as folder:
        save_file({k: v.detach().contiguous() for k, v in tensors.items()}, folder / TENSORS)
        (folder / STATE).write_text(text, encoding="utf-8")
        sums = "".join(f"{_sha256(folder / name)}  {name}\n" for name in (STATE, TENSORS))
        (folder / SUMS).write_text(sums, encoding="utf-8")
    return directory


def load_checkpoint(
    directory: str | Path, *, model: PeftModel, optimizer: torch.optim.Optimizer
) -> Checkpoint:
    """Restore adapter and optimizer in place and the global random states; returns the rest.

    Raises QerlError, before anything is changed, when a file is damaged (naming the newest older
    checkpoint that is intact) or when the adapter is not the one that was saved.
    """
    import torch

    directory = Path(directory)
    verify(directory)
    state = json.loads((directory / STATE).read_text(encoding="utf-8"))
    if state["format"] != FORMAT:
        raise QerlError(
            f"checkpoint {directory} has format {state['format']}, this version of qerl reads "
            f"{FORMAT}: resume with the version in the run's env.json"
        )
    tensors = read_tensors(directory / TENSORS)
    live = adapter_state(model)
    saved = {k.removeprefix("adapter/"): v for k, v in tensors.items() if k.startswith("adapter/")}
    _check_shapes(directory, saved, live)
    restored = _optimizer_dict(directory, state["optimizer"], tensors, optimizer, model)
    optimizer.load_state_dict(restored)
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])
    _restore_random_state(state["rng"], tensors)
    return Checkpoint(directory, state["step"], state["cursors"], state["extra"])


def checkpoints(root: str | Path) -> list[Path]:
    """Complete checkpoints below `root`, oldest first (half-written folders have other names)."""
    root = Path(root)
    if not root.is_dir():
        return []
    found = [(int(m[1]), p) for p in root.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def latest(root: str | Path) -> Path | None:
    """The newest checkpoint below `root`, or None."""
    return next(reversed(checkpoints(root)), None)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def recover(root: str | Path) -> None:
    """Put back a checkpoint whose replacement was killed between its two renames.

    Only for a run that no process is writing to.
    """
    for old in Path(root).glob(f"step-*.old{PARTIAL}"):
        path = old.with_name(old.name.removesuffix(f".old{PARTIAL}"))
        if not path.exists():
            old.rename(path)


def prune(root: str | Path, keep: int) -> list[Path]:
    """Remove all but the `keep` newest checkpoints; returns what was removed."""
    assert keep >= 1, keep
    for left in Path(root).glob(f".step-*{_DELETED}"):  # by a run that was killed in here
        shutil.rmtree(left)
    old = checkpoints(root)[:-keep]
    for path in old:
        doomed = path.with_name(f".{path.name}{_DELETED}")
        path.rename(doomed)  # never seen half deleted under its own name
        shutil.rmtree(doomed)
    return old


def verify(directory: str | Path) -> None:
    """Check every file against SHA256SUMS; QerlError naming the file and the way back."""
    directory = Path(directory)
    if not directory.is_dir():
        raise QerlError(f"no checkpoint at {directory}: look in the run's checkpoints folder")
    problem = _problem(directory)
    if problem is None:
        return
    everyone = checkpoints(directory.parent)
    older = everyone[: everyone.index(directory)] if directory in everyone else []
    intact = next((p for p in reversed(older) if _problem(p) is None), None)
    way_out = (
        f"{intact.name} is intact: delete {directory.name} and resume again"
        if intact
        else "no older checkpoint is intact: start the run again"
    )
    raise QerlError(f"checkpoint {directory} is damaged: {problem}; {way_out}")


def _problem(directory: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    sums = directory / SUMS
    if not sums.is_file():
        return f"{SUMS} is missing"
    lines = sums.read_text(encoding="utf-8", errors="replace").splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in (STATE, TENSORS):
        if not (directory / name).is_file():
            return f"{name} is missing"
        if listed.get(name) != _sha256(directory / name):
            return f"{name} does not match {SUMS}"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_shapes(
    directory: Path, saved: dict[str, torch.Tensor], live: dict[str, torch.Tensor]
) -> None:
    for name in sorted(saved.keys() ^ live.keys()):
        where = "only in the checkpoint" if name in saved else "not in the checkpoint"
        raise QerlError(f"checkpoint {directory} is of another adapter: {name} is {where}")
    for name, tensor in live.items():
        if (found := saved[name]).shape != tensor.shape or found.dtype != tensor.dtype:
            raise QerlError(
                f"checkpoint {directory} is of another adapter: {name} is {found.dtype} "
                f"{list(found.shape)} there and {tensor.dtype} {list(tensor.shape)} here"
            )


def _optimizer_state(
    optimizer: torch.optim.Optimizer, model: PeftModel, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Hyperparameters and scalars as JSON; tensors are added to `tensors`, by parameter name."""
    import torch

    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    groups, scalars = [], {}
    for group in optimizer.param_groups:
        hyper = {k: v for k, v in group.items() if k != "params"}
        groups.append({**hyper, "names": [names[p] for p in group["params"]]})
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer/{key}/{names[parameter]}"] = value
            else:
                scalars.setdefault(names[parameter], {})[key] = value
    return {"class": type(optimizer).__name__, "groups": groups, "scalars": scalars}


def _optimizer_dict(
    directory: Path,
    saved: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    model: PeftModel,
) -> dict[str, Any]:
    """The saved optimizer state as `optimizer.load_state_dict` takes it, in the live order."""
    if saved["class"] != type(optimizer).__name__:
        raise QerlError(
            f"checkpoint {directory} was made by {saved['class']}, and this run uses "
            f"{type(optimizer).__name__}: resume with the same optimizer"
        )
    names = {parameter: name for name, parameter in model.named_parameters()}
    live = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    kept = [group["names"] for group in saved["groups"]]
    if [sorted(group) for group in live] != [sorted(group) for group in kept]:
        raise QerlError(f"checkpoint {directory} is of another adapter: its parameters differ")
    state: dict[str, dict[str, Any]] = {n: dict(v) for n, v in saved["scalars"].items()}
    for full, tensor in tensors.items():
        if full.startswith("optimizer/"):
            _, key, name = full.split("/", 2)
            state.setdefault(name, {})[key] = tensor.clone()  # not a view of the mapped file
    order = [name for group in live for name in group]
    groups, start = [], 0
    for group, now in zip(saved["groups"], optimizer.param_groups, strict=True):
        hyper = {k: tuple(v) if isinstance(now.get(k), tuple) else v for k, v in group.items()}
        del hyper["names"]
        count = len(now["params"])
        groups.append({**hyper, "params": list(range(start, start + count))})
        start += count
    return {
        "state": {i: state[n] for i, n in enumerate(order) if n in state},
        "param_groups": groups,
    }


def _random_state(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Global states of Python, numpy and torch: tensors into `tensors`, the rest as JSON."""
    import numpy as np
    import torch

    tensors["rng/torch"] = torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"rng/cuda/{index}"] = state
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": [kind, [int(k) for k in keys], *rest]}


def _restore_random_state(saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    import numpy as np
    import torch

    version, keys, gauss = saved["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, words, *rest = saved["numpy"]
    np.random.set_state((kind, np.asarray(words, dtype=np.uint32), *rest))
    torch.set_rng_state(tensors["rng/torch"])
    cuda = [
        tensors[f"rng/cuda/{i}"] for i in range(sum(k.startswith("rng/cuda/") for k in tensors))
    ]
    if not cuda:
        return
    if torch.cuda.is_available() and torch.cuda.device_count() == len(cuda):
        torch.cuda.set_rng_state_all(cuda)
    else:
        logging.getLogger("qerl").warning(
            "the checkpoint was made with %d GPU(s) and there are others here: "
            "the run goes on, but not with the same random numbers",
            len(cuda),
        )
