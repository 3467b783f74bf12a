"""A whole model on the CUDA launchers, interpreted: the kernels are wired in, and agree."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny import write_tiny_model
from tiny_run import randomise_b, tiny_run_recipe

from qerl.errors import QerlError
from qerl.model import load
from qerl.model.linear import NVFP4Linear
from qerl.model.norms import wrap_norms
from qerl.optim import adapter_parameters
from qerl.pack import pack_one
from qerl.policy import Policy, load_policy
from qerl.types import Completion, Group, Prompt
from qerl_kernels import linear, logprob_triton, norm, ops, repack

LAYERS = 2
LINEARS = 7 * LAYERS


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("wired") / "llama", num_hidden_layers=LAYERS)


def policy_of(directory: Path, root: Path) -> Policy:
    """bf16, with an adapter that does something and noise on every layer's two norms."""
    policy = load_policy(tiny_run_recipe(directory, root, dtype="bfloat16"))
    randomise_b(policy)
    names = [
        f"model.layers.{i}.{part}"
        for i in range(LAYERS)
        for part in ("input_layernorm", "post_attention_layernorm")
    ]
    generator = torch.Generator().manual_seed(0)
    for layer in wrap_norms(policy.network, names).values():
        layer.set_noise(0.1 * torch.randn(layer.weight.shape, generator=generator))
    return policy


def forward_and_backward(
    policy: Policy,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and log-probabilities of the sampled tokens, and every adapter's gradient."""
    completions = [Completion(ids, [0.0] * 3, [], [], "stop") for ids in ([4, 5, 2], [7, 3, 2])]
    batch = pack_one([Group(Prompt(0, (), "", (1, 5, 6)), completions)], policy.device)
    hidden: list[torch.Tensor] = []
    hook = policy.decoder.register_forward_hook(
        lambda module, inputs, out: hidden.append(out.last_hidden_state[0, batch.predict].detach())
    )
    logp, _ = policy.logprobs(batch, 0.7)
    hook.remove()
    logp.sum().backward()
    gradients = {n: p.grad for n, p in adapter_parameters(policy.model).items()}
    return policy.logits(hidden[0]).detach(), logp.detach(), gradients


def test_two_layers_forward_and_backward_through_the_launchers(directory, tmp_path, monkeypatch):
    policy = policy_of(directory, tmp_path)
    want_logits, want, gradients = forward_and_backward(policy)
    policy.model.zero_grad()
    calls: Counter[str] = Counter()
    ran: dict[str, Counter[int]] = {}

    def counted(module, name: str) -> None:
        """Count the calls by the weight they were given: argument 1, the repacked codes."""
        real, by_weight = getattr(module, name), ran.setdefault(name, Counter())
        monkeypatch.setattr(
            module, name, lambda *a: by_weight.update([a[1].data_ptr()]) or real(*a)
        )

    # `linear` is where operators meet the launchers; the others are looked up at first use.
    counted(linear, "nvfp4_matmul")
    counted(linear, "nvfp4_matmul_t")
    rms_norm, logprobs = norm._rms_norm_kernel, logprob_triton._logits_kernel
    monkeypatch.setattr(norm, "_rms_norm_kernel", _Launches(rms_norm, calls, "norm"))
    monkeypatch.setattr(logprob_triton, "_logits_kernel", _Launches(logprobs, calls, "logits"))
    layers = [m for m in policy.network.modules() if isinstance(m, NVFP4Linear)]
    assert len(layers) == LINEARS
    with ops.interpreting():
        for layer in layers:
            layer.repack()
        got_logits, got, kernel_gradients = forward_and_backward(policy)
    assert all(layer.weight.dtype == torch.int32 for layer in layers)
    assert ops.cache_bytes() == 0  # nothing was unpacked behind the launchers' back
    # Every layer once each way. The first layer's q, k and v need no dX of the embeddings, only
    # their adapters' gradients.
    first = policy.network.get_submodule("model.layers.0.self_attn")
    no_dx = {
        first.get_submodule(n).base_layer.weight.data_ptr() for n in ("q_proj", "k_proj", "v_proj")
    }
    everything = {layer.weight.data_ptr() for layer in layers}
    assert ran["nvfp4_matmul"] == Counter(everything) and len(everything) == LINEARS
    assert ran["nvfp4_matmul_t"] == Counter(everything - no_dx) and len(no_dx) == 3
    assert calls["norm"] == 2 * LAYERS and calls["logits"] >= 1
    # Both runs round bf16 (2⁻⁸) some 20 times on the way to the logits, twice that to a gradient,
    # independently: √(2 · 20) · 2⁻⁸ and √(2 · 40) · 2⁻⁸ of the size. A log-probability moves by no
    # more than two logits do, over the temperature.
    logits_error = 0.025 * want_logits.abs().max()
    assert (got_logits - want_logits).abs().max() <= logits_error
    assert (got - want).abs().max() <= 2 * logits_error / 0.7
    for name, gradient in gradients.items():
        assert (kernel_gradients[name] - gradient).norm() <= 0.035 * gradient.norm(), name


class _Launches:
    """A kernel that counts its launches."""

    def __init__(self, kernel, calls: Counter[str], name: str) -> None:
        self.kernel, self.calls, self.name = kernel, calls, name

    def __getitem__(self, grid):
        self.calls[self.name] += 1
        return self.kernel[grid]


def test_repacking_a_layer_changes_no_number(directory, tmp_path):
    policy = policy_of(directory, tmp_path)
    layer = next(m for m in policy.network.modules() if isinstance(m, NVFP4Linear))
    before = [t.clone() for t in layer.packed[:2]]
    with ops.interpreting():
        layer.repack()
    again = repack.unrepack(*layer.packed[:2], layer.in_features)
    for a, b in zip(again, before, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_checkpoint_with_a_negative_scale_is_one_line(directory, tmp_path, monkeypatch):
    checkpoint = policy_of(directory, tmp_path).base.checkpoint
    real = load.TensorReader.__call__

    def damaged(self, name: str) -> torch.Tensor:
        tensor = real(self, name)
        if name.endswith("layers.1.mlp.up_proj.weight_scale"):
            tensor = tensor.clone()
            tensor.view(torch.uint8)[3, 2] = 0xB8
        return tensor

    monkeypatch.setattr(load.TensorReader, "__call__", damaged)
    with pytest.raises(QerlError, match=r"model: .*layers.1.mlp.up_proj: block scale \[3, 2\]"):
        load.load_packed(checkpoint, torch.bfloat16, torch.device("cpu"), lambda text: None)


def test_float32_activations_on_a_gpu_are_refused_before_anything_is_read():
    with pytest.raises(QerlError, match="dtype: float32 is not for a packed model on a GPU"):
        load.load_base(
            "nowhere/at-all", format="nvfp4", dtype=torch.float32, device=torch.device("cuda")
        )
