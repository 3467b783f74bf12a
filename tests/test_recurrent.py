"""Gated DeltaNet decoders: the state forks where completions leave their prompt."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch
import transformers
from test_native_engine import PROMPTS, padded_logprobs, prompts_of, randomise_adapter
from tiny import tiny_tokenizer
from tiny_run import starts_right, step_rows, tiny_run_recipe

from qerl.config import LoraConfig, Recipe
from qerl.errors import QerlError
from qerl.model import attention, recurrent
from qerl.model.linear import NVFP4Linear
from qerl.model.load import Base
from qerl.model.lora import attach_lora
from qerl.noise import Noise, find_norms
from qerl.pack import TreeBuilder, pack, pack_one
from qerl.policy import Policy, load_policy
from qerl.rollout.gate import run_gate
from qerl.rollout.native import NativeEngine
from qerl.run import train
from qerl.types import Completion, Group, Prompt, SamplingParams

LAYERS = 4  # three recurrent, then one of attention
COMMON: dict[str, Any] = dict(
    vocab_size=16,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FAMILIES: dict[str, Any] = {
    "qwen3_5": (transformers.Qwen3_5TextConfig, {"head_dim": 16}),
    "olmo_hybrid": (transformers.OlmoHybridConfig, {}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    kind, changes = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("models") / request.param
    write_model(transformers.AutoModelForCausalLM.from_config(kind(**COMMON, **changes)), folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "qwen3_5"
    config = transformers.Qwen3_5TextConfig(**COMMON, head_dim=16)
    write_model(transformers.AutoModelForCausalLM.from_config(config), folder)
    return folder


def write_model(model, folder) -> None:
    fill(model)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def fill(model) -> None:
    """Random weights, large enough and decaying slowly enough for the past to matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-4, 0, parameter.numel()))
            elif parameter.ndim > 1:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))


def policy_of(folder, dtype=torch.float32) -> Policy:
    """transformers' own loading, and an adapter that does something."""
    attention.register()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention.NAME
    )
    return policy_around(model, folder)


def policy_around(model, folder, targets: Any = "all-linear") -> Policy:
    model.requires_grad_(False).eval()
    base = Base(model, tiny_tokenizer(), folder, folder, "hub/id", "serve")
    attached = attach_lora(model, LoraConfig(targets=targets), seed=0)
    policy = Policy(base, attached, torch.device("cpu"))
    randomise_adapter(policy)
    return policy


