import math

import pytest
import torch
from torch import nn

from qerl.config import TrainConfig
from qerl.optim import adapter_parameters, build_optimizer, clip_gradients, lr_at


def toy():
    """A frozen base layer with one trainable matrix beside it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    model[0].requires_grad_(False)
    return model


def test_adapter_parameters_are_the_trainable_ones():
    assert list(adapter_parameters(toy())) == ["1.weight"]
    with pytest.raises(AssertionError, match="no trainable parameter"):
        adapter_parameters(nn.Linear(1, 1).requires_grad_(False))


def test_masters_must_be_float32():
    with pytest.raises(AssertionError, match="1.weight is torch.bfloat16"):
        build_optimizer(toy().bfloat16(), TrainConfig())


def test_two_adamw_steps_by_hand():
    model = toy()
    config = TrainConfig(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.5)
    optimizer = build_optimizer(model, config)
    weight = model[1].weight
    start = weight.detach().double()
    m = v = torch.zeros_like(start)
    expected = start
    for t, grad in enumerate([[1.0, -2.0], [3.0, 0.5]], start=1):
        g = torch.tensor([grad], dtype=torch.float64)
        weight.grad = g.float()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        update = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * update
        torch.testing.assert_close(weight.detach().double(), expected, atol=1e-6, rtol=1e-6)


def rates(total, **options):
    config = TrainConfig(steps=total, lr=1.0, **options)
    return [lr_at(step, config, total) for step in range(1, total + 1)]


def test_learning_rates_by_hand():
    assert rates(4, lr_schedule="constant") == [1.0] * 4
    assert rates(4, lr_schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(4, lr_schedule="linear", lr_end=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    cosine = [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    assert rates(4, lr_schedule="cosine") == pytest.approx(cosine)


def test_warm_up_then_decay():
    assert rates(6, lr_schedule="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates(2, lr_schedule="cosine", warmup_steps=4) == [0.25, 0.5]  # never leaves warm-up


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_no_step_is_wasted(schedule):
    assert rates(1, lr_schedule=schedule) == [1.0]
    assert min(rates(50, lr_schedule=schedule, warmup_steps=10)) > 0


def test_steps_count_from_one():
    with pytest.raises(AssertionError, match="count from 1"):
        lr_at(0, TrainConfig(), 10)


def test_gradients_past_the_last_step_stay_at_lr_end():
    config = TrainConfig(lr=1.0, lr_schedule="linear", lr_end=0.1)
    assert lr_at(99, config, 10) == pytest.approx(0.1)


def params_with(*grads):
    params = [nn.Parameter(torch.zeros(len(g))) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = torch.tensor(g)
    return params


def test_clip_by_global_norm():
    params = params_with([3.0], [0.0, 4.0])
    params.append(nn.Parameter(torch.zeros(1)))  # no gradient yet
    assert clip_gradients(params, max_norm=1.0) == pytest.approx(5.0)
    torch.testing.assert_close(params[0].grad, torch.tensor([0.6]), atol=1e-5, rtol=0)
    torch.testing.assert_close(params[1].grad, torch.tensor([0.0, 0.8]), atol=1e-5, rtol=0)


def test_small_gradients_are_left_alone():
    params = params_with([0.3, 0.4])
    assert clip_gradients(iter(params), max_norm=1.0) == pytest.approx(0.5)
    assert params[0].grad.tolist() == torch.tensor([0.3, 0.4]).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_comes_back_as_inf(bad):
    params = params_with([bad], [1.0])
    assert clip_gradients(params, max_norm=1.0) == math.inf
    assert params[1].grad.item() == 1.0
