"""Run text through a model of which only one decoder block at a time is in memory.

The model is transformers' own on the meta device. Its forward runs once with blocks that only note
what they are called with: embeddings, rotary tables, masks and whatever else a family hands to its
blocks are thereby its own. Then block after block is filled from the checkpoint, its linear layers'
inputs are measured, and its outputs, with the weights as quantized, become the next one's inputs.
Found structurally: the blocks are the decoder's list of modules with the most linear layers.

Left out: measuring a block's later layers behind its own quantized earlier ones; that takes four
passes through a block instead of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qerl.errors import QerlError
from qerl.quantize.search import Packed

UNPACKED = 1 << 22  # weights put back at a time
BATCH_TOKENS = 4096  # sequences of one length are run together up to this many tokens


class Weights(Protocol):
    """Where tensors come from, by their names in the checkpoint (`shards.Source`)."""

    def get(self, name: str) -> Tensor: ...

    def shape(self, name: str) -> tuple[int, ...] | None: ...


class Statistics:
    """What a linear layer's inputs x [tokens, K] look like: the sum of x² or of xᵀx, in fp32."""

    def __init__(self, features: int, hessian: bool, device: torch.device):
        shape = (features, features) if hessian else (features,)
        self.total = torch.zeros(shape, device=device)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """x [..., K] of any float type."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        self.tokens += rows.shape[0]
        if self.total.dim() == 2:
            self.total.addmm_(rows.T, rows)
        else:
            self.total.add_(rows.square().sum(0))

    @property
    def importance(self) -> Tensor:
        """E[x²] [K]."""
        total = self.total.diagonal() if self.total.dim() == 2 else self.total
        return total / max(self.tokens, 1)


@dataclass(slots=True)
class Batch:
    """Sequences of one length on their way: [B, T, H], and what each block is called with."""

    hidden: Tensor
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]


class Block:
    """A decoder block, filled, with the inputs that reach it. `linears`: full name → layer.

    Layers outside the blocks that the text passes on its way (rare) come as a first Block without
    a way to put anything back: later activations are of the unquantized ones.
    """

    def __init__(self, linears: dict[str, nn.Linear], measured: dict[str, Statistics] | None):
        self.linears = linears
        self._measured = measured

    def statistics(self) -> dict[str, Statistics]:
        """Statistics of each linear layer's inputs, by full name; those never called are absent.

        Layers called with the very same tensor share one object.
        """
        assert self._measured is not None
        return self._measured

    def put(self, name: str, packed: Packed) -> None:
        """Use the quantized weight from here on."""


class _DecoderBlock(Block):
    def __init__(
        self, module: nn.Module, prefix: str, index: int, batches: list[Batch], hessian: bool
    ):
        super().__init__(_linears(module, prefix), None)
        self.module, self.index, self.batches, self.hessian = module, index, batches, hessian

    @torch.no_grad()
    def statistics(self) -> dict[str, Statistics]:
        if self._measured is None:
            with _measuring(self.linears, self.hessian) as measured:
                for batch in self.batches:
                    self.run(batch)
            self._measured = measured
        return self._measured

    def put(self, name: str, packed: Packed) -> None:
        from qerl_kernels.quantize import dequantize

        value = torch.empty_like(self.linears[name].weight)  # the old one may be the source's own
        codes, scale, g = (part.to(value.device) for part in packed)
        rows = max(1, UNPACKED // value.shape[1])  # unpacking takes several times the weight
        for first in range(0, len(value), rows):
            some = slice(first, first + rows)
            value[some] = dequantize(codes[some], scale[some], g, value.dtype)
        self.linears[name].weight = nn.Parameter(value, requires_grad=False)

    def run(self, batch: Batch) -> Tensor:
        args, kwargs = batch.calls[self.index]
        out = self.module(batch.hidden, *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out


@torch.no_grad()
def walk(
    model: PreTrainedModel,
    source: Weights,
    calibration: Sequence[Sequence[int]],
    *,
    hessian: bool,
    device: str | torch.device = "cpu",
) -> Iterator[Block]:
    """Visit the model's blocks in order, each filled from `source` and fed by the ones before.

    model: on the meta device, and again so afterwards. calibration: lists of token ids. hessian:
    measure XᵀX rather than x². Blocks compute in fp32 on a CPU, in bf16 elsewhere. After the
    caller is done with a block its outputs are computed with the weights that were put into it.
    Raises QerlError for a model without a list of blocks, a tensor the checkpoint lacks, token ids
    outside the vocabulary, and inputs that are not finite.
    """
    device = torch.device(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    _check_ids(model, calibration)
    prefix, blocks = _find_blocks(model)
    was_training = model.training
    model.eval()
    try:
        outside, batches = _record(model, blocks, source, calibration, hessian, device, dtype)
        if outside.linears:
            yield outside
        for index, module in enumerate(blocks):
            name = f"{prefix}.{index}"
            with _filled(module, name, model, source, device, dtype):
                block = _DecoderBlock(module, name, index, batches, hessian)
                yield block
                _advance(block, name)
    finally:
        model.train(was_training)


def _advance(block: _DecoderBlock, name: str) -> None:
    for batch in block.batches:
        batch.hidden = block.run(batch)
        batch.calls[block.index] = ((), {})  # nobody needs it again
        if not torch.isfinite(batch.hidden).all():
            raise QerlError(
                f"model: block '{name}' does not stay finite on the calibration text; "
                "use a method without calibration, such as sweep"
            )


def _check_ids(model: PreTrainedModel, calibration: Sequence[Sequence[int]]) -> None:
    size = model.get_input_embeddings().get_parameter("weight").shape[0]
    ids = {i for sequence in calibration for i in (min(sequence), max(sequence))}
    wrong = [i for i in ids if not 0 <= i < size]
    if wrong:
        raise QerlError(
            f"calibration: token id {wrong[0]} is outside the model's vocabulary of {size}; "
            "tokenize the text with this model's tokenizer"
        )


def _find_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The decoder's list of blocks, and its full name."""
    decoder = model.get_decoder()
    best, most = nn.ModuleList(), 0
    for child in decoder.children():
        count = len(_linears(child, ""))
        if isinstance(child, nn.ModuleList) and count > most:
            best, most = child, count
    if not most:
        raise QerlError(
            f"model: no list of decoder blocks is found in {type(model).__name__}; "
            "use a method without calibration, such as sweep"
        )
    names = {id(module): name for name, module in model.named_modules()}
    return names[id(best)], best