def reference_of(policy, folder) -> Any:
    """A model of its own, nothing of ours in it: transformers' class, the adapter by plain sums."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, layer in policy.network.named_modules():
            if hasattr(layer, "lora_A"):
                a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                model.get_submodule(name).weight += layer.scaling["default"] * b @ a
    return model


def plain_logprobs(model, prompt, ids):
    full = torch.tensor([[*prompt.token_ids, *ids]])
    with torch.no_grad():
        logits = model(full, use_cache=False).logits[0, len(prompt.token_ids) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def group_of(prompt, *answers):
    """A group with made-up completions."""
    made = [
        Completion(list(a), [0.0] * len(a), [0.0] * len(a), [0] * len(a), "stop") for a in answers
    ]
    return Group(prompt, made)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1], prompts_of((1,), (4,), (1, 5, 6, 7, 8))])
def test_greedy_equals_transformers_generate(folder, prompts):
    policy = policy_of(folder)
    model = reference_of(policy, folder)
    params = SamplingParams(n=2, max_tokens=12, temperature=0.0)
    groups = NativeEngine(policy).sample(prompts, params)
    for prompt, group in zip(prompts, groups, strict=True):
        out = model.generate(torch.tensor([prompt.token_ids]), max_new_tokens=12, do_sample=False)
        for completion in group.completions:
            assert completion.token_ids == out[0, len(prompt.token_ids) :].tolist()


def test_sampler_trainer_and_transformers_agree(folder):
    policy = policy_of(folder)
    model = reference_of(policy, folder)
    groups = NativeEngine(policy).sample(PROMPTS, SamplingParams(n=4, max_tokens=10, seed=4))
    assert len({len(c.token_ids) for g in groups for c in g.completions}) > 1
    batch = pack_one(groups, torch.device("cpu"))
    logp = policy.logprobs(batch, 1.0)[0].detach()
    assert (logp - batch.recorded()).abs().max() < 1e-4
    pairs = [(g.prompt, c.token_ids) for g in groups for c in g.completions]
    plain = torch.cat([plain_logprobs(model, *pair) for pair in pairs])
    torch.testing.assert_close(logp, plain, atol=1e-4, rtol=0)
    own = torch.cat([padded_logprobs(policy, *pair)[0] for pair in pairs])  # without a tree
    torch.testing.assert_close(own, plain, atol=1e-4, rtol=0)


def test_long_segments_cross_chunks(qwen):
    """Lengths around the delta rule's chunk of 64, and segments shorter than the convolution."""
    policy = policy_of(qwen)
    model = reference_of(policy, qwen)
    ids = torch.randint(3, 16, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    first, second = (
        Prompt(i, (), "", (*ids[:70], *ids[100 : 100 + n])) for i, n in ((0, 65), (1, 1))
    )
    groups = [
        group_of(first, ids[200:330], ids[5:6], ids[7:9], ids[:64]),
        group_of(second, ids[300:303], ids[20:85]),
    ]
    logp = policy.logprobs(pack_one(groups, torch.device("cpu")), 1.0)[0].detach()
    pairs = [(g.prompt, c.token_ids) for g in groups for c in g.completions]
    plain = torch.cat([plain_logprobs(model, *pair) for pair in pairs])
    torch.testing.assert_close(logp, plain, atol=1e-4, rtol=0)


def gradient(policy, batches):
    """Of a sum that weighs tokens unequally, over every adapter parameter."""
    policy.model.zero_grad()
    for batch in batches:
        weight = torch.tensor([1.0 + 0.1 * (i % 7) for i in batch.targets.tolist()])
        (policy.logprobs(batch, 1.0)[0] * weight).sum().backward()
    return adapter_gradient(policy)


def adapter_gradient(policy):
    found = {n: p.grad for n, p in policy.model.named_parameters() if p.requires_grad}
    assert all(g is not None and g.abs().max() > 0 for g in found.values())
    return torch.cat([g.flatten() for g in found.values()])


def test_gradients_equal_one_sequence_at_a_time(folder):
    policy = policy_of(folder)
    groups = NativeEngine(policy).sample(PROMPTS, SamplingParams(n=3, max_tokens=7, seed=2))
    device = torch.device("cpu")
    whole = gradient(policy, pack(groups, 10_000, device))
    split = gradient(policy, pack(groups, 1, device))
    policy.model.zero_grad()
    for group in groups:
        for completion in group.completions:  # transformers' own forward: no tree, no packing
            full = torch.tensor([[*group.prompt.token_ids, *completion.token_ids]])
            logits = policy.network(full, use_cache=False).logits[
                0, len(group.prompt.token_ids) - 1 : -1
            ]
            targets = torch.tensor(completion.token_ids)
            logp = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
            weight = torch.tensor([1.0 + 0.1 * (i % 7) for i in targets.tolist()])
            (logp * weight).sum().backward()
    alone = adapter_gradient(policy)
    scale = alone.abs().max().item()
    torch.testing.assert_close(whole, alone, atol=1e-4 * scale, rtol=1e-3)
    torch.testing.assert_close(split, alone, atol=1e-4 * scale, rtol=1e-3)


def test_checkpointing_changes_no_gradient(qwen):
    policy = policy_of(qwen)
    groups = NativeEngine(policy).sample(PROMPTS, SamplingParams(n=3, max_tokens=7, seed=2))
    batches = pack(groups, 10_000, torch.device("cpu"))
    kept = gradient(policy, batches)
    policy.base.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy.model.train()
    torch.testing.assert_close(gradient(policy, batches), kept, atol=1e-5, rtol=1e-4)


def test_draws_do_not_depend_on_the_batch(qwen):
    policy = policy_of(qwen)
    params = SamplingParams(n=4, max_tokens=9, seed=5)
    together = NativeEngine(policy).sample(PROMPTS, params)
    apart = NativeEngine(policy, max_rows=4).sample(PROMPTS, params)
    ids, other = ([[c.token_ids for c in g.completions] for g in x] for x in (together, apart))
    assert ids == other


def test_a_neighbour_does_not_leak(qwen):
    """What a completion's log-probs are must not change with the completions packed before it."""
    policy = policy_of(qwen)
    answer = (5, 6, 7, 8)
    first, second = (
        policy.logprobs(pack_one([group_of(PROMPTS[0], before, answer)], torch.device("cpu")), 1.0)[
            0
        ]
        for before in ((9, 9, 9, 9, 9), (4, 4, 3, 10, 11))
    )
    torch.testing.assert_close(first[-4:], second[-4:], atol=1e-6, rtol=0)
    assert (first[:5] - second[:5]).abs().max() > 0.1  # the neighbours themselves do differ


def test_the_gate_passes_with_noise_and_adapter(folder):
    policy = policy_of(folder)
    noise = Noise(policy.network)
    assert len(noise.norms) == len(find_norms(policy.network))
    report = run_gate(NativeEngine(policy), policy, PROMPTS[:2], 1.0, noise.applied(1e-2, 1))
    assert report.numbers()["max_abs"] < 1e-4


@pytest.mark.parametrize("wrapped", [False, True])
def test_noise_finds_two_norms_a_layer_and_no_gated_one(qwen, wrapped):
    policy = policy_of(qwen)
    model = policy.network if wrapped else transformers.AutoModelForCausalLM.from_pretrained(qwen)
    want = {
        f"model.layers.{i}.{name}"
        for i in range(LAYERS)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    assert set(find_norms(model)) == want


def test_packed_nvfp4_model_samples_and_trains(qwen):
    policy = load_policy(Recipe(model=str(qwen), format="nvfp4", dtype="float32", device="cpu"))
    assert any(isinstance(m, NVFP4Linear) for m in policy.network.modules())
    randomise_adapter(policy)
    groups = NativeEngine(policy).sample(PROMPTS, SamplingParams(n=3, max_tokens=7, seed=2))
    batch = pack_one(groups, torch.device("cpu"))
    logp = policy.logprobs(batch, 1.0)[0]
    assert (logp - batch.recorded()).abs().max() < 1e-4
    logp.sum().backward()
    assert adapter_gradient(policy).isfinite().all()


def test_a_run_learns_the_target(qwen, tmp_path):
    """Gate, noise, sampling and packed training together, on an NVFP4 base."""
    recipe = tiny_run_recipe(
        qwen,
        tmp_path,
        lora={"rank": 16, "alpha": 32},
        rollout={"prompts_per_step": 8, "group_size": 16, "max_completion_tokens": 2},
        noise={"stages": 4},
        train={"steps": 14, "lr": 5e-3},
    )
    with train(recipe, reward=starts_right, report=False) as run:
        rewards = [row["reward"] for row in step_rows(run.folder)]
    assert fmean(rewards[:3]) < 0.2 and fmean(rewards[-3:]) > 0.4, rewards


def test_bf16_stays_near_the_plain_forward(qwen):
    policy = policy_of(qwen, torch.bfloat16)
    groups = NativeEngine(policy).sample(PROMPTS, SamplingParams(n=4, max_tokens=8, seed=2))
    batch = pack_one(groups, torch.device("cpu"))
    difference = (policy.logprobs(batch, 1.0)[0].detach() - batch.recorded()).abs()
    assert difference.mean() < 0.05


def test_a_text_tower_inside_another_architecture(qwen):
    """`*ForConditionalGeneration`: the decoder is the tower that get_decoder() finds."""
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64)
    text = transformers.Qwen3_5TextConfig(**COMMON, head_dim=16).to_dict()
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    attention.register()
    model = transformers.Qwen3_5ForConditionalGeneration._from_config(
        config, attn_implementation=attention.NAME, dtype=torch.float32
    )
    fill(model)
    policy = policy_around(model, qwen, ["q_proj", "in_proj_qkv", "out_proj"])
    assert policy.decoder is model.model.language_model
    groups = NativeEngine(policy).sample(PROMPTS, SamplingParams(n=3, max_tokens=8, seed=4))
    batch = pack_one(groups, torch.device("cpu"))
    logp = policy.logprobs(batch, 1.0)[0].detach()
    assert (logp - batch.recorded()).abs().max() < 1e-4
    pairs = [(g.prompt, c.token_ids) for g in groups for c in g.completions]
    plain = torch.cat([plain_logprobs(model, *pair) for pair in pairs])
    torch.testing.assert_close(logp, plain, atol=1e-4, rtol=0)


def test_mixers_are_known_by_what_they_call():
    config = transformers.Qwen3NextConfig(**COMMON, head_dim=16, num_experts=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert len(recurrent.enable(model.get_decoder())) == 3


def test_enabling_one_model_leaves_others_of_its_class_alone(qwen):
    policy_of(qwen)
    other = transformers.AutoModelForCausalLM.from_pretrained(qwen)
    mixer = next(m for m in other.modules() if recurrent.is_gated_delta(m))
    assert "forward" not in vars(mixer)
    assert mixer.forward.__func__ is type(mixer).forward


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            transformers.Lfm2Config(
                vocab_size=16,
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                layer_types=["conv", "full_attention"],
            ),
            "Lfm2Model has layers that can be neither masked nor forked .*conv",
        ),
        (
            transformers.MambaConfig(
                vocab_size=16, hidden_size=32, state_size=4, num_hidden_layers=1
            ),
            "MambaModel has layers .*conv1d",
        ),
        (
            transformers.FalconH1Config(
                vocab_size=16,
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=2,
                mamba_d_ssm=32,
                mamba_n_heads=4,
                mamba_d_head=8,
                mamba_d_state=8,
            ),
            "FalconH1Model has layers ",
        ),
    ],
    ids=["lfm2", "mamba", "falcon_h1"],
)
def test_another_recurrence_is_refused_by_name(config, named):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(QerlError, match=named):
        recurrent.enable(model.get_decoder())


def test_a_model_without_recurrence_is_left_as_it_is(tiny_policy):
    assert recurrent.enable(tiny_policy.decoder) == []


def test_states_are_numbered_level_after_level():
    builder = TreeBuilder()
    root = builder.add((), 0, ())  # nothing in common
    a = builder.add((5, 6), 0, (root,))
    builder.add((7,), 2, (root, a))
    b = builder.add((8,), 0, (root,))
    builder.add((), 1, (root, b))  # a completion of one token has none to compute
    builder.add((9, 9), 1, (root, b))
    tree = builder.tree(torch.device("cpu"))
    prompts, answers = tree.levels
    assert prompts.start.tolist() == [0, 0] and answers.start.tolist() == [1, 2]
    assert tree.end.tolist() == [0, 1, 3, 2, 2, 4]
    assert answers.before.tolist() == [2, 1] and answers.lengths.tolist() == [1, 2]
