"""Other decoders than Llama through the engine and the packed forward: tiny random models."""

from __future__ import annotations

import pytest
import torch
import transformers
from test_native_engine import PROMPTS, padded_logprobs, randomise_adapter
from tiny import tiny_tokenizer

from qerl.config import Recipe
from qerl.noise import find_norms
from qerl.pack import pack_one
from qerl.policy import load_policy
from qerl.rollout.native import NativeEngine
from qerl.types import SamplingParams

COMMON = dict(
    vocab_size=16,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 4}),
    "gemma2": (
        transformers.Gemma2Config,
        {"sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (transformers.Gemma3TextConfig, {"sliding_window": 4}),
    "phi3": (transformers.Phi3Config, {}),
    "granite": (transformers.GraniteConfig, {"logits_scaling": 4.0}),
}


@pytest.fixture(params=FAMILIES)
def policy(request, tmp_path):
    kind, changes = FAMILIES[request.param]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(kind(**COMMON, **changes))
    for parameter in model.parameters():
        if parameter.ndim > 1:  # larger than the default, so that attention is not uniform
            torch.nn.init.normal_(parameter, std=0.15)
    folder = tmp_path / request.param
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    policy = load_policy(Recipe(model=str(folder), dtype="float32", device="cpu"))
    randomise_adapter(policy)
    return policy


def test_greedy_equals_generate_and_logprobs_equal_the_plain_forward(policy):
    engine = NativeEngine(policy)
    greedy = engine.sample(PROMPTS, SamplingParams(n=1, max_tokens=12, temperature=0.0))
    policy.network.set_attn_implementation("eager")
    for prompt, group in zip(PROMPTS, greedy, strict=True):
        out = policy.network.generate(
            torch.tensor([prompt.token_ids]), max_new_tokens=12, do_sample=False
        )
        assert group.completions[0].token_ids == out[0, len(prompt.token_ids) :].tolist()
    policy.network.set_attn_implementation("qerl")
    groups = engine.sample(PROMPTS, SamplingParams(n=3, max_tokens=10, seed=4))
    batch = pack_one(groups, torch.device("cpu"))
    logp, _ = policy.logprobs(batch, 1.0)
    assert (logp - batch.recorded()).abs().max() < 1e-4
    policy.network.set_attn_implementation("eager")
    plain = [
        padded_logprobs(policy, g.prompt, c.token_ids)[0] for g in groups for c in g.completions
    ]
    torch.testing.assert_close(logp.detach(), torch.cat(plain), atol=1e-4, rtol=0)


def test_noise_finds_two_norms_a_layer(policy):
    assert len(find_norms(policy.network)) == 2 * COMMON["num_hidden_layers"]
