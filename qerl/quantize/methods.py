"""The ways to quantize a model, from its linear layers to NVFP4 tensors.

absmax, four-over-six and sweep look at one weight at a time. imatrix and gptq look at what the
layers are fed with, on calibration text: imatrix weights the sweep's errors by E[x²], gptq rounds
on imatrix's scales so that each error is made up for by later columns. All give the same format.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from qerl.errors import QerlError
from qerl.quantize.search import Packed, Search, divisor_for, quantize_weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from qerl.quantize.calibrate import Block, Statistics, Weights

METHODS = ("absmax", "four-over-six", "sweep", "imatrix", "gptq")
CALIBRATED = ("imatrix", "gptq")

Group = list[str]
Done = Callable[[str], "Packed | None"]


def encode(
    method: str,
    source: Weights,
    model: PreTrainedModel,
    groups: Sequence[Group],
    *,
    calibration: Sequence[Sequence[int]] | None = None,
    done: Done = lambda name: None,
    device: str | torch.device = "cpu",
) -> Iterator[tuple[Group, dict[str, Packed]]]:
    """Quantize the linear layers named in `groups`, whose members share a divisor.

    method: one of METHODS. source: tensors by name, `{layer}.weight` [N, K] among them. model: the
    skeleton on the meta device; it is as before afterwards. calibration: lists of token ids, for
    the methods in CALIBRATED. done(name): what an interrupted run already wrote, or None; groups
    that are done whole are not yielded again, calibrated methods use them for later activations.
    device: where calibrated methods compute.
    Yields (group, {name: Packed}) once a group: in the order given, or in that of the blocks.
    Linear layers that the calibration text never reaches are encoded by sweep, with a warning.
    Raises QerlError: unknown method, calibration missing or unfit, a damaged weight (named).
    """
    if method not in METHODS:
        raise QerlError(f"method: {method!r} is not known; use one of {', '.join(METHODS)}")
    if method in CALIBRATED:
        _check_calibration(method, calibration)
        assert calibration is not None
        return _calibrated(method, source, model, groups, calibration, done, device)
    return _data_free(method, source, groups, done)


def _check_calibration(method: str, calibration: Sequence[Sequence[int]] | None) -> None:
    if not calibration:
        raise QerlError(
            f"calibration: method {method} needs text to calibrate on; "
            "name some, or use method sweep, which needs none"
        )
    if not all(len(sequence) for sequence in calibration):
        raise QerlError("calibration: a text without tokens cannot be used; leave it out")


def _data_free(
    method: str, source: Weights, groups: Sequence[Group], done: Done
) -> Iterator[tuple[Group, dict[str, Packed]]]:
    for group in groups:
        if any(done(name) is None for name in group):
            yield group, _search_group(group, source, _search_of(method))


def _search_of(method: str) -> Search:
    return method if method in ("absmax", "four-over-six") else "sweep"


def _calibrated(
    method: str,
    source: Weights,
    model: PreTrainedModel,
    groups: Sequence[Group],
    calibration: Sequence[Sequence[int]],
    done: Done,
    device: str | torch.device,
) -> Iterator[tuple[Group, dict[str, Packed]]]:
    from qerl.quantize.calibrate import walk

    left = list(groups)
    for block in walk(model, source, calibration, hessian=method == "gptq", device=device):
        here = [group for group in left if any(name in block.linears for name in group)]
        left = [group for group in left if group not in here]
        written = {name: done(name) for group in here for name in group}
        if None in written.values():
            block.statistics()  # before any weight is put back, as in a run without interruption
        for group in here:
            packed = {name: p for name in group if (p := written[name]) is not None}
            if len(packed) < len(group):
                packed = _encode_group(method, group, source, block)
                yield group, packed
            for name in set(group) & set(block.linears):
                block.put(name, packed[name])
    missed = [group for group in left if any(done(name) is None for name in group)]
    if missed:
        _warn_missed([name for group in missed for name in group])
    for group in missed:
        yield group, _search_group(group, source, "sweep")


def _warn_missed(names: list[str]) -> None:
    warnings.warn(
        f"{len(names)} linear layers are not reached by the calibration text and are quantized "
        f"without it (sweep): {', '.join(names[:3])}{', …' if len(names) > 3 else ''}",
        stacklevel=3,
    )


def _encode_group(method: str, group: Group, source: Weights, block: Block) -> dict[str, Packed]:
    measured = block.statistics()
    unseen = [name for name in group if name not in measured]
    if unseen:
        _warn_missed(unseen)
    if unseen or method == "imatrix":
        return _search_group(group, source, "sweep", measured)
    return _gptq_group(group, source, measured)


def _weight(source: Weights, name: str) -> Tensor:
    return source.get(f"{name}.weight")


def _shared_divisor(group: Group, source: Weights) -> Tensor:
    """The divisor of a group, one weight in memory at a time."""
    import torch

    # The smallest of the members' own divisors is that of their largest weight.
    own = []
    for name in group:
        try:
            own.append(divisor_for(_weight(source, name)))
        except ValueError as error:
            raise _damaged(name, error) from error
    return torch.stack(own).amin(0)


def _damaged(name: str, error: ValueError) -> QerlError:
    return QerlError(f"model: layer '{name}': {error}; the checkpoint is damaged")


def _search_group(
    group: Group,
    source: Weights,
    search: Search,
    measured: dict[str, Statistics] | None = None,
) -> dict[str, Packed]:
    shared = _shared_divisor(group, source)
    found = {}
    for name in group:
        weight = _weight(source, name)
        statistics = (measured or {}).get(name)
        importance = None if statistics is None else statistics.importance.to(weight.device)
        try:
            found[name] = quantize_weight(weight, search, shared, importance)
        except ValueError as error:
            raise _damaged(name, error) from error
    return found


def _gptq_group(
    group: Group, source: Weights, measured: dict[str, Statistics]
) -> dict[str, Packed]:
    """Members that share their inputs are stacked: one hessian is factored once for them all."""
    import torch

    from qerl.quantize.gptq import gptq_round
    from qerl.quantize.search import search_scales

    shared = _shared_divisor(group, source)
    together: dict[int, list[str]] = {}
    for name in group:
        together.setdefault(id(measured[name]), []).append(name)
    found: dict[str, Packed] = {}
    for names in together.values():
        statistics = measured[names[0]]
        weights = [_weight(source, name) for name in names]
        stack = torch.cat(weights).to(statistics.total.device)
        g = shared.to(stack.device)
        try:
            scale = search_scales(stack, "sweep", g, statistics.importance)
            whole = gptq_round(stack, scale, g, statistics.total)
        except ValueError as error:
            raise QerlError(
                f"calibration: layer '{names[0]}': {error}; use more text, or method imatrix"
            ) from error
        sizes = [weight.shape[0] for weight in weights]
        codes, scales = whole.packed.cpu().split(sizes), whole.scale.cpu().split(sizes)
        for name, part, steps in zip(names, codes, scales, strict=True):
            found[name] = Packed(part.contiguous(), steps.contiguous(), shared.clone())
    return found
