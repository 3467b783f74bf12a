"""The timer, the meter, and a plan checked against real tensors."""

import io
import time

import pytest
import torch
from family_models import write_family
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    Phi3Config,
    Qwen3Config,
    ViTConfig,
)

from qerl.config import Recipe
from qerl.errors import QerlError
from qerl.memory import NF4_BITS, Meter, PhaseTimer, nvfp4_bytes, peak_resident_bytes, plan
from qerl.model.load import load_dense
from qerl.model.nf4 import nf4_linear


def tiny(kind=LlamaConfig, **changes):
    values = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return kind(**(values | changes))


def recipe(**changes):
    base = {"model": "m", "device": "cpu", "dtype": "float32"}
    return Recipe.model_validate(base | changes)


def line(result, name):
    return next(part for part in result.lines if part.name == name).bytes


class Clock:
    """Stands in for `time`: moves only when told to."""

    def __init__(self):
        self.wall = self.cpu = 0.0

    def perf_counter(self):
        return self.wall

    def process_time(self):
        return self.cpu

    def work(self, seconds):
        self.wall += seconds
        self.cpu += 2 * seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("qerl.memory.time", made)
    return made


def test_timer_sums_phases_and_excludes_inner_ones(clock):
    timer = PhaseTimer()
    with timer("rollout"):
        clock.work(1)
        with timer("reward"):
            clock.work(2)
        clock.work(4)
    clock.work(100)  # outside every phase
    with timer("reward"):
        clock.work(8)
    assert timer.seconds == {"rollout": 5.0, "reward": 10.0}
    assert timer.cpu_seconds == {"rollout": 10.0, "reward": 20.0}


def test_timer_laps_and_survives_errors(clock):
    timer = PhaseTimer()
    with pytest.raises(ValueError), timer("a"):
        clock.work(3)
        raise ValueError
    assert timer.lap() == {"a": 3.0}
    with timer("b"):
        clock.work(1)
    assert timer.lap() == {"b": 1.0}
    assert timer.seconds == {"a": 3.0, "b": 1.0}


def test_timer_syncs_only_at_the_end_of_phases(clock):
    calls = []
    timer = PhaseTimer(sync=lambda: calls.append(clock.wall))
    with timer("a"):
        clock.work(1)
    assert calls == [1.0]


def test_real_clock_counts_cpu_not_sleep():
    timer = PhaseTimer()
    with timer("sleep"):
        time.sleep(0.05)
    assert timer.seconds["sleep"] >= 0.05
    assert timer.cpu_seconds["sleep"] < 0.04


def test_peak_sees_an_allocation_and_remembers_it():
    mega = 1_000_000
    meter = Meter("cpu")
    resident = meter.current_bytes()
    block = torch.ones(50 * mega)  # 200 MB, touched
    peak = peak_resident_bytes()
    assert peak >= resident + 190 * mega
    del block
    # the kernel's counters are approximate by some pages, hence not an exact comparison
    assert meter.peak_bytes() >= peak - mega
    assert meter.current_bytes() <= peak - 150 * mega


