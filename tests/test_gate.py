"""The gate against engines with a fault: each one must be stopped before anything is trained."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import write_tiny_model
from tiny_run import make_session, randomise_b, tiny_run_recipe

from qerl.adapter import checksum
from qerl.errors import QerlError
from qerl.model.lora import lora_layers
from qerl.noise import Noise
from qerl.policy import Policy, load_policy
from qerl.rollout.gate import Canary, run_gate
from qerl.rollout.native import NativeEngine
from qerl.types import Group, Prompt, SamplingParams

PROMPTS = [Prompt(0, (), "", (1, 5, 6, 7)), Prompt(1, (), "", (1, 5, 9))]


@pytest.fixture(scope="module")
def sharp_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider random weights: logits spread over several nats, as a trained model's do."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "sharp", initializer_range=0.1)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def policy(sharp_dir, tmp_path_factory, request) -> Policy:
    root = tmp_path_factory.mktemp("gate")
    # rank and alpha of the bundled recipe: the canary's effect grows with them
    lora = {"rank": 16, "alpha": 32}
    return load_policy(tiny_run_recipe(sharp_dir, root, dtype=request.param, lora=lora))


@pytest.fixture(params=["fresh", "trained"])
def adapter(policy: Policy, request):
    """The gate runs before the first step and after a resume."""
    if request.param == "trained":
        randomise_b(policy, scale=0.02)
    yield request.param
    randomise_b(policy, scale=0.0)


class IgnoresAdapter(NativeEngine):
    def sample(self, prompts, params, *, progress=None):
        with self.policy.adapter_disabled():
            return super().sample(prompts, params, progress=progress)


class WrongScale(NativeEngine):
    """Applies the adapter `factor` times."""

    factor = 2.0

    def sample(self, prompts, params, *, progress=None):
        layers = lora_layers(self.policy.model).values()
        for layer in layers:
            layer.scaling["default"] *= self.factor
        groups = super().sample(prompts, params, progress=progress)
        for layer in layers:
            layer.scaling["default"] /= self.factor
        return groups


class AlphaForgotten(WrongScale):
    """Scale 1 instead of alpha / rank = 2."""

    factor = 0.5


class LeavesNoiseOn(NativeEngine):
    def sample(self, prompts, params, *, progress=None):
        with self.noise.applied(0.05, step=1):
            return super().sample(prompts, params, progress=progress)


class SecondBos(NativeEngine):
    """Tokenizes the prompt's text again and gets another BOS."""

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams, *, progress=None):
        longer = [replace(p, token_ids=(1, *p.token_ids)) for p in prompts]
        groups = super().sample(longer, params, progress=progress)
        return [Group(p, g.completions) for p, g in zip(prompts, groups, strict=True)]


