"""Which class a checkpoint is of, and what of it is loaded: the text tower of a model that sees.

The model is built as the checkpoint's own architecture class, because an adapter's keys are that
class's: saved from a text-only one they would name modules that engines do not have, and engines
then serve the base without a word. Vision and audio towers are taken off the skeleton before
anything is read, so they cost no memory; `mtp.*` (heads that predict several tokens) is no part of
transformers' classes at all.

Left out: mixtures of experts. Their experts are one 3-D tensor a layer, for which there is neither
a packed layer nor an adapter here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from qerl.errors import QerlError
from qerl.model import attention
from qerl.quantize import structure
from qerl.quantize.structure import FAMILIES


class LeftOut(nn.Module):
    """Stands where a tower was; QerlError when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise QerlError(
            f"model: '{self.name}' is not loaded, for only the text tower is trained; leave out "
            "rows with images, audio or video"
        )


def skeleton(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole architecture on the meta device (no memory), with attention that packs.

    Raises QerlError as `structure.architecture` does, for a class whose attention is not to be
    replaced, and for a mixture of experts.
    """
    attention.register()
    kind = structure.architecture(config)
    try:
        with torch.device("meta"):
            model = kind._from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    except KeyError as error:
        if error.args != (attention.NAME,):
            raise
        raise _own_attention(kind) from error
    if not any(map(_asks_for_attention, model.get_decoder().modules())):
        raise _own_attention(kind)
    refuse_experts(model)
    return model


def _asks_for_attention(module: nn.Module) -> bool:
    """Whether a module's forward looks up which attention to compute. (Classes say so themselves,
    in `_supports_attention_backend`, but not all of them.)"""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _own_attention(kind: type[PreTrainedModel]) -> QerlError:
    """It would run its own, blind to who may see whom in a pack."""
    return QerlError(
        f"model: {kind.__name__} computes attention in code of its own, which cannot be packed; "
        f"name a model of a newer class ({FAMILIES})"
    )


def refuse_experts(model: PreTrainedModel) -> None:
    """QerlError, naming architecture and layer, for a decoder with experts."""
    for name, module in model.get_decoder().named_modules():
        fused = not isinstance(module, nn.Conv1d) and any(
            parameter.ndim == 3 for parameter in module.parameters(recurse=False)
        )
        several = isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts"
        if fused or several:
            raise QerlError(
                f"model: {type(model).__name__} is a mixture of experts ('{name}'), for which "
                f"there is no packed layer and no adapter yet; name a dense model ({FAMILIES})"
            )


def leave_out_towers(model: PreTrainedModel) -> tuple[str, ...]:
    """Take everything off the model that is not its text decoder or its head, in place.

    Returns the names of the modules taken off, such as `model.visual`. The names of all that is in
    them stay known (`modules_left_out`): a suffix like q_proj means those too wherever the whole
    model is loaded.
    """
    decoder, outer = model.get_decoder(), model.base_model
    names = {id(module): name for name, module in model.named_modules()}
    taken: list[str] = []
    inside: list[str] = []
    while outer is not decoder:
        towards = None
        for leaf, child in list(outer.named_children()):
            if any(module is decoder for module in child.modules()):
                towards = child
            elif child is not model.get_output_embeddings():
                name = names[id(child)]
                inside += [f"{name}.{n}" if n else name for n, _ in child.named_modules()]
                setattr(outer, leaf, LeftOut(name))
                taken.append(name)
        if towards is None:
            raise QerlError(
                f"model: the text decoder of {type(model).__name__} was not found; name a causal "
                f"language model ({FAMILIES})"
            )
        outer = towards
    model._qerl_left_out = tuple(inside)  # pyright: ignore[reportArgumentType]
    return tuple(taken)


def modules_left_out(model: nn.Module) -> tuple[str, ...]:
    """Full names of the modules that the model's class has and this one was loaded without.

    An adapter that names its targets by suffix would reach these too in a model that has them.
    """
    return getattr(model, "_qerl_left_out", ())


def file_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """The model's tensor names -> those in its files (`structure.file_names`).

    A packed layer is several tensors; it is here by the `weight` that it would have in 16 bits.
    Raises QerlError for files whose tensors transformers would split or join.
    """
    return structure.file_names(model, {_whole(name) for name in names}, strict=True)


def _whole(name: str) -> str:
    """layer.weight_packed, layer.weight_scale, … -> layer.weight"""
    module, _, leaf = name.rpartition(".")
    return f"{module}.weight" if leaf.startswith("weight_") else name
