"""Checkpoints: a bitwise continuation, atomic folders, and clear words about damaged ones."""

import hashlib
import json
import random

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from qerl.adapter import adapter_state, checksum
from qerl.checkpoint import (
    SUMS,
    checkpoint_dir,
    checkpoints,
    latest,
    load_checkpoint,
    prune,
    recover,
    save_checkpoint,
    step_of,
    verify,
)
from qerl.errors import QerlError
from qerl.files import atomic_dir


def make_run(rank=4, targets=("q_proj", "down_proj"), seed=0, **adamw):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    lora = LoraConfig(r=rank, lora_alpha=8, target_modules=list(targets), lora_dropout=0.1)
    model = get_peft_model(LlamaForCausalLM(config), lora).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2, **adamw)


def step(model, optimizer):
    """One update that draws from all three global generators (dropout draws from torch's)."""
    ids = torch.tensor([[random.randrange(64) for _ in range(8)]])
    scale = float(np.random.random()) + torch.rand(()).item()
    loss = model(input_ids=ids, labels=ids).loss * scale
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def save(run, directory, number, **more):
    model, optimizer = run
    more = {"cursors": {"data": 24, "version": number}} | more
    return save_checkpoint(directory, step=number, model=model, optimizer=optimizer, **more)


def test_three_steps_save_load_two_steps_equals_five_straight(tmp_path):
    model, optimizer = make_run()
    seed_everything(7)
    losses = [step(model, optimizer) for _ in range(3)]
    where = save((model, optimizer), checkpoint_dir(tmp_path, 3), 3, extra={"best": 0.1 + 0.2})
    losses += [step(model, optimizer) for _ in range(2)]

    other, fresh = make_run()  # same base weights, untouched adapter and optimizer
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    restored = load_checkpoint(where, model=other, optimizer=fresh)
    assert [step(other, fresh) for _ in range(2)] == losses[3:]
    assert checksum(other) == checksum(model)
    for a, b in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a) and a.keys() == b.keys()
    assert (restored.step, restored.cursors["version"]) == (3, 3)
    assert restored.extra == {"best": 0.1 + 0.2} and restored.path == where


def test_without_restored_random_states_the_losses_differ(tmp_path):
    """Guards the test above: it can only pass because the generators were put back."""
    model, optimizer = make_run()
    seed_everything(7)
    where = save((model, optimizer), checkpoint_dir(tmp_path, 0), 0)
    first = step(model, optimizer)
    other, fresh = make_run()
    load_checkpoint(where, model=other, optimizer=fresh)
    for disturb in (random.random, np.random.random, lambda: torch.rand(())):
        load_checkpoint(where, model=other, optimizer=fresh)
        disturb()
        assert step(other, fresh) != first
    load_checkpoint(where, model=other, optimizer=fresh)
    assert step(other, fresh) == first


