"""What leaves a run: a checked adapter folder, and the base as plain transformers reads it."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from qerl.adapter import adapter_state, save_adapter
from qerl.errors import QerlError
from qerl.export import check_adapter, dequantized_base, export_adapter
from qerl_kernels.quantize import dequantize, quantize_absmax

IDS = torch.arange(12).reshape(1, 12)


def make_base(dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # not .to(): rotary frequencies stay in fp32
        parameter.data = parameter.data.to(dtype)
    return model


@pytest.fixture
def run(tmp_path):
    """A run folder with two different adapters: adapter/ (all 1) and best/ (all 2)."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"])
    model = get_peft_model(make_base(), config)
    for name, value in (("adapter", 1.0), ("best", 2.0)):
        for tensor in adapter_state(model).values():
            tensor.fill_(value)
        save_adapter(model, tmp_path / "run" / name, base_model="me/base")
    return tmp_path / "run"


@pytest.mark.parametrize(("which", "value"), [("last", 1.0), ("best", 2.0)])
def test_export_copies_the_adapter_asked_for(run, tmp_path, which, value):
    result = export_adapter(run, tmp_path / "to go", which=which)
    assert (result.path, result.modules) == (tmp_path / "to go", 4)
    assert result.bytes == (tmp_path / "to go" / "adapter_model.safetensors").stat().st_size
    plain = PeftModel.from_pretrained(make_base(), str(result.path))
    assert {float(t.unique()) for t in adapter_state(plain).values()} == {value}
    source = run / {"last": "adapter", "best": "best"}[which]
    assert sorted(p.name for p in source.iterdir()) == sorted(p.name for p in result.path.iterdir())


def test_export_refuses_a_folder_that_is_not_empty(run, tmp_path):
    (tmp_path / "empty").mkdir()
    export_adapter(run, tmp_path / "empty")
    with pytest.raises(QerlError, match="exists and is not empty; name another folder"):
        export_adapter(run, tmp_path / "empty")


def test_what_cannot_be_written_is_refused(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(QerlError, match=r"'.*/file/x': '.*/file' is not a folder; name another"):
        export_adapter(run, tmp_path / "file" / "x")


def test_export_names_what_is_missing(run, tmp_path):
    for name in ("adapter", "best"):
        (run / name / "adapter_config.json").unlink()
    with pytest.raises(QerlError, match="no adapter at .*run/adapter: .*is the run over"):
        export_adapter(run, tmp_path / "out")
    with pytest.raises(QerlError, match="no best adapter in .*eval.every is set"):
        export_adapter(run, tmp_path / "out", which="best")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["cut", "half", "rank", "none"])
def test_export_of_a_damaged_adapter_writes_nothing(run, tmp_path, damage):
    path = run / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    elif damage == "half":
        del tensors[max(tensors)]
        save_file(tensors, path)
    elif damage == "rank":
        config = json.loads((run / "adapter" / "adapter_config.json").read_text())
        (run / "adapter" / "adapter_config.json").write_text(json.dumps(config | {"r": 8}))
    else:
        save_file({}, path)
    with pytest.raises(QerlError, match="damaged|holds no adapter") as error:
        export_adapter(run, tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_check_adapter_counts_modules(run):
    assert check_adapter(run / "adapter") == 4


def write_nvfp4(folder, model, shards=1):
    """A compressed-tensors NVFP4 checkpoint of `model`, written by hand; returns plain tensors."""
    folder.mkdir(parents=True)
    config = json.loads(model.config.to_json_string())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
    }
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.bin").write_bytes(b"weights of another kind")
    files, plain = {}, {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if name.endswith("_proj.weight"):
            packed, scale, divisor = quantize_absmax(tensor)
            stem = name.removesuffix("weight")
            plain[name] = dequantize(packed, scale, divisor, tensor.dtype)
            files |= {f"{stem}weight_packed": packed, f"{stem}weight_scale": scale}
            files[f"{stem}weight_global_scale"] = divisor
        else:
            files[name] = plain[name] = tensor
    if shards == 1:
        save_file(files, folder / "model.safetensors")
        return plain
    # Deal the tensors out one by one, so that a weight's three parts lie in different shards.
    names = [f"model-{i}.safetensors" for i in range(shards)]
    where = {name: names[i % shards] for i, name in enumerate(files)}
    for file in names:
        save_file({k: v for k, v in files.items() if where[k] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 2])
def test_dequantized_base_is_what_the_codes_stand_for(tmp_path, dtype, shards):
    model = make_base(dtype)
    plain = write_nvfp4(tmp_path / "packed", model, shards)
    seen = []
    out = dequantized_base(
        tmp_path / "packed", tmp_path / "plain", progress=lambda *at: seen.append(at)
    )
    assert {p.name for p in out.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()) and loaded.dtype == dtype
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.items())
    assert seen == [(i + 1, len(plain)) for i in range(len(plain))]
    model.load_state_dict(plain, strict=False)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_dequantized_base_in_shards_and_another_dtype(tmp_path):
    plain = write_nvfp4(tmp_path / "packed", make_base())
    out = dequantized_base(
        tmp_path / "packed", tmp_path / "plain", dtype=torch.bfloat16, shard_bytes=20_000
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    sizes = [sum(t.nbytes for t in load_file(out / f).values()) for f in files]
    assert max(sizes) <= 20_000 and sum(sizes) == index["metadata"]["total_size"]
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config.dtype == torch.bfloat16
    for name, tensor in loaded.state_dict().items():
        if name.endswith("_proj.weight"):
            assert torch.equal(tensor, plain[name].bfloat16())


def test_adapter_and_dequantized_base_work_together_in_plain_peft(run, tmp_path):
    write_nvfp4(tmp_path / "packed", make_base())
    out = dequantized_base(tmp_path / "packed", tmp_path / "plain")
    base = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        before = base(IDS).logits
        after = PeftModel.from_pretrained(base, str(run / "adapter")).eval()(IDS).logits
    assert (after - before).abs().max() > 0.1


def test_dequantized_base_errors_are_one_line(tmp_path):
    source = tmp_path / "packed"
    with pytest.raises(QerlError, match="no checkpoint at .*: config.json is not there"):
        dequantized_base(source, tmp_path / "out")
    make_base().save_pretrained(tmp_path / "bf16")
    with pytest.raises(QerlError, match="format not quantized, wanted nvfp4-pack-quantized"):
        dequantized_base(tmp_path / "bf16", tmp_path / "out")
    write_nvfp4(source, make_base(), shards=2)
    with pytest.raises(QerlError, match="cannot write a checkpoint to .*: it exists"):
        dequantized_base(source, tmp_path / "bf16")
    path = source / "model-0.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(QerlError, match="model-0.safetensors is damaged"):
        dequantized_base(source, tmp_path / "out")
    path.unlink()
    with pytest.raises(QerlError, match="is incomplete: model-0.safetensors is missing"):
        dequantized_base(source, tmp_path / "out")
    path.write_bytes(data)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    gone = "model.layers.1.mlp.up_proj.weight_scale"
    del index["weight_map"][gone]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(QerlError, match=f"is incomplete: {gone} is missing"):
        dequantized_base(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bf16", "packed"]
