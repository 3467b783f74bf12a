"""The streaming quantizer: interruptions, full disks, layouts, heads, damaged checkpoints."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_quantize import tensors_of, tiny_llama
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from qerl.errors import QerlError
from qerl.quantize import nvfp4, output, writer
from qerl.quantize.checkpoint import quantize_checkpoint
from qerl.quantize.shards import Source
from qerl.quantize.writer import Spec, Writer, unfinished
from qerl_kernels import quantize

TEXT_SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
VISION_SIZES = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, image_size=28)


@pytest.fixture
def checkpoint(tmp_path):
    tiny_llama(tied=False).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def files_of(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def stop_at(layer):
    def progress(done, total, name):
        if done == layer:
            raise KeyboardInterrupt

    return progress


# --- interruptions -------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_an_interrupted_run_goes_on_and_ends_the_same(checkpoint, tmp_path, format):
    options = dict(format=format, shard_bytes=20_000)
    quantize_checkpoint(checkpoint, tmp_path / "whole", **options)
    said, seen = [], []
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(
            checkpoint, tmp_path / "q", progress=stop_at(5), say=said.append, **options
        )
    work = unfinished(tmp_path / "q")
    assert not (tmp_path / "q").exists() and work.is_dir()
    assert said == [
        f"stopped; what is done is kept in '{work}', the same command goes on from there"
    ]
    assert not list(work.glob("*.safetensors")) and not (work / "config.json").exists()
    quantize_checkpoint(
        checkpoint,
        tmp_path / "q",
        progress=lambda done, total, name: seen.append(done),
        say=said.append,
        **options,
    )
    assert said[1].startswith(f"going on from '{work}', ")
    # The fifth layer is within a group, which is searched again whole; four were in whole groups.
    assert seen == list(range(6, 15))
    assert files_of(tmp_path / "q") == files_of(tmp_path / "whole")
    assert not work.exists()


@pytest.mark.slow
def test_a_killed_run_goes_on(checkpoint, tmp_path):
    code = f"""
        import os, signal
        from qerl.quantize.checkpoint import quantize_checkpoint
        def progress(done, total, name):
            if done == 9:
                os.kill(os.getpid(), signal.SIGKILL)
        src, dst = {str(checkpoint)!r}, {str(tmp_path / "q")!r}
        quantize_checkpoint(src, dst, progress=progress)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)])
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(QerlError, match=r"has no config.json"):
        quantize_checkpoint(unfinished(tmp_path / "q"), tmp_path / "half")
    seen = []
    quantize_checkpoint(
        checkpoint, tmp_path / "q", progress=lambda done, total, name: seen.append(done)
    )
    assert seen == list(range(10, 15))
    quantize_checkpoint(checkpoint, tmp_path / "whole")
    assert files_of(tmp_path / "q") == files_of(tmp_path / "whole")


def test_calibrated_runs_go_on_too(checkpoint, tmp_path):
    ids = [[3, 5, 7, 9, 11, 13, 15, 17], [2, 4, 6, 8]]
    quantize_checkpoint(checkpoint, tmp_path / "whole", calibration=ids)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(checkpoint, tmp_path / "q", calibration=ids, progress=stop_at(9))
    made = quantize_checkpoint(checkpoint, tmp_path / "q", calibration=ids)
    assert made["method"] == "imatrix"
    assert files_of(tmp_path / "q") == files_of(tmp_path / "whole")
    data_free = tensors_of(quantized(checkpoint, tmp_path / "free"))
    name = "model.layers.0.mlp.down_proj.weight_packed"
    assert not torch.equal(data_free[name], tensors_of(tmp_path / "q")[name])


def quantized(src, dst, **options):
    quantize_checkpoint(src, dst, **options)
    return dst


