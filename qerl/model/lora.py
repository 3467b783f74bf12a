"""Attach a LoRA adapter through PEFT; the one module that touches PEFT's private hook.

`LoraConfig._register_custom_module` is experimental; it is tested on the range of PEFT versions
that pyproject.toml allows.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import peft
import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from qerl.config import LoraConfig
from qerl.errors import QerlError
from qerl.model.fp8 import FP8Linear
from qerl.model.linear import LoraLinear, NVFP4Linear
from qerl.model.peft_folder import Shape, shape_of

ADAPTER = "default"
LINEARS = (nn.Linear, NVFP4Linear, FP8Linear)


def attach_lora(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> peft.PeftModel:
    """Wrap the target linears; A is drawn from `seed` alone, B is zero, both fp32.

    With `config.init` the rank, alpha, rsLoRA, patterns and targets are those of that adapter,
    whatever the recipe says; its weights are not read here (`qerl.adapter.load_adapter`).
    Raises QerlError when a target names no linear layer, or `init` is no LoRA of this base.
    """
    if config.init is None:
        shape = Shape(
            config.rank,
            config.alpha,
            resolve_targets(model, config.targets),
            config.rslora,
            config.rank_pattern,
            config.alpha_pattern,
        )
    else:
        shape = shape_of(config.init)
        _check_modules(model, list(shape.targets), config.init)
    lora = peft.LoraConfig(
        r=shape.rank,
        lora_alpha=_whole(shape.alpha),
        lora_dropout=config.dropout,
        target_modules=list(shape.targets),
        use_rslora=shape.rslora,
        rank_pattern=shape.rank_pattern,
        alpha_pattern={key: _whole(alpha) for key, alpha in shape.alpha_pattern.items()},
        bias="none",
        task_type="CAUSAL_LM",
    )
    makers: Any = dict.fromkeys(LINEARS, _lora_linear)  # PEFT only calls what it is given
    lora._register_custom_module(makers)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT warns of layer types it does not know; this one has the layer registered above.
        warnings.filterwarnings("ignore", message="Unsupported layer type", category=UserWarning)
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(model, lora, adapter_name=ADAPTER)
    for name, parameter in wrapped.named_parameters():
        assert not parameter.requires_grad or parameter.dtype == torch.float32, name
    assert isinstance(wrapped, peft.PeftModel)
    return wrapped


def _whole(alpha: float) -> Any:
    """PEFT and the engines type alpha as a whole number where it is one."""
    return int(alpha) if float(alpha).is_integer() else alpha


def _lora_linear(
    base: nn.Module, adapter: str, config: peft.LoraConfig, r: int, lora_alpha: Any, **more: Any
) -> LoraLinear:
    """What PEFT calls for each target; r and lora_alpha are those that the patterns give it."""
    own = copy.copy(config)
    own.r, own.lora_alpha = r, lora_alpha
    return LoraLinear(base, adapter, own, **more)


def _check_modules(model: PreTrainedModel, names: list[str], source: str) -> None:
    """Raise QerlError naming the first module of a saved adapter that is no linear layer here."""
    linears = decoder_linears(model)
    for name in names:
        if name in linears:
            continue
        tail = ".".join(name.split(".")[-4:])
        here = next((other for other in linears if other.endswith("." + tail)), None)
        raise QerlError(
            f"lora.init: the adapter at {source} adapts {name}, which is no linear layer of "
            f"{type(model).__name__}"
            + (
                f" ({here} is): it was saved from another class of this model"
                if here
                else ": it was trained on another base model"
            )
        )


def decoder_linears(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Every linear layer but the output head, by full name; found by type, not by name."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LINEARS) and module is not head
    }


def resolve_targets(model: PreTrainedModel, targets: str | list[str]) -> list[str]:
    """Last name components of the target linears, sorted: what PEFT and vLLM expect to read."""
    linears = decoder_linears(model)
    if not linears:
        raise QerlError(
            f"model: {type(model).__name__} has no linear layers of a kind that can be adapted "
            "(torch.nn.Linear); name another model"
        )
    if targets == "all-linear":
        return sorted({name.rpartition(".")[2] for name in linears})
    wanted = [targets] if isinstance(targets, str) else targets
    suffixes = sorted({name.rpartition(".")[2] for name in linears})
    for target in wanted:
        if not any(name == target or name.endswith("." + target) for name in linears):
            raise QerlError(
                f"lora.targets: '{target}' names no linear layer of this model; "
                f'known: {", ".join(suffixes)} (or "all-linear")'
            )
    return sorted(wanted)


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Every module that carries an adapter, by full name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
