"""A kernel as it is compiled without a GPU: what `static` counts and what the budget test holds.

Every kernel module offers `variants()`: one `Variant` for each (kernel, tile) its dispatch can
choose.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Compute capabilities of the cards people own: A100, 30 series, 40 series and L40S, H100/H200,
# B200, 50 series and RTX PRO 6000, GB10.
ALL_TARGETS = (80, 86, 89, 90, 100, 120, 121)
BEFORE_HOPPER = (80, 86, 89)
# One card of each kind of tensor-core instruction and register file.
KINDS = (80, 90, 100, 120)


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of one kernel.

    kernel: the op's stem. tile: how the table names it, e.g. "16x64x128 w4 s3 bf16".
    function: the `triton.jit` function. types: Triton types of the run-time arguments in order
    ("*bf16", "i32", "fp32"). constexprs: the others. divisible: arguments that launches give as
    multiples of 16 (every pointer is one and needs no mention). elements: weights (for attention
    and norms: elements of the streamed operand) that one pass of the main loop consumes, None
    where there is no main loop. targets: compute capabilities it is chosen on.
    """

    kernel: str
    tile: str
    function: Any
    types: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: frozenset[str]
    num_warps: int
    num_stages: int
    elements: int | None
    targets: tuple[int, ...] = ALL_TARGETS