def test_optimizer_state_follows_parameter_names_not_their_order(tmp_path):
    model, optimizer = make_run(weight_decay=0.25, betas=(0.8, 0.95))
    step(model, optimizer)
    where = save((model, optimizer), checkpoint_dir(tmp_path, 1), 1)
    other, _ = make_run(seed=1)
    backwards = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad][::-1], lr=1.0)
    load_checkpoint(where, model=other, optimizer=backwards)
    names = {name: p for name, p in other.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            moments = backwards.state[names[name]]
            assert torch.equal(moments["exp_avg_sq"], optimizer.state[parameter]["exp_avg_sq"])
    group = backwards.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (1e-2, 0.25, (0.8, 0.95))


def test_loading_keeps_the_live_parameters(tmp_path):
    model, optimizer = make_run()
    where = save((model, optimizer), checkpoint_dir(tmp_path, 1), 1)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    load_checkpoint(where, model=model, optimizer=optimizer)
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_files_are_safetensors_and_json_with_standard_sums(tmp_path):
    where = save(make_run(), checkpoint_dir(tmp_path, 12), 12)
    assert where.name == "step-000012"
    assert sorted(p.name for p in where.iterdir()) == [SUMS, "state.json", "tensors.safetensors"]
    assert json.loads((where / "state.json").read_text())["cursors"] == {"data": 24, "version": 12}
    for line in (where / SUMS).read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((where / name).read_bytes()).hexdigest() == digest


def test_saving_a_step_again_replaces_it(tmp_path):
    run = make_run()
    save(run, checkpoint_dir(tmp_path, 1), 1)
    step(*run)
    where = save(run, checkpoint_dir(tmp_path, 1), 1)
    expected = checksum(run[0])
    other = make_run(seed=3)
    load_checkpoint(where, model=other[0], optimizer=other[1])
    assert checksum(other[0]) == expected and len(list(tmp_path.iterdir())) == 1


def test_latest_and_prune_ignore_unfinished_folders(tmp_path):
    assert latest(tmp_path / "nowhere") is None
    run = make_run()
    for number in (1, 2, 10, 1000000):
        save(run, checkpoint_dir(tmp_path, number), number)
    with pytest.raises(RuntimeError), atomic_dir(checkpoint_dir(tmp_path, 2000000)):
        raise RuntimeError
    (tmp_path / "step-000011.partial").mkdir()
    (tmp_path / ".step-000000.deleted").mkdir()
    assert latest(tmp_path) == checkpoint_dir(tmp_path, 1000000)
    assert [p.name for p in prune(tmp_path, keep=2)] == ["step-000001", "step-000002"]
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000010", "step-1000000"]
    assert not (tmp_path / ".step-000000.deleted").exists()


def test_a_replacement_killed_between_its_renames_is_put_back(tmp_path):
    run = make_run()
    for number in (1, 2):
        save(run, checkpoint_dir(tmp_path, number), number)
    checkpoint_dir(tmp_path, 2).rename(tmp_path / "step-000002.old.partial")
    (tmp_path / "step-000001.old.partial").mkdir()
    assert latest(tmp_path) == checkpoint_dir(tmp_path, 1)
    recover(tmp_path)
    assert latest(tmp_path) == checkpoint_dir(tmp_path, 2) and step_of(latest(tmp_path)) == 2
    verify(checkpoint_dir(tmp_path, 1))
    verify(checkpoint_dir(tmp_path, 2))


def test_a_cursor_that_is_not_json_leaves_no_folder(tmp_path):
    with pytest.raises(TypeError):
        save(make_run(), checkpoint_dir(tmp_path, 1), 1, cursors={"data": object()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors", SUMS])
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_a_damaged_file_is_named_and_the_previous_checkpoint_offered(tmp_path, name, damage):
    run = make_run()
    save(run, checkpoint_dir(tmp_path, 1), 1)
    where = save(run, checkpoint_dir(tmp_path, 2), 2)
    data = bytearray((where / name).read_bytes())
    if damage == "delete":
        (where / name).unlink()
    elif damage == "truncate":
        (where / name).write_bytes(data[:-40])
    else:
        data[len(data) // 4] ^= 1
        (where / name).write_bytes(data)
    step(*run)
    before = checksum(run[0])
    with pytest.raises(QerlError) as error:
        load_checkpoint(where, model=run[0], optimizer=run[1])
    message = str(error.value)
    assert str(where) in message and "step-000001 is intact: delete step-000002" in message
    assert SUMS in message or name in message
    assert "\n" not in message and checksum(run[0]) == before


def test_without_an_intact_one_the_message_says_so(tmp_path):
    where = save(make_run(), checkpoint_dir(tmp_path, 2), 2)
    (where / "state.json").write_text("{}")
    with pytest.raises(QerlError, match="no older checkpoint is intact: start the run again"):
        verify(where)
    with pytest.raises(QerlError, match="no checkpoint at"):
        verify(tmp_path / "step-000009")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"rank": 8}, r"another adapter: .*lora_A.*\[4, .*\] there and .*\[8, .*\] here"),
        ({"targets": ("q_proj",)}, "another adapter: .*down_proj.* is only in the checkpoint"),
        ({"targets": ("q_proj", "down_proj", "o_proj")}, "o_proj.* is not in the checkpoint"),
    ],
)
def test_another_adapter_is_refused_untouched(tmp_path, other, words):
    where = save(make_run(), checkpoint_dir(tmp_path, 1), 1)
    model, optimizer = make_run(**other)
    before = checksum(model)
    with pytest.raises(QerlError, match=words):
        load_checkpoint(where, model=model, optimizer=optimizer)
    assert checksum(model) == before and not optimizer.state


def test_another_optimizer_or_format_is_refused(tmp_path):
    model, optimizer = make_run()
    where = save((model, optimizer), checkpoint_dir(tmp_path, 1), 1)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(QerlError, match="made by AdamW, and this run uses SGD"):
        load_checkpoint(where, model=model, optimizer=sgd)
    text = (where / "state.json").read_text().replace('"format": 1', '"format": 9')
    (where / "state.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    sums = (where / SUMS).read_text().splitlines()
    (where / SUMS).write_text(f"{digest}  state.json\n{sums[1]}\n")
    with pytest.raises(QerlError, match="has format 9, this version of qerl reads 1"):
        load_checkpoint(where, model=model, optimizer=optimizer)


def test_masters_keep_their_type(tmp_path):
    where = save(make_run(), checkpoint_dir(tmp_path, 1), 1)
    model, optimizer = make_run()
    model.to(torch.bfloat16)
    with pytest.raises(QerlError, match="torch.float32 .* there and torch.bfloat16"):
        load_checkpoint(where, model=model, optimizer=optimizer)
    assert all(t.dtype == torch.bfloat16 for t in adapter_state(model).values())
