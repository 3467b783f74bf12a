"""GPTQ on fixed scales: against the textbook's loop in float64."""

import pytest
import torch

from qerl.quantize import gptq
from qerl.quantize.gptq import gptq_round
from qerl.quantize.search import divisor_for, round_to, search_scales
from qerl_kernels import layout, quantize


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def correlated(tokens, k, seed=0):
    """Inputs with a few strong directions and columns of different size."""
    mixing = torch.randn(k // 4, k, generator=rng(seed)) / (k // 4) ** 0.5
    common = torch.randn(tokens, k // 4, generator=rng(seed + 1)) @ mixing
    own = 0.3 * torch.randn(tokens, k, generator=rng(seed + 2))
    return (common + own) * torch.linspace(0.2, 2, k)


def case(n=24, k=80, seed=0):
    weight = torch.randn(n, k, generator=rng(seed))
    x = correlated(4 * k, k, seed)
    g = divisor_for(weight)
    hessian = x.T @ x
    scale = search_scales(weight, "sweep", g, hessian.diagonal() / len(x))
    return weight, x, scale, g, hessian


def textbook(weight, scale, g, hessian, damping):
    """Optimal brain quantization in a fixed order: the inverse is updated column by column."""
    w, h = weight.double().clone(), hessian.double().clone()
    h.diagonal().add_(damping * h.diagonal().mean())
    order = torch.argsort(hessian.diagonal(), descending=True)
    inverse = torch.linalg.inv(h)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    table = torch.tensor(layout.E2M1_VALUES, dtype=torch.float64)
    for column in order.tolist():
        step = scale[:, column // 16].double() / g.double()
        codes[:, column] = quantize.encode(w[:, column] / step)
        miss = w[:, column] - table[codes[:, column].long()] * step
        w -= torch.outer(miss / inverse[column, column], inverse[column])
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return codes


@pytest.mark.parametrize("k", [16, 80, 272])  # less than, not a multiple of, and beyond 128
def test_codes_are_those_of_the_textbook(k):
    weight, _, scale, g, hessian = case(k=k)
    found = layout.unpack(gptq_round(weight, scale, g, hessian).packed)
    expected = textbook(weight, scale, g, hessian, gptq.DAMPING)
    # A value a rounding error away from an edge goes the other way in fp32, and its row then
    # drifts: rare, never systematic.
    assert (found == expected).float().mean() > 0.99
    assert (found != round_codes(weight, scale, g)).float().mean() > 0.05 or k == 16


def round_codes(weight, scale, g):
    return layout.unpack(round_to(weight, scale, g).packed)


def test_outputs_are_nearer_than_with_plain_rounding():
    weight, x, scale, g, hessian = case(k=256)
    new = correlated(500, 256, seed=0)[-300:]  # of the same kind
    plain, gptqed = round_to(weight, scale, g), gptq_round(weight, scale, g, hessian)
    for inputs in (x, new):
        errors = [
            (inputs @ (quantize.dequantize(*p) - weight).T).square().sum() for p in (plain, gptqed)
        ]
        assert errors[1] < 0.6 * errors[0]
    # The price: the weights themselves are further off.
    far = [(quantize.dequantize(*p) - weight).norm() for p in (plain, gptqed)]
    assert far[1] > far[0]


def test_scales_and_inputs_are_left_alone():
    weight, _, scale, g, hessian = case()
    before = [t.clone() for t in (weight, scale.float(), g, hessian)]
    packed = gptq_round(weight, scale, g, hessian)
    assert torch.equal(packed.scale.float(), scale.float())
    assert torch.equal(packed.global_scale, g)
    for old, new in zip(before, (weight, scale.float(), g, hessian), strict=True):
        assert torch.equal(old, new)


def test_uncorrelated_inputs_round_to_nearest():
    weight, _, scale, g, hessian = case()
    diagonal = torch.diag(hessian.diagonal())
    assert torch.equal(
        gptq_round(weight, scale, g, diagonal).packed, round_to(weight, scale, g).packed
    )


def test_an_input_that_is_always_zero_rounds_to_nearest():
    weight, x, scale, g, _ = case()
    x[:, [3, 40]] = 0
    codes = layout.unpack(gptq_round(weight, scale, g, x.T @ x).packed)
    assert torch.equal(codes[:, [3, 40]], round_codes(weight, scale, g)[:, [3, 40]])
    zeros = gptq_round(weight, scale, g, torch.zeros(80, 80))
    assert torch.equal(zeros.packed, round_to(weight, scale, g).packed)


def test_the_factor_is_that_of_the_inverse():
    _, _, _, _, hessian = case()
    order = torch.randperm(80, generator=rng())
    factor = gptq._inverse_factor(hessian, order, 0.01)
    damped = hessian.double()[order][:, order]
    damped.diagonal().add_(0.01 * damped.diagonal().mean())
    assert torch.equal(factor, factor.triu())
    product = factor.double().T @ factor.double() @ damped
    torch.testing.assert_close(product, torch.eye(80).double(), rtol=0, atol=1e-3)


def test_fewer_tokens_than_columns_is_enough():
    weight, x, scale, g, _ = case()
    few = x[:10]
    packed = gptq_round(weight, scale, g, few.T @ few)
    error = (few @ (quantize.dequantize(*packed) - weight).T).norm()
    assert (
        error < 0.5 * (few @ (quantize.dequantize(*round_to(weight, scale, g)) - weight).T).norm()
    )


def test_bad_hessians_say_what():
    weight, _, scale, g, hessian = case()
    with pytest.raises(ValueError, match=r"hessian must be \[80, 80\], found \(16, 16\)"):
        gptq_round(weight, scale, g, torch.eye(16))
    with pytest.raises(ValueError, match="not positive definite"):
        gptq_round(weight, scale, g, hessian - 2 * torch.diag(hessian.diagonal() / 2 + 1))
    hessian[2, 2] = float("nan")
    with pytest.raises(ValueError, match="NaN or an infinity"):
        gptq_round(weight, scale, g, hessian)
