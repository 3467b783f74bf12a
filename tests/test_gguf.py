"""A GGUF file as the quantizer's source: written as llama.cpp's converter does, read back."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from test_quantize import tensors_of
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qerl.errors import QerlError
from qerl.quantize.checkpoint import quantize_checkpoint
from qerl_kernels import quantize

TOKENS = [*map(chr, range(ord("!"), ord("!") + 93)), "ab"]


SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


def llama(tied=True, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).to(dtype)


def ggml_names(arch, model):
    """HF tensor name -> GGUF name, by llama.cpp's own table."""
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    table = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    names = {}
    for name in model.state_dict():
        stem, _, leaf = name.rpartition(".")
        if found := table.get_name(stem):
            names[name] = f"{found}.{leaf}"
    return names


def permuted(weight, heads):
    """llama.cpp's order of rotary rows, from `convert_hf_to_gguf.py`."""
    n, k = weight.shape
    return weight.reshape(heads, 2, n // heads // 2, k).swapaxes(1, 2).reshape(n, k)


def as_llama_cpp(arch, name, array, config):
    if arch == "llama" and ".attn_q." in name:
        return permuted(array, config.num_attention_heads)
    if arch == "llama" and ".attn_k." in name:
        return permuted(array, config.num_key_value_heads)
    if arch == "gemma3" and "norm" in name:
        return array + 1
    return array


def write_gguf(path: Path, model, kind: Kind, arch="llama") -> Path:
    """`model` as llama.cpp would write it: matrices in `kind`, vectors in F32."""
    config = model.config
    out = gguf.GGUFWriter(path, arch)
    out.add_name("tiny")
    out.add_context_length(128)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_key_length(config.head_dim)
    out.add_value_length(config.head_dim)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(10000.0)
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("default")
    out.add_token_list([*TOKENS, "<s>", "</s>"])
    out.add_token_types([1] * 94 + [3, 3])
    out.add_token_merges(["a b"])
    out.add_bos_token_id(94)
    out.add_eos_token_id(95)
    names = ggml_names(arch, model)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = as_llama_cpp(arch, names[name], tensor.float().numpy(), config)
        array = np.ascontiguousarray(array, dtype=np.float32)
        stored = kind if tensor.dim() > 1 else Kind.F32
        if stored != Kind.F32:
            array = gguf.quantize(array, stored)
        out.add_tensor(names[name], array, raw_dtype=stored)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def rounded(tensor, kind):
    """A matrix after a trip through a GGUF type."""
    data = gguf.quantize(tensor.float().numpy(), kind)
    return torch.from_numpy(gguf.dequantize(data, kind).copy()).reshape(tensor.shape)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0])
def test_llama_in_every_type_that_is_meant(tmp_path, kind):
    """Rotary rows back in order, weights as the file means them, quantized from those."""
    model = llama(tied=False, dtype=torch.float32)
    path = write_gguf(tmp_path / "tiny.gguf", model, kind)
    said = []
    made = quantize_checkpoint(path, tmp_path / "q", method="absmax", say=said.append)
    after, before = tensors_of(tmp_path / "q"), model.state_dict()
    assert made["layers"] == 14 and said == []
    for layer in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"):
        name = f"model.layers.1.{layer}.weight"
        g = after[f"{name}_global_scale"]
        # llama.cpp permutes rows and quantizes along them: the same numbers in another place.
        packed, scale, _ = quantize.quantize_absmax(rounded(before[name], kind), g)
        assert torch.equal(after[f"{name}_packed"], packed)
        assert torch.equal(after[f"{name}_scale"].view(torch.uint8), scale.view(torch.uint8))
    dtype = torch.float16 if kind == Kind.F16 else torch.bfloat16
    embedding = rounded(before["model.embed_tokens.weight"], kind).to(dtype)
    assert torch.equal(after["model.embed_tokens.weight"], embedding)
    assert after["model.norm.weight"].dtype == dtype
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_the_result_is_a_model_with_its_tokenizer(tmp_path):
    model = llama()
    path = write_gguf(tmp_path / "tiny.gguf", model, Kind.BF16)
    model.save_pretrained(tmp_path / "base")
    quantize_checkpoint(path, tmp_path / "q")
    quantize_checkpoint(tmp_path / "base", tmp_path / "direct")
    assert "lm_head.weight" not in tensors_of(tmp_path / "q")
    ids = torch.arange(24).reshape(2, 12)
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(tmp_path / n, dtype=torch.bfloat16)(ids).logits
        for n in ("q", "direct")
    )
    torch.testing.assert_close(theirs, ours, rtol=0.02, atol=0.02)  # rope_theta, eps: via the file
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "q")
    assert tokenizer("abc", add_special_tokens=False)["input_ids"] and tokenizer.eos_token_id == 95
    generation = json.loads((tmp_path / "q" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 95


def test_norms_with_an_offset(tmp_path):
    """llama.cpp stores Gemma's norms as 1 + w."""
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=16))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.normal_()
    path = write_gguf(tmp_path / "tiny.gguf", model, Kind.F32, arch="gemma3")
    quantize_checkpoint(path, tmp_path / "q")
    after = tensors_of(tmp_path / "q")
    for name in ("model.norm.weight", "model.layers.1.post_attention_layernorm.weight"):
        torch.testing.assert_close(
            after[name].float(), model.state_dict()[name], rtol=0.01, atol=0.01
        )