class Stale(NativeEngine):
    """Samples from a copy of the model that missed every later write to the adapter."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.frozen = NativeEngine(copy.deepcopy(policy))

    def sample(self, prompts, params, *, progress=None):
        return self.frozen.sample(prompts, params, progress=progress)


def test_a_sound_engine_passes_and_the_adapter_is_untouched(policy, adapter):
    before = checksum(policy.model)
    report = run_gate(NativeEngine(policy), policy, PROMPTS, 1.0)
    assert report.parity.ok and report.parity_canary.ok and report.parity.n > 4
    if policy.dtype == torch.float32:
        assert max(report.parity.max_abs, report.parity_canary.max_abs) < 1e-4
    assert report.moved > 0.01
    assert checksum(policy.model) == before


@pytest.mark.parametrize("fault", [IgnoresAdapter, WrongScale, AlphaForgotten, SecondBos, Stale])
def test_a_faulty_engine_is_stopped_with_the_numbers(policy, fault):
    before = checksum(policy.model)
    with pytest.raises(QerlError, match="nothing was trained") as caught:
        run_gate(fault(policy), policy, PROMPTS, 1.0)
    assert str(caught.value).startswith("rollout.engine: ") and "\n" not in str(caught.value)
    assert checksum(policy.model) == before


def test_noise_left_on_in_the_engine_alone_is_stopped(tiny_dir, tmp_path):
    policy = load_policy(tiny_run_recipe(tiny_dir, tmp_path))
    engine = LeavesNoiseOn(policy)
    engine.noise = Noise(policy.network)
    with pytest.raises(QerlError, match="the adapter as it is, sampler and trainer disagree"):
        run_gate(engine, policy, PROMPTS, 1.0)


def test_noise_lost_in_the_engine_is_stopped(tiny_dir, tmp_path):
    class DropsNoise(NativeEngine):
        def sample(self, prompts, params, *, progress=None):
            kept = {name: norm.noise for name, norm in noise.norms.items()}
            for norm in noise.norms.values():
                norm.set_noise(None)
            groups = super().sample(prompts, params, progress=progress)
            for name, z in kept.items():
                noise.norms[name].set_noise(z)
            return groups

    policy = load_policy(tiny_run_recipe(tiny_dir, tmp_path))
    noise = Noise(policy.network)
    sound = run_gate(NativeEngine(policy), policy, PROMPTS, 1.0, noise.applied(0.05, 0))
    assert sound.parity_noise is not None and sound.parity_noise.max_abs < 1e-4
    with pytest.raises(QerlError, match="with exploration noise, sampler and trainer disagree"):
        run_gate(DropsNoise(policy), policy, PROMPTS, 1.0, noise.applied(0.05, 0))


def test_a_final_projection_wrong_in_both_is_stopped(tiny_dir, tmp_path):
    policy = load_policy(tiny_run_recipe(tiny_dir, tmp_path))
    policy.logit_scale = 0.5
    with pytest.raises(QerlError, match="transformers' own forward in the trainer's place"):
        run_gate(NativeEngine(policy), policy, PROMPTS, 1.0)


def test_an_engine_one_update_behind_is_stopped(policy):
    randomise_b(policy, seed=1)
    engine = Stale(policy)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p += 0.02  # the update that the engine never hears of
    with pytest.raises(QerlError, match="sampler and trainer disagree"):
        run_gate(engine, policy, PROMPTS, 1.0)
    randomise_b(policy, scale=0.0)


def test_an_engine_that_fails_inside_the_canary_leaves_the_adapter_alone(policy):
    randomise_b(policy)
    before = checksum(policy.model)

    class Breaks(NativeEngine):
        calls = 0

        def sample(self, prompts, params, *, progress=None):
            self.calls += 1
            if self.calls == 2:
                assert checksum(self.policy.model) != before, "the canary must be in by now"
                raise RuntimeError("engine died")
            return super().sample(prompts, params, progress=progress)

    with pytest.raises(RuntimeError, match="engine died"):
        run_gate(Breaks(policy), policy, PROMPTS, 1.0)
    assert checksum(policy.model) == before
    randomise_b(policy, scale=0.0)


def test_the_canary_is_the_same_every_time_and_fills_every_b(policy):
    seen = []
    for _ in range(2):
        with Canary(policy):
            seen.append(checksum(policy.model))
            parameters = dict(policy.model.named_parameters())
            assert all(p.any() for n, p in parameters.items() if "lora_B" in n)
    assert seen[0] == seen[1]


def test_one_held_out_prompt_that_just_fits_passes(tiny_dir, tmp_path):
    """A prompt that leaves room for one answer token is legal with max_completion_tokens: 1."""
    recipe = tiny_run_recipe(tiny_dir, tmp_path, rollout__max_completion_tokens=1)
    s = make_session(recipe)
    longest = Prompt(0, (), "", (5,) * (s.policy.context - 1))
    assert run_gate(s.engine, s.policy, [longest], 1.0).parity.ok
    s.close()


@pytest.mark.parametrize(
    "lora",
    [
        {"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"]},
        {"rank": 1, "alpha": 1, "targets": ["k_proj"]},
        {"rank": 16, "alpha": 32, "dropout": 0.5},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_adapters_and_dropout_are_no_fault(sharp_dir, tmp_path, dtype, lora):
    """A weak canary in bf16 must not be taken for an engine without the adapter."""
    policy = load_policy(tiny_run_recipe(sharp_dir, tmp_path, dtype=dtype, lora=lora))
    assert run_gate(NativeEngine(policy), policy, PROMPTS, 1.0).moved > 0
    for fault in (IgnoresAdapter, WrongScale):
        with pytest.raises(QerlError, match="nothing was trained"):
            run_gate(fault(policy), policy, PROMPTS, 1.0)


def test_an_engine_with_a_copy_is_told_of_the_canary_and_of_its_end(policy):
    class Copied(Stale):
        def sync(self, version):
            self.frozen.policy.model.load_state_dict(self.policy.model.state_dict())

    engine = Copied(policy)
    assert run_gate(engine, policy, PROMPTS, 1.0).moved > 0
    assert checksum(engine.frozen.policy.model) == checksum(policy.model)
