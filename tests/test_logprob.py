"""Log-probabilities without logits: values, gradients, and what is never allocated."""

import math

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from qerl_kernels import logprob, ops, reference
from qerl_kernels.ops.logprob import linear_logprob_topk


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


@pytest.fixture(params=[16, 50, 2048], ids=["3 tiles and 2 rows", "one tile", "a larger tile"])
def vocab_tile(request, monkeypatch):
    monkeypatch.setattr(logprob, "_VOCAB_TILE", request.param)


@pytest.mark.parametrize("logit_scale", [1.0, 0.25])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("inv_temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.usefixtures("vocab_tile")
def test_values_and_gradients_in_float64(logit_scale, softcap, inv_temperature, chunk):
    h, w, targets = problem()
    targets[:4] = torch.tensor([0, 15, 16, 49])  # edges of the tiles
    h.requires_grad_()
    logp, entropy, mass = linear_logprob_topk(
        h, w, targets, 7, inv_temperature, softcap, chunk, logit_scale=logit_scale
    )
    true_logp, true_entropy, true_mass = reference.linear_logprob(
        h, w, targets, inv_temperature, softcap, logit_scale, 7
    )
    torch.testing.assert_close(mass, true_mass, rtol=1e-12, atol=0)
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
        lambda h: ops.linear_logprob(h, w, targets, 0.8, softcap, 2, logit_scale=1.7)[0], (h,)
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
    true_logp, true_entropy, _ = reference.linear_logprob(wide, w, targets)
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
    """Remembers the bytes of the largest storage that an operator made."""

    def __init__(self, *inputs):
        super().__init__()
        self.given = {x.untyped_storage().data_ptr() for x in inputs}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.given:
                    self.bytes = max(self.bytes, storage.nbytes())
        return result


@pytest.mark.parametrize("tokens, vocab", [(100, 500), (800, 500), (100, 4000)])
def test_extra_memory_grows_with_neither_tokens_nor_vocabulary(tokens, vocab, monkeypatch):
    monkeypatch.setattr(logprob, "_VOCAB_TILE", 300)
    h, w, targets = problem(tokens, 8, vocab, torch.float32)
    with _Largest(h, w, targets) as seen:
        logprob.linear_logprob_forward(h, w, targets, 1.0, 5.0, 1.0, 20, 50, True)
    # Logits and probabilities of a tile in fp32; the largest output, the Jacobian, is smaller.
    assert seen.bytes == 2 * 50 * 300 * 4 > tokens * 8 * 4


@pytest.mark.parametrize("top_k, mass", [(0, None), (1, 0.25), (2, 0.5), (3, 0.75), (5, 1.0)])
def test_mass_of_the_likeliest_tokens_with_ties(top_k, mass, monkeypatch):
    """Probabilities (1/4, 1/8, 1/4, 1/8, 1/4): any two of the three tied ones make a half."""
    monkeypatch.setattr(logprob, "_VOCAB_TILE", 2)
    w = torch.tensor([2.0, 1.0, 2.0, 1.0, 2.0]).log()[:, None]
    _, _, found = linear_logprob_topk(torch.ones(1, 1), w, torch.tensor([3]), top_k)
    assert found.shape == (1 if top_k else 0,)
    assert not top_k or found.item() == pytest.approx(mass, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_its_own_is_bit_for_bit_a_row_of_a_batch(dtype):
    h, w, targets = problem(17, 24, 4099, dtype)
    args = (1.0, 5.0, 0.7, 9, None, True)
    with ops.batch_invariant():
        batch = logprob.linear_logprob_forward(h, w, targets, *args)
        for i in range(17):
            one = logprob.linear_logprob_forward(h[i : i + 1], w, targets[i : i + 1], *args)
            assert all(torch.equal(a, b[i : i + 1]) for a, b in zip(one, batch, strict=True))


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
    opcheck(op, (h.requires_grad_(), w, targets, 0.7, 5.0, 1.1, 3, 4, True))
    opcheck(op, (h.detach(), w.bfloat16(), targets, 1.0, 0.0, 1.0, 0, None, False))


def test_meta_tensors():
    h, w, targets = (x.to("meta") for x in problem(dtype=torch.bfloat16))
    logp, entropy, mass = linear_logprob_topk(h.requires_grad_(), w, targets, 3)
    assert [(x.shape, x.dtype) for x in (logp, entropy, mass)] == [((13,), torch.float32)] * 3
    logp.sum().backward()
    assert h.grad.shape == h.shape and h.grad.dtype == torch.bfloat16


def test_compiles_whole():
    h, w, targets = problem(dtype=torch.float32)
    h.requires_grad_()

    def loss(h):
        logp, entropy, mass = linear_logprob_topk(h, w, targets, 3, 0.7, 5.0)
        return (logp * entropy.exp()).sum() + mass.sum()

    expected = loss(h)
    (true_grad,) = torch.autograd.grad(expected, h)
    found = torch.compile(loss, fullgraph=True, backend="aot_eager")(h)
    (grad,) = torch.autograd.grad(found, h)
    assert torch.equal(found, expected) and torch.equal(grad, true_grad)


def test_what_does_not_fit_is_refused():
    h, w, targets = problem()
    with pytest.raises(ValueError, match=r"hidden must be \[T, H\]"):
        ops.linear_logprob(h[:, :3], w, targets)
    with pytest.raises(ValueError, match=r"targets must be int64 \[13\]"):
        ops.linear_logprob(h, w, targets.int())
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        ops.linear_logprob(h, w, targets, chunk=0)
    with pytest.raises(ValueError, match="softcap must be positive"):
        ops.linear_logprob(h, w, targets, softcap=-1.0)
    with pytest.raises(ValueError, match="top_k must be 0 to 50, found 51"):
        linear_logprob_topk(h, w, targets, 51)
    for wrong in (-1, 50):
        targets[3] = wrong
        with pytest.raises(ValueError, match="targets must be ids from 0 to 49, found"):
            ops.linear_logprob(h, w, targets)


def test_no_gradient_without_the_jacobian():
    h, w, targets = problem(dtype=torch.float32)
    op = torch.ops.qerl.linear_logprob.default
    logp, *_ = op(h.requires_grad_(), w, targets, 1.0, 0.0, 1.0, 0, None, False)
    with pytest.raises(ValueError, match="without its Jacobian"):
        logp.sum().backward()
