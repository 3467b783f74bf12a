"""The gate before a run: does the sampler see the policy that is trained, and is it alive?

Parity: the engine samples a few tokens and records their log-probs; the packed training forward
computes them again, with and without exploration noise, and so does transformers' own forward of
the whole model; they must agree within the bounds below. Canary: a fresh adapter has B = 0 and
changes nothing, so a seeded B is written, the engine's output must move by far more than the
parity error, and B is put back bit for bit. Any of it failing stops the run with the numbers: many
have trained for hours on rollouts of the wrong policy without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from qerl.adapter import adapter_state, checksum
from qerl.errors import QerlError
from qerl.pack import pack
from qerl.policy import Policy
from qerl.rollout.engine import Engine
from qerl.types import Group, Prompt, SamplingParams

# (largest difference, mean difference, k3 KL) of log-probs, in nats. fp32: only the order of sums
# differs (measured 1e-5). bf16 and fp16: one rounding step moves single tokens by up to 0.2, so
# single tokens are not bounded there, their mean and KL are (means of 0.02 were measured).
BOUNDS = {
    torch.float32: (1e-3, 1e-4, 1e-6),
    torch.bfloat16: (float("inf"), 0.05, 5e-3),
    torch.float16: (float("inf"), 0.05, 5e-3),
}
TOKENS = 3
SAMPLES = 2
PROBES = 2
CANARY_SEED = 20_11_69  # any fixed number: the same B for every run
# Standard deviations of B, tried until one moves the output well above rounding: an adapter of few
# modules or low rank, in bf16, needs more than one of sixteen ranks everywhere.
CANARY_SCALES = (0.02, 0.1, 0.5, 2.5)


@dataclass(frozen=True, slots=True)
class Parity:
    """Sampler against trainer on n tokens: |difference| of log-probs, and k3 KL, in nats."""

    ok: bool
    mean_abs: float
    max_abs: float
    kl: float
    n: int


@dataclass(frozen=True, slots=True)
class GateReport:
    """What was compared.

    parity: sampler and trainer with the adapter as it is. parity_noise: the same under noise (None
    without). parity_canary: the same with the canary's B. parity_plain: sampler and transformers'
    own forward, with the canary's B. moved: largest change of a log-prob the canary made.
    """

    parity: Parity
    parity_noise: Parity | None
    parity_canary: Parity
    parity_plain: Parity
    moved: float

    def numbers(self) -> dict[str, float]:
        """For the metrics: the worst of the parities, and what the canary moved."""
        found = (self.parity, self.parity_noise, self.parity_canary, self.parity_plain)
        parities = [p for p in found if p is not None]
        return {
            "max_abs": max(p.max_abs for p in parities),
            "mean_abs": max(p.mean_abs for p in parities),
            "kl": max(p.kl for p in parities),
            "canary_moved": self.moved,
        }

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_gate(
    engine: Engine,
    policy: Policy,
    prompts: Sequence[Prompt],
    temperature: float,
    noise: AbstractContextManager[None] | None = None,
) -> GateReport:
    """Check parity and canary on the first prompts. Raises QerlError with the numbers.

    noise: within it the model carries exploration noise (entered once).
    The adapter is left as it was found, bit for bit, also when the check fails.
    """
    probes = list(prompts)[:PROBES]
    room = policy.context - max(len(p.token_ids) for p in probes)
    params = SamplingParams(SAMPLES, min(TOKENS, room), temperature, seed=CANARY_SEED)
    before = engine.sample(probes, params)
    parity = require(compare(policy, before, temperature), policy.dtype, "the adapter as it is")
    noisy = None
    if noise is not None:
        with noise:
            noisy = compare(policy, engine.sample(probes, params), temperature)
        require(noisy, policy.dtype, "exploration noise")
    for scale in CANARY_SCALES:
        with Canary(policy, scale):
            engine.sync(policy.version)
            after = engine.sample(probes, params)
            canary = compare(policy, after, temperature)
            plain = compare_plain(policy, after, temperature)
        engine.sync(policy.version)  # B is back: an engine with a copy must hear of that too
        require(canary, policy.dtype, "a canary adapter")
        require(plain, policy.dtype, "transformers' own forward in the trainer's place")
        moved = first_token_change(before, after)
        if moved >= 10 * max(canary.max_abs, 1e-5):
            return GateReport(parity, noisy, canary, plain, moved)
    raise QerlError(
        f"rollout.engine: the canary adapter moved log-probs by {moved:.2g} only, parity error "
        f"{canary.max_abs:.2g}: the engine does not apply the adapter; nothing was trained"
    )


@torch.no_grad()
def compare(policy: Policy, groups: Sequence[Group], temperature: float) -> Parity:
    """Recorded log-probs against the training forward's."""
    batches = pack(groups, budget=2**31, device=policy.device)
    policy.model.eval()  # without LoRA dropout; the loop switches to training by itself
    trained = torch.cat([policy.logprobs(b, temperature)[0] for b in batches]).double()
    return parity_of(policy, trained, torch.cat([b.recorded() for b in batches]).double())