def _linears(module: nn.Module, prefix: str) -> dict[str, nn.Linear]:
    return {
        f"{prefix}.{name}" if prefix else name: child
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear)
    }


# --- the first pass: what the blocks are called with ---------------------------------------------


def _record(
    model: PreTrainedModel,
    blocks: nn.ModuleList,
    source: Weights,
    calibration: Sequence[Sequence[int]],
    hessian: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Block, list[Batch]]:
    """Everything but the blocks, run on the text: their first inputs, and the layers met."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    inside = {id(m) for m in blocks.modules()}
    outside = {n: m for n, m in _linears(decoder, prefix).items() if id(m) not in inside}
    batches: list[Batch] = []
    with (
        _filled(decoder, prefix, model, source, device, dtype, inside),
        _noting(blocks) as notes,
        _measuring(outside, hessian) as measured,
    ):
        for ids in _batches(calibration):
            notes.clear()
            decoder(input_ids=torch.tensor(ids, device=device), use_cache=False)
            hidden = notes[0][0].to(dtype)
            calls = [(args, kwargs) for _, args, kwargs in notes]
            if batches:
                calls = _same(calls, batches[-1].calls)
            batches.append(Batch(hidden, calls))
    met = {name: linear for name, linear in outside.items() if name in measured}
    return Block(met, measured), batches


def _batches(calibration: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
    """Sequences of equal length together, so that none is padded."""
    by_length: dict[int, list[list[int]]] = {}
    for sequence in calibration:
        by_length.setdefault(len(sequence), []).append(list(sequence))
    for length, sequences in by_length.items():
        size = max(1, BATCH_TOKENS // length)
        for i in range(0, len(sequences), size):
            yield sequences[i : i + size]


@contextmanager
def _noting(blocks: nn.ModuleList) -> Iterator[list[tuple[Tensor, tuple, dict]]]:
    """Within: blocks return their input and append (hidden, other arguments) to the list."""
    notes: list[tuple[Tensor, tuple, dict]] = []

    def note(*args: Any, **kwargs: Any) -> Tensor:
        if args:
            hidden, args = args[0], args[1:]
        else:
            hidden = kwargs.pop("hidden_states")
        notes.append((hidden, args, kwargs))
        return hidden

    for block in blocks:
        block.forward = note
    try:
        yield notes
    finally:
        for block in blocks:
            del block.forward


def _same(new: Any, old: Any) -> Any:
    """`new`, with every tensor that equals the one at its place in `old` replaced by that one.

    Masks and rotary tables are those of the batch before: kept once, not once a batch.
    """
    if isinstance(new, Tensor):
        alike = isinstance(old, Tensor) and new.shape == old.shape and new.dtype == old.dtype
        return old if alike and torch.equal(new, old) else new
    if isinstance(new, (list, tuple)):
        if not isinstance(old, (list, tuple)) or len(old) != len(new) or hasattr(new, "_fields"):
            return new
        return type(new)(_same(a, b) for a, b in zip(new, old, strict=True))
    if type(new) is dict and isinstance(old, dict):
        return {key: _same(value, old.get(key)) for key, value in new.items()}
    return new  # anything else may be state that one batch's blocks share: its own


@contextmanager
def _measuring(linears: dict[str, nn.Linear], hessian: bool) -> Iterator[dict[str, Statistics]]:
    """Within: every call of the layers adds to their statistics, once for layers sharing inputs."""
    found: dict[str, Statistics] = {}
    last: list[Any] = [None, None]  # the tensor measured last, and where to

    def hook(name: str) -> Any:
        def measure(module: nn.Linear, inputs: tuple[Any, ...]) -> None:
            x = inputs[0]
            if name not in found:
                shared = x is last[0]
                found[name] = (
                    last[1] if shared else Statistics(module.in_features, hessian, x.device)
                )
            if x is not last[0] or found[name] is not last[1]:
                found[name].add(x)
            last[:] = [x, found[name]]

        return measure

    handles = [m.register_forward_pre_hook(hook(name)) for name, m in linears.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        last[:] = [None, None]


# --- weights in and out --------------------------------------------------------------------------


@contextmanager
def _filled(
    module: nn.Module,
    prefix: str,
    model: PreTrainedModel,
    source: Weights,
    device: torch.device,
    dtype: torch.dtype,
    but: set[int] | frozenset[int] = frozenset(),
) -> Iterator[None]:
    """Within: parameters and buffers hold the checkpoint's values; afterwards as before.

    but: ids of modules inside that are left alone. Embeddings keep the type they are stored in
    (they are the largest tensor, and only rows of them are used) and give out `dtype`.
    """
    parts = [(f"{prefix}.{n}" if n else prefix, m) for n, m in module.named_modules()]
    parts = [(name, part) for name, part in parts if id(part) not in but]
    before = [(part, dict(part._parameters), dict(part._buffers)) for _, part in parts]
    handles = []
    try:
        for name, part in parts:
            _fill_buffers(part, name, model, source, device)
            wanted = None if isinstance(part, nn.Embedding) else dtype
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    value = _tensor(source, f"{name}.{key}", parameter).to(device, wanted)
                    part._parameters[key] = nn.Parameter(value, requires_grad=False)
            if isinstance(part, nn.Embedding):
                handles.append(part.register_forward_hook(lambda m, i, out: out.to(dtype)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for part, parameters, buffers in before:
            part._parameters.update(parameters)
            part._buffers.update(buffers)


def _tensor(source: Weights, name: str, like: Tensor) -> Tensor:
    found = source.shape(name)
    if found != tuple(like.shape):
        raise QerlError(
            f"model: calibration needs '{name}' of shape {tuple(like.shape)}, "
            f"found {found or 'no such tensor'}; the files do not fit config.json"
        )
    return source.get(name)


def _fill_buffers(
    part: nn.Module, name: str, model: PreTrainedModel, source: Weights, device: torch.device
) -> None:
    """From the file where it has them; computed ones (rotary frequencies) by transformers' rule."""
    stranded = {key: b for key, b in part._buffers.items() if b is not None and b.is_meta}
    if not stranded:
        return
    for key, buffer in stranded.items():
        part._buffers[key] = torch.empty_like(buffer, device=device)
    model._init_weights(part)
    for key, buffer in stranded.items():
        if source.shape(f"{name}.{key}") == tuple(buffer.shape):
            part._buffers[key] = source.get(f"{name}.{key}").to(device, buffer.dtype)
