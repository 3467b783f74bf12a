import math

import pytest
import torch

from qerl.algo.loss import Totals, mismatch_metrics, policy_loss

LOSSES = ["dapo", "grpo", "dr_grpo", "bnpo"]


def tensor(values):
    return torch.tensor(values, dtype=torch.float32)


def log(*values):
    return tensor(values).log()


def run(logp, old, anchor, advantage, index, mask=None, **options):
    """The loss and its gradient with respect to logp."""
    logp = logp.clone().requires_grad_()
    anchor = logp.detach() if anchor == "detached" else anchor
    mask = torch.ones(len(logp)) if mask is None else tensor(mask)
    index = torch.tensor(index)
    if "totals" not in options:
        lengths = [int(mask[index == i].sum()) for i in range(int(index.max()) + 1)]
        options["totals"] = Totals.count(lengths, budget=20)
    out = policy_loss(logp, old, anchor, tensor(advantage), index, mask, **options)
    out.loss.backward()
    return out.loss.item(), logp.grad, out.metrics


# Completion 0 has three tokens and A = 2, completion 1 one token and A = -1; every ratio is 1.
ON_POLICY = (log(0.5, 0.4, 0.3, 0.2), log(0.5, 0.4, 0.3, 0.2), None, [2.0, 2.0, 2.0, -1.0])


