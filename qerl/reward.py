"""Rewards: one signature, TRL's, `reward(prompts, completions, **columns) -> list[float | None]`.

Everything in a column list is aligned with `completions`; besides the row's own columns there
are `completion_ids` and `finish_reasons` ("stop" or "length"). A function gets those it names,
or all with **kwargs. None means "does not apply". Functions run in this process, so lambdas and
closures are fine; `async` ones run on an event loop of our own, in a thread, so that they work
inside a notebook's running loop and may keep one client open from step to step.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from qerl.errors import QerlError
from qerl.types import Group

RESERVED = ("prompts", "completions", "completion_ids", "finish_reasons")


class Reward(NamedTuple):
    """A reward function, the name it has in logs, and its weight in the sum."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0


def score_groups(groups: Sequence[Group], rewards: Sequence[Reward]) -> None:
    """Fill in `rewards` (by name) and `reward` (weighted sum of those not None) of every
    completion. Each function is called once, with all completions.

    Raises QerlError when a function raises, returns something else than one finite number or
    None per completion, or when every function returned None for a completion.
    """
    assert rewards
    pairs = [(group.prompt, c) for group in groups for c in group.completions]
    prompts = [prompt.text for prompt, _ in pairs]
    completions = [completion.text for _, completion in pairs]
    names = dict.fromkeys(key for prompt, _ in pairs for key in prompt.columns)
    columns = {key: [prompt.columns.get(key) for prompt, _ in pairs] for key in names}
    columns["completion_ids"] = [list(completion.token_ids) for _, completion in pairs]
    columns["finish_reasons"] = [completion.finish_reason for _, completion in pairs]
    for reward in rewards:
        values = call_reward(reward, prompts, completions, columns)
        for (_, completion), value in zip(pairs, values, strict=True):
            completion.rewards[reward.name] = value
    for _, completion in pairs:
        completion.reward = weighted_sum(completion.rewards, rewards, completion.text)


def weighted_sum(
    values: dict[str, float | None], rewards: Sequence[Reward], completion: str
) -> float:
    """Sum of weight times value over the rewards that apply."""
    parts = [(values[r.name], r.weight) for r in rewards]
    applicable = [value * weight for value, weight in parts if value is not None]
    if not applicable:
        raise QerlError(
            f"reward {', '.join(f'`{r.name}`' for r in rewards)}: None for completion "
            f"{quote(completion)}, so it has no reward; return a number, such as 0.0"
        )
    return float(sum(applicable))


def call_reward(
    reward: Reward, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
) -> list[float | None]:
    """Call one reward function and check what it returns."""
    if not completions:
        return []
    arguments = bind(reward.name, reward.function, ("prompts", "completions"), columns)
    try:
        values = settle(arguments(prompts, completions))
    except QerlError:
        raise
    except Exception as error:  # the user's own code: whatever it raises is reported by name
        where = f"on prompt {quote(prompts[0])} completion {quote(completions[0])}"
        if len(completions) > 1:
            where += f" and {len(completions) - 1} more"
        raise failure(reward.name, error, where) from error
    return check_values(reward.name, values, prompts, completions)


def check_values(
    name: str, values: Any, prompts: list[str], completions: list[str]
) -> list[float | None]:
    """One finite number or None per completion, as plain floats."""
    if hasattr(values, "tolist"):  # NumPy arrays and tensors
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise QerlError(
            f"reward `{name}` returned {type(values).__name__}; return a list with one number "
            "per completion (qerl.per_row wraps a function of a single row)"
        )
    if len(values) != len(completions):
        raise QerlError(
            f"reward `{name}` returned {len(values)} values for {len(completions)} completions; "
            "return one per completion"
        )
    return [
        check_value(name, value, prompt, completion)
        for value, prompt, completion in zip(values, prompts, completions, strict=True)
    ]


def check_value(name: str, value: Any, prompt: str, completion: str) -> float | None:
    if value is None:
        return None
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real) or not math.isfinite(value):
        found = value if isinstance(value, Real) else f"{quote(value)} ({type(value).__name__})"
        raise QerlError(
            f"reward `{name}` returned {found} for prompt {quote(prompt)} completion "
            f"{quote(completion)}; return a finite number, or None where it does not apply"
        )
    return float(value)


