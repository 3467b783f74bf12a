"""Answers prompts with plain `peft` and `transformers`: what a user without qerl runs.

A program, not a test: `python plain_peft.py in.json out.json`. in.json: base, adapter (folders),
max_tokens, prompts (token ids), answers. Greedy, left-padded batches, fp32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 20


def main(source: str, target: str) -> None:
    given = json.loads(Path(source).read_text())
    tokenizer = AutoTokenizer.from_pretrained(given["adapter"])
    base = AutoModelForCausalLM.from_pretrained(given["base"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, given["adapter"]).eval()
    eos = model.generation_config.eos_token_id
    stops = set(eos if isinstance(eos, list) else [eos])
    texts, solved = [], 0
    for start in range(0, len(given["prompts"]), BATCH):
        rows = given["prompts"][start : start + BATCH]
        right = given["answers"][start : start + BATCH]
        for ids, answer in zip(generate(model, rows, given["max_tokens"]), right, strict=True):
            end = next((i for i, token in enumerate(ids) if token in stops), None)
            texts.append(tokenizer.decode(ids[:end], skip_special_tokens=True))
            solved += end is not None and texts[-1].strip() == answer
    with safe_open(Path(given["adapter"]) / "adapter_model.safetensors", "pt") as file:
        saved = {name.rpartition(".lora_")[0] for name in file.keys()}  # noqa: SIM118 - no mapping
    applied = [module for module in model.modules() if "default" in getattr(module, "lora_B", {})]
    live = [m for m in applied if m.lora_B["default"].weight.any()]
    result = {
        "accuracy": solved / len(texts),
        "texts": texts,
        "saved": len(saved),
        "applied": len(applied),
        "trained": len(live),
        "qerl": sorted(name for name in sys.modules if name.split(".")[0].startswith("qerl")),
    }
    Path(target).write_text(json.dumps(result))


@torch.no_grad()
def generate(model: PeftModel, rows: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Ids after each prompt."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False
    )
    return out[:, longest:].tolist()


if __name__ == "__main__":
    main(*sys.argv[1:])
