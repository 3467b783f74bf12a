"""From a checkpoint on disk to an NVFP4 one, and what other people's code makes of it."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from qerl.errors import QerlError
from qerl.quantize import nvfp4
from qerl.quantize.checkpoint import quantize_checkpoint
from qerl_kernels import layout, quantize, reference

LINEARS = 7


def tiny_llama(hidden=64, tied=True, dtype=torch.bfloat16, **kwargs):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=hidden,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        **kwargs,
    )
    return LlamaForCausalLM(config).to(dtype)


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny bf16 Llama on disk, with a file of the kind a tokenizer leaves."""
    tiny_llama().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path / "base"


def tensors_of(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: t for file in files for name, t in load_file(file).items()}


def ct_args():
    weights = nvfp4.quantization_config([])["config_groups"]["group_0"]["weights"]
    return QuantizationArgs(**weights)


# --- numbers -------------------------------------------------------------------------------------


def test_every_e2m1_value_and_midpoint_by_hand():
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 99.0])
    assert quantize.encode(midpoints).tolist() == [0, 2, 2, 4, 4, 6, 6, 7]  # ties to even
    values = torch.tensor(layout.E2M1_VALUES)
    assert quantize.encode(values).tolist() == list(range(16))  # −0 is code 8


def test_rounding_agrees_with_ml_dtypes():
    x = torch.cat([torch.linspace(-7, 7, 5601), torch.randn(1000, generator=_rng())])
    ours = torch.tensor(layout.E2M1_VALUES)[quantize.encode(x).long()].numpy()
    theirs = x.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(ours, theirs)


def _rng(seed=0):
    return torch.Generator().manual_seed(seed)


def test_block_by_hand():
    """absmax 12 in one block of 16: g = 2688/12 = 224, scale = 12/6·224 = 448, codes w/2."""
    weight = torch.zeros(1, 16)
    weight[0, :4] = torch.tensor([12.0, -6.0, 1.0, -0.1])
    packed, scale, g = quantize.quantize_absmax(weight)
    assert (g.tolist(), scale.float().tolist()) == ([224.0], [[448.0]])
    assert layout.unpack(packed)[0, :4].tolist() == [7, 8 + 5, 1, 8]  # 6, −3, 0.5, −0
    back = quantize.dequantize(packed, scale, g, torch.float32)
    assert back[0, :4].tolist() == [12.0, -6.0, 1.0, -0.0]


@pytest.mark.parametrize("spread", [1e-6, 0.02, 30.0])
@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (17, 576)])
def test_scales_and_codes_equal_compressed_tensors(shape, spread):
    weight = torch.randn(shape, generator=_rng()) * spread
    weight[0, :16] = 0  # an all-zero block
    weight[-1, -16:] *= 1e-5  # a block whose scale rounds to zero or to a subnormal
    packed, scale, g = quantize.quantize_absmax(weight)
    args = ct_args()
    g_ct = generate_gparam(weight.amin(), weight.amax())
    blocks = weight.unflatten(1, (-1, 16))
    scale_ct, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, g_ct)
    values_ct = ct_quantize(weight, scale_ct, torch.zeros_like(scale_ct), args, global_scale=g_ct)
    assert torch.equal(g, g_ct)
    assert torch.equal(scale.float(), scale_ct.float())
    ours = torch.tensor(layout.E2M1_VALUES)[layout.unpack(packed).long()]
    torch.testing.assert_close(ours, values_ct, rtol=0, atol=0)
    assert torch.equal(unpack_fp4_from_uint8(packed, *shape, dtype=torch.float32), ours)


def test_all_bytes_and_all_scales_dequantize_as_the_reference():
    packed = torch.arange(256, dtype=torch.uint8).repeat(127, 1)  # every pair of codes …
    codes = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 32).contiguous()
    scale = codes.view(torch.float8_e4m3fn)  # … under every finite non-negative scale
    g = torch.tensor([3.7])
    truth = reference.dequantize(packed, scale, g)
    torch.testing.assert_close(
        quantize.dequantize(packed, scale, g, torch.float64), truth, rtol=1e-15, atol=0
    )
    for dtype in (torch.bfloat16, torch.float16):  # six significant bits: nothing is rounded
        exact = quantize.unscaled(packed, scale, torch.float64)
        assert torch.equal(quantize.unscaled(packed, scale, dtype).double(), exact)


def test_zero_weight_and_bad_weights():
    packed, scale, g = quantize.quantize_absmax(torch.zeros(2, 32))
    assert quantize.dequantize(packed, scale, g).abs().max() == 0
    with pytest.raises(ValueError, match=r"K a multiple of 16, found \(2, 24\)"):
        quantize.quantize_absmax(torch.zeros(2, 24))
    with pytest.raises(ValueError, match="NaN or an infinity"):
        quantize.quantize_absmax(torch.full((1, 16), float("nan")))


