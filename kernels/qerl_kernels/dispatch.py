"""Which tile, split and layout a product takes on which card: read from `dispatch.json`.

The thresholds are data: `scripts/gpu_check.py` measures them on a card and prints the table to
put in the file. The file's "source" says where the present numbers come from. Past the last
`max_m` a layer is unpacked once and handed to cuBLAS. Shape letters: M tokens, N outputs, K inputs.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from qerl_kernels import launch
from qerl_kernels.variants import ALL_TARGETS

# Products with an NVFP4 weight, and those with an E4M3 one.
Pass = Literal["forward", "backward", "fp8_forward", "fp8_backward"]
# What the interpreter pretends to be.
_INTERPRETED_TARGET, _INTERPRETED_SMS = 90, 132


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share: bm tokens by bn outputs, in steps of 128 · groups inputs.

    max_m: largest M it is chosen for. split: whether K may be divided among programs.
    """

    max_m: int
    bm: int
    bn: int
    warps: int
    stages: int
    groups: int = 1
    split: bool = False

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}x{128 * self.groups} w{self.warps} s{self.stages}"


@cache
def table() -> dict[str, Any]:
    """`dispatch.json` as it is."""
    return json.loads(Path(__file__).with_name("dispatch.json").read_text())


def _family(target: int) -> str:
    """The entry of the table a compute capability uses: the nearest one not above it."""
    known = sorted(int(name) for name in table()["targets"])
    below = [name for name in known if name <= target]
    if not below:
        raise ValueError(
            f"no kernel runs on sm_{target}: compute capability 8.0 or newer is needed"
        )
    return str(below[-1])


@cache
def tiles(target: int, direction: Pass) -> tuple[Tile, ...]:
    """Fused tiles of a compute capability, by rising `max_m`."""
    return tuple(Tile(**row) for row in table()["targets"][_family(target)][direction])


def all_tiles(direction: Pass) -> Iterator[tuple[int, tuple[Tile, ...]]]:
    """(target, tiles) for every target the project supports."""
    for target in ALL_TARGETS:
        yield target, tiles(target, direction)


@cache
def target_of(device: torch.device) -> int:
    """Compute capability of a device, 90 for 9.0; off CUDA what the interpreter pretends."""
    if device.type != "cuda":
        return _INTERPRETED_TARGET
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def fused_tile(direction: Pass, m: int, device: torch.device) -> Tile:
    """The tile for M = m; in batch-invariant mode always the same one."""
    target = target_of(device)
    rows = tiles(target, direction)
    if launch.is_batch_invariant():
        return rows[table()["targets"][_family(target)]["invariant"][direction]]
    return next((tile for tile in rows if m <= tile.max_m), rows[-1])


def is_large(direction: Pass, m: int, device: torch.device) -> bool:
    """Whether to unpack the layer and use cuBLAS; never in batch-invariant mode."""
    return not launch.is_batch_invariant() and m > tiles(target_of(device), direction)[-1].max_m


def splits(tile: Tile, m: int, n: int, groups: int, device: torch.device) -> tuple[int, int]:
    """(number of splits along K, groups of 128 each); one split in batch-invariant mode.

    Enough programs to fill the card, each with enough groups to pay for its start.
    """
    if not tile.split or launch.is_batch_invariant():
        return 1, groups
    data = table()
    programs = -(-n // tile.bn) * -(-m // tile.bm)
    wanted = data["programs_per_sm"] * _multiprocessors(device) // programs
    most = min(data["max_splits"], groups // data["min_groups_per_split"])
    per_split = -(-groups // max(1, min(wanted, most)))
    return -(-groups // per_split), per_split


@cache
def _triton_version() -> tuple[int, int]:
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def target_flags(target: int) -> dict[str, bool]:
    """Compile-time facts of a target.

    FMA: no bf16x2 multiply. BY_LANE: warps own rows as mma.sync and wgmma want them. WIDE: before
    3.8 Triton halves the operand width behind a join, so that mma.sync takes k = 4t … 4t+3 a lane.
    """
    generation = target // 10
    return {
        "FMA": generation == 8,
        "WIDE": generation in (8, 12) and _triton_version() < (3, 8),  # mma.sync
        "BY_LANE": generation not in (10, 11),  # tcgen05
    }


def flags(device: torch.device) -> dict[str, bool]:
    """`target_flags` of a device."""
    return target_flags(target_of(device))


def lane_order(device: torch.device) -> str:
    """The order `repack` must give a weight for this device and the Triton at hand."""
    return "wide" if flags(device)["WIDE"] else "paired"