@pytest.mark.parametrize(
    ("loss", "coefficient"),
    [
        ("dapo", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("bnpo", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("grpo", [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        ("dr_grpo", [1 / 20, 1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_value_and_gradient_on_policy(loss, coefficient):
    value, grad, metrics = run(*ON_POLICY, [0, 0, 0, 1], loss=loss)
    c = tensor(coefficient)
    # L_t = -A_i at ratio 1, and dL_t/dlogp_t = -A_i
    expected = c * tensor([-2.0, -2.0, -2.0, 1.0])
    assert value == pytest.approx(expected.sum().item(), abs=1e-6)
    torch.testing.assert_close(grad, expected)
    assert metrics["kl"] == 0.0
    assert metrics["qerl/ess"] == pytest.approx(1.0)


def test_clip_by_hand():
    # ratios 2, 2, 1/2, 1/2 with A = 1, -1, 1, -1: the first and the last are clipped
    old = log(0.2, 0.2, 0.4, 0.4)
    logp = old + log(2.0, 2.0, 0.5, 0.5)
    value, grad, metrics = run(logp, old, None, [1.0, -1.0, 1.0, -1.0], [0, 1, 2, 3])
    # objective terms: min(2, 1.28), min(-2, -1.28), min(.5, .8), min(-.5, -.8)
    assert value == pytest.approx(-(1.28 - 2.0 + 0.5 - 0.8) / 4, abs=1e-6)
    torch.testing.assert_close(grad, tensor([0.0, 2.0, -0.5, 0.0]) / 4)
    assert metrics["clip_ratio/low_mean"] == pytest.approx(1 / 4)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("correction", "weights"),
    [("truncate", [0.5, 2.0, 1.0]), ("mask", [0.5, 0.0, 1.0]), ("none", [1.0, 1.0, 1.0])],
)
def test_importance_weight_by_hand(correction, weights):
    # anchor = the policy itself: ratio 1, so the gradient is -w A / T and the clip never acts
    old = log(0.4, 0.1, 0.3)
    logp = old + log(0.5, 3.0, 1.0)
    value, grad, metrics = run(
        logp, old, "detached", [1.0, 1.0, -1.0], [0, 1, 2], correction=correction
    )
    expected = -tensor(weights) * tensor([1.0, 1.0, -1.0]) / 3
    assert value == pytest.approx(expected.sum().item(), abs=1e-6)
    torch.testing.assert_close(grad, expected)
    assert metrics["clip_ratio/high_mean"] == 0.0
    assert metrics["qerl/logp_diff_max"] == pytest.approx(math.log(3.0), rel=1e-5)


def test_recomputed_anchor_combines_ratio_and_weight():
    # old .2 -> anchor .3 (w = 1.5) -> policy .33 (r = 1.1, inside the clip): L = -1.5 * 1.1 * 2
    value, grad, _ = run(log(0.33), log(0.2), log(0.3), [2.0], [0])
    assert value == pytest.approx(-3.3, rel=1e-5)
    torch.testing.assert_close(grad, tensor([-3.3]))


def test_only_the_policy_gets_a_gradient():
    old, advantage = log(0.5, 0.5).requires_grad_(), tensor([1.0, -1.0]).requires_grad_()
    logp = log(0.6, 0.3).requires_grad_()
    index, mask = torch.tensor([0, 1]), torch.ones(2)
    totals = Totals(tokens=2, completions=2, budget=8)
    policy_loss(logp, old, None, advantage, index, mask, totals=totals).loss.backward()
    assert logp.grad is not None and old.grad is None and advantage.grad is None


def packed(seed=0):
    """Six completions of lengths 1..6, with ratios around 1 and every kind of clip."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.repeat_interleave(torch.arange(6), torch.arange(1, 7))
    old = -torch.rand(21, generator=generator) - 0.5
    logp = old + 0.4 * torch.randn(21, generator=generator)
    return logp, old, torch.randn(6, generator=generator)[index], index


@pytest.mark.parametrize("anchored", ["recorded", "detached"])
@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("split", [[3], [1, 2], [2, 5], [1, 2, 3, 4, 5]])
def test_accumulation_does_not_change_loss_or_gradient(loss, split, anchored):
    logp, old, advantage, index = packed()
    totals = Totals.count([1, 2, 3, 4, 5, 6], budget=60)

    def part(rows):
        leaf = logp[rows].clone().requires_grad_()
        anchor = leaf.detach() if anchored == "detached" else None
        out = policy_loss(
            leaf,
            old[rows],
            anchor,
            advantage[rows],
            index[rows] - index[rows].min(),  # numbered anew in each micro-batch
            torch.ones(int(rows.sum())),
            totals=totals,
            loss=loss,
        )
        out.loss.backward()
        return out.loss.detach(), leaf.grad

    whole, whole_grad = part(index >= 0)
    bounds = [0, *split, 6]
    parts = [part((index >= a) & (index < b)) for a, b in zip(bounds, bounds[1:], strict=False)]
    torch.testing.assert_close(sum(value for value, _ in parts), whole)
    torch.testing.assert_close(torch.cat([grad for _, grad in parts]), whole_grad)


def test_bnpo_averages_over_each_micro_batch():
    totals = Totals.count([3, 1], budget=20, micro_batches=2)
    logp, old = log(0.5, 0.4, 0.3), log(0.5, 0.4, 0.3)
    first, _, _ = run(logp, old, None, [2.0] * 3, [0, 0, 0], loss="bnpo", totals=totals)
    second, _, _ = run(log(0.2), log(0.2), None, [-1.0], [0], loss="bnpo", totals=totals)
    assert first + second == pytest.approx((-2.0 + 1.0) / 2)


@pytest.mark.parametrize("loss", LOSSES)
def test_masked_truncated_completion_counts_nowhere(loss):
    """A truncated completion, masked, is as if it had never been sampled: sums and divisors."""
    logp, old, advantage, index = packed()
    mask = (index != 4).float().tolist()
    poisoned = torch.where(index == 4, torch.full_like(logp, math.nan), logp)
    value, grad, metrics = run(
        poisoned, old, None, advantage.tolist(), index.tolist(), mask, loss=loss
    )

    kept = index != 4
    totals = Totals(tokens=16, completions=5, budget=20)
    alone, alone_grad, alone_metrics = run(
        logp[kept], old[kept], None, advantage[kept].tolist(), index[kept].tolist(),
        loss=loss, totals=totals,
    )  # fmt: skip
    assert value == pytest.approx(alone)
    torch.testing.assert_close(grad[kept], alone_grad)
    assert (grad[~kept] == 0).all()
    assert metrics == alone_metrics


@pytest.mark.parametrize("loss", LOSSES)
def test_everything_masked_is_a_zero_with_a_graph(loss):
    value, grad, metrics = run(log(0.5), log(0.5), None, [1.0], [0], [0.0], loss=loss)
    assert (value, grad.tolist(), metrics) == (0.0, [0.0], {})


def test_extreme_ratios_stay_finite():
    value, grad, metrics = run(
        tensor([-1.0, -300.0]), tensor([-300.0, -1.0]), None, [1.0, 1.0], [0, 1]
    )
    assert math.isfinite(value) and torch.isfinite(grad).all()
    assert metrics["qerl/logp_diff_max"] == 299.0 and math.isfinite(metrics["kl"])


def test_bfloat16_inputs_are_computed_in_float32():
    value, _, _ = run(log(0.5, 0.25).bfloat16(), log(0.5, 0.25), None, [1.0, 1.0], [0, 1])
    assert value == pytest.approx(-1.0, abs=1e-2)
    logp = log(0.5).bfloat16().requires_grad_()
    totals = Totals(tokens=1, completions=1, budget=1)
    out = policy_loss(
        logp, logp, None, tensor([1.0]), torch.tensor([0]), torch.ones(1), totals=totals
    )
    assert out.loss.dtype == torch.float32


def test_mismatch_metrics_by_hand():
    old = log(0.2, 0.2, 0.2, 0.2)
    logp = old + log(1.0, 2.0, 0.5, 1.0)
    metrics = mismatch_metrics(logp, old)
    # k3: (0 + (1 - ln 2) + (-1/2 + ln 2) + 0) / 4; ess: 4.5^2 / (4 * 6.25)
    assert metrics["kl"] == pytest.approx(0.5 / 4, rel=1e-5)
    assert metrics["qerl/ess"] == pytest.approx(20.25 / 25, rel=1e-5)
    assert metrics["qerl/ratio_p01"] == pytest.approx(0.5)
    assert metrics["qerl/ratio_p50"] == pytest.approx(1.0)
    assert metrics["qerl/ratio_p99"] == pytest.approx(2.0)
    assert metrics["qerl/logp_diff_max"] == pytest.approx(math.log(2), rel=1e-5)


def test_mismatch_metrics_of_a_step_use_the_mask():
    old = log(0.2, 0.2)
    metrics = mismatch_metrics(old + log(1.0, 9.0), old, mask=tensor([1.0, 0.0]))
    assert metrics["qerl/logp_diff_max"] == 0.0
    assert mismatch_metrics(old, old, mask=torch.zeros(2)) == {}


def test_k3_estimates_the_divergence_from_sampler_to_policy():
    """Averaged over the sampler's own distribution, k3 is KL(sampler || policy) exactly."""
    sampler, policy = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    counts = torch.tensor([7, 2, 1])  # ten draws in the sampler's proportions
    old, logp = (torch.repeat_interleave(p.log(), counts) for p in (sampler, policy))
    exact = (sampler * (sampler / policy).log()).sum().item()
    assert mismatch_metrics(logp, old)["kl"] == pytest.approx(exact, rel=1e-5)
