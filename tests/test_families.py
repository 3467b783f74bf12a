"""Every family on a tiny random model of its real class: loaded packed, sampled from, trained,
its adapter taken out and in again. The reference is transformers on dequantized weights."""

from __future__ import annotations

import peft
import pytest
import torch
from family_models import FAMILIES, LAYERS, TOWERS, unpacked, write_family
from test_native_engine import PROMPTS, padded_logprobs, randomise_adapter

from qerl.adapter import load_adapter, save_adapter
from qerl.config import LoraConfig, Recipe
from qerl.merge import Merge
from qerl.model.lora import attach_lora, lora_layers
from qerl.noise import find_norms
from qerl.pack import pack_one
from qerl.policy import Policy, load_policy
from qerl.requantize import live_packed, requantize
from qerl.rollout.native import NativeEngine
from qerl.types import SamplingParams

IDS = torch.tensor([[1, 4, 5, 6, 7, 8, 9, 10, 3, 4]])


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "model"
    return request.param, write_family(request.param, folder)


@pytest.fixture
def policy(family) -> Policy:
    policy = load_policy(Recipe(model=str(family[1]), dtype="float32", device="cpu"))
    randomise_adapter(policy)
    return policy


@pytest.fixture
def reference(policy, tmp_path):
    """transformers' own model of the checkpoint's class, nothing of ours in it."""
    folder = unpacked(policy.base.checkpoint, tmp_path / "unpacked")
    kind = type(policy.network)
    # eager: transformers' other attention leaves out Gemma 2's soft-caps
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def test_logits_equal_transformers_on_dequantized_weights(family, policy, reference):
    assert type(policy.network).__name__ == reference.config.architectures[0]
    assert type(policy.network).__name__.endswith("ForConditionalGeneration") == (
        family[0] in TOWERS
    )
    with policy.adapter_disabled(), torch.no_grad():
        torch.testing.assert_close(
            policy.network(IDS).logits, reference(IDS).logits, atol=1e-4, rtol=0
        )


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
    assert len(find_norms(policy.network)) == 2 * LAYERS


def test_rows_take_over_seats(policy):
    """More requests than seats: the same tokens, and the log-probs of the packed forward."""
    params = SamplingParams(n=3, max_tokens=8, seed=4)
    whole = NativeEngine(policy).sample(PROMPTS, params)
    seated = NativeEngine(policy, max_rows=2, prefill_tokens=6).sample(PROMPTS, params)
    ids = [[c.token_ids for c in g.completions] for g in whole]
    assert ids == [[c.token_ids for c in g.completions] for g in seated]
    batch = pack_one(seated, torch.device("cpu"))
    with torch.no_grad():
        assert (policy.logprobs(batch, 1.0)[0] - batch.recorded()).abs().max() < 1e-4


def test_a_step_of_training_does_what_its_gradient_says(policy):
    groups = NativeEngine(policy).sample(PROMPTS, SamplingParams(n=2, max_tokens=8, seed=4))
    batch = pack_one(groups, torch.device("cpu"))
    trained = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    before = policy.logprobs(batch, 1.0)[0].double().sum()
    (-before).backward()
    for name, parameter in trained.items():
        assert parameter.grad is not None and parameter.grad.any(), name
    squares = sum(p.grad.double().square().sum().item() for p in trained.values())
    promised = 0.01  # nats in all: small enough for the tangent, large enough for fp32
    torch.optim.SGD(trained.values(), lr=promised / squares).step()
    gained = policy.logprobs(batch, 1.0)[0].double().sum() - before
    assert abs(gained.item() - promised) < 0.1 * promised


def test_an_adapter_goes_out_to_plain_peft_and_comes_back(policy, reference, tmp_path):
    with torch.no_grad():
        wanted = policy.network(IDS).logits
    save_adapter(policy.model, tmp_path / "adapter", base_model="owner/name")
    theirs = peft.PeftModel.from_pretrained(reference, str(tmp_path / "adapter"))
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, wanted, atol=1e-4, rtol=0)
    # Modules applied = modules saved, also where a vision tower has a q_proj of its own.
    saved = len(applied(policy.model))
    assert applied(theirs) == applied(policy.model)
    again = attach_lora(policy.model.unload(), LoraConfig(init=str(tmp_path / "adapter")), seed=9)
    assert load_adapter(again, tmp_path / "adapter") == saved
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ["bf16", "nvfp4"])
def test_an_adapter_is_merged_under_the_files_own_names(policy, tmp_path, method):
    """Also where the files name layers otherwise than the model (Gemma 3, Ministral 3)."""
    with torch.no_grad():
        wanted = policy.network(IDS).logits
        with policy.adapter_disabled():
            base = policy.network(IDS).logits
    save_adapter(policy.model, tmp_path / "adapter", base_model="owner/name")
    merge = Merge(policy.base.checkpoint, tmp_path / "adapter", live_packed(policy))
    made = tmp_path / "made"
    made.mkdir()
    with merge:
        assert set(merge.adapted.values()) == set(lora_layers(policy.network))
        if method == "bf16":
            merge.write_bf16(made)
        else:
            groups = NativeEngine(policy).sample(PROMPTS, SamplingParams(n=2, max_tokens=8, seed=4))
            fed = [pack_one(groups, torch.device("cpu"))]
            merge.write_nvfp4(made, ((e.name, e.packed) for e in requantize(merge, policy, fed)))
    kind = type(policy.network)
    folder = made if method == "bf16" else unpacked(made, tmp_path / "unpacked")
    theirs, info = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        off = (theirs.eval()(IDS).logits - wanted).norm()
    share = 0.1 if method == "bf16" else 0.8  # IDS are not what NVFP4 was fitted to
    assert off < share * (base - wanted).norm()
    if method == "nvfp4":
        again = load_policy(Recipe(model=str(made), dtype="float32", device="cpu"))
        assert set(live_packed(again)) == set(live_packed(policy))


def applied(model) -> set[str]:
    return set(lora_layers(model.get_base_model()))
