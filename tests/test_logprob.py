"""Log-probabilities without logits: values, gradients, and what is never allocated."""

import math

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from qerl_kernels import ops, reference


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def problem(tokens=13, hidden=24, vocab=50, dtype=torch.float64):
    h = torch.randn(tokens, hidden, generator=rng(1), dtype=torch.float64)
    w = torch.randn(vocab, hidden, generator=rng(2), dtype=torch.float64)
    targets = torch.randint(0, vocab, (tokens,), generator=rng(3))
    return h.to(dtype), w.to(dtype), targets


def test_two_tokens_by_hand():
    """Logits (ln 3, 0): p = (3/4, 1/4), and d log p₀/dh = w₀ − p₀w₀ − p₁w₁ = (1/4)·w₀."""
    h = torch.tensor([[1.0]], requires_grad=True)
    w = torch.tensor([[math.log(3.0)], [0.0]])
    logp, entropy = ops.linear_logprob(h, w, torch.tensor([0]))
    assert logp.item() == pytest.approx(math.log(0.75), rel=1e-6)
    assert entropy.item() == pytest.approx(
        -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), rel=1e-6
    )
    logp.sum().backward()
    assert h.grad.item() == pytest.approx(math.log(3.0) / 4, rel=1e-6)


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("inv_temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 5, 13, 256])
def test_values_and_gradients_in_float64(softcap, inv_temperature, chunk):
    h, w, targets = problem()
    h.requires_grad_()
    logp, entropy = ops.linear_logprob(h, w, targets, inv_temperature, softcap, chunk)
    true_logp, true_entropy = reference.linear_logprob(h, w, targets, inv_temperature, softcap)
    torch.testing.assert_close(logp, true_logp, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, true_entropy, rtol=1e-12, atol=1e-12)
    g = torch.randn(13, generator=rng(4), dtype=torch.float64)
    (found,) = torch.autograd.grad(logp, h, g)
    (truth,) = torch.autograd.grad(true_logp, h, g)
    torch.testing.assert_close(found, truth, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_gradcheck(softcap):
    h, w, targets = problem(tokens=3, hidden=5, vocab=11)
    h.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h: ops.linear_logprob(h, w, targets, 0.8, softcap, 2)[0], (h,)
    )


@pytest.mark.parametrize(
    "dtype, atol", [(torch.float32, 2e-5), (torch.bfloat16, 1e-4), (torch.float16, 1e-4)]
)
def test_sixteen_bit_inputs_are_summed_in_fp32(dtype, atol):
    """The head is wider than one tile; the inputs' own rounding is shared with the truth."""
    h, w, targets = problem(tokens=6, hidden=16, vocab=9001, dtype=dtype)
    h.requires_grad_()
    logp, entropy = ops.linear_logprob(h, w, targets, chunk=4)
    wide = h.detach().double().requires_grad_()
    true_logp, true_entropy = reference.linear_logprob(wide, w, targets)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp.double(), true_logp, rtol=0, atol=atol)
    torch.testing.assert_close(entropy.double(), true_entropy, rtol=0, atol=atol)
    logp.sum().backward()
    true_logp.sum().backward()
    assert h.grad.dtype == dtype
    rounding = torch.finfo(dtype).eps * true_logp.abs().max().item()
    torch.testing.assert_close(h.grad.double(), wide.grad, rtol=rounding, atol=atol)


def test_large_logits_stay_finite():
    h, w, targets = problem(dtype=torch.float32)
    h = (h * 1e4).requires_grad_()
    logp, entropy = ops.linear_logprob(h, w, targets)
    logp.sum().backward()
    assert torch.isfinite(logp).all() and torch.isfinite(h.grad).all()
    assert (entropy >= 0).all() and torch.isfinite(entropy).all()


def test_entropy_and_targets_carry_no_gradient():
    h, w, targets = problem(dtype=torch.float32)
    logp, entropy = ops.linear_logprob(h.requires_grad_(), w, targets)
    assert logp.requires_grad and not entropy.requires_grad
    with torch.no_grad():
        silent, _ = ops.linear_logprob(h, w, targets)
    assert not silent.requires_grad
    torch.testing.assert_close(silent, logp.detach(), rtol=0, atol=0)


class _Largest(TorchDispatchMode):
    """Remembers the most elements any operator's result had."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_grows_with_tokens_times_vocabulary():
    from qerl_kernels.logprob import linear_logprob_forward

    h, w, targets = problem(tokens=200, hidden=8, vocab=500, dtype=torch.float32)
    with _Largest() as seen:
        _, _, jacobian = linear_logprob_forward(h, w, targets, 1.0, 5.0, 10, True)
    assert seen.elements == 10 * 500  # one chunk of logits; in full it would be 200 · 500
    assert jacobian.shape == (200, 8)


def test_only_the_jacobian_is_kept_for_backward():
    h, w, targets = problem(dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.linear_logprob(h.requires_grad_(), w, targets)
    assert [tuple(t.shape) for t in saved] == [(13, 24)]


def test_no_tokens():
    h, w, targets = problem(tokens=0, dtype=torch.float32)
    logp, entropy = ops.linear_logprob(h.requires_grad_(), w, targets)
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert h.grad.shape == (0, 24)


def test_opcheck():
    h, w, targets = problem(dtype=torch.float32)
    op = torch.ops.qerl.linear_logprob.default
    opcheck(op, (h.requires_grad_(), w, targets, 0.7, 5.0, 4, True))
    opcheck(op, (h.detach(), w.bfloat16(), targets, 1.0, 0.0, 4, False))


def test_what_does_not_fit_is_refused():
    h, w, targets = problem()
    with pytest.raises(ValueError, match=r"hidden must be \[T, H\]"):
        ops.linear_logprob(h[:, :3], w, targets)
    with pytest.raises(ValueError, match=r"targets must be int64 \[13\]"):
        ops.linear_logprob(h, w, targets.int())
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        ops.linear_logprob(h, w, targets, chunk=0)
