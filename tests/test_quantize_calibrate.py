"""Block by block against the whole model; then the methods, their order and their mistakes."""

import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from qerl.errors import QerlError
from qerl.quantize import calibrate, nvfp4
from qerl.quantize.calibrate import walk
from qerl.quantize.methods import CALIBRATED, METHODS, encode
from qerl.quantize.search import quantize_weight
from qerl_kernels import quantize

VOCABULARY = 64
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"attention_bias": True}),
    "qwen3": (transformers.Qwen3Config, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 4}),
    "phi3": (transformers.Phi3Config, {}),
    "gemma3": (transformers.Gemma3TextConfig, {"sliding_window": 4}),
    "gemma4": (
        transformers.Gemma4TextConfig,
        {
            "sliding_window": 4,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "qwen3_5": (
        transformers.Qwen3_5TextConfig,
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
}


class Tensors(dict):
    """A checkpoint in memory."""

    def shape(self, name):
        return tuple(self[name].shape) if name in self else None

    def get(self, name):
        return self[name]


def build(family="llama", **changes):
    """(model with weights large enough to matter, the same as a skeleton, its tensors, groups)."""
    kind, own = FAMILIES[family]
    config = kind(**{**COMMON, **own, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    return model, skeleton, Tensors(model.state_dict()), groups_of(skeleton)


def groups_of(model):
    return nvfp4.scale_groups(nvfp4.linear_shapes(model))


def text(count=6, length=12, seed=0):
    rng = torch.Generator().manual_seed(seed)
    lengths = [length - (i % 3) for i in range(count)]
    return [torch.randint(3, VOCABULARY, (n,), generator=rng).tolist() for n in lengths]


@torch.no_grad()
def inputs_of(model, sequences):
    """What the whole model's linear layers are fed with: name → x [tokens, K]."""
    found = {}

    def hook(name):
        return lambda module, args: found.setdefault(name, []).append(args[0].flatten(0, -2))

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.get_decoder().named_modules(prefix="model")
        if isinstance(module, torch.nn.Linear)
    ]
    for ids in sequences:
        model(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def all_meta(model):
    tensors = [*model.parameters(), *model.buffers()]
    return all(tensor.is_meta for tensor in tensors)


# --- the walk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_those_of_the_whole_model(family):
    model, skeleton, tensors, _ = build(family)
    expected = inputs_of(model, text())
    seen = set()
    for block in walk(skeleton, tensors, text(), hessian=True):
        for name, statistics in block.statistics().items():
            x = expected[name]
            assert statistics.tokens == len(x)
            scale = x.square().mean().item() * len(x)
            torch.testing.assert_close(statistics.total, x.T @ x, rtol=1e-3, atol=1e-4 * scale)
            torch.testing.assert_close(
                statistics.importance, x.square().mean(0), rtol=1e-3, atol=1e-4 * scale / len(x)
            )
            seen.add(name)
    assert seen == set(expected) >= set(nvfp4.linear_shapes(model))
    assert all_meta(skeleton)


@pytest.mark.parametrize("family", ["llama", "gemma4", "qwen3_5"])
def test_later_blocks_are_fed_by_the_quantized_ones(family):
    model, skeleton, tensors, _ = build(family)
    packed = {n: quantize_weight(tensors[f"{n}.weight"], "absmax") for n in layers_of(model)}
    with torch.no_grad():
        for name, value in packed.items():
            model.get_submodule(name).weight.copy_(quantize.dequantize(*value))
    expected = inputs_of(model, text())
    for block in walk(skeleton, tensors, text(), hessian=False):
        names = [name for name in block.linears if name in packed]
        for name in names:
            block.put(name, packed[name])
        for name in names:
            found = block.statistics()[name].importance
            truth = expected[name].square().mean(0)
            torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-4 * truth.mean().item())


def layers_of(model):
    return [name for name in nvfp4.linear_shapes(model) if ".layers." in name]


def test_one_block_at_a_time_and_masks_once(monkeypatch):
    _, skeleton, tensors, _ = build("gemma3")
    monkeypatch.setattr(calibrate, "BATCH_TOKENS", 12)  # each sequence on its own
    same_length = [ids[:10] for ids in text()]
    count = 0
    for block in walk(skeleton, tensors, same_length, hessian=False):
        filled = [n for n, p in skeleton.named_parameters() if not p.is_meta]
        assert filled and all(n.startswith(f"model.layers.{count}.") for n in filled)
        assert len(block.batches) == 6
        masks = {id(batch.calls[count][1]["attention_mask"]) for batch in block.batches}
        assert len(masks) == 1
        count += 1
    assert count == 4


def test_the_skeleton_is_as_before_when_the_caller_stops_early():
    _, skeleton, tensors, groups = build()
    skeleton.train()
    work = encode("gptq", tensors, skeleton, groups, calibration=text())
    next(work)
    assert not all_meta(skeleton)
    work.close()
    assert all_meta(skeleton) and skeleton.training
    assert not any(module._forward_pre_hooks for module in skeleton.modules())
    assert all("forward" not in vars(module) for module in skeleton.modules())


# --- methods -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_layer_once_with_its_group(method):
    model, skeleton, tensors, groups = build()
    found = list(encode(method, tensors, skeleton, groups, calibration=text()))
    assert sorted(group for group, _ in found) == sorted(groups)
    for group, packed in found:
        assert list(packed) == group
        shared = {p.global_scale.item() for p in packed.values()}
        peak = max(tensors[f"{name}.weight"].abs().max().item() for name in group)
        assert list(shared) == [pytest.approx(2688 / peak)]
        for name, p in packed.items():
            weight = tensors[f"{name}.weight"]
            assert (p.packed.shape[0], 2 * p.packed.shape[1]) == weight.shape
            assert p.scale.float().min() >= 2.0**-6
            relative = (quantize.dequantize(*p) - weight).norm() / weight.norm()
            assert 0.03 < relative < 0.25


@pytest.mark.parametrize("method", ["absmax", "four-over-six", "sweep"])
def test_data_free_methods_look_at_weights_alone(method):
    _, _, tensors, groups = build()
    found = dict(p for _, packed in encode(method, tensors, None, groups) for p in packed.items())
    for name, packed in found.items():
        direct = quantize_weight(tensors[f"{name}.weight"], method, packed.global_scale)
        assert torch.equal(packed.packed, direct.packed)


def test_each_method_brings_the_outputs_nearer():
    """Of the first block, whose inputs are the same for all."""
    model, skeleton, tensors, groups = build(num_hidden_layers=1)
    sequences = text(40, 24)
    inputs = inputs_of(model, sequences)
    errors = {}
    for method in METHODS:
        work = encode(method, tensors, skeleton, groups, calibration=sequences)
        packed = dict(item for _, part in work for item in part.items())
        errors[method] = sum(
            (inputs[n] @ (quantize.dequantize(*p) - tensors[f"{n}.weight"]).T).square().sum()
            for n, p in packed.items()
        )
    found = [errors[method].item() for method in METHODS]
    assert found == sorted(found, reverse=True), errors
    assert errors["gptq"] < 0.6 * errors["absmax"]


@pytest.mark.parametrize("method", ["sweep", *CALIBRATED])
def test_a_run_goes_on_where_it_stopped(method):
    _, skeleton, tensors, groups = build()
    whole = list(encode(method, tensors, skeleton, groups, calibration=text()))
    for count in (1, 5, len(whole)):
        written = dict(item for _, packed in whole[:count] for item in packed.items())
        rest = list(encode(method, tensors, skeleton, groups, calibration=text(), done=written.get))
        assert [group for group, _ in rest] == [group for group, _ in whole[count:]]
        for (_, again), (_, first) in zip(rest, whole[count:], strict=True):
            for name in first:
                assert torch.equal(again[name].packed, first[name].packed)


def test_a_group_written_by_half_is_done_again():
    _, skeleton, tensors, groups = build()
    name = "model.layers.0.self_attn.k_proj"
    written = {name: quantize_weight(tensors[f"{name}.weight"], "sweep")}
    for method in ("sweep", "imatrix"):
        found = list(
            encode(method, tensors, skeleton, groups, calibration=text(), done=written.get)
        )
        assert len(found) == len(groups)


def test_layers_the_text_does_not_reach_are_named():
    _, skeleton, tensors, groups = build()
    skeleton.extra = torch.nn.Linear(32, 8, device="meta")
    tensors["extra.weight"] = torch.randn(8, 32)
    with pytest.warns(UserWarning, match=r"1 linear layers are not reached .*: extra$"):
        found = list(encode("imatrix", tensors, skeleton, [*groups, ["extra"]], calibration=text()))
    expected = quantize_weight(tensors["extra.weight"], "sweep")
    assert torch.equal(found[-1][1]["extra"].packed, expected.packed)


def test_no_warning_without_reason():
    _, skeleton, tensors, groups = build("gemma4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(encode("imatrix", tensors, skeleton, groups, calibration=text(2)))


LARGE = """
import torch, transformers.models.qwen2.modeling_qwen2
from transformers import AutoModelForCausalLM, Qwen2Config
from qerl.memory import peak_resident_bytes
from qerl.quantize import nvfp4
from qerl.quantize.methods import encode

config = Qwen2Config(vocab_size=152064, hidden_size=5120, intermediate_size=27648,
                     num_hidden_layers=2, num_attention_heads=40, num_key_value_heads=8)
with torch.device("meta"):
    skeleton = AutoModelForCausalLM.from_config(config)
shapes = {name: tuple(p.shape) for name, p in skeleton.named_parameters()}
noise = torch.randn(1 << 20).bfloat16() * 0.02

class Made:
    "Tensors made when asked for, as a memory-mapped file would give them."
    def shape(self, name):
        return shapes.get(name)
    def get(self, name):
        size = torch.Size(shapes[name]).numel()
        return noise.repeat(-(-size // len(noise)))[:size].view(shapes[name])

before = peak_resident_bytes()
text = [torch.randint(0, 152064, (16,)).tolist()]
groups = nvfp4.scale_groups(nvfp4.linear_shapes(skeleton))
layers = [name for group, packed in
          encode("imatrix", Made(), skeleton, groups, calibration=text) for name in packed]
assert len(layers) == 14
print(before, peak_resident_bytes())
"""


@pytest.mark.slow
def test_two_layers_of_a_32b_model_need_one_block_of_memory():
    run = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    block = 4 * (2 * 5120 * 5120 + 2 * 1024 * 5120 + 3 * 5120 * 27648)  # fp32
    layer = 4 * 5120 * 27648
    before, peak = map(int, run.stdout.split())
    assert peak < before + max(2 * 152064 * 5120, block + 2 * layer) + 400e6  # the embedding, bf16


# --- mistakes ------------------------------------------------------------------------------------


def run(method="imatrix", calibration=None, change=None):
    _, skeleton, tensors, groups = build()
    if change:
        change(tensors)
    return list(encode(method, tensors, skeleton, groups, calibration=calibration))


def test_calibration_must_be_there_and_fit():
    for method in CALIBRATED:
        for nothing in (None, []):
            with pytest.raises(QerlError, match=f"^calibration: method {method} needs text"):
                run(method, nothing)
    with pytest.raises(QerlError, match="^calibration: a text without tokens"):
        run("imatrix", [[1, 2], []])
    for wrong in (VOCABULARY, -1):
        with pytest.raises(QerlError, match=rf"token id {wrong} is outside .* vocabulary of 64"):
            run("imatrix", [[1, 2], [3, wrong]])
    with pytest.raises(QerlError, match="^method: 'awq' is not known; use one of absmax, "):
        run("awq")


def test_a_tensor_that_is_missing_or_of_another_shape_is_named():
    norm = "model.layers.2.input_layernorm.weight"
    with pytest.raises(QerlError, match=rf"needs '{norm}' of shape \(64,\), found no such tensor"):
        run("imatrix", text(), lambda tensors: tensors.pop(norm))
    with pytest.raises(QerlError, match=r"embed_tokens.weight' of shape \(64, 64\), found \(2,\)"):
        run("imatrix", text(), lambda t: t.update({"model.embed_tokens.weight": torch.ones(2)}))


@pytest.mark.parametrize("method", ["absmax", "sweep", "imatrix", "gptq"])
def test_a_weight_that_is_not_finite_is_named(method):
    name = "model.layers.0.mlp.up_proj"

    def spoil(tensors):
        tensors[f"{name}.weight"][3, 3] = float("nan")

    with pytest.raises(QerlError, match=rf"^model: layer '{name}': weight holds a NaN .* damaged"):
        run(method, text(), spoil)


def test_activations_that_overflow_are_said():
    def spoil(tensors):
        tensors["model.layers.1.input_layernorm.weight"].fill_(1e38)
        tensors["model.layers.1.self_attn.v_proj.weight"].mul_(1e5)

    with pytest.raises(QerlError, match=r"^(model|calibration): .*model.layers.1"):
        run("gptq", text(), spoil)


def test_a_model_without_blocks_is_said():
    with torch.device("meta"):
        config = transformers.MambaConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.backbone.layers = torch.nn.ModuleList()
    with pytest.raises(QerlError, match="no list of decoder blocks is found in MambaForCausalLM"):
        list(encode("imatrix", Tensors(), model, [["x"]], calibration=text()))
