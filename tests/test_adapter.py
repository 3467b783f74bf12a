"""The adapter folder: PEFT reads it, it comes back bit for bit, and misfits are named."""

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qerl.adapter import (
    Adapter,
    adapted_modules,
    adapter_state,
    checksum,
    is_hub_id,
    load_adapter,
    save_adapter,
)
from qerl.errors import QerlError

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.arange(12).reshape(1, 12)


def make_base(hidden=64):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def make_model(*, rank=4, alpha=8.0, targets=ALL, seed=None, hidden=64, **more):
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM", **more
    )
    model = get_peft_model(make_base(hidden), config)
    if seed is not None:  # a trained adapter: B is not zero
        generator = torch.Generator().manual_seed(seed)
        for tensor in adapter_state(model).values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model.eval()


def make_tokenizer():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token="<eos>")),
        eos_token="<eos>",
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return tokenizer


@pytest.fixture
def saved(tmp_path):
    model = make_model(seed=1)
    save_adapter(model, tmp_path / "mine", base_model="me/base", tokenizer=make_tokenizer())
    return model, tmp_path / "mine"


def edit_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_plain_peft_gives_the_same_logits(saved):
    model, folder = saved
    plain = PeftModel.from_pretrained(make_base(), str(folder)).eval()
    with torch.no_grad():
        assert torch.equal(plain(IDS).logits, model(IDS).logits)
        assert not torch.equal(plain(IDS).logits, make_base()(IDS).logits)
    assert len(adapted_modules(plain)) == len(adapted_modules(model)) == 14


def test_keys_and_bytes_are_those_peft_itself_writes(saved, tmp_path):
    model, folder = saved
    model.save_pretrained(str(tmp_path / "peft"), save_embedding_layers=False)
    ours = load_file(folder / "adapter_model.safetensors")
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys() and len(ours) == 28
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}


def test_configuration_is_portable(saved):
    model, folder = saved
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "me/base" and config["inference_mode"] is True
    assert config["target_modules"] == sorted(ALL) and config["lora_alpha"] == 8
    assert isinstance(config["lora_alpha"], int) and config["r"] == 4
    live = model.peft_config["default"]
    assert live.inference_mode is False and live.base_model_name_or_path != "me/base"


def test_full_names_become_suffixes_only_where_these_mean_the_same(tmp_path):
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]
    for targets, expected in ((names, ["q_proj"]), (names[:1], names[:1])):
        model = make_model(targets=targets, seed=2)
        save_adapter(model, tmp_path / "a", base_model="me/base")
        config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
        assert config["target_modules"] == expected
        plain = PeftModel.from_pretrained(make_base(), str(tmp_path / "a"))
        assert adapted_modules(plain) == targets


def test_folder_is_a_hub_repository(saved):
    _, folder = saved
    names = {path.name for path in folder.iterdir()}
    assert {"README.md", "tokenizer.json", "chat_template.jinja"} <= names
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in names)
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "peft" and card.data.base_model == "me/base"
    assert "lora" in card.data.tags and "PeftModel.from_pretrained(base, 'mine')" in card.text
    assert "Rank 4, alpha 8, 14 adapted modules" in card.text
    assert "on top of" not in card.text and "frozen" not in card.text
    assert PreTrainedTokenizerFast.from_pretrained(str(folder)).chat_template.startswith("{% for")


def test_card_leaves_a_local_base_out_and_takes_metadata(tmp_path):
    model = make_model()
    local = str(tmp_path / "base model")
    save_adapter(model, tmp_path / "a", base_model=local)
    assert ModelCard.load(tmp_path / "a" / "README.md").data.base_model is None
    meta = {"license": "apache-2.0", "base_model": "me/base"}
    said = "Trained on an NVFP4 (4.5 bits a weight) copy of me/base."
    save_adapter(model, tmp_path / "b", base_model="me/base", trained_on=said)
    text = (tmp_path / "b" / "README.md").read_text()
    assert (
        text.endswith(f"14 adapted modules.\n\n{said}\n") and ".from_pretrained(base, 'b'" in text
    )
    save_adapter(model, tmp_path / "a", base_model=local, readme="Hello.\n", metadata=meta)
    card = ModelCard.load(tmp_path / "a" / "README.md")
    assert (card.data.license, card.data.base_model) == ("apache-2.0", "me/base")
    assert card.text.strip() == "# a\n\nHello."
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == local


def test_load_restores_bit_for_bit_in_place(saved):
    model, folder = saved
    other = make_model()
    before = {name: tensor.data_ptr() for name, tensor in adapter_state(other).items()}
    assert checksum(other) != checksum(model)
    assert load_adapter(other, folder) == 14
    assert checksum(other) == checksum(model)
    assert before == {name: tensor.data_ptr() for name, tensor in adapter_state(other).items()}


def test_load_keeps_fp32_masters_when_the_file_is_bf16(saved):
    model, folder = saved
    path = folder / "adapter_model.safetensors"
    save_file({k: v.bfloat16() for k, v in load_file(path).items()}, path)
    other = make_model()
    load_adapter(other, str(folder))
    for name, tensor in adapter_state(other).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, adapter_state(model)[name].bfloat16().float())


def test_checksum_sees_one_bit_and_the_shape():
    model = make_model(seed=1)
    before = checksum(model)
    assert before == checksum(make_model(seed=1)) and len(before) == 64
    tensor = next(iter(adapter_state(model).values()))
    tensor.view(torch.int32)[0, 0] ^= 1
    assert checksum(model) != before
    tensor.view(torch.int32)[0, 0] ^= 1
    assert checksum(model) == before
    half = make_model(seed=1).to(torch.bfloat16)
    assert checksum(half) != before


