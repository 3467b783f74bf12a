"""The native engine against transformers' generate and against the packed training forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from tiny import tiny_tokenizer

from qerl.config import Recipe
from qerl.errors import QerlError
from qerl.model.attention import qerl_attention
from qerl.pack import common_prefix_length, pack, pack_one, packed_tokens
from qerl.policy import load_policy
from qerl.rollout import native
from qerl.rollout.cache import Decode
from qerl.rollout.native import NativeEngine
from qerl.rollout.sampling import sample_tokens, uniforms
from qerl.types import Prompt, SamplingParams


def prompts_of(*texts: tuple[int, ...]) -> list[Prompt]:
    return [Prompt(i, (), "", ids) for i, ids in enumerate(texts)]


PROMPTS = prompts_of((1, 5, 6, 7, 8, 9), (1, 5, 6, 3), (1, 5, 6, 7, 8, 4, 4, 4))


def randomise_adapter(policy, seed: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p.copy_(0.05 * torch.randn(p.shape, generator=generator))


def padded_logprobs(policy, prompt, ids, temperature=1.0):
    """One sequence at a time through the plain model: the slow truth."""
    full = torch.tensor([[*prompt.token_ids, *ids]])
    with torch.no_grad():
        logits = policy.network(full).logits[0, len(prompt.token_ids) - 1 : -1].float()
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(-1, torch.tensor(ids)[:, None])[:, 0], torch.special.entr(logp.exp()).sum(-1)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1], [PROMPTS[0], PROMPTS[0]]])
def test_greedy_equals_transformers_generate(tiny_policy, prompts):
    randomise_adapter(tiny_policy)
    engine = NativeEngine(tiny_policy)
    groups = engine.sample(prompts, SamplingParams(n=1, max_tokens=12, temperature=0.0))
    for prompt, group in zip(prompts, groups, strict=True):
        out = tiny_policy.network.generate(
            torch.tensor([prompt.token_ids]), max_new_tokens=12, do_sample=False
        )
        assert group.completions[0].token_ids == out[0, len(prompt.token_ids) :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_equal_packed_and_plain_forward(tiny_policy, temperature):
    randomise_adapter(tiny_policy)
    engine = NativeEngine(tiny_policy)
    params = SamplingParams(n=4, max_tokens=9, temperature=temperature, seed=11)
    groups = engine.sample(PROMPTS, params)
    assert {c.finish_reason for g in groups for c in g.completions} == {"stop", "length"}
    batch = pack_one(groups, torch.device("cpu"))
    logp, entropy = tiny_policy.logprobs(batch, temperature)
    assert (logp - batch.recorded()).abs().max() < 1e-4
    row = 0
    for group in groups:
        for c in group.completions:
            n = len(c.token_ids)
            want, want_entropy = padded_logprobs(
                tiny_policy, group.prompt, c.token_ids, temperature
            )
            torch.testing.assert_close(logp[row : row + n], want, atol=1e-4, rtol=0)
            torch.testing.assert_close(entropy[row : row + n], want_entropy, atol=1e-4, rtol=0)
            torch.testing.assert_close(torch.tensor(c.entropies), want_entropy, atol=1e-4, rtol=0)
            row += n


def test_draws_do_not_depend_on_the_batch(tiny_policy):
    params = SamplingParams(n=4, max_tokens=9, seed=5)
    together = NativeEngine(tiny_policy).sample(PROMPTS, params)
    apart = NativeEngine(tiny_policy, max_rows=4).sample(PROMPTS, params)
    other = NativeEngine(tiny_policy).sample(PROMPTS, SamplingParams(n=4, max_tokens=9, seed=6))
    ids = [[c.token_ids for c in g.completions] for g in together]
    assert ids == [[c.token_ids for c in g.completions] for g in apart]
    assert ids != [[c.token_ids for c in g.completions] for g in other]


def test_gradients_do_not_depend_on_packing(tiny_policy):
    randomise_adapter(tiny_policy)
    groups = NativeEngine(tiny_policy).sample(PROMPTS, SamplingParams(n=3, max_tokens=6, seed=2))

    def gradient(budget: int) -> torch.Tensor:
        tiny_policy.model.zero_grad()
        batches = pack(groups, budget, torch.device("cpu"))
        for batch in batches:
            tiny_policy.logprobs(batch, 1.0)[0].sum().backward()
        parameters = [p for p in tiny_policy.model.parameters() if p.requires_grad]
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    whole, split = gradient(10_000), gradient(1)
    assert whole.norm() > 0
    torch.testing.assert_close(whole, split, atol=1e-4, rtol=1e-4)


def test_packed_tokens_counts_what_pack_makes(tiny_policy):
    groups = NativeEngine(tiny_policy).sample(PROMPTS, SamplingParams(n=3, max_tokens=6, seed=2))
    assert pack_one(groups, torch.device("cpu")).input_ids.shape[1] == packed_tokens(groups)
    budget = packed_tokens(groups[:2])
    assert [len(b.groups) for b in pack(groups, budget, torch.device("cpu"))] == [2, 1]


def test_common_prefix_leaves_every_prompt_a_token():
    assert common_prefix_length([(1, 2, 3), (1, 2, 3)]) == 2
    assert common_prefix_length([(1, 2, 3), (1, 2)]) == 1
    assert common_prefix_length([(1,), (2, 3)]) == 0


def test_prompt_without_room_is_refused(tiny_policy):
    long = [Prompt(7, (), "", (1,) * 250)]
    with pytest.raises(QerlError, match="prompt 7 has 250 tokens"):
        NativeEngine(tiny_policy).sample(long, SamplingParams(n=1, max_tokens=7))


def test_uniforms_are_uniform_and_pure():
    ids = np.arange(200_000)
    u = uniforms(9, ids, 4)
    assert np.array_equal(u[[5, 77]], uniforms(9, ids[[5, 77]], 4))
    assert abs(u.mean() - 0.5) < 0.002 and abs(u.var() - 1 / 12) < 0.001
    v = uniforms(9, ids, 5)
    assert abs(np.corrcoef(u, v)[0, 1]) < 0.01 and u.min() >= 0 and u.max() < 1


def test_sampling_follows_the_distribution():
    p = torch.tensor([0.1, 0.0, 0.6, 0.3])
    logits = p.log().expand(50_000, 4)
    token, logp, entropy = sample_tokens(logits, 1.0, uniforms(1, np.arange(50_000), 0))
    share = torch.bincount(token, minlength=4) / 50_000
    assert (share - p).abs().max() < 0.01 and share[1] == 0
    torch.testing.assert_close(logp, p[token].log())
    assert entropy[0].item() == pytest.approx(0.8979457, abs=1e-5)


def test_temperature_zero_takes_the_largest():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    token, logp, _ = sample_tokens(logits, 0.0, np.zeros(1))
    assert token.item() == 1
    assert logp.item() == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item())


MANY = prompts_of(
    (1, 5, 6, 7, 8, 9), (1, 5, 6, 3), (1, 5, 6, 7, 8, 4, 4, 4), (1, 5, 6, 9, 9), (1, 5, 6, 12)
)
BOUNDS = [
    {"max_rows": 1},
    {"max_rows": 3},
    {"max_rows": 7, "prefill_tokens": 9},
    {"prefill_tokens": 1},
]


@pytest.mark.parametrize("bounds", BOUNDS)
def test_a_seat_taken_over_is_as_good_as_a_new_one(tiny_policy, bounds, monkeypatch):
    """Rows of other prompts and lengths sit where finished ones were."""
    monkeypatch.setattr("qerl.rollout.cache.CHUNK", 2)
    randomise_adapter(tiny_policy)
    params = SamplingParams(n=4, max_tokens=9, seed=11)
    whole = NativeEngine(tiny_policy).sample(MANY, params)
    seated = NativeEngine(tiny_policy, **bounds).sample(MANY, params)
    assert [g.prompt for g in seated] == MANY
    lengths = {len(c.token_ids) for g in whole for c in g.completions}
    assert 1 in lengths and len(lengths) > 4
    for one, other in zip(whole, seated, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
            assert a.entropies == pytest.approx(b.entropies, abs=1e-5)


def test_bounds_are_kept(tiny_policy, monkeypatch):
    calls = []
    forward = tiny_policy.decoder.forward

    def noted(*args, **kwargs):
        calls.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    monkeypatch.setattr(tiny_policy.decoder, "forward", noted)
    engine = NativeEngine(tiny_policy, max_rows=3, prefill_tokens=14)
    groups = engine.sample(MANY, SamplingParams(n=4, max_tokens=9, seed=11))
    prefills = [tokens for rows, tokens in calls if rows == 1 and tokens > 1]
    # What the prompts share, (1, 5, 6), is computed once a prefill: 3 + 3 + 1, 3 + 5 + 2, 3 + 1.
    assert prefills == [7, 10, 4]
    decodes = [rows for rows, tokens in calls if tokens == 1]
    assert max(decodes) == 3
    assert sum(decodes) == sum(len(c.token_ids) - 1 for g in groups for c in g.completions)
    assert [rows < 3 for rows in decodes] == sorted(rows < 3 for rows in decodes)  # full to the end


def test_seats_are_never_empty_while_requests_wait(tiny_policy, monkeypatch):
    """64 requests of 1 to 256 tokens in 8 seats: within a tenth of tokens/8 steps."""
    lengths = np.random.default_rng(0).integers(1, 257, 64)
    latest = {}

    def noted(seed, requests, positions):
        latest.update(request=requests // 65536, position=positions)
        return uniforms(seed, requests, positions)

    def until_its_length(logits, temperature, draw):
        ends = latest["position"] + 1 >= lengths[latest["request"]]
        token = torch.from_numpy(np.where(ends, 2, 5))
        return token, torch.zeros(len(ends)), torch.zeros(len(ends))

    monkeypatch.setattr("qerl.rollout.native.uniforms", noted)
    monkeypatch.setattr("qerl.rollout.native.sample_tokens", until_its_length)
    monkeypatch.setattr(tiny_policy, "context", 512)
    steps = 0
    decode = native._Rollout._decode

    def counted(rollout):
        nonlocal steps
        steps += 1
        return decode(rollout)

    monkeypatch.setattr(native._Rollout, "_decode", counted)
    prompts = [Prompt(i, (), "", (1, 5, 3 + i % 9)) for i in range(64)]
    groups = NativeEngine(tiny_policy, max_rows=8).sample(
        prompts, SamplingParams(n=1, max_tokens=256)
    )
    assert [len(g.completions[0].token_ids) for g in groups] == lengths.tolist()
    assert steps <= 1.1 * -(-lengths.sum() // 8)


def test_a_prompts_memory_goes_with_its_last_row(tiny_policy, monkeypatch):
    most = 0
    forget = Decode.forget

    def noted(state, waiting):
        nonlocal most
        forget(state, waiting)
        most = max(most, len(state.numbers))

    monkeypatch.setattr(Decode, "forget", noted)
    many = [Prompt(i, (), "", (1, 5, 3 + i % 9, 4)) for i in range(40)]
    NativeEngine(tiny_policy, max_rows=4).sample(many, SamplingParams(n=2, max_tokens=6, seed=1))
    assert most <= 4


def test_suffix_grows_past_its_first_room(tiny_policy, monkeypatch):
    monkeypatch.setattr("qerl.rollout.cache.CHUNK", 2)
    randomise_adapter(tiny_policy)
    groups = NativeEngine(tiny_policy).sample(PROMPTS, SamplingParams(n=2, max_tokens=9, seed=11))
    assert max(len(c.token_ids) for g in groups for c in g.completions) > 4
    logp, _ = tiny_policy.logprobs(batch := pack_one(groups, torch.device("cpu")), 1.0)
    assert (logp - batch.recorded()).abs().max() < 1e-4


def test_layers_without_keys_of_their_own_read_an_earlier_layers(tmp_path):
    """Gemma 4: the last layers share keys and values; head sizes differ by kind of layer."""
    config = transformers.Gemma4TextConfig(
        vocab_size=16,
        vocab_size_per_layer_input=16,
        hidden_size_per_layer_input=8,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,  # pyright: ignore[reportCallIssue]  (a field of checkpoints)
        sliding_window=4,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(tmp_path / "gemma")
    tiny_tokenizer().save_pretrained(tmp_path / "gemma")
    recipe = Recipe(model=str(tmp_path / "gemma"), format="bf16", dtype="float32", device="cpu")
    policy = load_policy(recipe)
    greedy = SamplingParams(n=2, max_tokens=12, temperature=0.0)
    for prompt, group in zip(PROMPTS, NativeEngine(policy).sample(PROMPTS, greedy), strict=True):
        ids = torch.tensor([prompt.token_ids])
        out = model.generate(ids, max_new_tokens=12, do_sample=False)
        for completion in group.completions:
            assert completion.token_ids == out[0, len(prompt.token_ids) :].tolist()
    randomise_adapter(policy)
    groups = NativeEngine(policy).sample(PROMPTS, SamplingParams(n=3, max_tokens=9, seed=4))
    logp, _ = policy.logprobs(batch := pack_one(groups, torch.device("cpu")), 1.0)
    assert (logp - batch.recorded()).abs().max() < 1e-4


def test_attention_sinks_are_refused():
    """Left out of the softmax, they would change every probability without an error."""
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(QerlError, match="Identity has attention sinks"):
        qerl_attention(torch.nn.Identity(), q, q, q, None, s_aux=torch.zeros(2))
