"""The static table made in this process: which compilations there are, their costs, their faults.

`static` is the door: it starts a process whose environment suits Triton. Row: a dict with kernel,
tile, target, triton, registers, shared_bytes, spill_bytes, local_bytes, instructions_per_weight
and budget.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton

from qerl_kernels.budgets import Budgets
from qerl_kernels.offline import CompileError, Cost, cost
from qerl_kernels.static import SHARED_LIMIT, StaticError
from qerl_kernels.variants import ALL_TARGETS, Variant

Row = dict[str, Any]
# Those of a `Cost`, in its order.
_NUMBERS = ("registers", "shared_bytes", "spill_bytes", "local_bytes", "instructions_per_weight")
Task = tuple[Variant, int]  # and the target to compile it for


def tasks(modules: Iterable[str], kernels: Sequence[str], targets: Sequence[int]) -> list[Task]:
    """What the installed Triton compiles, of the chosen kernels and targets or of all.

    Raises StaticError for a kernel or target there is not.
    """
    if unknown := set(targets) - set(ALL_TARGETS):
        numbers = ", ".join(map(str, ALL_TARGETS))
        raise StaticError(f"--target {unknown.pop()}: there are {numbers}")
    variants = [v for name in modules for v in importlib.import_module(name).variants()]
    known = sorted({v.kernel for v in variants})
    for name in kernels:
        if not any(_named(kernel, name) for kernel in known):
            raise StaticError(f"--kernel {name!r}: there are {', '.join(known)}")
    found = [
        (variant, target)
        for variant in variants
        for target in variant.targets
        if (not targets or target in targets)
        and (not kernels or any(_named(variant.kernel, name) for name in kernels))
    ]
    _check_names(found)
    return found


def _named(kernel: str, name: str) -> bool:
    return name in (kernel, kernel.split("/")[0])


def _check_names(found: list[Task]) -> None:
    seen = set()
    for variant, target in found:
        name = (variant.kernel, variant.tile, target)
        if name in seen:
            raise StaticError(f"two variants are called {variant.kernel} {variant.tile!r}")
        seen.add(name)


_work: list[Task] = []  # inherited by the pool's processes: functions of kernels do not pickle
_cache: list[Path | None] = [None]


def _cost(index: int) -> Cost | CompileError:
    try:
        return cost(*_work[index], _cache[0])
    except CompileError as error:
        return CompileError(str(error))  # what it was raised from may not pickle


def costs(
    todo: list[Task], jobs: int, cache: Path | None, say: Callable[[str], None]
) -> list[Cost | CompileError]:
    """The cost of each task, by `jobs` processes. Raises StaticError when a compiler crashes."""
    _work[:], _cache[0] = todo, cache
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        waiting = [pool.submit(_cost, index) for index in range(len(todo))]
        try:
            for count, _ in enumerate(as_completed(waiting), 1):
                say(f"{count} of {len(todo)}")
            return [future.result() for future in waiting]
        except BrokenProcessPool as error:
            (variant, target), *_ = (
                task
                for task, future in zip(todo, waiting, strict=True)
                if future.exception() is not None
            )
            raise StaticError(
                f"a compiler crashed, at {variant.kernel} {variant.tile} sm_{target} or soon after"
            ) from error


def row(task: Task, made: Cost | CompileError, budgets: Budgets) -> tuple[Row, list[str]]:
    """A row of the table, and what is wrong with it, a line each."""
    variant, target = task
    version = triton.__version__
    values = astuple(made) if isinstance(made, Cost) else [None] * len(_NUMBERS)
    numbers = dict(zip(_NUMBERS, values, strict=True))
    names = {"kernel": variant.kernel, "tile": variant.tile, "target": target, "triton": version}
    budget = budgets.get(variant.kernel, variant.tile, target, version)
    name = f"{variant.kernel} {variant.tile} sm_{target} (Triton {version})"
    faults = (
        _faults(made, SHARED_LIMIT[target], budget)
        if isinstance(made, Cost)
        else [f"does not compile: {made}"]
    )
    return {**names, **numbers, "budget": budget}, [f"{name}: {fault}" for fault in faults]


def _faults(made: Cost, limit: int, budget: float | None) -> Iterator[str]:
    if made.spill_bytes:
        yield f"spills {made.spill_bytes} bytes of registers"
    if made.local_bytes:
        yield f"uses {made.local_bytes} bytes of local memory"
    if made.shared_bytes > limit:
        yield f"{made.shared_bytes} bytes of shared memory; a block may have {limit}"
    if made.instructions is None:
        return
    if budget is None:
        yield f"{made.instructions:.2f} instructions a weight and no budget recorded"
    elif made.instructions > budget:
        yield f"{made.instructions:.2f} instructions a weight; the budget is {budget:g}"


def record(
    todo: list[Task], made: list[Cost | CompileError], budgets: Budgets, whole: bool
) -> None:
    """Write the budgets file; see `Budgets.record`."""
    counted = [
        (variant.kernel, variant.tile, target, found.instructions)
        for (variant, target), found in zip(todo, made, strict=True)
        if isinstance(found, Cost) and found.instructions is not None
    ]
    budgets.record(triton.__version__, counted, whole)