def test_fused_layers_share_and_others_do_not():
    names = ["l.0.q_proj", "l.0.k_proj", "l.0.o_proj", "l.0.up_proj", "l.0.v_proj", "l.1.q_proj"]
    assert nvfp4.scale_groups(names) == [
        ["l.0.q_proj", "l.0.k_proj", "l.0.v_proj"],
        ["l.0.o_proj"],
        ["l.0.up_proj"],
        ["l.1.q_proj"],
    ]


# --- checkpoints ---------------------------------------------------------------------------------


def test_checkpoint_holds_three_tensors_a_layer_and_the_rest_unchanged(checkpoint, tmp_path):
    seen = []
    report = quantize_checkpoint(
        checkpoint,
        tmp_path / "q",
        method="absmax",
        progress=lambda done, total, name: seen.append((done, total)),
    )
    before, after = tensors_of(checkpoint), tensors_of(tmp_path / "q")
    assert report["layers"] == 2 * LINEARS and seen[-1] == (14, 14)
    assert "lm_head.weight" not in after  # tied stays tied
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    name = "model.layers.1.mlp.down_proj"
    packed, scale, g = (after[f"{name}.weight{s}"] for s in ("_packed", "_scale", "_global_scale"))
    assert f"{name}.weight" not in after
    assert (packed.shape, scale.shape, g.shape) == ((64, 56), (64, 7), (1,))
    for ours, direct in zip(
        (packed, scale.float(), g),
        quantize.quantize_absmax(before[f"{name}.weight"]),
        strict=True,
    ):
        assert torch.equal(ours, direct.to(ours.dtype))
    error = quantize.dequantize(packed, scale, g) - before[f"{name}.weight"].float()
    assert error.norm() / before[f"{name}.weight"].float().norm() < 0.12
    assert report["bytes"] == sum(t.nbytes for t in after.values())
    assert (tmp_path / "q" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not list(tmp_path.glob("*.partial"))


def test_fused_layers_share_the_larger_absmax(checkpoint, tmp_path):
    quantize_checkpoint(checkpoint, tmp_path / "q")
    before, after = tensors_of(checkpoint), tensors_of(tmp_path / "q")
    attention = "model.layers.0.self_attn."
    qkv = [attention + n for n in ("q_proj", "k_proj", "v_proj")]
    peak = max(before[f"{n}.weight"].abs().max().item() for n in qkv)
    for name in qkv:
        assert after[f"{name}.weight_global_scale"].item() == pytest.approx(2688 / peak)
    alone = before[attention + "o_proj.weight"].abs().max().item()
    own = after[attention + "o_proj.weight_global_scale"].item()
    assert own == pytest.approx(2688 / alone)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_result_and_computes_the_same(tmp_path, tied):
    """compressed-tensors' own loader against the weights put back by hand into the plain model."""
    tiny_llama(tied=tied).save_pretrained(tmp_path / "base")
    quantize_checkpoint(tmp_path / "base", tmp_path / "q")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        plain = ours(ids).logits
    quantized = tensors_of(tmp_path / "q")
    with torch.no_grad():
        for name, module in ours.named_modules():
            if f"{name}.weight_packed" in quantized:
                parts = (quantized[f"{name}.weight{s}"] for s in ("_packed", "_scale"))
                g = quantized[f"{name}.weight_global_scale"]
                module.weight.copy_(quantize.dequantize(*parts, g, torch.bfloat16))
    with torch.no_grad():
        expected, found = ours(ids).logits, theirs(ids).logits
    assert torch.equal(found, expected)
    assert not torch.equal(expected, plain)  # quantization did change something


def test_biases_and_fp32_sources(tmp_path):
    base = tiny_llama(dtype=torch.float32, attention_bias=True)
    base.save_pretrained(tmp_path / "base")
    quantize_checkpoint(tmp_path / "base", tmp_path / "q", method="absmax")
    after = tensors_of(tmp_path / "q")
    assert after["model.layers.0.self_attn.q_proj.bias"].dtype == torch.bfloat16
    weight = base.model.layers[0].mlp.down_proj.weight
    direct, _, _ = quantize.quantize_absmax(weight)  # from fp32, not from its bf16 rounding
    assert torch.equal(after["model.layers.0.mlp.down_proj.weight_packed"], direct)
    assert json.loads((tmp_path / "q" / "config.json").read_text())["dtype"] == "bfloat16"


def test_fp32_among_16_bits_stays_fp32(checkpoint, tmp_path):
    """A publisher left it so on purpose, such as a recurrence's A_log."""
    mixed = tmp_path / "mixed"
    shutil.copytree(checkpoint, mixed)
    tensors = load_file(mixed / "model.safetensors")
    name = "model.layers.0.input_layernorm.weight"
    tensors[name] = tensors[name].float() + 1e-5
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    quantize_checkpoint(mixed, tmp_path / "q", method="absmax")
    after = tensors_of(tmp_path / "q")[name]
    assert after.dtype == torch.float32 and torch.equal(after, tensors[name])


def test_what_writes_no_text_is_refused(tmp_path):
    common = dict(vocab_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    t5 = transformers.T5Config(vocab_size=16, d_model=32, d_kv=16, d_ff=32, num_layers=1)
    llama = transformers.LlamaConfig(**common, intermediate_size=32)
    bert = transformers.BertConfig(**common, intermediate_size=32)
    for kind, config, why in (
        (transformers.T5ForConditionalGeneration, t5, "is an encoder-decoder"),
        (transformers.LlamaForSequenceClassification, llama, "does not write text"),
        (transformers.BertForMaskedLM, bert, "does not write text"),
    ):
        kind(config).save_pretrained(tmp_path / kind.__name__)
        with pytest.raises(QerlError, match=why):
            quantize_checkpoint(tmp_path / kind.__name__, tmp_path / "q")
        assert not (tmp_path / "q").exists()


def test_shards_in_and_out(checkpoint, tmp_path):
    base = tmp_path / "sharded"
    tiny_llama().save_pretrained(base, max_shard_size="40KB")
    assert len(list(base.glob("*.safetensors"))) > 2
    quantize_checkpoint(base, tmp_path / "many", shard_bytes=20_000)
    quantize_checkpoint(checkpoint, tmp_path / "one")
    many, one = tensors_of(tmp_path / "many"), tensors_of(tmp_path / "one")
    assert (tmp_path / "one" / "model.safetensors").is_file()
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert all((tmp_path / "many" / f).is_file() for f in index["weight_map"].values())
    assert set(index["weight_map"]) == set(many) == set(one)
    assert all(torch.equal(many[n].view(torch.uint8), one[n].view(torch.uint8)) for n in one)
    AutoModelForCausalLM.from_pretrained(tmp_path / "many")


def test_smollm2_shapes_stay_tied(tmp_path):
    """K = 576 and 1536, nine heads over three: one layer of SmolLM2-135M's own config."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "base")
    report = quantize_checkpoint(tmp_path / "base", tmp_path / "q")
    after = tensors_of(tmp_path / "q")
    assert report["layers"] == LINEARS and "lm_head.weight" not in after
    assert after["model.layers.0.mlp.down_proj.weight_packed"].shape == (576, 768)
    assert after["model.layers.0.self_attn.k_proj.weight_scale"].shape == (192, 36)
    linear = sum(t.nbytes for n, t in after.items() if ".weight_" in n)
    assert linear * 8 / report["parameters"] == pytest.approx(4.5, abs=0.001)


# --- mistakes ------------------------------------------------------------------------------------


def test_width_that_does_not_fit_names_the_layer(tmp_path):
    tiny_llama(hidden=40).save_pretrained(tmp_path / "base")
    with pytest.raises(QerlError, match=r"layer 'model.layers.0.self_attn.q_proj' has 40 input"):
        quantize_checkpoint(tmp_path / "base", tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_existing_output_is_kept_unless_asked(checkpoint, tmp_path):
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "mine.txt").write_text("precious")
    with pytest.raises(QerlError, match="exists already"):
        quantize_checkpoint(checkpoint, tmp_path / "q")
    assert (tmp_path / "q" / "mine.txt").read_text() == "precious"
    quantize_checkpoint(checkpoint, tmp_path / "q", overwrite=True)
    assert (tmp_path / "q" / "model.safetensors").is_file()


def test_output_that_cannot_be_written_is_refused_before_the_work(checkpoint, tmp_path):
    def working(done, total, name):
        raise AssertionError("it has begun")

    (tmp_path / "file").write_text("")
    with pytest.raises(QerlError, match=r"^output: '.*/file/q': '.*/file' is not a folder; name"):
        quantize_checkpoint(checkpoint, tmp_path / "file" / "q", progress=working)


def test_source_that_is_not_a_checkpoint(checkpoint, tmp_path):
    with pytest.raises(QerlError, match=r"has no config.json"):
        quantize_checkpoint(tmp_path / "nowhere", tmp_path / "q")
    quantize_checkpoint(checkpoint, tmp_path / "q")
    with pytest.raises(QerlError, match=r"quantized already \(compressed-tensors\)"):
        quantize_checkpoint(tmp_path / "q", tmp_path / "twice")
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(QerlError, match="not a whole safetensors file"):
        quantize_checkpoint(checkpoint, tmp_path / "half")
    weights.unlink()
    with pytest.raises(QerlError, match=r"has no model.safetensors; only safetensors"):
        quantize_checkpoint(checkpoint, tmp_path / "none")


def test_files_that_do_not_fit_the_config(checkpoint, tmp_path):
    weights = load_file(checkpoint / "model.safetensors")
    missing = "model.layers.1.mlp.up_proj.weight"
    save_file({n: t for n, t in weights.items() if n != missing}, checkpoint / "model.safetensors")
    with pytest.raises(QerlError, match=f"should hold '{missing}' of shape"):
        quantize_checkpoint(checkpoint, tmp_path / "q")


def test_nan_names_the_layer(checkpoint, tmp_path):
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(weights, checkpoint / "model.safetensors")
    with pytest.raises(QerlError, match=r"layer 'model.layers.0.mlp.\w+': weight holds a NaN"):
        quantize_checkpoint(checkpoint, tmp_path / "q")
