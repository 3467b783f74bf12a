"""One step of the loop, looked at from inside: noise, log-probs, gradients, what is skipped."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import pytest
import torch
from tiny import VOCABULARY
from tiny_run import (
    EOS,
    TARGET,
    gradients,
    make_session,
    randomise_b,
    short,
    starts_right,
    step_rows,
    tiny_run_recipe,
)
from torch import nn

from qerl import policy as policy_module
from qerl.adapter import checksum
from qerl.errors import QerlError
from qerl.interrupt import Interrupts
from qerl.loop import accumulate, noise, reward, run_steps, sample, update
from qerl.model.load import load_base
from qerl.noise import sigma_at
from qerl.optim import adapter_parameters
from qerl.pack import pack_one
from qerl.run import train
from qerl.session import Session
from qerl.types import Completion, Group

NOISY = 2  # with two stages over two steps, the second step has noise


@pytest.fixture
def session(tiny_dir, tmp_path):
    """`session(reward, section__key=value, …)` makes one; all are closed at the end."""
    made: list[Session] = []

    def make(function=short, **changes) -> Session:
        made.append(make_session(tiny_run_recipe(tiny_dir, tmp_path, **changes), function))
        return made[-1]

    yield make
    for s in made:
        s.close()


def norms_hash(s: Session) -> str:
    digest = hashlib.sha256()
    for name, p in sorted(s.policy.network.named_parameters()):
        if "norm" in name:
            digest.update(p.detach().numpy().tobytes())
    assert s.noise is not None and all(n.noise is None for n in s.noise.norms.values())
    return digest.hexdigest()


def one_gradient(s: Session, step: int = 1) -> dict[str, torch.Tensor]:
    groups, _ = sample(s, step)
    reward(s, groups)
    s.optimizer.zero_grad(set_to_none=True)
    accumulate(s, step, groups)
    return gradients(s)


# ---------------------------------------------------------------------------------- noise


def test_sigma_in_the_metrics_follows_the_schedule(tiny_dir, tmp_path):
    recipe = tiny_run_recipe(
        tiny_dir, tmp_path, train__steps=6, noise__stages=3, noise__sigma_start=0.01
    )
    with train(recipe, reward=short, report=False) as run:
        rows = step_rows(run.folder)
    assert [r["qerl/sigma"] for r in rows] == pytest.approx([0, 0, 0.01, 0.01, 5e-4, 5e-4])
    assert [r["qerl/noise_stage"] for r in rows] == [0, 0, 1, 1, 2, 2]


def test_norms_are_bit_for_bit_clean_after_steps_and_after_an_error(session):
    s = session()
    before = norms_hash(s)
    logits = s.policy.network(torch.tensor([[1, 5, 6]])).logits
    one_gradient(s, NOISY)
    assert norms_hash(s) == before
    assert torch.equal(s.policy.network(torch.tensor([[1, 5, 6]])).logits, logits)
    with pytest.raises(ZeroDivisionError), noise(s, NOISY):
        noisy = s.policy.network(torch.tensor([[1, 5, 6]])).logits
        assert (noisy - logits).abs().max() > 1e-4
        raise ZeroDivisionError
    assert norms_hash(s) == before
    assert torch.equal(s.policy.network(torch.tensor([[1, 5, 6]])).logits, logits)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_equal_the_training_forwards_under_noise(session, temperature):
    """NVFP4 base, an adapter that does something, noise in both: fp32 differs by sums only."""
    s = session(rollout__temperature=temperature, noise__sigma_start=0.05, noise__sigma_end=0.05)
    randomise_b(s.policy)
    groups, _ = sample(s, NOISY)
    batch = pack_one(groups, s.policy.device)
    with torch.no_grad():
        with noise(s, NOISY):
            same, _ = s.policy.logprobs(batch, temperature)
        clean, _ = s.policy.logprobs(batch, temperature)
    assert (same - batch.recorded()).abs().max() < 1e-4
    assert (clean - batch.recorded()).abs().max() > 1e-3, "the noise must have been on"


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_credit_shared_and_corrected(session, correction):
    """shared: sampler and trainer are one policy. corrected: they differ, and weights say so."""
    changes = dict(noise__sigma_start=0.2, noise__sigma_end=0.2, algorithm__correction=correction)
    metrics = {}
    for credit in ("shared", "corrected"):
        s = session(noise__credit=credit, **changes)
        groups, _ = sample(s, NOISY)
        reward(s, groups)
        metrics[credit] = accumulate(s, NOISY, groups)
    assert metrics["shared"]["kl"] < 1e-9 and metrics["shared"]["qerl/ess"] > 1 - 1e-6
    assert metrics["shared"]["qerl/logp_diff_max"] < 1e-4
    assert metrics["corrected"]["kl"] > 1e-5 and metrics["corrected"]["qerl/ess"] < 1 - 1e-5
    assert metrics["corrected"]["qerl/ratio_p01"] < 0.999 < 1.001
    assert metrics["corrected"]["qerl/ratio_p99"] > 1.001
    assert metrics["corrected"]["loss"] != pytest.approx(metrics["shared"]["loss"], abs=1e-6)


def test_credit_uncorrected_has_a_clean_forward_and_no_weights(session, tiny_dir, tmp_path):
    """The gradient is the plain one: that of a run whose sampler claims to be the clean policy."""
    s = session(noise__credit="uncorrected", noise__sigma_start=0.2, noise__sigma_end=0.2)
    groups, _ = sample(s, NOISY)
    reward(s, groups)
    metrics = accumulate(s, NOISY, groups)
    got = gradients(s)
    assert metrics["kl"] > 1e-5
    with torch.no_grad():
        clean, _ = s.policy.logprobs(pack_one(groups, s.policy.device), 1.0)
    values = iter(clean.tolist())
    for completion in (c for g in groups for c in g.completions):
        completion.logprobs = [next(values) for _ in completion.token_ids]
    other = session(noise__schedule="off")
    accumulate(other, NOISY, groups)
    for name, wanted in gradients(other).items():
        torch.testing.assert_close(got[name], wanted, atol=1e-6, rtol=1e-4)


def test_uncorrected_warns(tiny_dir, tmp_path, capsys):
    recipe = tiny_run_recipe(tiny_dir, tmp_path, noise__credit="uncorrected", train__steps=1)
    train(recipe, reward=short).close()
    assert "noise.credit: uncorrected" in capsys.readouterr().out


# ---------------------------------------------------------------------------- gradients


def test_every_b_at_step_one_and_every_a_at_step_two(session):
    s = session()
    first = one_gradient(s, 1)
    for name, p in adapter_parameters(s.policy.model).items():
        assert first[name].any() == ("lora_B" in name), name
        assert p.dtype == torch.float32
    assert update(s, 1)["qerl/skipped_step"] == 0
    second = one_gradient(s, 2)
    assert all(g.any() for g in second.values()) and len(second) == len(first)


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_accumulation_does_not_change_the_first_update(session, loss):
    states = []
    for budget in (1, 100_000):
        s = session(train__tokens_per_micro_batch=budget, algorithm__loss=loss)
        one_gradient(s, 1)
        grad = gradients(s)
        update(s, 1)
        states.append((grad, {n: p.clone() for n, p in adapter_parameters(s.policy.model).items()}))
    for one, whole in zip(*(side.values() for side in (states[0][0], states[1][0])), strict=True):
        torch.testing.assert_close(one, whole, atol=1e-6, rtol=1e-4)
    for name, p in states[0][1].items():
        # AdamW's first step is g/(|g| + 1e-8): for a gradient near that, rounding is all there is.
        clear = states[0][0][name].abs() > 1e-6
        assert clear.any() == ("lora_B" in name), name
        assert ((p - states[1][1][name])[clear].abs() < 1e-5).all(), name


def test_gradient_checkpointing_gives_the_same_gradients_under_noise(session):
    """The forward that backward runs again must see the same noise as the first one."""
    found = []
    for on in (False, True):
        s = session(train__gradient_checkpointing=on, noise__sigma_start=0.2, noise__sigma_end=0.2)
        randomise_b(s.policy)
        found.append(one_gradient(s, NOISY))
    layers = s.policy.decoder.layers
    assert all(layer.gradient_checkpointing for layer in layers), "checkpointing must be on"
    for name, plain in found[0].items():
        torch.testing.assert_close(found[1][name], plain, atol=1e-7, rtol=1e-5)


def test_dropout_is_a_function_of_the_step_for_any_seed(session):
    s = session(lora__dropout=0.5, seed=2**31 - 1)
    randomise_b(s.policy)
    state = torch.get_rng_state()
    first = one_gradient(s, 1)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"
    torch.manual_seed(99)
    again, other = one_gradient(s, 1), one_gradient(s, 2)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert any(not torch.equal(first[n], other[n]) for n in first)


def add_dead_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base gets a linear layer that nothing calls."""

    def load(*args, **kwargs):
        base = load_base(*args, **kwargs)
        layer = nn.Linear(128, 32, bias=False).requires_grad_(False)
        base.model.get_decoder().layers[1].unused_proj = layer
        return base

    monkeypatch.setattr(policy_module, "load_base", load)


