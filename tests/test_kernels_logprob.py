"""The Triton kernels of `linear_logprob`, interpreted: against float64, and bit for bit."""

import numpy as np
import pytest
import torch

from qerl_kernels import launch, ops, reference
from qerl_kernels import logprob_triton as kernels
from qerl_kernels.logprob import linear_logprob_forward

# Relative rounding of a probability. The interpreter truncates to bfloat16, a GPU rounds.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
EPS = 2.0**-23


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Two splits to a vocabulary chunk, so that a few thousand rows are several chunks."""
    monkeypatch.setattr(kernels, "_WIDTH", 1024)
    monkeypatch.setattr(kernels, "_SPAN", 512)


def problem(tokens, hidden, vocab, dtype=torch.bfloat16, seed=0, spread=1.0):
    rng = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, hidden, generator=rng) * spread
    w = torch.randn(vocab, hidden, generator=rng) * 2 / hidden**0.5
    targets = torch.randint(0, vocab, (tokens,), generator=rng)
    return h.to(dtype), w.to(dtype), targets


def run(h, w, targets, logit_scale=1.0, softcap=0.0, inv_temperature=1.0, top_k=0, chunk=None,
        with_jacobian=True):  # fmt: skip
    with ops.interpreting():
        return kernels.linear_logprob(
            h, w, targets, logit_scale, softcap, inv_temperature, top_k, chunk, with_jacobian
        )


def truth(h, w, targets, logit_scale, softcap, inv_temperature, top_k):
    wide = h.double().requires_grad_()
    logp, entropy, mass = reference.linear_logprob(
        wide, w, targets, inv_temperature, softcap, logit_scale, top_k
    )
    (jacobian,) = torch.autograd.grad(logp.sum(), wide)
    return logp.detach(), entropy.detach(), mass.detach(), jacobian


def bounds(h, w, targets, logit_scale, softcap, inv_temperature, top_k):
    """Largest errors of (logp, entropy, mass, Jacobian) that the arithmetic allows.

    A logit is a sum of H products in fp32, off by H·ε·Σ|h||w| at most, times its scale (tanh's
    slope is below 1); tanh itself is off by 4ε of its largest value. Every exponential doubles
    the relative error of its argument's absolute one; sums of positive numbers add log₂V + 64
    roundings (pairwise within a tile, one by one over tiles and splits).
    """
    scale = logit_scale * inv_temperature
    h, w = h.double().abs(), w.double().abs()
    z = (h @ w.T).amax(1) * scale
    logit = (h.shape[1] + 4) * EPS * z + 4 * EPS * softcap * inv_temperature
    relative = 2 * logit + 80 * EPS  # of a probability
    entropy = torch.full_like(logit, float(w.shape[0])).log()
    return logit + relative + EPS * z, relative * (2 + entropy), relative, relative, scale


def check(h, w, targets, logit_scale=1.0, softcap=0.0, inv_temperature=1.0, top_k=5, chunk=None):
    args = (logit_scale, softcap, inv_temperature, top_k)
    found = run(h, w, targets, *args, chunk)
    true = truth(h, w, targets, *args)
    logp, entropy, mass, relative, scale = bounds(h, w, targets, *args)
    # The Jacobian: each probability is off by its own rounding and `relative`, fp16 loses what is
    # below 2⁻²⁵ of the largest; the target's factor 1 − p by `relative`.
    rounding = ROUNDING[h.dtype] + relative
    p = torch.softmax(h.double() @ w.double().T * scale, 1) if not softcap else None
    rows = w.double().abs()
    others = rows.amax(0).expand(len(h), -1) if p is None else p @ rows
    lost = w.shape[0] * 2.0**-25 * rows.amax(0) if h.dtype == torch.float16 else 0.0
    own = (relative + logp)[:, None] * rows[targets]
    jacobian = scale * (rounding[:, None] * others + lost + own)
    for name, x, y, bound in zip(
        ("logp", "entropy", "mass", "jacobian"), found, true, (logp, entropy, mass, jacobian),
        strict=True,
    ):  # fmt: skip
        assert x.dtype == torch.float32
        error = (x.double() - y).abs()
        assert (error <= bound).all(), f"{name}: {(error / bound).max()} times the bound"


CASES = [
    # T, H, V: one row and one split; a last split of 17 rows in a second chunk; a chunk and a row
    (1, 16, 100),
    (15, 48, 1041),
    (17, 80, 1025),
]


@pytest.mark.parametrize("tokens, hidden, vocab", CASES)
def test_against_float64(tokens, hidden, vocab):
    check(*problem(tokens, hidden, vocab))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype):
    check(*problem(5, 64, 700, dtype))


@pytest.mark.parametrize(
    "logit_scale, softcap, inv_temperature", [(0.125, 0.0, 1.4), (1.0, 3.0, 1.0), (2.0, 3.0, 0.7)]
)
def test_scale_cap_and_temperature(logit_scale, softcap, inv_temperature):
    check(*problem(5, 64, 700), logit_scale, softcap, inv_temperature)


def test_targets_at_the_edges_of_tiles_splits_and_chunks():
    h, w, _ = problem(12, 16, 1541)
    edges = [0, 63, 64, 127, 128, 511, 512, 1023, 1024, 1535, 1536, 1540]
    check(h, w, torch.tensor(edges))


@pytest.mark.parametrize("target", [90, 100])
def test_other_targets_tiles(target, monkeypatch):
    monkeypatch.setattr(kernels, "_target", lambda device: target)
    check(*problem(3, 32, 1100))


def test_large_logits_stay_finite():
    h, w, targets = problem(4, 16, 600, spread=1e5)
    logp, entropy, mass, jacobian = run(h, w, targets, top_k=3)
    assert all(torch.isfinite(x).all() for x in (logp, entropy, jacobian))
    assert (entropy >= 0).all() and torch.allclose(mass, torch.ones(4))


def test_the_gradient_of_a_likely_token_is_not_lost_in_rounding():
    """p = 0.9998: as one of the rounded probabilities it would be 1, and 1 − p nothing."""
    h = torch.ones(1, 16, dtype=torch.bfloat16)
    w = torch.zeros(64, 16, dtype=torch.bfloat16)
    w[7] = 12.65625 / 16
    args = (1.0, 0.0, 1.0, 0)
    targets = torch.tensor([7])
    jacobian, true = run(h, w, targets, *args)[3], truth(h, w, targets, *args)[3]
    assert true[0, 0] == pytest.approx((1 - 0.9998) * 0.791, rel=0.05)
    # 1 − p itself is taken in fp32: off by ε of 1.
    torch.testing.assert_close(jacobian.double(), true, rtol=4 * EPS / 2e-4, atol=0)


@pytest.mark.parametrize("top_k, mass", [(1, 1 / 3), (2, 2 / 3), (3, 1.0), (600, 1.0)])
def test_mass_with_ties_in_different_chunks(top_k, mass):
    w = torch.full((1100, 16), -4.0, dtype=torch.bfloat16)
    w[[0, 600, 1099]] = 1.0
    h = torch.ones(1, 16, dtype=torch.bfloat16)
    found = run(h, w, torch.tensor([0]), top_k=top_k, with_jacobian=False)[2]
    assert found.item() == pytest.approx(mass, rel=1e-6)


def test_a_row_is_bit_for_bit_the_same_alone_and_in_any_chunk(monkeypatch):
    # The BLAS behind numpy.matmul sums differently at different places of a tile, unlike a GPU.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ik,kj->ij", a, b))
    h, w, targets = problem(17, 32, 1041)
    batch = run(h, w, targets, 1.0, 5.0, 0.7, 3)
    chunked = run(h, w, targets, 1.0, 5.0, 0.7, 3, chunk=12)
    silent = run(h, w, targets, 1.0, 5.0, 0.7, 0, with_jacobian=False)
    one = run(h[9:10], w, targets[9:10], 1.0, 5.0, 0.7, 3)
    assert all(torch.equal(a, b) for a, b in zip(batch, chunked, strict=True))
    assert torch.equal(batch[0], silent[0]) and torch.equal(batch[1], silent[1])
    assert all(torch.equal(a, b[9:10]) for a, b in zip(one, batch, strict=True))


def test_through_the_operator_and_backward():
    """The Jacobian times the incoming gradient, and the CPU path within the same bounds."""
    h, w, targets = problem(3, 32, 300)
    h.requires_grad_()
    with ops.interpreting():
        logp, entropy = ops.linear_logprob(h, w, targets, 0.7, 4.0)
    incoming = torch.tensor([1.0, -2.0, 0.5])
    (grad,) = torch.autograd.grad(logp, h, incoming)
    jacobian = run(h.detach(), w, targets, 1.0, 4.0, 0.7)[3]
    assert torch.equal(grad, (incoming[:, None] * jacobian).bfloat16())
    cpu = linear_logprob_forward(h.detach(), w, targets, 1.0, 4.0, 0.7, 0, None, True)
    logp_bound, entropy_bound, *_ = bounds(h.detach(), w, targets, 1.0, 4.0, 0.7, 0)
    assert ((logp - cpu[0]).abs() <= 2 * logp_bound).all()
    assert ((entropy - cpu[1]).abs() <= 2 * entropy_bound).all()


def test_a_target_outside_the_vocabulary_gives_nan():
    h, w, _ = problem(3, 16, 200)
    logp, entropy, _, jacobian = run(h, w, torch.tensor([-1, 200, 3]))
    assert logp.isnan().tolist() == [True, True, False]
    assert jacobian.isnan().all(1).tolist() == [True, True, False]
    assert entropy.isfinite().all()


def test_no_tokens():
    h, w, targets = problem(0, 16, 100)
    assert [tuple(x.shape) for x in run(h, w, targets, top_k=2)] == [(0,), (0,), (0,), (0, 16)]


@pytest.mark.parametrize("tokens, vocab", [(6, 1100), (6, 1700), (9, 1100)])
def test_scratch_depends_on_the_chunk_alone(tokens, vocab, monkeypatch):
    made = []
    monkeypatch.setattr(
        kernels._Launch, "chunk", lambda self, h, t, out, scratch: made.append(scratch)
    )
    run(*problem(tokens, 16, vocab), top_k=2, chunk=4)
    assert {(x.shape, x.dtype) for pair in made for x in pair} == {
        ((4, 1024), torch.float32), ((4, 1024), torch.bfloat16),
    }  # fmt: skip


def test_what_does_not_fit_is_refused():
    h, w, targets = problem(2, 32, 100)
    with pytest.raises(ValueError, match="hidden must be on a CUDA device"):
        kernels.linear_logprob(h, w, targets, 1.0, 0.0, 1.0, 0, None, False)
    refused = {
        "hidden must be bfloat16 or float16 or float32": (h.double(), w, targets),
        "weight must be bfloat16, found float16": (h, w.half(), targets),
        "hidden must be contiguous": (h.T.contiguous().T, w, targets),
        "weight must be contiguous": (h, w.T.contiguous().T, targets),
        "targets must be contiguous": (h, w, targets.repeat_interleave(2)[::2]),
        "targets must be int64": (h, w, targets.int()),
        "a multiple of 16 features, found 24": (
            h[:, :24].contiguous(), w[:, :24].contiguous(), targets,
        ),
        r"weight \[V, H\]": (h, w[:, :16], targets),
    }  # fmt: skip
    for message, arguments in refused.items():
        with pytest.raises(ValueError, match=message):
            run(*arguments)
    for name, value in (("softcap", -1.0), ("top_k", 101), ("chunk", 0)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            run(h, w, targets, **{name: value})


def test_variants_name_every_argument():
    found = list(kernels.variants())
    bodies = {getattr(kernels, name) for name in dir(kernels) if name.endswith("_kernel")}
    assert {v.function for v in found} == bodies
    for v in found:
        assert sorted([*v.types, *v.constexprs]) == sorted(v.function.arg_names), v.kernel
        assert v.divisible <= v.types.keys() or "n_hidden" not in v.function.arg_names


@pytest.mark.slow
def test_a_real_vocabulary_at_the_real_chunk(monkeypatch):
    monkeypatch.undo()
    check(*problem(3, 64, 50257, torch.bfloat16), 0.5, 8.0, 0.9, top_k=50)
    assert launch.is_batch_invariant() is False
