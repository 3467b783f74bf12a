"""The NVFP4 product against float64, its gradients, and the cache behind the CPU path."""

import gc

import pytest
import torch
from torch.library import opcheck

from qerl_kernels import cpu, layout, ops, quantize, reference

# One output rounding plus fp32 accumulation, relative to Σ|x·w|.
TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 2e-6,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11 * 1.01,
}


@pytest.fixture(autouse=True)
def empty_cache():
    ops.clear_cache()
    yield
    ops.clear_cache()


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def weight(n=48, k=64, seed=0):
    return quantize.quantize_absmax(torch.randn(n, k, generator=rng(seed)) * 0.05)


def close(found, truth, scale_of_sum, dtype):
    bound = TOLERANCE[dtype] * scale_of_sum + 1e-30
    assert found.dtype == dtype
    assert ((found.double() - truth).abs() <= bound).all()


def test_pack_puts_even_k_in_the_low_nibble():
    codes = torch.tensor([[1, 15, 0, 8]], dtype=torch.uint8)
    assert layout.pack(codes).tolist() == [[0xF1, 0x80]]
    assert torch.equal(layout.unpack(layout.pack(codes)), codes)
    every = torch.arange(256, dtype=torch.uint8)[None]
    assert torch.equal(layout.pack(layout.unpack(every)), every)
    with pytest.raises(ValueError, match="even last dimension"):
        layout.pack(codes[:, :3])


def test_product_by_hand():
    """Codes 1, 3 (0.5, 1.5) under scale 2 and g = 4: weights 0.25 and 0.75."""
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 0], codes[0, 1] = 1, 3
    scale = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    w = (layout.pack(codes), scale, torch.tensor([4.0]))
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1], x[0, 2] = 8.0, 4.0, 100.0
    assert ops.nvfp4_matmul(x, *w, torch.tensor([10.0])).item() == 15.0
    assert ops.nvfp4_matmul_t(torch.tensor([[2.0]]), *w, 16)[0, :3].tolist() == [0.5, 1.5, 0.0]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "rows, n, k", [(1, 48, 64), (15, 33, 48), (17, 64, 16), (64, 96, 576), (3, 40, 1536)]
)
def test_forward_and_backward_against_float64(rows, n, k, dtype):
    w = weight(n, k)
    dense = reference.dequantize(*w)
    x = torch.randn(rows, k, generator=rng(1)).to(dtype).requires_grad_()
    bias = torch.randn(n, generator=rng(2)).to(dtype)
    y = ops.nvfp4_matmul(x, *w, bias)
    sums = x.detach().double().abs() @ dense.abs().T + bias.double().abs()
    close(y.detach(), reference.matmul(x.detach(), *w, bias), sums, dtype)
    dy = torch.randn(rows, n, generator=rng(3)).to(dtype)
    y.backward(dy)
    close(x.grad, dy.double() @ dense, dy.double().abs() @ dense.abs(), dtype)


def test_float16_does_not_overflow_before_the_global_scale():
    """Partial sums of x·v·s pass 65504 here; the finished product does not."""
    w = quantize.quantize_absmax(torch.full((16, 256), 0.01))
    y = ops.nvfp4_matmul(torch.ones(2, 256, dtype=torch.float16), *w)
    assert torch.allclose(y, torch.full_like(y, 2.56), rtol=2e-3)


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (0, 64), (2, 0, 64)])
def test_leading_shapes(shape):
    w = weight()
    x = torch.randn(shape, generator=rng())
    y = ops.nvfp4_matmul(x, *w)
    assert y.shape == (*shape[:-1], 48)
    torch.testing.assert_close(y.double(), reference.matmul(x, *w), rtol=1e-4, atol=1e-5)
    strided = torch.randn(64, 5, generator=rng()).T
    torch.testing.assert_close(
        ops.nvfp4_matmul(strided, *w), ops.nvfp4_matmul(strided.contiguous(), *w)
    )


def test_derivatives_of_first_and_second_order():
    w = weight(8, 16)
    x = torch.randn(3, 16, dtype=torch.float64, generator=rng(), requires_grad=True)
    bias = torch.randn(8, dtype=torch.float64, generator=rng(), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, b: ops.nvfp4_matmul(x, *w, b), (x, bias))
    assert torch.autograd.gradgradcheck(lambda x: ops.nvfp4_matmul(x, *w), (x,))
    vector = torch.randn(16, dtype=torch.float64, generator=rng(), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, b: ops.nvfp4_matmul(x, *w, b), (vector, bias))


def test_backward_keeps_neither_x_nor_a_wide_weight():
    w = weight()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.nvfp4_matmul(torch.randn(4, 64, requires_grad=True), *w)
    assert saved == []


def test_opcheck():
    packed, scale, g = weight()
    # opcheck compares arguments before and after, which PyTorch cannot do for 8-bit floats on
    # CPU; the operator takes the same bytes as uint8.
    w = (packed, scale.view(torch.uint8), g)
    x = torch.randn(5, 64, requires_grad=True)
    opcheck(torch.ops.qerl.nvfp4_matmul.default, (x, *w, torch.randn(48, requires_grad=True)))
    opcheck(torch.ops.qerl.nvfp4_matmul.default, (torch.randn(2, 3, 64), *w, None))
    opcheck(torch.ops.qerl.nvfp4_matmul_t.default, (torch.randn(5, 48, requires_grad=True), *w, 64))
    assert torch.equal(ops.nvfp4_matmul(x, *w), ops.nvfp4_matmul(x, packed, scale, g))


