"""The frame: what a check is, where checks are kept, how they are run and reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from qerl.config import Recipe
from qerl.doctor.context import Context, Needs, NotChecked
from qerl.errors import QerlError

if TYPE_CHECKING:
    from rich.table import Table

Status = Literal["ok", "warn", "fail", "not checked"]
COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "not checked": "dim"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. text: one line with the numbers; fix: what to do about it, if anything.

    data: the numbers themselves, ready for JSON.
    """

    status: Literal["ok", "warn", "fail"]
    text: str
    fix: str = ""
    data: dict[str, Any] = field(default_factory=dict)


class Check(Protocol):
    """One thing to look at. needs: what must exist before `run` is called.

    `run` may raise QerlError (the check fails with that text) or NotChecked with the reason.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> Needs: ...

    def run(self, context: Context) -> Finding: ...


@dataclass(frozen=True, slots=True)
class FunctionCheck:
    name: str
    needs: Needs
    function: Callable[[Context], Finding]

    def run(self, context: Context) -> Finding:
        return self.function(context)


ORDER: tuple[Needs, ...] = ("recipe", "tokenizer", "model")  # cheap ones first
CHECKS: dict[str, Check] = {}


def register(new: Check) -> None:
    """Add a check; it runs after those that need as much. Two of one name are our mistake."""
    assert new.name not in CHECKS, f"two checks are named {new.name}"
    CHECKS[new.name] = new


def check(
    name: str, needs: Needs
) -> Callable[[Callable[[Context], Finding]], Callable[[Context], Finding]]:
    """Decorator: register a function as a check."""

    def add(function: Callable[[Context], Finding]) -> Callable[[Context], Finding]:
        register(FunctionCheck(name, needs, function))
        return function

    return add


@dataclass(frozen=True, slots=True)
class Line:
    """A check's line of the report; `seconds` is what it took, shared work included."""

    name: str
    status: Status
    text: str
    fix: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """All lines, in the order they were made."""

    recipe: str
    lines: tuple[Line, ...]

    @property
    def failed(self) -> bool:
        return self.count("fail") > 0

    def count(self, status: Status) -> int:
        return sum(line.status == status for line in self.lines)

    def __getitem__(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)

    def summary(self) -> str:
        """ "12 ok, 1 warn, 0 fail, 2 not checked" """
        return ", ".join(f"{self.count(status)} {status}" for status in COLOURS)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, Any]:
        counts = {status: self.count(status) for status in COLOURS}  # type: ignore[arg-type]
        checks = {line.name: asdict(line) for line in self.lines}
        for line in checks.values():
            line["seconds"] = round(line["seconds"], 3)
        return {"recipe": self.recipe, "failed": self.failed, "counts": counts, "checks": checks}

    def table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table("check", "", "found", title=f"doctor: {self.recipe}", caption=self.summary())
        for line in self.lines:
            found = Text(line.text)
            if line.fix:
                found.append(f"\n→ {line.fix}", style="italic")
            table.add_row(line.name, Text(line.status, style=COLOURS[line.status]), found)
        return table


def run_checks(
    recipe: Recipe,
    *,
    offline: bool = False,
    only: Iterable[str] | None = None,
    reward: Any = None,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Try a recipe out; the policy is loaded once, and only if a check needs it.

    offline: use nothing from the network; what then is missing is "not checked". only: names of
    the checks to run. reward: as for `qerl.train`. say: hears what is going on.
    Raises QerlError for an unknown name in `only`; whatever else is wrong is in the report.
    """
    chosen = _choose(only)
    context = Context(recipe, offline=offline, reward=reward, say=say)
    try:
        lines = []
        for item in chosen:
            say(f"checking {item.name}")
            lines.append(_run(item, context))
    finally:
        context.close()
    return Report(recipe.name, tuple(lines))


def _choose(only: Iterable[str] | None) -> list[Check]:
    ordered = sorted(CHECKS.values(), key=lambda item: ORDER.index(item.needs))
    if only is None:
        return ordered
    names = list(only)
    for name in names:
        if name not in CHECKS:
            known = ", ".join(item.name for item in ordered)
            raise QerlError(f"doctor: there is no check {name!r}; there are: {known}")
    return [item for item in ordered if item.name in names]


def _run(item: Check, context: Context) -> Line:
    begun = time.perf_counter()
    try:
        context.require(item.needs)
        found = item.run(context)
        parts = (found.status, found.text, found.fix, found.data)
    except NotChecked as reason:
        parts = ("not checked", str(reason), "", {})
    except QerlError as error:
        parts = ("fail", str(error), "", {})
    return Line(item.name, *parts, time.perf_counter() - begun)
