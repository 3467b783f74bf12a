"""Attach a LoRA adapter through PEFT; the one module that touches PEFT's private hook.

`LoraConfig._register_custom_module` is experimental; it is tested on the range of PEFT versions
that pyproject.toml allows.
"""

from __future__ import annotations

import warnings

import peft
import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from qerl.config import LoraConfig
from qerl.errors import QerlError
from qerl.model.linear import LoraLinear, NVFP4Linear

ADAPTER = "default"


def attach_lora(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> peft.PeftModel:
    """Wrap the target linears; A is drawn from `seed` alone, B is zero, both fp32.

    Raises QerlError when a target names no linear layer.
    """
    targets = resolve_targets(model, config.targets)
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=int(config.alpha) if float(config.alpha).is_integer() else config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
    )
    lora._register_custom_module({NVFP4Linear: LoraLinear, nn.Linear: LoraLinear})
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT warns of layer types it does not know; this one has the layer registered above.
        warnings.filterwarnings("ignore", message="Unsupported layer type", category=UserWarning)
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(model, lora, adapter_name=ADAPTER)
    for name, parameter in wrapped.named_parameters():
        assert not parameter.requires_grad or parameter.dtype == torch.float32, name
    assert isinstance(wrapped, peft.PeftModel)
    return wrapped


def decoder_linears(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Every linear layer but the output head, by full name; found by type, not by name."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, NVFP4Linear)) and module is not head
    }


def resolve_targets(model: PreTrainedModel, targets: str | list[str]) -> list[str]:
    """Last name components of the target linears, sorted: what PEFT and vLLM expect to read."""
    linears = decoder_linears(model)
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