def bind(
    name: str,
    function: Callable[..., Any],
    standard: tuple[str, str],
    columns: dict[str, Any],
) -> Callable[[Any, Any], Any]:
    """A function of two arguments that calls `function` with the columns its signature accepts.

    standard: the names of the two, ("prompts", "completions"). They go by keyword to a function
    that names them, as TRL does (it may leave out the first), and by position to any other.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature: they take two arguments
        return function
    catch_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = {p.name for p in named}
    known = {*columns, *standard}
    all_known = all(p.name in known for p in ordered if p.default is p.empty)
    by_keyword = standard[1] in names or (catch_all and all_known)  # (completion_ids, **kwargs)
    taken = set() if by_keyword else {p.name for p in ordered[:2]}
    for p in named:
        if p.name not in taken | known and p.default is p.empty:
            raise QerlError(
                f"reward `{name}` wants `{p.name}`, and the rows have no such column; they have: "
                f"{', '.join(sorted(columns))}"
            )
    accepted = {k: v for k, v in columns.items() if (catch_all or k in names) and k not in taken}
    if not by_keyword:
        return lambda first, second: function(first, second, **accepted)

    def call(first: Any, second: Any) -> Any:
        pair = zip(standard, (first, second), strict=True)
        return function(**{k: v for k, v in pair if catch_all or k in names}, **accepted)

    return call


class PerRow:
    """A function of one row as a reward of many; see `per_row`."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.__name__ = reward_name(function)

    def __call__(self, prompts: list[str], completions: list[str], **columns: list[Any]) -> Any:
        rows = [
            (prompt, completion, {key: values[i] for key, values in columns.items()})
            for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        results = [self._row(*row) for row in rows]
        if not any(inspect.isawaitable(result) for result in results):
            return results
        return self._gather(results, prompts, completions)

    def _row(self, prompt: str, completion: str, columns: dict[str, Any]) -> Any:
        columns = {singular(key): value for key, value in columns.items()}
        call = bind(self.__name__, self.function, ("prompt", "completion"), columns)
        try:
            return call(prompt, completion)
        except Exception as error:  # the user's own code, reported with its row
            raise self._failure(error, prompt, completion) from error

    async def _gather(
        self, results: list[Any], prompts: list[str], completions: list[str]
    ) -> list[Any]:
        done = await asyncio.gather(*map(value_of, results), return_exceptions=True)
        for result, prompt, completion in zip(done, prompts, completions, strict=True):
            if isinstance(result, Exception):
                raise self._failure(result, prompt, completion) from result
            if isinstance(result, BaseException):  # cancelled, interrupted
                raise result
        return list(done)

    def _failure(self, error: Exception, prompt: str, completion: str) -> QerlError:
        where = f"on prompt {quote(prompt)} completion {quote(completion)}"
        return failure(self.__name__, error, where)


def per_row(function: Callable[..., Any]) -> PerRow:
    """Wrap `function(prompt, completion, **columns of the row) -> float | None` as a reward.

    It gets the columns it names (all with **kwargs), plus `completion_ids` and `finish_reason`
    of that completion. It may be async; then all rows run together.
    """
    return PerRow(function)


def singular(column: str) -> str:
    return "finish_reason" if column == "finish_reasons" else column


async def value_of(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def settle(result: Any) -> Any:
    """The value of `result`, awaited on our own loop if it is awaitable."""
    if not inspect.isawaitable(result):
        return result
    future = asyncio.run_coroutine_threadsafe(value_of(result), event_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C while waiting: stop the user's coroutine too
        raise


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the whole process, running in a daemon thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="qerl-async-rewards", daemon=True).start()
    return loop


def failure(name: str, error: Exception, where: str) -> QerlError:
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())
    return QerlError(f"reward `{name}` raised {type(error).__name__}: {message}{line} {where}")


def quote(value: Any, length: int = 80) -> str:
    """repr on one line; a long text keeps its end, where the question usually is."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:20]}…{text[21 - length :]}"


def reward_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "reward" if name == "<lambda>" else name


def name_rewards(
    functions: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None
) -> list[Reward]:
    """Rewards under distinct names. Raises QerlError for a non-function or a wrong number of
    weights."""
    if not functions:
        raise QerlError("task.reward: the list is empty; name a function, or leave it out")
    if weights is not None and len(weights) != len(functions):
        raise QerlError(
            f"task.reward_weights: {len(weights)} weights for {len(functions)} reward functions; "
            "give one for each"
        )
    rewards: list[Reward] = []
    for i, function in enumerate(functions):
        if not callable(function):
            raise QerlError(f"reward: {quote(function)} is not a function")
        name = reward_name(function)
        same = sum(reward_name(earlier) == name for earlier in functions[:i])
        weight = 1.0 if weights is None else float(weights[i])
        rewards.append(Reward(f"{name}_{same + 1}" if same else name, function, weight))
    return rewards


def load_reward(spec: str, base: Path) -> Callable[..., Any]:
    """The function named by "./file.py:function"; a relative path starts at `base`.

    The file's folder is put last on `sys.path`, so that it can import its neighbours.
    Raises QerlError for a missing file or function, and for a file that does not import.
    """
    file, _, function = spec.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise QerlError(f'task.reward: found {spec!r}, expected "./file.py:function"')
    path = (base / Path(file).expanduser()).resolve()
    if not path.is_file():
        raise QerlError(f"task.reward: there is no file {str(path)!r}; check the path")
    module = import_file(path)
    found = getattr(module, function, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if is_own_function(v, module.__name__)]
        raise QerlError(
            f"task.reward: {path.name} has no function {function!r}; it has: "
            f"{', '.join(names) or 'none'}"
        )
    return found


def is_own_function(value: Any, module: str) -> bool:
    return isinstance(value, PerRow) or (
        inspect.isfunction(value) and value.__module__ == module and value.__name__ != "<lambda>"
    )


def import_file(path: Path) -> Any:
    """Run a Python file as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"qerl_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[spec.name] = module  # dataclasses and pickling look a function's module up here
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code
        line = error.lineno if isinstance(error, SyntaxError) else own_line(error, path)
        message = " ".join(str(error).split())
        raise QerlError(
            f"task.reward: {path.name}, line {line}, raised {type(error).__name__}: {message}"
        ) from error
    return module


def own_line(error: Exception, path: Path) -> int | None:
    """The last line of `path` in the error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return lines[-1] if lines else None