@pytest.mark.parametrize("change", ["method", "source", "damage"])
def test_another_source_or_setting_starts_again(checkpoint, tmp_path, change):
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(checkpoint, tmp_path / "q", progress=stop_at(9))
    options = {"method": "absmax"} if change == "method" else {}
    if change == "source":
        os.utime(checkpoint / "model.safetensors", ns=(1, 1))
    if change == "damage":
        os.truncate(unfinished(tmp_path / "q") / "00000.part", 100)
    said, seen = [], []
    quantize_checkpoint(
        checkpoint,
        tmp_path / "q",
        progress=lambda done, total, name: seen.append(done),
        say=said.append,
        **options,
    )
    assert "starting again" in said[0] and seen == list(range(1, 15))
    assert ("is damaged" in said[0]) == (change == "damage")


def test_bytes_that_changed_since_are_written_again(checkpoint, tmp_path):
    quantize_checkpoint(checkpoint, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(checkpoint, tmp_path / "q", progress=stop_at(14))
    work = unfinished(tmp_path / "q")
    journal = (work / "journal.jsonl").read_text()
    (work / "journal.jsonl").write_text(journal + '{"name": "model.norm.wei')  # a torn line
    with (work / "00000.part").open("r+b") as file:  # as after a power cut
        file.seek(-5000, os.SEEK_END)
        file.write(bytes(1000))
    seen = []
    quantize_checkpoint(checkpoint, tmp_path / "q", progress=lambda *step: seen.append(step))
    assert 0 < len(seen) < 14
    assert files_of(tmp_path / "q") == files_of(tmp_path / "whole")


def test_two_processes_do_not_write_the_same_checkpoint(checkpoint, tmp_path):
    def meanwhile(done, total, name):
        if done == 3:
            with pytest.raises(QerlError, match="another process is writing"):
                quantize_checkpoint(checkpoint, tmp_path / "q")

    quantize_checkpoint(checkpoint, tmp_path / "q", progress=meanwhile)
    assert (tmp_path / "q" / "model.safetensors").is_file()


def test_a_full_disk_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    """At the start, where space is reserved, and in the middle, where a system reserves none."""
    original = os.pwrite
    room = 30_000

    def full(fd, *arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    def filling(fd, data, at):
        nonlocal room
        room -= len(data)
        return original(fd, data, at) if room > 0 else full(fd)

    for name, fake in (("posix_fallocate", full), ("pwrite", filling)):
        with monkeypatch.context() as patch:
            patch.setattr(writer.os, name, fake)
            with pytest.raises(QerlError, match=r"no space for '.*/q' \(No space left.*free some"):
                quantize_checkpoint(checkpoint, tmp_path / "q")
        assert [p.name for p in tmp_path.iterdir()] == ["base"]
    assert room <= 0


def test_files_may_not_grow(checkpoint, tmp_path):
    """A limit of the system itself: what it says of a file is what a full disk is to a folder."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(QerlError, match=r"no space for '.*/q' \(File too large\); free some"):
            quantize_checkpoint(checkpoint, tmp_path / "q")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0,
    reason="no private mounts here",
)
def test_a_disk_that_is_really_full(checkpoint, tmp_path):
    (tmp_path / "disk").mkdir()
    code = f"""
        from pathlib import Path
        from qerl.errors import QerlError
        from qerl.quantize.checkpoint import quantize_checkpoint
        disk = Path({str(tmp_path / "disk")!r})
        try:
            quantize_checkpoint(Path({str(checkpoint)!r}), disk / "q")
        except QerlError as error:
            print(error, list(disk.iterdir()))
    """
    mount = f'mount -t tmpfs -o size=64k tmpfs "{tmp_path}/disk" && exec "$0" -c "$1"'
    command = ["unshare", "-rm", "sh", "-c", mount, sys.executable, textwrap.dedent(code)]
    said = subprocess.run(command, capture_output=True, text=True)
    assert "no space for" in said.stdout, said.stderr
    assert said.stdout.rstrip().endswith(" []")


def test_replacing_keeps_the_old_one_until_the_new_one_is_whole(checkpoint, tmp_path):
    quantize_checkpoint(checkpoint, tmp_path / "q", method="absmax")
    before = files_of(tmp_path / "q")
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(checkpoint, tmp_path / "q", overwrite=True, progress=stop_at(14))
    assert files_of(tmp_path / "q") == before
    quantize_checkpoint(checkpoint, tmp_path / "q", overwrite=True)
    assert files_of(tmp_path / "q") != before


def test_writer_places_tensors_in_any_order(tmp_path):
    """Sizes that end shards early, odd offsets, scalars: read back by the safetensors library."""
    values = {
        "a": torch.arange(5, dtype=torch.uint8),
        "b": torch.randn(3, 7),
        "c": torch.tensor(2.5),
        "d": torch.randn(40, 2).bfloat16(),
        "e": torch.empty(0, 4),
    }
    names = {"uint8": "U8", "float32": "F32", "bfloat16": "BF16"}
    specs = [
        Spec(n, names[str(t.dtype).removeprefix("torch.")], tuple(t.shape))
        for n, t in values.items()
    ]
    with Writer(tmp_path / "w", specs, 100, {}) as made:
        for name in reversed(values):
            rows = values[name].split(2) if values[name].dim() else [values[name]]
            made.write(name, rows)
            assert torch.equal(made.read(name), values[name])
        (tmp_path / "out").mkdir()
        made.move_to(tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    assert found.keys() == values.keys()
    assert all(torch.equal(found[n], values[n]) for n in values)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3


# --- settings ------------------------------------------------------------------------------------


def test_kept_layers_stay_and_are_ignored_by_other_code(checkpoint, tmp_path):
    keep = ["*.layers.0.self_attn.*", "re:down_proj$"]
    made = quantize_checkpoint(checkpoint, tmp_path / "q", keep=keep)
    before, after = tensors_of(checkpoint), tensors_of(tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    kept = [n for n in config["quantization_config"]["ignore"] if n != "lm_head"]
    assert len(kept) == 4 + 2 and made["layers"] == 14 - 6
    for name in kept:
        assert torch.equal(after[f"{name}.weight"], before[f"{name}.weight"])
    AutoModelForCausalLM.from_pretrained(tmp_path / "q")(torch.arange(8)[None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(keep=["*.nonsense"]), r"keep: '\*.nonsense' matches no linear layer"),
        (dict(keep=["re:("]), r"keep: 're:\(' is no regular expression"),
        (dict(keep=["*.0.self_attn.k_proj"]), r"keep: .*k_proj' is kept but '.*q_proj' is not"),
        (dict(method="best"), r"method: 'best' is unknown; choose absmax, four-over-six"),
        (dict(method="gptq"), r"method: gptq needs calibration text"),
        (dict(method="sweep", calibration=[[1, 2]]), r"method: sweep uses no calibration text"),
        (dict(lm_head="int8"), r"lm_head: 'int8' is unknown"),
        (dict(format="gguf"), r"format: 'gguf' is unknown; choose compressed-tensors, modelopt"),
        (dict(format="modelopt", lm_head="fp8"), r"lm_head: fp8 is not for format modelopt"),
    ],
)
def test_settings_that_do_not_fit(checkpoint, tmp_path, options, message):
    with pytest.raises(QerlError, match=message):
        quantize_checkpoint(checkpoint, tmp_path / "q", **options)
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


def put_back(model, folder, head=None):
    """The dequantized weights of a checkpoint in the plain model; the head as given."""
    found = tensors_of(folder)
    with torch.no_grad():
        for name, module in model.named_modules():
            if f"{name}.weight_packed" in found:
                parts = [found[f"{name}.weight{s}"] for s in ("_packed", "_scale", "_global_scale")]
                module.weight.copy_(quantize.dequantize(*parts, torch.bfloat16))
        if head is not None:
            model.lm_head.weight.copy_(head)
    return model


@pytest.mark.parametrize("lm_head", ["nvfp4", "fp8"])
def test_a_quantized_head_is_read_by_transformers(checkpoint, tmp_path, lm_head):
    quantize_checkpoint(checkpoint, tmp_path / "q", lm_head=lm_head)
    before, after = tensors_of(checkpoint)["lm_head.weight"].float(), tensors_of(tmp_path / "q")
    head = None
    if lm_head == "fp8":
        scale = after["lm_head.weight_scale"]
        assert after["lm_head.weight"].dtype == torch.float8_e4m3fn and scale.shape == (96, 1)
        rows = before.abs().amax(1, keepdim=True) / 448
        torch.testing.assert_close(scale, rows)
        back = after["lm_head.weight"].float() * scale
        assert ((back - before).abs() <= before.abs() / 16 + scale * 2**-10).all()
        head = back.bfloat16()
    else:
        expected = quantize_checkpoint_head(before)
        assert torch.equal(after["lm_head.weight_packed"], expected.packed)
        assert torch.equal(after["lm_head.weight_global_scale"], expected.global_scale)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    ours = put_back(AutoModelForCausalLM.from_pretrained(checkpoint), tmp_path / "q", head)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=0.02, atol=0.01)


def quantize_checkpoint_head(weight):
    from qerl.quantize.search import quantize_weight

    return quantize_weight(weight, "sweep")


def test_a_head_in_pieces_equals_one_in_one_piece(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("qerl.quantize.shards.PIECE_BYTES", 1000)
    source = Source(checkpoint)
    assert len(list(source.pieces("lm_head.weight"))) > 10
    quantize_checkpoint(checkpoint, tmp_path / "q", lm_head="nvfp4")
    expected = quantize_checkpoint_head(tensors_of(checkpoint)["lm_head.weight"])
    after = tensors_of(tmp_path / "q")
    assert torch.equal(after["lm_head.weight_packed"], expected.packed)
    scale = after["lm_head.weight_scale"].view(torch.uint8)
    assert torch.equal(scale, expected.scale.view(torch.uint8))


def test_a_tied_head_is_not_quantized(tmp_path):
    tiny_llama(tied=True).save_pretrained(tmp_path / "base")
    for lm_head in ("nvfp4", "fp8"):
        with pytest.raises(QerlError, match=r"lm_head: the model's head is the embedding"):
            quantize_checkpoint(tmp_path / "base", tmp_path / "q", lm_head=lm_head)


def test_modelopt_layout_holds_the_same_numbers(checkpoint, tmp_path):
    ours = tensors_of(quantized(checkpoint, tmp_path / "ct"))
    theirs = tensors_of(quantized(checkpoint, tmp_path / "mo", format="modelopt"))
    for name in nvfp4.linear_shapes(tiny_llama(tied=False)):
        assert torch.equal(theirs[f"{name}.weight"], ours[f"{name}.weight_packed"])
        a, b = theirs[f"{name}.weight_scale"], ours[f"{name}.weight_scale"]
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        multiplier = theirs[f"{name}.weight_scale_2"]
        assert multiplier.shape == () and multiplier.dtype == torch.float32
        torch.testing.assert_close(multiplier, 1 / ours[f"{name}.weight_global_scale"][0])
    config = json.loads((tmp_path / "mo" / "config.json").read_text())["quantization_config"]
    beside = json.loads((tmp_path / "mo" / "hf_quant_config.json").read_text())["quantization"]
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt", "W4A16_NVFP4")
    assert config["ignore"] == beside["exclude_modules"] == ["lm_head"]
    assert beside == {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }


def test_modelopt_layout_is_converted_back_by_compressed_tensors(checkpoint, tmp_path):
    """Their converter, from ModelOpt's tensors to theirs, gives what we write directly."""
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter

    layers = list(nvfp4.linear_shapes(tiny_llama(tied=False)))
    ours = tensors_of(quantized(checkpoint, tmp_path / "ct"))
    tensors = tensors_of(quantized(checkpoint, tmp_path / "mo", format="modelopt"))
    converter = ModelOptNvfp4Converter(targets=[f"re:.*{n}$" for n in layers])
    found = converter.process(dict(tensors)) or tensors
    for name in layers:
        assert torch.equal(found[f"{name}.weight_packed"], ours[f"{name}.weight_packed"])
        torch.testing.assert_close(
            found[f"{name}.weight_global_scale"].reshape(1), ours[f"{name}.weight_global_scale"]
        )


# --- families ------------------------------------------------------------------------------------


def test_phi_stays_fused(tmp_path):
    sizes = {k: v for k, v in TEXT_SIZES.items() if k != "head_dim"}
    config = Phi3Config(**sizes, pad_token_id=0, tie_word_embeddings=False)
    Phi3ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "base")
    made = quantize_checkpoint(tmp_path / "base", tmp_path / "q")
    after = tensors_of(tmp_path / "q")
    assert made["layers"] == 2 * 4
    assert after["model.layers.0.self_attn.qkv_proj.weight_packed"].shape == (128, 32)
    assert after["model.layers.1.mlp.gate_up_proj.weight_packed"].shape == (192, 32)
    AutoModelForCausalLM.from_pretrained(tmp_path / "q")(torch.arange(8)[None])


def qwen3_5(folder):
    text = dict(TEXT_SIZES, num_hidden_layers=4, linear_num_value_heads=4, linear_num_key_heads=2)
    text |= dict(linear_key_head_dim=16, linear_value_head_dim=16, tie_word_embeddings=False)
    vision = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64)
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    torch.manual_seed(0)
    Qwen3_5ForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["mtp.fc.weight"] = torch.randn(64, 128).bfloat16()
    weights["mtp.norm.weight"] = torch.randn(64).bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_only_the_text_tower_of_qwen3_5_is_quantized(tmp_path):
    base = qwen3_5(tmp_path / "base")
    before, after = tensors_of(base), tensors_of(quantized(base, tmp_path / "q"))
    packed = [n.removesuffix(".weight_packed") for n in after if n.endswith(".weight_packed")]
    assert packed and all(n.startswith("model.language_model.layers.") for n in packed)
    recurrent = "model.language_model.layers.0.linear_attn."
    assert {f"{recurrent}in_proj_qkv", f"{recurrent}in_proj_z", f"{recurrent}out_proj"} < set(
        packed
    )
    pair = [after[f"{recurrent}in_proj_{n}.weight_global_scale"] for n in ("qkv", "z")]
    assert torch.equal(*pair)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    ignore = config["quantization_config"]["ignore"]
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert {f"{recurrent}in_proj_a", f"{recurrent}in_proj_b", "mtp.fc", "lm_head"} < set(ignore)
    untouched = [n for n in before if n in after]
    assert {"mtp.fc.weight", "mtp.norm.weight", f"{recurrent}in_proj_a.weight"} < set(untouched)
    assert any(n.startswith("model.visual.") for n in untouched)
    assert all(torch.equal(after[n], before[n]) for n in untouched)
    assert set(before) - set(untouched) == {f"{n}.weight" for n in packed}
    theirs = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    ours = put_back(Qwen3_5ForConditionalGeneration.from_pretrained(base), tmp_path / "q")
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=0.02, atol=0.02)