@pytest.mark.parametrize("tied", [True, False])
def test_plan_equals_real_tensors(tied):
    config = tiny(tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    linear = [
        m.weight
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and name != "lm_head"
    ]
    everything = sum(p.numel() for p in model.parameters())
    count = sum(w.numel() for w in linear)
    result = plan(recipe(format="bf16", dtype="bfloat16"), config)
    assert line(result, "linear weights") == 2 * count
    assert line(result, "embeddings, head, norms") == 2 * (everything - count)

    result = plan(recipe(), config)
    packed = sum(w.numel() // 2 + w.numel() // 16 + 4 for w in linear)
    assert line(result, "linear weights") == packed
    assert line(result, "CPU weight cache") == 4 * count


def test_plan_adapters_equal_peft():
    config = tiny()
    targets = ["q_proj", "down_proj"]
    model = AutoModelForCausalLM.from_config(config)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
    trained = sum(p.numel() for p in peft.parameters() if p.requires_grad)
    result = plan(recipe(lora={"rank": 4, "targets": targets}), config)
    assert line(result, "adapter and optimizer") == 16 * trained


def test_plan_of_modules_with_ranks_of_their_own():
    lora = {"rank": 4, "rank_pattern": {"layers.0.mlp.down_proj": 16, "q_proj": 2}}
    model = AutoModelForCausalLM.from_config(tiny())
    config = LoraConfig(r=4, rank_pattern=lora["rank_pattern"], target_modules="all-linear")
    peft = get_peft_model(model, config)
    trained = sum(p.numel() for p in peft.parameters() if p.requires_grad)
    result = plan(recipe(lora=lora), tiny())
    assert line(result, "adapter and optimizer") == 16 * trained
    assert "ranks 2 to 16" in next(x.note for x in result.lines if x.name.startswith("adapter"))


def test_plan_of_a_text_tower_counts_what_is_loaded(tmp_path):
    folder = write_family("qwen3_5", tmp_path / "model")
    loaded = load_dense(folder, torch.float32, torch.device("cpu"))
    result = plan(recipe(format="bf16"), AutoConfig.from_pretrained(folder), prompt_tokens=6)
    weights = line(result, "linear weights") + line(result, "embeddings, head, norms")
    assert weights == sum(p.nbytes for p in loaded.parameters())
    rows = min(
        recipe().rollout.prompts_per_step * recipe().rollout.group_size, recipe().rollout.max_rows
    )
    cache = loaded(torch.ones(rows, 6, dtype=torch.long), use_cache=True).past_key_values
    mixers = [layer for layer in cache.layers if getattr(layer, "recurrent_states", None)]
    states = [t for m in mixers for t in (m.conv_states[0], m.recurrent_states[0])]
    assert len(mixers) == 3
    assert line(result, "recurrent states") == sum(state.nbytes for state in states)


def test_plan_of_nf4_equals_what_bitsandbytes_holds():
    weight = torch.randn(64, 512)
    layer = nf4_linear(weight, None, torch.float32, torch.device("cpu"))
    state = layer.weight.quant_state
    inner = state.state2.absmax.nbytes
    held = layer.weight.nbytes + state.absmax.nbytes + inner
    assert held == pytest.approx(weight.numel() * NF4_BITS / 8, rel=1e-3)
    count = sum(
        m.weight.numel()
        for name, m in AutoModelForCausalLM.from_config(tiny()).named_modules()
        if isinstance(m, torch.nn.Linear) and name != "lm_head"
    )
    assert line(plan(recipe(format="nf4"), tiny()), "linear weights") == round(count * NF4_BITS / 8)


def test_plan_cache_equals_a_real_one():
    config = tiny(kind=Qwen3Config, head_dim=32)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids = torch.ones(3, 11, dtype=torch.long)
    cache = model(ids, use_cache=True).past_key_values
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    rollout = {"prompts_per_step": 2, "group_size": 4, "max_rows": 3, "max_completion_tokens": 5}
    assert line(plan(recipe(rollout=rollout), config, prompt_tokens=6), "KV cache") == real


def test_plan_cache_with_fused_projections():
    config = tiny(kind=Phi3Config)
    rollout = {"prompts_per_step": 1, "group_size": 2, "max_completion_tokens": 8}
    result = plan(recipe(rollout=rollout), config, prompt_tokens=8)
    assert line(result, "KV cache") == 2 * 16 * (2 * 2 * 2 * 16) * 4  # layers, k and v, heads, size


def test_plan_for_a_gpu_needs_none():
    result = plan(recipe(device="cuda", dtype="auto"), tiny())
    assert result.dtype == "bfloat16"
    assert line(result, "dequantization workspace") == 2 * 64 * 128
    assert all(part.name != "CPU weight cache" for part in result.lines)


def test_plan_says_what_it_assumed():
    assumed = plan(recipe(), tiny()).lines[-1].note
    told = plan(recipe(task={"max_prompt_tokens": 99}), tiny()).lines[-1].note
    assert "512 assumed" in assumed and "assumed" not in told


def test_plan_totals_and_table():
    result = plan(recipe(), tiny())
    assert result.total == sum(part.bytes for part in result.lines)
    assert result.as_dict()["parts"]["KV cache"]["bytes"] == line(result, "KV cache")
    out = io.StringIO()
    Console(width=120, file=out).print(result.table())
    text = out.getvalue()
    assert "KV cache" in text and "total" in text and "not counted" in text


def test_nvfp4_is_four_and_a_half_bits():
    assert nvfp4_bytes(64, 128) == 64 * 128 * 4.5 / 8 + 4


def test_plan_errors():
    with pytest.raises(QerlError, match="no causal language model for 'vit'"):
        plan(recipe(), ViTConfig())
    with pytest.raises(QerlError, match=r"lora.targets \['nope'\]: no linear layer matches"):
        plan(recipe(lora={"targets": ["nope"]}), tiny())