def test_an_architecture_stored_as_it_is(tmp_path):
    """Qwen3: nothing to undo, so every tensor may be read in pieces."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES | {"head_dim": 128})).bfloat16()
    path = write_gguf(tmp_path / "tiny.gguf", model, Kind.BF16, arch="qwen3")
    model.save_pretrained(tmp_path / "base")
    quantize_checkpoint(path, tmp_path / "q")
    quantize_checkpoint(tmp_path / "base", tmp_path / "direct")
    ours, direct = tensors_of(tmp_path / "q"), tensors_of(tmp_path / "direct")
    assert ours.keys() == direct.keys()
    assert all(torch.equal(ours[n].view(torch.uint8), direct[n].view(torch.uint8)) for n in ours)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q5_1])
def test_lower_types_are_converted_with_a_warning(tmp_path, kind):
    model = llama(tied=False, dtype=torch.float32)
    path = write_gguf(tmp_path / "tiny.gguf", model, kind)
    said = []
    quantize_checkpoint(path, tmp_path / "q", say=said.append)
    assert said == [
        f"'tiny.gguf' was quantized once already ({kind.name}): the result is worse than one from "
        "the 16-bit checkpoint"
    ]
    assert (tmp_path / "q" / "config.json").is_file()


def test_rows_in_pieces(tmp_path, monkeypatch):
    """The embedding, unpacked a few rows at a time, is the same."""
    path = write_gguf(tmp_path / "tiny.gguf", llama(dtype=torch.float32), Kind.Q8_0)
    quantize_checkpoint(path, tmp_path / "whole")
    monkeypatch.setattr("qerl.quantize.shards.PIECE_BYTES", 1000)
    quantize_checkpoint(path, tmp_path / "pieces")
    assert {p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "pieces").iterdir()
    }


def test_damaged_files(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", llama(), Kind.F16)
    whole = path.read_bytes()
    for damaged in (b"", b"GGUF", b"nonsense" * 100, whole[:2000], whole[: len(whole) - 4000]):
        path.write_bytes(damaged)
        with pytest.raises(QerlError, match="download it again"):
            quantize_checkpoint(path, tmp_path / "q")
    with pytest.raises(QerlError, match="there is no file"):
        quantize_checkpoint(tmp_path / "none.gguf", tmp_path / "q")


def test_a_configuration_that_transformers_reads_otherwise(tmp_path):
    """It takes Qwen3's head size to be 128 whatever the file says."""
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    path = write_gguf(tmp_path / "tiny.gguf", model, Kind.F16, arch="qwen3")
    with pytest.raises(QerlError, match=r"holds 4096 numbers for '.*q_proj.weight', its shape is"):
        quantize_checkpoint(path, tmp_path / "q")


def test_nan_in_a_gguf_is_named(tmp_path):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    path = write_gguf(tmp_path / "tiny.gguf", model, Kind.F16)
    with pytest.raises(QerlError, match=r"layer 'model.layers.1.mlp.up_proj': weight holds a NaN"):
        quantize_checkpoint(path, tmp_path / "q")