@torch.no_grad()
def compare_plain(policy: Policy, groups: Sequence[Group], temperature: float) -> Parity:
    """Recorded log-probs against the whole model as transformers runs it, one completion a group.

    Sampler and trainer share the final projection; this one does not, so that a mistake in it
    (a scale, a cap, a bias) cannot hide in both.
    """
    policy.model.eval()
    plain, recorded = [], []
    for group in groups:
        completion = group.completions[0]
        n = len(completion.token_ids)
        ids = torch.tensor([[*group.prompt.token_ids, *completion.token_ids]], device=policy.device)
        logits = policy.network(input_ids=ids, use_cache=False, logits_to_keep=n + 1).logits
        logp = torch.log_softmax(logits[0, -n - 1 : -1].float() / temperature, -1)
        plain.append(logp.gather(-1, ids[0, -n:, None])[:, 0].double().cpu())
        recorded.append(torch.tensor(completion.logprobs, dtype=torch.float64))
    return parity_of(policy, torch.cat(plain), torch.cat(recorded))


def parity_of(policy: Policy, trained: torch.Tensor, recorded: torch.Tensor) -> Parity:
    """Differences of two f64 [n] log-probs, against the bounds of the policy's type."""
    difference = trained - recorded
    kl = (difference.exp() - 1 - difference).mean().item()
    worst, mean = difference.abs().max().item(), difference.abs().mean().item()
    bounds = BOUNDS[policy.dtype]
    ok = worst <= bounds[0] and mean <= bounds[1] and kl <= bounds[2]
    return Parity(ok, mean, worst, kl, len(difference))


def require(parity: Parity, dtype: torch.dtype, what: str) -> Parity:
    """The parity itself, or QerlError with its numbers and the bounds."""
    if not parity.ok:
        worst, mean, kl = BOUNDS[dtype]
        raise QerlError(
            f"rollout.engine: with {what}, sampler and trainer disagree on {parity.n} tokens: "
            f"max |dlogp| {parity.max_abs:.2g} (bound {worst:g}), mean {parity.mean_abs:.2g} "
            f"({mean:g}), KL {parity.kl:.2g} ({kl:g}); nothing was trained"
        )
    return parity


def first_token_change(before: Sequence[Group], after: Sequence[Group]) -> float:
    """Largest |change| of a first token's log-prob, where it is the same token; the draws are
    fixed, so that none is the same says that all have moved: infinite."""
    pairs = [
        (a, b)
        for old, new in zip(before, after, strict=True)
        for a, b in zip(old.completions, new.completions, strict=True)
    ]
    same = [
        abs(a.logprobs[0] - b.logprobs[0]) for a, b in pairs if a.token_ids[0] == b.token_ids[0]
    ]
    return max(same, default=float("inf"))


class Canary:
    """Within: the adapter's B holds seeded noise. After: the adapter is bit for bit as before."""

    def __init__(self, policy: Policy, scale: float = CANARY_SCALES[0]) -> None:
        self.policy, self.scale = policy, scale
        self.saved: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Canary:
        self.before = checksum(self.policy.model)
        generator = torch.Generator().manual_seed(CANARY_SEED)
        with torch.no_grad():
            for name, tensor in sorted(adapter_state(self.policy.model).items()):
                if "lora_B" in name:
                    self.saved[name] = tensor.clone()
                    tensor += self.scale * torch.randn(tensor.shape, generator=generator).to(tensor)
        return self

    def __exit__(self, *exception: object) -> None:
        live = adapter_state(self.policy.model)
        with torch.no_grad():
            for name, tensor in self.saved.items():
                live[name].copy_(tensor)
        assert checksum(self.policy.model) == self.before, "the canary was not taken back"