def test_names_that_transformers_changes_while_loading(tmp_path):
    """Gemma 3's files say language_model.model.layers, its class model.language_model.layers."""
    text = dict(TEXT_SIZES, sliding_window=8)
    vision = dict(VISION_SIZES, num_hidden_layers=1, patch_size=14)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).bfloat16().save_pretrained(tmp_path / "base")
    before = tensors_of(tmp_path / "base")
    if not any(n.startswith("language_model.model.") for n in before):  # as the Hub's files are
        before = {old_gemma_name(n): t for n, t in before.items()}
        save_file(before, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    made = quantize_checkpoint(tmp_path / "base", tmp_path / "q")
    after = tensors_of(tmp_path / "q")
    assert made["layers"] == 14
    assert "language_model.model.layers.1.mlp.up_proj.weight_packed" in after
    assert all(torch.equal(after[n], before[n]) for n in before if n.startswith("vision_tower."))
    assert "lm_head.weight" not in after and "language_model.lm_head.weight" not in after
    ids = torch.arange(3, 15)[None]
    theirs = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    plain = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    with torch.no_grad():
        distance = (theirs(ids).logits - plain(ids).logits).norm() / plain(ids).logits.norm()
    assert 0 < distance < 0.3


def old_gemma_name(name):
    return (
        name.replace("model.language_model.", "language_model.model.")
        .replace("model.vision_tower", "vision_tower")
        .replace("model.multi_modal", "multi_modal")
    )


def test_experts_in_one_tensor_are_refused(tmp_path):
    sizes = dict(TEXT_SIZES, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    config = AutoConfig.for_model("qwen3_moe", **sizes)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "base")
    with pytest.raises(QerlError, match=r"Qwen3MoeForCausalLM holds all experts in one tensor"):
        quantize_checkpoint(tmp_path / "base", tmp_path / "q")


# --- damaged and foreign checkpoints -------------------------------------------------------------


def shard(folder):
    """The same checkpoint in several files; its index."""
    tiny_llama(tied=False).save_pretrained(folder, max_shard_size="40KB")
    return folder / "model.safetensors.index.json"


def test_missing_shard_and_wrong_index(tmp_path):
    index = shard(tmp_path / "base")
    original = json.loads(index.read_text())
    cases = [
        (
            lambda m: m.update({"ghost.weight": next(iter(m.values()))}),
            "'ghost.weight' is in model",
        ),
        (lambda m: m.update({"model.norm.weight": min(m.values())}), "which does not hold it"),
        (lambda m: m.update({"model.norm.weight": "model-9.safetensors"}), "has no model-9"),
        (lambda m: m.update({"model.norm.weight": 3}), "is not an index of tensors"),
    ]
    for change, message in cases:
        changed = json.loads(json.dumps(original))
        change(changed["weight_map"])
        index.write_text(json.dumps(changed))
        with pytest.raises(QerlError, match=message):
            quantize_checkpoint(tmp_path / "base", tmp_path / "q")
    for text in ("{", "[]", '{"weight_map": []}'):
        index.write_text(text)
        with pytest.raises(QerlError, match="is not an index of tensors; download it again"):
            quantize_checkpoint(tmp_path / "base", tmp_path / "q")
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_truncated_files(checkpoint, tmp_path, cut):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:cut])
    with pytest.raises(QerlError, match=r"model.safetensors' is not a whole safetensors file"):
        quantize_checkpoint(checkpoint, tmp_path / "q")