def test_meta_tensors_give_shapes():
    w = tuple(t.to("meta") for t in weight())
    x = torch.empty(2, 3, 64, dtype=torch.bfloat16, device="meta")
    y = ops.nvfp4_matmul(x, *w)
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, 48), torch.bfloat16, "meta")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_does_not_fit_is_refused(device):
    packed, scale, g = (t.to(device) for t in weight())
    x = torch.zeros(2, 64, device=device)
    with pytest.raises(
        ValueError, match="takes 64 features, found 48|has 48 features, the weight takes 64"
    ):
        ops.nvfp4_matmul(x[:, :48], packed, scale, g)
    with pytest.raises(ValueError, match="packed must be uint8"):
        ops.nvfp4_matmul(x, packed.short(), scale, g)
    with pytest.raises(ValueError, match="scale must be float8_e4m3fn"):
        ops.nvfp4_matmul(x, packed, scale[:, :2], g)
    with pytest.raises(ValueError, match="global_scale must be one float32"):
        ops.nvfp4_matmul(x, packed, scale, g.repeat(2))
    with pytest.raises(ValueError, match="int64"):
        ops.nvfp4_matmul(x.long(), packed, scale, g)
    with pytest.raises(ValueError, match=r"bias must be \[48\]"):
        ops.nvfp4_matmul(x, packed, scale, g, torch.zeros(1, device=device))


# --- the cache -----------------------------------------------------------------------------------


def test_cache_holds_one_copy_a_dtype_and_dies_with_the_weight():
    w = weight()
    ops.nvfp4_matmul(torch.zeros(1, 64), *w)
    ops.nvfp4_matmul(torch.zeros(9, 64), *w)
    ops.nvfp4_matmul_t(torch.zeros(1, 48), *w, 64)
    assert ops.cache_bytes() == 48 * 64 * 4
    ops.nvfp4_matmul(torch.zeros(1, 64, dtype=torch.bfloat16), *w)
    assert ops.cache_bytes() == 48 * 64 * (4 + 2)
    del w
    gc.collect()
    assert ops.cache_bytes() == 0


def test_changes_in_place_are_seen():
    packed, scale, g = weight()
    x = torch.randn(3, 64, generator=rng())
    ops.nvfp4_matmul(x, packed, scale, g)
    for changed in weight(seed=5), weight(seed=6):
        packed.copy_(changed[0])
        scale.copy_(changed[1])
        g.copy_(changed[2])
        torch.testing.assert_close(
            ops.nvfp4_matmul(x, packed, scale, g).double(),
            reference.matmul(x, *changed),
            rtol=1e-4,
            atol=1e-5,
        )
    g.mul_(2)
    torch.testing.assert_close(
        ops.nvfp4_matmul(x, packed, scale, g).double(),
        reference.matmul(x, packed, scale, g),
        rtol=1e-4,
        atol=1e-5,
    )
    assert ops.cache_bytes() == 48 * 64 * 4


def test_another_scale_for_the_same_codes_is_seen():
    packed, scale, g = weight()
    x = torch.randn(3, 64, generator=rng())
    first = ops.nvfp4_matmul(x, packed, scale, g)
    doubled = (scale.float() / 2).to(torch.float8_e4m3fn)
    assert torch.allclose(ops.nvfp4_matmul(x, packed, doubled, g), first / 2, rtol=0.2, atol=0.05)
    assert torch.equal(ops.nvfp4_matmul(x, packed, scale, g), first)


def test_a_copy_made_while_sampling_serves_training():
    w = weight()
    with torch.inference_mode():
        sampled = ops.nvfp4_matmul(torch.ones(2, 64), *w)
    held = ops.cache_bytes()
    x = torch.ones(2, 64, requires_grad=True)
    trained = ops.nvfp4_matmul(x, *w)
    trained.sum().backward()
    assert torch.equal(sampled, trained.detach()) and ops.cache_bytes() == held
    assert torch.isfinite(x.grad).all()


def test_checkpointing_recomputes_through_the_same_copy():
    w = weight()
    x = torch.randn(2, 64, generator=rng(), requires_grad=True)

    def layer(x):
        return ops.nvfp4_matmul(x, *w).relu()

    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    checkpointed, x.grad = x.grad, None
    layer(x).sum().backward()
    assert torch.equal(checkpointed, x.grad)
    assert ops.cache_bytes() == 48 * 64 * 4


def test_a_changed_copy_is_found_and_a_stale_one_is_not_meant():
    w, other = weight(), weight(seed=5)
    for dtype in (torch.float32, torch.bfloat16):
        ops.nvfp4_matmul(torch.zeros(1, 64, dtype=dtype), *w)
        ops.nvfp4_matmul(torch.zeros(1, 64, dtype=dtype), *other)
    assert ops.verify_cache() == []
    copy = cpu._cache[w[0]].weights[torch.bfloat16]
    zero = (copy == 0).nonzero()[0]
    copy[tuple(zero)] *= -1  # the sign of a zero: equal as a number, not as bits
    (found,) = ops.verify_cache()
    assert found is w[0]
    w[0].copy_(other[0])  # the next product unpacks anew
    assert ops.verify_cache() == []
