import hashlib
import statistics

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from qerl.config import NoiseConfig
from qerl.errors import QerlError
from qerl.model.norms import NoisyRMSNorm
from qerl.noise import Noise, draw, find_norms, sigma_at

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PLAIN = ["input_layernorm", "post_attention_layernorm"]
GEMMA = ["input_layernorm", "pre_feedforward_layernorm"]
FAMILIES = {  # config class, options, the noisy norms of each layer
    "llama": ("LlamaConfig", {}, PLAIN),
    "qwen3": ("Qwen3Config", {}, PLAIN),
    "gemma3": ("Gemma3TextConfig", {}, GEMMA),
    "gemma4": ("Gemma4TextConfig", {"vocab_size_per_layer_input": 64}, GEMMA),
    "qwen3_5": ("Qwen3_5TextConfig", {**DELTA, "num_hidden_layers": 4}, PLAIN),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS, PLAIN),
}


def tiny(family="llama", lora=False):
    torch.manual_seed(0)
    name, options, _ = FAMILIES[family]
    config = getattr(transformers, name)(**{**SHAPE, **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data += 0.1 * torch.randn_like(p)
    model = model.eval().requires_grad_(False)
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=2))
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[3, 5, 7, 9]])).logits


def fingerprint(model):
    digest = hashlib.sha256()
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(name.encode() + x.detach().numpy().tobytes())
    return digest.hexdigest()


# --- schedule -----------------------------------------------------------------------------------


def test_schedule_by_hand():
    config = NoiseConfig(sigma_start=1e-2, sigma_end=1e-4, stages=4)
    sigmas = [sigma_at(step, 8, config) for step in range(1, 9)]
    expected = [(0.0, 0), (1e-2, 1), (1e-3, 2), (1e-4, 3)]
    for (sigma, stage), (want, want_stage) in zip(
        sigmas, [e for e in expected for _ in "ab"], strict=True
    ):
        assert stage == want_stage and sigma == pytest.approx(want)


def test_paper_schedule_has_equal_stages_and_exact_ends():
    config = NoiseConfig()  # ten stages, 1e-2 to 5e-4
    found = [sigma_at(step, 600, config) for step in range(1, 601)]
    stages = [stage for _, stage in found]
    assert [stages.count(k) for k in range(10)] == [60] * 10
    assert found[60][0] == 1e-2 and found[-1][0] == pytest.approx(5e-4, rel=1e-12)
    ratios = [found[60 * k + 60][0] / found[60 * k][0] for k in range(1, 9)]
    assert ratios == pytest.approx([(5e-4 / 1e-2) ** (1 / 8)] * 8)


def test_two_stages_are_silence_then_sigma_start():
    config = NoiseConfig(stages=2, sigma_start=0.01, sigma_end=0.001)
    assert [sigma_at(s, 4, config)[0] for s in (1, 2, 3, 4)] == [0.0, 0.0, 0.01, 0.01]


def test_short_runs_off_and_steps_past_the_end():
    config = NoiseConfig()
    assert sigma_at(1, 1, config) == (0.0, 0)
    assert [sigma_at(s, 5, config)[1] for s in range(1, 6)] == [0, 2, 4, 6, 8]
    assert sigma_at(1000, 600, config)[1] == 9
    assert sigma_at(500, 600, NoiseConfig(schedule="off")) == (0.0, 0)
    with pytest.raises(AssertionError, match="count from 1"):
        sigma_at(0, 600, config)


# --- which norms --------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_norms_found_by_data_flow(family, lora):
    model = tiny(family, lora)
    layers = range(FAMILIES[family][1].get("num_hidden_layers", 2))
    prefix = "base_model.model." if lora else ""
    expected = [f"{prefix}model.layers.{i}.{n}" for i in layers for n in FAMILIES[family][2]]
    assert sorted(find_norms(model)) == sorted(expected)