def test_corrupt_headers(checkpoint, tmp_path):
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (
        whole[:20] + b"\xff" * 10 + whole[30:],
        (2**40).to_bytes(8, "little") + whole[8:],
        whole.replace(b'"BF16"', b'"XY16"', 1),
    ):
        weights.write_bytes(damaged)
        with pytest.raises(QerlError, match="is not a whole safetensors file"):
            quantize_checkpoint(checkpoint, tmp_path / "q")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_bad_numbers_outside_linear_layers_are_named_too(checkpoint, tmp_path, name, value):
    weights = load_file(checkpoint / "model.safetensors")
    weights[name].view(-1)[-1] = value
    save_file(weights, checkpoint / "model.safetensors")
    layer = name.removesuffix(".weight")
    with pytest.raises(QerlError, match=f"layer '{layer}': weight holds a NaN or an infinity"):
        quantize_checkpoint(checkpoint, tmp_path / "q")
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


def test_pickles_are_refused_with_the_way_out(checkpoint, tmp_path):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    for source in (checkpoint, checkpoint / "pytorch_model.bin"):
        with pytest.raises(QerlError, match=r"pickle.*from_pretrained\(OLD\).save_pretrained"):
            quantize_checkpoint(source, tmp_path / "q")


def test_code_of_the_model_is_not_run(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass")
    with pytest.raises(QerlError, match=r"needs Python code .* is not run unless you ask"):
        quantize_checkpoint(checkpoint, tmp_path / "q")
    assert not (tmp_path / "ran").exists()


def test_a_layer_too_narrow_may_be_kept(tmp_path):
    tiny_llama(hidden=40, tied=False).save_pretrained(tmp_path / "base")
    made = quantize_checkpoint(
        tmp_path / "base",
        tmp_path / "q",
        keep=["*self_attn.*", "*gate_proj", "*up_proj"],
    )
    assert made["layers"] == 2  # down_proj, whose K is 112
    with pytest.raises(QerlError, match="layer 'lm_head' has 40 input features"):
        quantize_checkpoint(
            tmp_path / "base",
            tmp_path / "head",
            keep=["*self_attn.*", "*gate_proj", "*up_proj"],
            lm_head="nvfp4",
        )


def test_fp8_rows_by_hand():
    rows = torch.tensor([[4.48, -2.24, 0.0], [0.0, 0.0, 0.0]])
    made = output.fp8_tensors("x", [rows[:1], rows[1:]])
    codes, scale = torch.cat(made["x.weight"]), torch.cat(made["x.weight_scale"])
    assert codes.float().tolist() == [[448.0, -224.0, 0.0], [0.0, 0.0, 0.0]]
    torch.testing.assert_close(scale, torch.tensor([[0.01], [1.0]]))


# --- memory --------------------------------------------------------------------------------------

QWEN_32B = dict(
    vocab_size=152064,
    hidden_size=5120,
    intermediate_size=27648,
    num_hidden_layers=2,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
)
MEASURE = """
    import resource, sys
    import torch
    torch.set_num_threads(1)
    from qerl.quantize.checkpoint import quantize_checkpoint
    import transformers.models.qwen2.modeling_qwen2, compressed_tensors
    def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    before = peak()
    src, dst, method, lm_head = sys.argv[1:]
    quantize_checkpoint(src, dst, method=method, lm_head=lm_head)
    print(before, peak())
"""


def write_32b(folder: Path) -> int:
    """Two layers, embedding and head of a 32B shape, written a tensor at a time; its bytes."""
    config = AutoConfig.for_model("qwen2", **QWEN_32B, architectures=["Qwen2ForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    specs = [Spec(n, "BF16", tuple(p.shape)) for n, p in model.named_parameters()]
    block = (torch.randn(1 << 20) * 0.02).bfloat16()
    with Writer(folder / "w", specs, 8 * 1024**3, {}) as made:
        for spec in specs:
            left = spec.nbytes // 2
            whole = [block] * (left // block.numel())
            made.write(spec.name, [*whole, block[: left % block.numel()]])
        made.move_to(folder)
    return made.total


@pytest.mark.slow
def test_peak_memory_of_a_32b_shape(tmp_path):
    """2 × the largest tensor and a constant: the embedding has 1.56 GB, gate_proj 283 MB."""
    folder = tmp_path / "base"
    assert write_32b(folder) > 5e9
    largest = 152064 * 5120 * 2
    for lm_head in ("keep", "nvfp4", "fp8"):
        command = [sys.executable, "-c", textwrap.dedent(MEASURE), folder, tmp_path / lm_head]
        run = subprocess.run(
            [*map(str, command), "absmax", lm_head], capture_output=True, text=True, check=True
        )
        before, peak = map(int, run.stdout.split())
        print(f"lm_head {lm_head}: {before / 1e6:.0f} MB before, peak {peak / 1e6:.0f} MB")
        assert peak < before + 2 * largest + 200e6
        if lm_head == "keep":  # the embedding is copied a piece at a time: only layers count
            assert peak < before + 4 * (27648 * 5120 * 2) + 300e6
