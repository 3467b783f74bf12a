"""Checks of what the model will read: chat template, special tokens, lengths."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from qerl.doctor.context import Context, NotChecked
from qerl.doctor.frame import Finding, check

MARK = "qerl"  # an answer to look for in a rendered conversation
MANY_DROPPED = 0.1
BINS = 10


@check("chat_template", "tokenizer")
def chat_template(context: Context) -> Finding:
    """Prompts render, and begin with BOS exactly once where the tokenizer has one."""
    from qerl.tasks.prompts import added_bos

    tokenizer, prompts = context.tokenizer, context.prompts
    bos, added = tokenizer.bos_token_id, added_bos(tokenizer)
    counts = [leading(prompt.token_ids, bos) for prompt in prompts]
    data = {"template": bool(tokenizer.chat_template), "bos": bos, "example": prompts[0].text}
    if max(counts) > 1:
        text = f"BOS ({tokenizer.bos_token}) stands {max(counts)} times at the start of a prompt"
        return Finding("fail", text, "write it once: in the template or in the rows", data)
    if added is not None and min(counts) == 0:
        text = f"a prompt lacks the BOS ({tokenizer.bos_token}) this tokenizer puts before text"
        return Finding("fail", text, "check the chat template", data)
    said = "BOS once" if min(counts) == 1 else "no BOS (neither template nor tokenizer adds one)"
    if not tokenizer.chat_template:
        fix = "for an instruct model, use a directory whose tokenizer has its chat template"
        return Finding("warn", f"no chat template: prompts are plain text; {said}", fix, data)
    return Finding("ok", f"{len(prompts)} prompts render; {said}", data=data)


def leading(ids: Sequence[int], bos: int | None) -> int:
    """How many BOS ids a prompt begins with. Later ones may mark turns (SmolLM2's do)."""
    count = 0
    while bos is not None and count < len(ids) and ids[count] == bos:
        count += 1
    return count


@check("eos", "tokenizer")
def eos(context: Context) -> Finding:
    """There are EOS ids, the vocabulary has them, and the template ends an answer with one."""
    from qerl.policy import eos_ids

    tokenizer = context.tokenizer
    holder: Any = SimpleNamespace(
        config=context.config, generation_config=generation_config(context)
    )
    ids = sorted(eos_ids(holder, tokenizer))
    names = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in ids}
    data: dict[str, Any] = {"eos": {str(i): name for i, name in names.items()}}
    listed = ", ".join(f"{name} ({i})" for i, name in names.items())
    size = context.config.get_text_config().vocab_size
    beyond = [i for i in ids if i >= size]
    if beyond:
        text = f"EOS id {beyond[0]} is outside the model's vocabulary of {size}"
        return Finding("fail", text, "correct eos_token_id in generation_config.json", data)
    end = end_of_turn(context)
    data["end_of_turn"] = end
    if end is not None and end not in ids:
        token = tokenizer.convert_ids_to_tokens(end)
        text = f"the chat template ends an answer with {token} ({end}), but EOS is {listed}"
        return Finding("warn", text, "add it to eos_token_id in generation_config.json", data)
    said = "" if end is None else "; the chat template ends an answer with one of them"
    return Finding("ok", f"EOS is {listed}{said}", data=data)


def generation_config(context: Context) -> Any:
    """generation_config.json of the model, or None where it has none."""
    from transformers import GenerationConfig

    if not (context.source / "generation_config.json").exists():
        return None
    return GenerationConfig.from_pretrained(context.source)


def end_of_turn(context: Context) -> int | None:
    """The special token that the template writes after an answer; None where it writes none."""
    tokenizer = context.tokenizer
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    _, found, rest = text.rpartition(MARK)
    ids = tokenizer(rest, add_special_tokens=False).input_ids if found and rest else []
    return ids[0] if ids and ids[0] in tokenizer.all_special_ids else None


@check("prompt_length", "tokenizer")
def prompt_length(context: Context) -> Finding:
    """Prompts leave room for the completion in the model's context."""
    limit, given = context.prompt_limit, context.recipe.task.max_prompt_tokens
    prompts = [*context.prompts, *context.held_out]
    lengths = sorted(len(prompt.token_ids) for prompt in prompts)
    data = length_data(lengths) | {"limit": limit, "max_prompt_tokens": given}
    rows = len(context.task.train_rows())
    looked = "" if rows == len(context.prompts) else f" ({len(context.prompts)} of {rows} rows)"
    text = f"{lengths[0]} to {lengths[-1]} tokens, median {data['p50']}{looked}"
    if limit is None:
        raise NotChecked(f"{text}; the model's configuration names no context length")
    room = f"context {context.context_length} minus completion leaves {limit}"
    if limit <= 0:
        return Finding("fail", f"{text}; {room}", "lower rollout.max_completion_tokens", data)
    bound = limit if given is None else min(limit, given)
    long = [prompt for prompt in prompts if len(prompt.token_ids) > bound]
    data["too_long"] = len(long)
    if long and given is None:
        first = f"row {long[0].index} has {len(long[0].token_ids)} tokens"
        fix = f"task.max_prompt_tokens: {limit} drops them; or lower rollout.max_completion_tokens"
        return Finding(
            "fail", f"{len(long)} of {len(prompts)} are too long: {first}; {room}", fix, data
        )
    share = len(long) / len(prompts)
    text += f"; {room}; {len(long)} of {len(prompts)} are dropped" if long else f"; {room}"
    if share == 1:
        return Finding("fail", text, "raise task.max_prompt_tokens", data)
    return Finding("warn" if share > MANY_DROPPED else "ok", text, data=data)


def length_data(lengths: Sequence[int]) -> dict[str, Any]:
    """Quantiles of sorted lengths, and a histogram as [lower bound, count] pairs."""

    def at(q: float) -> int:
        return lengths[min(int(q * len(lengths)), len(lengths) - 1)]

    width = max(1, -(-(lengths[-1] + 1 - lengths[0]) // BINS))
    counts = [0] * BINS
    for length in lengths:
        counts[(length - lengths[0]) // width] += 1
    bins = [[lengths[0] + i * width, n] for i, n in enumerate(counts) if n]
    return {"p50": at(0.5), "p90": at(0.9), "max": lengths[-1], "histogram": bins}
