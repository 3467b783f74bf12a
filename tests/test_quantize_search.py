"""Block scales by search: against trying every scale there is, in float64."""

import pytest
import torch

from qerl.quantize import search
from qerl.quantize.search import SEARCHES, divisor_for, quantize_weight
from qerl_kernels import layout, quantize, reference

NORMAL = torch.arange(8, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
MAGNITUDES = torch.tensor(layout.E2M1_MAGNITUDES, dtype=torch.float64)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def weights(n=6, k=96, seed=0):
    """Normal weights with what goes wrong: a zero block, a tiny block, outliers, a flat block."""
    w = torch.randn(n, k, generator=rng(seed)) * 0.02
    w[0, :16] = 0
    w[1, :16] *= 1e-6
    w[2, 16:32] *= 3e-4
    w[3, 5] = 0.4
    w[4, 16:32] = 0.011
    return w


def block_errors(weight, g, importance):
    """Float64 [N, K/16, 119]: each block's weighted squared error under every normal scale."""
    blocks = weight.double().unflatten(1, (-1, 16))
    value = blocks.abs().unsqueeze(-2) * g.double() / NORMAL.unsqueeze(-1)
    near = (value.unsqueeze(-1) - MAGNITUDES).abs().amin(-1)  # the nearest of the eight
    miss = (near * NORMAL.unsqueeze(-1) / g.double()).square()
    if importance is not None:
        miss = miss * importance.double().view(1, -1, 1, 16)
    return miss.sum(-1)


def errors_of(weight, packed, importance):
    miss = (reference.dequantize(*packed) - weight.double()).square()
    if importance is not None:
        miss = miss * importance.double()
    return miss.unflatten(1, (-1, 16)).sum(-1)


IMPORTANCES = {
    "none": None,
    "mild": torch.rand(96, generator=rng(1)) + 0.5,
    "steep": torch.rand(96, generator=rng(2)) ** 16,
    "one column": torch.eye(96)[7],
}


@pytest.mark.parametrize("kind", IMPORTANCES)
def test_sweep_finds_the_best_of_all_scales(kind):
    importance = IMPORTANCES[kind]
    for seed in range(3):
        weight = weights(seed=seed)
        packed = quantize_weight(weight, "sweep", importance=importance)
        every = block_errors(weight, packed.global_scale, importance)
        found = errors_of(weight, packed, importance)
        # fp32 may take the other of two scales whose errors differ in the seventh digit
        torch.testing.assert_close(found, every.amin(-1), rtol=1e-5, atol=1e-16)


def test_scales_far_from_absmax_are_found():
    """The best scale may be half the absmax one, where an outlier's column carries no weight."""
    weight = torch.full((2, 32), 0.01)
    weight[0, 0] = 1.0  # gives the tensor its divisor
    weight[1] = torch.tensor([6.0, *[1.0, 0.5] * 7, 1.0] * 2) * 0.01
    weight[1, 16:] *= 1.2
    importance = torch.ones(32)
    importance[[0, 16]] = 1e-6
    plain = quantize_weight(weight, "sweep")
    weighted = quantize_weight(weight, "sweep", importance=importance)
    assert plain.scale[1, 0].float() > 2 * weighted.scale[1, 0].float()
    error = errors_of(weight, weighted, importance)[1, 0]
    assert error < errors_of(weight, plain, importance)[1, 0]


@pytest.mark.parametrize("kind", ["none", "mild"])
def test_four_over_six_takes_the_better_of_two(kind):
    importance = IMPORTANCES[kind]
    weight = weights()
    packed = quantize_weight(weight, "four-over-six", importance=importance)
    g = packed.global_scale
    peak = weight.unflatten(1, (-1, 16)).abs().amax(-1) * g
    two = torch.stack([peak / 6, peak / 4]).clamp(max=448.0)
    two = two.to(torch.float8_e4m3fn).float().clamp(min=2.0**-6)
    every = block_errors(weight, g, importance)
    where = torch.searchsorted(NORMAL, two.double().movedim(0, -1).contiguous())
    best = every.gather(-1, where).amin(-1)
    found = errors_of(weight, packed, importance)
    torch.testing.assert_close(found, best, rtol=1e-5, atol=1e-16)
    assert (packed.scale.float() == two[1]).any() and (packed.scale.float() == two[0]).any()


def test_four_over_six_by_hand():
    """±4 beside 3, 2 and 1 is exact under the larger scale; 6 beside them under the smaller."""
    weight = torch.zeros(2, 16)
    weight[0, :4] = torch.tensor([6.0, 3.0, 2.0, 1.0])
    weight[1, :4] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    g = torch.tensor([64.0])
    packed = quantize_weight(weight, "four-over-six", g)
    assert packed.scale.float().flatten().tolist() == [64.0, 64.0]
    assert torch.equal(quantize.dequantize(*packed), weight)
    six = quantize_weight(weight, "absmax", g)
    assert six.scale.float().flatten().tolist() == [64.0, 44.0]
    assert not torch.equal(quantize.dequantize(*six), weight)


def test_absmax_is_compressed_tensors_rounding():
    weight = torch.randn(9, 64, generator=rng())
    weight[0, :16] = 0
    ours, theirs = quantize_weight(weight, "absmax"), quantize.quantize_absmax(weight)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("how", SEARCHES)
def test_scales_are_normal_numbers_up_to_448(how):
    packed = quantize_weight(weights(), how)
    scale = packed.scale.float()
    assert scale.min() >= 2.0**-6
    assert 300 <= scale.max() <= 448
    assert scale[0, 0] == 0.125  # what compressed-tensors stores for a block of zeros
    assert quantize.dequantize(*packed)[0, :16].abs().max() == 0


def test_each_search_beats_the_one_before():
    weight = torch.randn(64, 256, generator=rng())
    found = [errors_of(weight, quantize_weight(weight, how), None) for how in SEARCHES]
    for worse, better in zip(found, found[1:], strict=False):
        assert (better <= worse * (1 + 1e-5)).all()
        assert better.sum() < 0.95 * worse.sum()


def test_importance_is_relative_and_nothing_at_all_means_absmax():
    weight, importance = weights(), IMPORTANCES["mild"]
    one = quantize_weight(weight, "sweep", importance=importance)
    for factor in (2.0**-60, 2.0**60):
        other = quantize_weight(weight, "sweep", importance=importance * factor)
        assert torch.equal(one.packed, other.packed)
    dead = quantize_weight(weight, "sweep", importance=torch.zeros(96))
    assert torch.equal(dead.packed, quantize_weight(weight, "absmax").packed)


@pytest.mark.parametrize("how", SEARCHES)
def test_pieces_types_and_strides_do_not_matter(how, monkeypatch):
    weight = torch.randn(40, 96, generator=rng()).bfloat16()
    whole = quantize_weight(weight, how, importance=IMPORTANCES["mild"])
    monkeypatch.setattr(search, "CHUNK", 300)  # three rows at a time
    for same in (weight, weight.float(), weight.double(), weight.T.contiguous().T):
        pieces = quantize_weight(same, how, importance=IMPORTANCES["mild"])
        assert torch.equal(whole.packed, pieces.packed)
        assert torch.equal(whole.scale.float(), pieces.scale.float())


def test_a_shared_divisor_is_used_and_not_aliased():
    a, b = torch.randn(4, 32, generator=rng()), 3 * torch.randn(4, 32, generator=rng(1))
    shared = divisor_for(a, b)
    assert shared.item() == pytest.approx(2688 / b.abs().max().item())
    packed = quantize_weight(a, "sweep", shared)
    assert torch.equal(packed.global_scale, shared) and packed.global_scale is not shared
    relative = (quantize.dequantize(*packed) - a).norm() / a.norm()
    assert relative < 0.1


def test_rounding_by_addition_is_the_table():
    x = torch.cat([torch.linspace(0, 9, 90_001), torch.tensor([0.25, 0.75, 1.75, 2.5, 3.5, 5.0])])
    expected = torch.tensor(layout.E2M1_VALUES)[quantize.encode(x).long()]
    assert torch.equal(search._round_e2m1(x), expected)


def test_bad_input_says_what():
    good = torch.ones(2, 32)
    with pytest.raises(ValueError, match=r"K a multiple of 16, found \(2, 24\)"):
        quantize_weight(torch.ones(2, 24), "sweep")
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = good.clone()
        bad[1, 3] = value
        with pytest.raises(ValueError, match="NaN or an infinity"):
            quantize_weight(bad, "sweep")
        with pytest.raises(ValueError, match="NaN or an infinity"):
            quantize_weight(bad, "absmax", torch.ones(1))
    with pytest.raises(ValueError, match=r"importance must be \[32\].*found \(16,\)"):
        quantize_weight(good, "sweep", importance=torch.ones(16))
    with pytest.raises(ValueError, match="finite and not negative"):
        quantize_weight(good, "sweep", importance=-torch.ones(32))
    with pytest.raises(ValueError, match="one of absmax, four-over-six, sweep, found 'gptq'"):
        quantize_weight(good, "gptq")
