"""`gpu_check`'s section `learn`: a tiny Llama learns to emit one token, through every kernel.

Packed base, LoRA through PEFT's hook, noise on the norms, group advantages, log-probabilities from
hidden states, packed backward; on a GPU sampling replays a CUDA graph. No KV cache: a step samples
four tokens by four whole forwards, which is enough to show that the pieces learn together.
Shape letters: P prompts, G group, B = P·G, T prompt tokens, L answer tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from qerl.model.linear import LoraLinear, NVFP4Linear
from qerl.model.norms import wrap_norms
from qerl_kernels import ops, quantize

PROMPTS, GROUP, PROMPT, ANSWER, VOCABULARY, TARGET = 8, 8, 4, 4, 64, 7


def packed_llama(device: torch.device, dtype: torch.dtype) -> peft.PeftModel:
    """Two random layers in NVFP4 with adapters of rank 8; everything else frozen."""
    torch.manual_seed(0)
    # Initialised wide enough for the frozen head to be able to say one token with certainty.
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).requires_grad_(False)
    model.to(device, dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]  (wrapped)
    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear):
            packed = NVFP4Linear(*quantize.quantize_absmax(module.weight.float()))
            parent, _, leaf = name.rpartition(".")
            on_kernels = device.type == "cuda"
            layer = packed.repack(name) if on_kernels else packed
            setattr(model.model.get_submodule(parent), leaf, layer)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj",
                           "o_proj", "gate_proj", "up_proj", "down_proj"])  # fmt: skip
    lora._register_custom_module({NVFP4Linear: LoraLinear})
    wrapped = peft.get_peft_model(model, lora)
    assert isinstance(wrapped, peft.PeftModel)
    return wrapped


class Sampler:
    """Next-token logits of the last position so far, by a CUDA graph where there is a GPU."""

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.graph = torch.cuda.CUDAGraph() if ids.is_cuda else None
        if self.graph:
            self.out = self._logits()  # compiles the kernels
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                self.out = self._logits()

    @torch.no_grad()
    def _logits(self) -> Tensor:
        return self.model(input_ids=self.ids, use_cache=False).logits.float()

    def __call__(self, position: int) -> Tensor:
        if self.graph:
            self.graph.replay()
            return self.out[:, position]
        return self._logits()[:, position]


def sample(sampler: Sampler, generator: torch.Generator) -> Tensor:
    """Fill ids [B, T + L] with new prompts and sampled answers; returns the answers [B, L]."""
    ids = sampler.ids
    prompts = torch.randint(0, VOCABULARY, (PROMPTS, PROMPT), generator=generator)
    ids.zero_()
    ids[:, :PROMPT] = prompts.repeat_interleave(GROUP, 0).to(ids.device)
    for position in range(PROMPT, PROMPT + ANSWER):
        probabilities = sampler(position - 1).softmax(-1).cpu()
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        ids[:, position] = drawn[:, 0].to(ids.device)
    return ids[:, PROMPT:].clone()


def advantages(rewards: Tensor) -> Tensor:
    """Group-relative advantages [B] of rewards [B] (DeepSeekMath, section 4.1)."""
    grouped = rewards.view(PROMPTS, GROUP)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


def learn(
    device: torch.device,
    *,
    steps: int = 120,
    enough: float = 0.98,
    seconds: float = 60.0,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train until the mean reward of a step is `enough`; rewards by step, seconds, steps taken."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = packed_llama(device, dtype)
    network: Any = model.get_base_model()
    names = [f"model.layers.{i}.{n}" for i in range(2)
             for n in ("input_layernorm", "post_attention_layernorm")]  # fmt: skip
    norms = wrap_norms(network, names)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(PROMPTS * GROUP, PROMPT + ANSWER, dtype=torch.long, device=device)
    noises = {name: torch.zeros(128, device=device) for name in norms}
    for name, norm in norms.items():
        norm.set_noise(noises[name])  # one buffer for good: the graph reads it where it is
    sampler = Sampler(model, ids)
    rewards, start = [], time.monotonic()
    for step in range(steps):
        sigma = 1e-2 * (1 - step / steps)
        for noise in noises.values():
            noise.copy_(sigma * torch.randn(128, generator=generator))
        answers = sample(sampler, generator)
        reward = (answers == TARGET).float().mean(1)
        rewards.append(float(reward.mean()))
        if rewards[-1] >= enough or time.monotonic() - start > seconds:
            break
        hidden = network.model(input_ids=ids, use_cache=False).last_hidden_state
        rows = hidden[:, PROMPT - 1 : -1].reshape(-1, hidden.shape[-1])
        logp, _ = ops.linear_logprob(rows, network.lm_head.weight, answers.flatten())
        loss = -(advantages(reward)[:, None] * logp.view(-1, ANSWER)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            say(f"learn: step {step}, reward {rewards[-1]:.3f}")
    return {"rewards": rewards, "steps": len(rewards), "seconds": time.monotonic() - start,
            "reached": rewards[-1] >= enough}  # fmt: skip