@pytest.mark.parametrize(
    ("live", "words"),
    [
        ({"rank": 8}, "lora.rank: 8 here, but .* has 4: set lora.rank=4"),
        ({"alpha": 16}, "lora.alpha: 16 here, but .* has 8: set lora.alpha=8"),
        (
            {"targets": ["q_proj"]},
            "lora.targets: .* has .*layers.0.mlp.down_proj.lora_A.*, which is not adapted here",
        ),
        ({"hidden": 32}, r"lora.init: .* is \[.*\] in the adapter .* another base model"),
    ],
)
def test_load_names_what_does_not_fit_and_changes_nothing(saved, live, words):
    model = make_model(**live)
    before = checksum(model)
    with pytest.raises(QerlError, match=words) as error:
        load_adapter(model, saved[1])
    assert checksum(model) == before and "\n" not in str(error.value)


def test_load_names_a_missing_key(saved):
    path = saved[1] / "adapter_model.safetensors"
    tensors = load_file(path)
    first = min(tensors)
    del tensors[first]
    save_file(tensors, path)
    with pytest.raises(QerlError) as error:
        load_adapter(make_model(), saved[1])
    assert f"has no {first}; it adapts down_proj, gate_proj" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, r"uses DoRA \(use_dora\): only plain LoRA is supported"),
        ({"use_rslora": True}, "uses rsLoRA"),
        ({"rank_pattern": {"q_proj": 8}}, "one rank per module"),
        ({"bias": "all"}, "trains biases"),
        ({"peft_type": "LOHA"}, "is LOHA, not LORA"),
    ],
)
def test_load_refuses_other_methods(saved, changes, words):
    edit_config(saved[1], **changes)
    with pytest.raises(QerlError, match=words):
        load_adapter(make_model(), saved[1])


def test_load_names_missing_and_damaged_files(saved, tmp_path):
    folder = saved[1]
    model = make_model()
    with pytest.raises(QerlError, match="lora.init: no adapter folder at ./nowhere"):
        load_adapter(model, "./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(QerlError, match="not a PEFT adapter: adapter_config.json is not there"):
        load_adapter(model, tmp_path / "empty")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(QerlError, match=r"adapter_model.safetensors is damaged or cut short"):
        load_adapter(model, folder)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(QerlError, match="is missing .only safetensors"):
        load_adapter(model, folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(QerlError, match="is not valid JSON"):
        load_adapter(model, folder)


def test_load_from_the_hub(saved, monkeypatch):
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(saved[1])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = make_model()
    load_adapter(model, "someone/adapter")
    assert checksum(model) == checksum(saved[0])
    assert asked == [("someone/adapter", ["adapter_config.json", "adapter_model.safetensors"])]

    def offline(name, allow_patterns):
        raise OSError("no route to host\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(QerlError, match="cannot fetch someone/adapter .*: no route to host$"):
        load_adapter(model, "someone/adapter")


def test_hub_ids():
    assert is_hub_id("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert not any(map(is_hub_id, ("./a/b", "/a/b", "~/a", "a", "a/b/c", "a b/c", "tests/..")))


def test_adapter_save_copies_and_may_be_run_again(saved, tmp_path):
    adapter = Adapter(saved[1])
    out = tmp_path / "with space"
    for _ in range(2):  # a notebook cell run twice
        assert adapter.save(out) == out
    model = make_model()
    load_adapter(model, out)
    assert checksum(model) == checksum(saved[0])
    with pytest.raises(QerlError, match="already at"):
        adapter.save(saved[1])
    with pytest.raises(QerlError, match="no adapter at .*nothing"):
        Adapter(tmp_path / "nothing").save(tmp_path / "b")


def test_a_copy_into_a_file_is_refused_in_one_line(saved, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(QerlError, match=r"^adapter folder '.*/file/x': '.*/file' is not a folder"):
        Adapter(saved[1]).save(tmp_path / "file" / "x")


def test_nothing_but_an_adapter_is_ever_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for name, words in (("home", "exists and is not empty"), ("file", "is a file")):
        with pytest.raises(QerlError, match=words):
            save_adapter(make_model(), tmp_path / name, base_model="me/base")
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


def test_a_failed_save_leaves_the_old_adapter(saved):
    model, folder = saved

    class Broken:
        def save_pretrained(self, where):
            assert Path(where).is_dir()
            raise RuntimeError("disk full")

    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(RuntimeError, match="disk full"):
        save_adapter(model, folder, base_model="me/base", tokenizer=Broken())
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}
    assert [p.name for p in folder.parent.iterdir()] == ["mine"]


def test_equal_adapters_are_equal_files(tmp_path):
    """Their hash says so on the Hub; the library writes metadata in another order each time."""
    model, found = make_model(seed=3), set()
    for i in range(12):
        save_adapter(model, tmp_path / str(i), base_model="me/base", base_sha256="ab" * 32)
        found.add((tmp_path / str(i) / "adapter_model.safetensors").read_bytes())
    assert len(found) == 1
    with safe_open(tmp_path / "0" / "adapter_model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "base_sha256": "ab" * 32}
    state = load_file(tmp_path / "0" / "adapter_model.safetensors")
    assert all(torch.equal(state[name], t) for name, t in adapter_state(model).items())


def test_import_is_light():
    code = "import sys, qerl.adapter, qerl.checkpoint, qerl.export; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"
