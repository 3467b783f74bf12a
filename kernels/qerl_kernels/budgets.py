"""`budgets.json`: the most instructions a weight may cost, by kernel, tile, target and Triton.

An entry is one number for every recorded Triton, or one for each. `python -m qerl_kernels.static
--write-budgets` writes the file anew, so that a change of cost is a change in its diff.
"""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("budgets.json")
STEP = 20  # budgets are multiples of 1/20
Cost = tuple[str, str, int, float]  # kernel, tile, target, instructions a weight
Budget = dict[tuple[str, str, str], dict[str, float]]  # (kernel, tile, target) -> Triton -> budget


def minor(version: str) -> str:
    """ "3.7" of "3.7.1"."""
    return ".".join(version.split(".")[:2])


class Budgets:
    """The budgets of a file; none where there is no file yet."""

    def __init__(self, path: Path = FILE) -> None:
        self.path = path
        empty = {"tritons": [], "kernels": {}}
        data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else empty
        self.tritons: list[str] = data["tritons"]
        self._budgets: Budget = {
            (kernel, tile, target): self._by_triton(entry)
            for kernel, tiles in data["kernels"].items()
            for tile, targets in tiles.items()
            for target, entry in targets.items()
        }

    def _by_triton(self, entry: dict[str, float] | float) -> dict[str, float]:
        return entry if isinstance(entry, dict) else {version: entry for version in self.tritons}

    def get(self, kernel: str, tile: str, target: int, triton: str) -> float | None:
        """The budget; None where none is recorded."""
        return self._budgets.get((kernel, tile, str(target)), {}).get(minor(triton))

    def record(self, triton: str, costs: Iterable[Cost], whole: bool) -> None:
        """Set the budgets of one Triton to what was counted, rounded up, and write the file.

        whole: `costs` is everything there is, and what it lacks is forgotten.
        """
        version = minor(triton)
        self.tritons = sorted({*self.tritons, version}, key=lambda v: [*map(int, v.split("."))])
        for by_triton in self._budgets.values() if whole else ():
            by_triton.pop(version, None)
        for kernel, tile, target, value in costs:
            budget = math.ceil(round(value * STEP, 6)) / STEP
            self._budgets.setdefault((kernel, tile, str(target)), {})[version] = budget
        self.path.write_text(self._text())

    def _text(self) -> str:
        """JSON with a line for each tile."""
        tree: dict[str, dict[str, dict[str, object]]] = {}
        for (kernel, tile, target), by_triton in sorted(self._budgets.items(), key=_order):
            if by_triton:
                targets = tree.setdefault(kernel, {}).setdefault(tile, {})
                targets[target] = self._entry(by_triton)
        lines = [f'{{\n  "tritons": {json.dumps(self.tritons)},\n  "kernels": {{']
        for kernel, tiles in tree.items():
            lines += [f"    {json.dumps(kernel)}: {{"]
            lines += [f"      {json.dumps(name)}: {json.dumps(tiles[name])}," for name in tiles]
            lines += ["    },"]
        return re.sub(r",(\n *\})", r"\1", "\n".join([*lines, "  }\n}\n"]))

    def _entry(self, by_triton: dict[str, float]) -> object:
        values = set(by_triton.values())
        if len(values) == 1 and len(by_triton) == len(self.tritons):
            return values.pop()
        return {version: by_triton[version] for version in self.tritons if version in by_triton}


def _order(item: tuple[tuple[str, str, str], object]) -> tuple[str, str, int]:
    (kernel, tile, target), _ = item
    return kernel, tile, int(target)
