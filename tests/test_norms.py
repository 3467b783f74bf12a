import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from qerl.errors import QerlError
from qerl.model.norms import NoisyRMSNorm, wrap_norms
from qerl_kernels.ops import interpreting

D = 8
FAMILIES = [
    pytest.param(LlamaRMSNorm, 0.0, id="w"),
    pytest.param(Gemma3RMSNorm, 1.0, id="1+w"),
    pytest.param(nn.RMSNorm, 0.0, id="torch"),
]


def make(cls, dtype=torch.float32, seed=0):
    norm = cls(D, eps=1e-5).to(dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    norm.weight.copy_(torch.randn(D, generator=generator))
    return norm


def data(dtype=torch.float32):
    return torch.randn(2, 3, D, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(("cls", "offset"), FAMILIES)
def test_family_is_found_by_running_the_norm(cls, offset):
    noisy = NoisyRMSNorm(make(cls))
    assert (noisy.offset, noisy.eps) == (offset, 1e-5)
    torch.testing.assert_close(noisy.effective_weight(), noisy.weight + offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cls", "offset"), FAMILIES)
def test_without_noise_bit_identical(cls, offset, dtype):
    original = make(cls, dtype)
    expected = original(data(dtype))
    noisy = NoisyRMSNorm(original)
    assert torch.equal(noisy(data(dtype)), expected)
    noisy.set_noise(torch.ones(D))
    assert not torch.equal(noisy(data(dtype)), expected)
    noisy.set_noise(None)
    assert torch.equal(noisy(data(dtype)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("cls", "offset"), FAMILIES)
def test_kernel_clean_and_noisy(cls, offset, dtype):
    """What a GPU runs, interpreted: on small integers, where sums are exact, the same bits."""
    noisy = NoisyRMSNorm(make(cls, dtype))
    x = torch.randint(-9, 10, (2, 3, D), generator=torch.Generator().manual_seed(1)).to(dtype)
    z = 0.1 * torch.arange(D).float()
    clean, moved = noisy(x), None
    for noise in (None, z):
        noisy.set_noise(noise)
        on_cpu = noisy(x)
        noisy._original.forward = None  # the kernel does not need it
        with interpreting():
            assert torch.equal(noisy(x), on_cpu)
        del noisy._original.forward
        moved = on_cpu
    assert not torch.equal(moved, clean)


@pytest.mark.parametrize(("cls", "offset"), FAMILIES)
def test_noise_against_float64(cls, offset):
    noisy, x, z = NoisyRMSNorm(make(cls)), data(), 0.1 * torch.arange(D).float()
    noisy.set_noise(z)
    x64 = x.double()
    unit = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = (offset + noisy.weight.double() + z.double()) * unit
    torch.testing.assert_close(noisy(x).double(), expected, rtol=1e-6, atol=1e-6)


def test_by_hand():
    norm = LlamaRMSNorm(2, eps=0.0)
    noisy = NoisyRMSNorm(norm.requires_grad_(False))
    noisy.set_noise(torch.tensor([0.5, -1.0]))
    # x / rms(x) = [3, 4] / sqrt(12.5), weights 1 + [0.5, -1]
    expected = torch.tensor([4.5 / 12.5**0.5, 0.0])
    torch.testing.assert_close(noisy(torch.tensor([3.0, 4.0])), expected)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [LlamaRMSNorm, Gemma3RMSNorm])
def test_output_type_is_the_original_s(cls, w_dtype, x_dtype):
    """Llama's norm returns the wider of the two types, Gemma's always the input's."""
    noisy = NoisyRMSNorm(make(cls, w_dtype))
    clean = noisy(data(x_dtype)).dtype
    noisy.set_noise(torch.ones(D))
    assert noisy(data(x_dtype)).dtype == clean


def test_noise_below_bfloat16_resolution_still_acts():
    """|w| = 1 and z = 1e-4: adding in bfloat16 would change nothing."""
    norm = LlamaRMSNorm(D).bfloat16().requires_grad_(False)
    assert torch.equal(norm.weight + torch.tensor(1e-4, dtype=torch.bfloat16), norm.weight)
    noisy, x = NoisyRMSNorm(norm), data()
    noisy.set_noise(torch.zeros(D))
    without = noisy(x)
    noisy.set_noise(torch.full((D,), 1e-4))
    torch.testing.assert_close(noisy(x) / without, torch.full_like(x, 1.0001), rtol=1e-6, atol=0)


def test_gradient_flows_to_the_input_through_the_noise():
    noisy = NoisyRMSNorm(make(LlamaRMSNorm))
    z = 0.3 * torch.ones(D)
    noisy.set_noise(z)
    x, y = data().requires_grad_(), data().requires_grad_()
    noisy(x).square().sum().backward()
    F.rms_norm(y, (D,), noisy.weight + z, 1e-5).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def model():
    return nn.ModuleDict({"block": nn.ModuleDict({"norm": make(LlamaRMSNorm)})})


def test_wrapping_keeps_names_and_parameter_objects():
    m = model()
    weight, keys = m["block"]["norm"].weight, list(m.state_dict())
    norms = wrap_norms(m, ["block.norm"])
    assert m.get_submodule("block.norm") is norms["block.norm"]
    assert norms["block.norm"].weight is weight
    assert list(m.state_dict()) == keys == ["block.norm.weight"]
    assert wrap_norms(m, ["block.norm"]) == norms  # again: the same objects


def test_original_and_stand_in_follow_a_replaced_weight():
    m = model()
    norm = wrap_norms(m, ["block.norm"])["block.norm"]
    norm.weight = nn.Parameter(torch.full((D,), 2.0), requires_grad=False)
    torch.testing.assert_close(norm(data()), F.rms_norm(data(), (D,), norm.weight, 1e-5))
    norm.bfloat16()
    assert norm(data(torch.bfloat16)).dtype == torch.bfloat16


def test_a_copy_is_independent():
    norm = NoisyRMSNorm(make(LlamaRMSNorm))
    twin = copy.deepcopy(norm)
    twin.weight.zero_()
    assert twin(data()).abs().sum() == 0 and norm(data()).abs().sum() > 0


def test_unknown_arithmetic_is_refused_and_nothing_is_replaced():
    m = model()
    m["other"] = nn.LayerNorm(D, bias=False)
    kept = m["block"]["norm"]
    with pytest.raises(QerlError, match=r"noise\.schedule: other \(LayerNorm\) is not an RMSNorm"):
        wrap_norms(m, ["block.norm", "other"])
    assert m["block"]["norm"] is kept