def test_finding_leaves_mode_hooks_and_random_stream_alone():
    model = tiny(lora=True)
    model.train()
    model.base_model.model.model.norm.eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    find_norms(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_no_norm_is_an_error_that_lists_what_was_looked_at():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Embedding(4, 8), LlamaRMSNorm(8)
            self.head = nn.Linear(8, 4)

        def get_input_embeddings(self):
            return self.embed

        def get_output_embeddings(self):
            return self.head

        def forward(self, input_ids, use_cache):
            return self.head(self.norm(self.embed(input_ids)))

    with pytest.raises(
        QerlError, match=r"looked at: norm \(LlamaRMSNorm\); set noise.schedule=off"
    ):
        Noise(Model())


# --- drawing and applying -----------------------------------------------------------------------


def wide_norm(weight=2.0):
    norm = LlamaRMSNorm(20_000).requires_grad_(False)
    norm.weight.fill_(weight)
    return {"a": NoisyRMSNorm(norm)}


def test_draw_has_the_asked_spread():
    z = draw(wide_norm(), sigma=1e-3, seed=0, step=1)["a"]
    assert z.dtype == torch.float32
    assert statistics.fmean(z.tolist()) == pytest.approx(0, abs=3e-5)
    assert z.std().item() == pytest.approx(1e-3, rel=0.02)


def test_relative_draw_scales_with_the_effective_weight():
    absolute = draw(wide_norm(-3.0), 1e-3, seed=0, step=1)["a"]
    relative = draw(wide_norm(-3.0), 1e-3, seed=0, step=1, scale="relative")["a"]
    torch.testing.assert_close(relative, 3 * absolute)
    model = tiny("gemma3")
    norms = Noise(model).norms
    name, norm = next(iter(norms.items()))
    absolute, relative = (draw(norms, 0.1, 0, 1, scale)[name] for scale in ("absolute", "relative"))
    torch.testing.assert_close(relative, absolute * (1 + norm.weight).abs())


def test_draws_depend_on_seed_and_step_only():
    norms = Noise(tiny()).norms
    state = torch.get_rng_state()
    first, again = draw(norms, 0.1, 7, 3), draw(norms, 0.1, 7, 3)
    assert torch.equal(torch.get_rng_state(), state)
    name, other_name = list(norms)[:2]
    assert all(torch.equal(first[n], again[n]) for n in norms)
    assert not torch.equal(first[name], first[other_name])
    assert not torch.equal(first[name], draw(norms, 0.1, 7, 4)[name])
    assert not torch.equal(first[name], draw(norms, 0.1, 8, 3)[name])
    torch.testing.assert_close(draw(norms, 0.2, 7, 3)[name], 2 * first[name])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_applied_equals_editing_the_weights_then_restores_bit_for_bit(family):
    reference, model = tiny(family), tiny(family)
    clean, before = logits(reference), fingerprint(model)
    noise = Noise(model, seed=5)
    assert torch.equal(logits(model), clean) and fingerprint(model) == before
    with noise.applied(0.05, step=2):
        noisy = logits(model)
        assert fingerprint(model) == before  # clean weights are not touched even here
    for name, z in draw(noise.norms, 0.05, 5, 2).items():
        reference.get_submodule(name).weight.add_(z)
    torch.testing.assert_close(noisy, logits(reference), rtol=1e-4, atol=1e-5)
    assert (noisy - clean).abs().max() > 1e-3
    assert torch.equal(logits(model), clean) and fingerprint(model) == before


def test_noise_does_not_accumulate_and_comes_back_the_same():
    model = tiny(lora=True)
    noise = Noise(model)
    with noise.applied(0.05, step=1):
        first = logits(model)
    for step in range(2, 30):
        with noise.applied(0.05, step=step):
            assert not torch.equal(logits(model), first)
    with noise.applied(0.05, step=1):
        assert torch.equal(logits(model), first)


def test_sigma_zero_is_the_clean_model_and_an_error_inside_restores():
    model = tiny()
    clean, noise = logits(model), Noise(model)
    with noise.applied(0.0, step=1):
        assert torch.equal(logits(model), clean)
    with pytest.raises(RuntimeError, match="stop"), noise.applied(0.05, step=1):
        raise RuntimeError("stop")
    assert torch.equal(logits(model), clean)


def test_noise_is_not_applied_twice():
    noise = Noise(tiny())
    with (
        noise.applied(0.05, step=1),
        pytest.raises(AssertionError, match="already applied"),
        noise.applied(0.05, step=2),
    ):
        pass