def test_a_dead_target_stops_the_run(tiny_dir, tmp_path, monkeypatch):
    add_dead_linear(monkeypatch)
    with pytest.raises(QerlError, match=r"lora.targets: .* 1 adapter matrices.*unused_proj"):
        train(tiny_run_recipe(tiny_dir, tmp_path), reward=short, report=False)


def test_an_adapter_that_reaches_nothing_is_an_error(tiny_dir, tmp_path, monkeypatch, session):
    add_dead_linear(monkeypatch)
    s = session(lora__targets=["unused_proj"])
    with pytest.raises(QerlError, match="lora.targets: the output does not depend"):
        one_gradient(s)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_skips_the_update(session, bad):
    s = session()
    one_gradient(s)
    parameters = adapter_parameters(s.policy.model)
    next(iter(parameters.values())).grad[0, 0] = bad
    before = checksum(s.policy.model)
    metrics = update(s, 1)
    assert metrics["qerl/skipped_step"] == 1 and metrics["grad_norm"] != metrics["grad_norm"]
    assert checksum(s.policy.model) == before and s.policy.version == 0
    assert not s.optimizer.state


# ------------------------------------------------------------------------------ skipping


def first_group_only(prompts, **_):
    """Rewards differ only within the first prompt's group, whatever was answered."""
    return [float(i) if p == prompts[0] else 1.0 for i, p in enumerate(prompts)]


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_zero_variance_groups_are_skipped_and_counted(session, loss):
    """Leaving them out saves the work and changes no gradient."""
    found = []
    for skip in (True, False):
        s = session(first_group_only, algorithm__skip_zero_variance=skip, algorithm__loss=loss)
        groups, _ = sample(s, 1)
        reward(s, groups)
        metrics = accumulate(s, 1, groups)
        assert metrics["qerl/trained_groups"] == (1 if skip else 4)
        found.append(gradients(s))
    for name, g in found[0].items():
        torch.testing.assert_close(g, found[1][name], atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("skip", [True, False])
def test_a_step_with_nothing_to_learn_changes_only_the_counters(session, skip):
    """Also after real updates, when AdamW's momentum would move the adapter by itself."""
    s = session(short, algorithm__skip_zero_variance=skip, train__steps=4)
    seen = []

    def watch(step, numbers):
        moments = [v["exp_avg"].clone() for v in s.optimizer.state.values()]
        seen.append((checksum(s.policy.model), moments, s.policy.version, numbers))
        if step in (1, 3):  # steps 2 and 4 reward everything alike
            s.task.rewards[0] = replace_function(s.task.rewards[0], lambda c: [0.5] * len(c))
        else:
            s.task.rewards[0] = replace_function(s.task.rewards[0], None)

    with Interrupts() as interrupts:
        run_steps(s, interrupts, watch)
    (a1, m1, v1, n1), (a2, m2, v2, n2), (a3, _, v3, _), (a4, _, v4, n4) = seen
    assert (v1, v2, v3, v4) == (1, 1, 2, 2)
    assert a1 == a2 and all(torch.equal(x, y) for x, y in zip(m1, m2, strict=True))
    assert a3 != a2 and a3 == a4
    assert n2["qerl/skipped_step"] == 1 and n2["frac_reward_zero_std"] == 1 and n2["loss"] == 0
    assert n2["qerl/trained_groups"] == (0 if skip else 4) and n2["grad_norm"] == 0
    assert n1["qerl/skipped_step"] == 0 and n2["num_tokens"] > n1["num_tokens"]
    assert s.progress.step == 4 and s.progress.cursor == 16 and s.progress.version == 2


def replace_function(old, function):
    def scored(completions, completion_ids, **_):
        return short(completion_ids) if function is None else function(completions)

    return old._replace(function=scored)


def test_first_step_without_variance_is_no_dead_adapter(session):
    """With skip_zero_variance off the gradients are there and zero: nothing is wrong with that."""
    s = session(
        lambda completions, **_: [1.0] * len(completions), algorithm__skip_zero_variance=False
    )
    one_gradient(s)
    assert update(s, 1)["qerl/skipped_step"] == 1


def test_masked_truncated_completions_are_in_no_sum(session):
    """The gradient is that of the finished completions alone."""
    s = session(starts_right, algorithm__mask_truncated=True)
    s.policy.eos_ids = frozenset({EOS, 4, 6, 8})
    groups, _ = sample(s, 1)
    reward(s, groups)
    reasons = {c.finish_reason for g in groups for c in g.completions}
    assert reasons == {"stop", "length"}
    for number, c in enumerate(c for g in groups for c in g.completions):
        c.reward = float(number % 2)
        c.advantage = 1.0 if number % 2 else -1.0
    accumulate(s, 1, groups)
    got = gradients(s)
    s.optimizer.zero_grad(set_to_none=True)
    ended = [
        Group(g.prompt, [c for c in g.completions if c.finish_reason == "stop"], g.sigma)
        for g in groups
    ]
    whole = [g for g in ended if g.completions]
    tokens = sum(len(c.token_ids) for g in whole for c in g.completions)
    batch = pack_one(whole, s.policy.device)
    logp, _ = s.policy.logprobs(batch, 1.0)
    (-(batch.per_token([c.advantage for c in batch.completions]) * logp).sum() / tokens).backward()
    for name, wanted in gradients(s).items():
        torch.testing.assert_close(got[name], wanted, atol=1e-6, rtol=1e-4)


def test_the_same_prompt_twice_in_a_step_gets_different_draws(session):
    """A dataset smaller than a step repeats prompts; copies of a group would teach nothing."""
    s = session()
    prompt = s.stream.items[0]
    s.stream.items = [prompt]
    groups, _ = sample(s, 1)
    texts = [tuple(tuple(c.token_ids) for c in g.completions) for g in groups]
    assert len(set(texts)) == len(texts)


# ---------------------------------------------------------------------------- EOS and BOS


def test_any_eos_id_ends_an_answer_and_is_trained_on(session):
    s = session(rollout__max_completion_tokens=30)
    extra = VOCABULARY["m"]
    s.policy.eos_ids = frozenset({EOS, extra})
    groups, _ = sample(s, 1)
    completions = [c for g in groups for c in g.completions]
    last = {c.token_ids[-1] for c in completions if c.finish_reason == "stop"}
    assert last == {EOS, extra}
    for c in completions:
        assert not {EOS, extra} & set(c.token_ids[:-1])
        assert (c.token_ids[-1] in {EOS, extra}) == (c.finish_reason == "stop")
    batch = pack_one(groups, s.policy.device)
    assert batch.targets.tolist() == [t for c in completions for t in c.token_ids]
    assert {EOS, extra} <= set(batch.targets.tolist())


def test_eos_is_in_the_loss(session):
    """Reward only the end: one answer stops at once, one goes on. EOS must become likelier."""
    s = session()
    prompt = s.stream.items[0]
    s.policy.eos_ids = frozenset({EOS})

    def answer(ids, advantage):
        return Completion(
            ids, [0.0] * len(ids), [], [], "stop", reward=advantage, advantage=advantage
        )

    group = Group(prompt, [answer([EOS], 1.0), answer([TARGET], -1.0)])
    before = logp_of(s, group)
    accumulate(s, 1, [group])
    update(s, 1)
    after = logp_of(s, group)
    assert after[0] > before[0] + 0.01 and after[1] < before[1] - 0.01


def logp_of(s: Session, group: Group) -> list[float]:
    with torch.no_grad():
        return s.policy.logprobs(pack_one([group], s.policy.device), 1.0)[0].tolist()


def test_pad_may_equal_eos(session, tiny_dir, tmp_path):
    """Nothing is masked by id: with pad = EOS the gradients stay the same."""
    plain = session()
    wanted = one_gradient(plain)
    s = session()
    s.policy.tokenizer.pad_token = s.policy.tokenizer.eos_token
    s.policy.network.config.pad_token_id = EOS
    got = one_gradient(s)
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize("template, adds, expected", [
    ("{{ bos_token }}", False, 1),
    ("", True, 1),
    ("{{ bos_token }}", True, 1),
    ("", False, 0),
])  # fmt: skip
def test_bos_is_there_once(tiny_dir, tmp_path, template, adds, expected):
    """Whoever writes it, template or tokenizer or both; and it is never sampled or trained."""
    import shutil

    from tiny import TEMPLATE, tiny_tokenizer
    from tokenizers.processors import TemplateProcessing

    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template + TEMPLATE
    if adds:
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    tokenizer.save_pretrained(model)
    (model / "chat_template.jinja").write_text(template + TEMPLATE)
    s = make_session(tiny_run_recipe(model, tmp_path, format="bf16"))
    prompts = [*s.stream.take(0, 3)[0], *s.eval_prompts]
    assert {p.token_ids.count(1) for p in prompts} == {expected}
    assert all(p.token_ids[0] == 1 for p in prompts) == bool(expected)
    groups, _ = sample(s, 1)
    assert groups[0].prompt.token_ids.count(1) == expected
    s.close()


def test_schedule_is_a_function_of_the_recipe_alone(session):
    s = session()
    groups, _ = sample(s, NOISY)
    sigma, _ = sigma_at(NOISY, 2, s.recipe.noise)
    assert {g.sigma for g in groups} == {sigma} and sigma > 0
    again, _ = sample(s, NOISY)
    ids = [[c.token_ids for c in g.completions] for g in groups]
    assert ids == [[c.token_ids for c in g.completions] for g in again]
    assert replace(groups[0].prompt) == again[0].prompt


def test_five_non_finite_gradients_in_a_row_stop_the_run(session):
    s = session()
    one_gradient(s)
    parameters = adapter_parameters(s.policy.model)
    next(iter(parameters.values())).grad[0, 0] = math.nan
    for _ in range(4):
        assert math.isnan(update(s, 1)["grad_norm"])
    with pytest.raises(QerlError, match="train.lr: gradients were not finite 5 steps in a row"):
        update(s, 1)
