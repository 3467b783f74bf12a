"""Merged weights back to NVFP4, on the inputs that the run's own answers give each layer.

One pass over those answers gathers XᵀX for as many layers as fit `HESSIAN_BYTES`; then they are
encoded and forgotten, and the next pass begins: a large model takes more passes, not more memory.
Shape letters: N outputs, K inputs, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qerl.errors import QerlError
from qerl.merge import Merge
from qerl.quantize.gptq import gptq_round
from qerl.quantize.nvfp4 import BLOCK, scale_groups
from qerl.quantize.search import Packed, divisor_for, search_scales
from qerl_kernels.quantize import dequantize
from qerl_kernels.repack import unrepack

if TYPE_CHECKING:
    from qerl.model.linear import NVFP4Linear
    from qerl.pack import MicroBatch
    from qerl.policy import Policy

HESSIAN_BYTES = 2 << 30
DAMPING = 0.01  # of the mean of XᵀX's diagonal
_INSIDE = {"base_layer", "lora_A", "lora_B"}  # what an adapted layer is made of


@dataclass(frozen=True, slots=True)
class Encoded:
    """A layer in NVFP4. loss: |X(Q - W')ᵀ|² / |X W'ᵀ|² on the run's answers, 0 where W' is the
    base's own weight. weights: how many there are."""

    name: str
    packed: Packed
    loss: float
    weights: int


@dataclass(frozen=True, slots=True)
class Loss:
    """What is left of an `Encoded` when its tensors are written."""

    name: str
    loss: float
    weights: int


def requantize(
    merge: Merge,
    policy: Policy,
    batches: Sequence[MicroBatch],
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Encoded]:
    """Every layer that is to be NVFP4, encoded; layers that the adapter leaves alone come first.

    policy: the run's model with its adapter, in eval mode. batches: what it is fed with.
    progress(done, total) counts layers that are encoded anew.
    Raises QerlError naming a layer that the batches never reach or whose inputs are not finite.
    """
    groups = scale_groups(_layers(merge, policy))
    adapted = set(merge.adapted)
    dense = not any(merge.is_nvfp4(group[0]) for group in groups)
    changed = [group for group in groups if dense or adapted & set(group)]
    for group in groups:
        if group not in changed:
            for name in group:
                packed = merge.stored(name)
                assert packed is not None, name
                yield Encoded(name, packed, 0.0, 2 * packed.packed.numel())
    total, done = sum(map(len, changed)), 0
    for some in _chunks(changed, merge):
        hessians = gather(policy, batches, [merge.module(group[0]) for group in some])
        for group in some:
            yield from encode_group(merge, group, hessians.pop(merge.module(group[0])))
            done += len(group)
            if progress is not None:
                progress(done, total)


def live_packed(policy: Policy) -> dict[str, Callable[[], Packed]]:
    """The NVFP4 layers of a model in memory, by name; a call gives one in the files' layout.

    Raises QerlError for adapted layers whose weight is in a format that has no exact 16-bit form
    here (bitsandbytes).
    """
    from qerl.model.fp8 import FP8Linear
    from qerl.model.linear import NVFP4Linear
    from qerl.model.lora import lora_layers

    for name, layer in lora_layers(policy.network).items():
        base = layer.get_base_layer()
        if not isinstance(base, (NVFP4Linear, FP8Linear)) and type(base) is not nn.Linear:
            raise QerlError(
                f"merge: layer {name} is a {type(base).__name__}, whose weight cannot be merged "
                "into; train on format: nvfp4 or bf16, or export the adapter alone"
            )
    found = {
        name.removesuffix(".base_layer"): module
        for name, module in policy.network.named_modules()
        if isinstance(module, NVFP4Linear)
    }
    return {name: partial(_on_disk, module) for name, module in found.items()}


def _on_disk(layer: NVFP4Linear) -> Packed:
    codes, scale, divisor = layer.packed
    if codes.dtype == torch.int32:  # repacked for the kernels of a GPU
        codes, scale = unrepack(codes, scale, layer.in_features)
    return Packed(codes.detach().cpu(), scale.cpu(), divisor.cpu())


def _layers(merge: Merge, policy: Policy) -> list[str]:
    """Names of the layers that are NVFP4 in the result, in the order of the model.

    Those that are in the base; of a base that has none, every linear layer that can be.
    """
    from qerl.model.lora import decoder_linears

    stored = [name for name in merge.wide() if merge.is_nvfp4(name)]
    if stored:
        return stored
    plain = [n for n in decoder_linears(policy.network) if not set(n.split(".")) & _INSIDE]
    names = {*merge.adapted, *map(merge.file, plain)}
    return sorted(name for name in names if merge.layers.shape(name)[1] % BLOCK == 0)


def _chunks(groups: list[list[str]], merge: Merge) -> Iterator[list[list[str]]]:
    """Runs of groups whose hessians, fp32 [K, K] each, fit together."""
    some: list[list[str]] = []
    held = 0
    for group in groups:
        size = 4 * merge.layers.shape(group[0])[1] ** 2
        if some and held + size > HESSIAN_BYTES:
            yield some
            some, held = [], 0
        some.append(group)
        held += size
    if some:
        yield some


@torch.no_grad()
def gather(policy: Policy, batches: Sequence[MicroBatch], names: list[str]) -> dict[str, Tensor]:
    """XᵀX, fp32 [K, K], of the inputs X [T, K] of each named layer over all batches.

    Raises QerlError for a layer that is never called, or whose inputs are not finite.
    """
    found: dict[str, Tensor] = {}

    def listen(name: str) -> Callable[..., None]:
        def heard(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            x = arguments[0].reshape(-1, arguments[0].shape[-1]).float()
            product = x.T @ x
            found[name] = found[name].add_(product) if name in found else product

        return heard

    policy.model.eval()
    with ExitStack() as stack:
        for name in names:
            module = policy.network.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(listen(name)).remove)
        for batch in batches:
            policy.logprobs(batch, 1.0)
    for name in names:
        if name not in found or not bool(found[name].isfinite().all()):
            what = "gets inputs that are not finite" if name in found else "is never called"
            raise QerlError(f"merge: layer {name} {what} on the run's answers; use --merge bf16")
    return found


@torch.no_grad()
def encode_group(merge: Merge, group: list[str], hessian: Tensor) -> Iterator[Encoded]:
    """Layers that share their inputs and, as inference engines want it, one divisor."""
    weights = {name: merge.weight(name) for name in group}
    stored = {name: merge.stored(name) for name in group}
    shared = divisor_for(*weights.values())
    halvings = _halvings(weights, stored)
    for name, weight in weights.items():
        base = stored[name]
        if base is not None and not halvings and name not in merge.adapted:
            yield Encoded(name, base, 0.0, weight.numel())
            continue
        weight = weight.to(hessian.device)
        divisor = shared if base is None else base.global_scale / 2**halvings
        divisor = divisor.to(weight.device)
        scale = search_scales(weight, "sweep", divisor, hessian.diagonal())
        if base is not None:
            own = base.scale.to(weight.device).float() / 2**halvings
            scale = _own_scales(weight, own, divisor, scale)
        try:
            packed = gptq_round(weight, scale, divisor, hessian, DAMPING)
        except ValueError as error:
            raise QerlError(f"merge: layer {name}: {error}; use --merge bf16") from error
        loss = output_error(packed, weight, hessian)
        yield Encoded(name, Packed(*(part.cpu() for part in packed)), loss, weight.numel())


def output_error(packed: Packed, weight: Tensor, hessian: Tensor) -> float:
    """|X(Q - W)ᵀ|² / |X Wᵀ|², for Q the weight that `packed` stands for and XᵀX the hessian."""
    missed = dequantize(*packed) - weight
    return _energy(missed, hessian) / max(_energy(weight, hessian), 1e-30)


def _halvings(weights: dict[str, Tensor], stored: dict[str, Packed | None]) -> int:
    """How often a group's divisor is halved so that the merged weights are within its reach.

    Powers of two keep every block scale of the base exact.
    """
    reach = [
        float(weight.abs().amax() * base.global_scale) / (7 * 448)
        for name, weight in weights.items()
        if (base := stored[name]) is not None
    ]
    return max(0, math.ceil(math.log2(max(reach)))) if reach and max(reach) > 0 else 0


def _own_scales(weight: Tensor, own: Tensor, divisor: Tensor, searched: Tensor) -> Tensor:
    """The base's block scales, but for blocks that have outgrown them.

    Under its own scale a block that the adapter hardly moves is hardly rounded: most of its
    weights are on the grid already. Up to 7 (of 6) rounding to the top is no worse than elsewhere
    on the grid. own: fp32 [N, K/16]; those that are no normal number of E4M3 are replaced as well.
    """
    reach = weight.abs().unflatten(1, (-1, BLOCK)).amax(-1) * divisor
    fits = (reach <= 7 * own) & (own >= 2**-6)
    stored = own.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(fits, stored, searched.view(torch.uint8)).view(torch.float8_e4m3fn)


def _energy(weight: Tensor, hessian: Tensor) -> float:
    """|X Wᵀ|² = tr(W XᵀX Wᵀ)."""
    return float(((weight @ hessian) * weight).sum())
