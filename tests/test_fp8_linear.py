"""The frozen FP8 layer: what it multiplies by, its gradients, an adapter on it."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from published import compress
from torch import nn

from qerl.model.fp8 import FP8Linear
from qerl.model.linear import LoraLinear
from qerl_kernels import reference


def fp8_layer(preset="FP8_DYNAMIC", bias=True):
    torch.manual_seed(0)
    parts = compress(torch.randn(24, 32), preset)
    layer = FP8Linear(
        parts["weight"], parts["weight_scale"], torch.randn(24).bfloat16() if bias else None
    )
    return layer, parts


@pytest.mark.parametrize("preset", ["FP8", "FP8_DYNAMIC"])
def test_fp8_layer_multiplies_by_what_is_stored(preset):
    layer, parts = fp8_layer(preset)
    x = torch.randn(2, 3, 32).bfloat16().requires_grad_()
    y = layer(x)
    truth = reference.fp8_matmul(
        x.detach(), parts["weight"], parts["weight_scale"].float(), layer.bias
    )
    torch.testing.assert_close(y.double(), truth, rtol=2**-8, atol=1e-5)
    y.backward(dy := torch.randn_like(y))
    dx = reference.fp8_matmul_t(dy, parts["weight"], parts["weight_scale"].float())
    torch.testing.assert_close(x.grad.double(), dx, rtol=2**-8, atol=1e-5)
    assert [p.requires_grad for p in layer.parameters()] == [False, False]


def test_fp8_layer_takes_a_scale_without_dimensions_and_keeps_its_bytes():
    layer = FP8Linear(torch.ones(16, 32).to(torch.float8_e4m3fn), torch.tensor(0.5))
    assert layer.weight_scale.shape == (1,)
    assert layer(torch.ones(32).bfloat16()).tolist() == [16.0] * 16
    before = layer.weight.clone()
    assert torch.equal(layer.to(torch.bfloat16).weight, before)  # a float weight would be cast


def test_adapter_on_an_fp8_layer_is_pefts(tmp_path):
    layer, parts = fp8_layer(bias=False)
    model = nn.Sequential(layer)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["0"], init_lora_weights=False)
    config._register_custom_module({FP8Linear: LoraLinear})
    with pytest.warns(UserWarning, match="Unsupported layer type"):  # of PEFT's own, it means
        wrapped = get_peft_model(model, config)
    adapted = wrapped.base_model.model[0]
    assert isinstance(adapted, LoraLinear)
    a, b = (part["default"].weight for part in (adapted.lora_A, adapted.lora_B))
    assert a.dtype == b.dtype == torch.float32 and a.requires_grad
    x = torch.randn(5, 32, requires_grad=True)
    y = wrapped(x)
    weight = parts["weight"].float() * parts["weight_scale"].float()
    torch.testing.assert_close(y, x @ (weight + 2 * b @ a).T, rtol=1e-5, atol=1e-4)
    y.sum().backward()
    dx = torch.ones(5, 24) @ (weight + 2 * b @ a)
    torch.testing.assert_close(x.grad, dx, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(a.grad, 2 * b.sum(0)[:, None] * x.sum(0)[None], rtol=1e-4, atol=1e-4)
    with wrapped.disable_adapter():
        torch.testing.assert_close(wrapped(x), x @ weight.T, rtol=1e-5, atol=1e-4)
