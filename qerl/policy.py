"""The trained policy: one model object, seen by the trainer and by the native engine alike.

`Policy.logprobs` is the training forward: packed micro-batch in, log-prob and entropy of every
sampled token out, under the sampling temperature, without ever holding [tokens, vocabulary].
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl.config import Recipe
from qerl.device import resolve_device, resolve_dtype
from qerl.errors import QerlError
from qerl.model import recurrent
from qerl.model.load import Base, load_base
from qerl.model.lora import attach_lora
from qerl.pack import MicroBatch
from qerl_kernels import ops


class Policy:
    """Base + adapter + tokenizer. version counts the adapter's updates."""

    def __init__(self, base: Base, model: PeftModel, device: torch.device) -> None:
        self.base = base
        self.model = model
        self.device = device
        self.version = 0
        self.network: PreTrainedModel = model.get_base_model()  # type: ignore[assignment]
        self.tokenizer: PreTrainedTokenizerBase = base.tokenizer
        self.decoder: nn.Module = self.network.get_decoder()
        recurrent.enable(self.decoder)
        head = self.network.get_output_embeddings()
        if head is None:
            raise QerlError(f"model: {type(self.network).__name__} has no output head")
        if getattr(head, "bias", None) is not None:
            raise QerlError(
                f"model: the output head of {type(self.network).__name__} has a bias, which is not "
                f"supported; name another model"
            )
        self.head = head.get_parameter("weight")
        config = self.network.config.get_text_config()
        self.softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        self.logit_scale = logit_scale(config)
        self.context = int(getattr(config, "max_position_embeddings", 0) or 2**31)
        self.eos_ids = eos_ids(self.network, self.tokenizer)

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    def hidden(self, batch: MicroBatch) -> torch.Tensor:
        """Final hidden states [N, hidden] at the positions that predict a trained token."""
        out = self.decoder(
            input_ids=batch.input_ids,
            position_ids=batch.positions,
            attention_mask=batch.tree.mask,
            use_cache=False,
            tree=batch.tree,
        )
        return out.last_hidden_state[0, batch.predict]

    def logprobs(self, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob, entropy) of the sampled tokens, f32 [N] each; differentiable log-prob."""
        return ops.linear_logprob(
            self.hidden(batch),
            self.head,
            batch.targets,
            1 / temperature,
            self.softcap,
            logit_scale=self.logit_scale,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits f32 [B, V] of hidden states [B, hidden], temperature 1."""
        logits = (hidden @ self.head.T).float()
        if self.logit_scale != 1.0:
            logits *= self.logit_scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    @contextmanager
    def adapter_disabled(self) -> Iterator[None]:
        """The base alone, inside the block."""
        with self.model.disable_adapter():
            yield


def load_policy(recipe: Recipe, say: Callable[[str], None] = lambda text: None) -> Policy:
    """A recipe's base and a fresh (or imported) adapter, on its device."""
    device = resolve_device(recipe.device)
    dtype = resolve_dtype(recipe.dtype, device)
    base = load_base(
        recipe.model,
        format=recipe.format,
        rest=recipe.rest,
        dtype=dtype,
        device=device,
        trust_remote_code=recipe.trust_remote_code,
        say=say,
    )
    model = attach_lora(base.model, recipe.lora, seed=recipe.seed)
    if recipe.lora.init is not None:
        from qerl.adapter import load_adapter

        load_adapter(model, recipe.lora.init)
    if recipe.train.gradient_checkpointing:
        base.model.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(base, model, device)


def logit_scale(config: object) -> float:
    """Granite divides logits by `logits_scaling`, Cohere multiplies by `logit_scale`."""
    divide = float(getattr(config, "logits_scaling", None) or 1.0)
    return float(getattr(config, "logit_scale", None) or 1.0) / divide


def eos_ids(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends an answer: generation config, model config and tokenizer together.

    One id alone is not enough: chat models end a turn with another token than a document.
    """
    found: set[int] = set()
    generation = getattr(network, "generation_config", None)
    for source in (generation, network.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        values = value if isinstance(value, (list, tuple)) else [value]
        found |= {int(i) for i in values if i is not None}
    if not found:
        raise QerlError("model: neither generation_config, config nor tokenizer names an EOS id")
    return frozenset(found)


def base_sha256(model: nn.Module) -> str:
    """SHA-256 over every frozen tensor (packed codes, scales, norms, embeddings), in name order."""
    digest = hashlib.sha256()
    state = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    state |= dict(model.named_buffers())
    for name in sorted(state):
        tensor = state[name].detach().contiguous().cpu()
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
