"""The end of a run: `summary.json`, and what is printed last on the screen."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from qerl import environment
from qerl.console import human_bytes, human_seconds
from qerl.errors import QerlError
from qerl.types import Group as SampledGroup

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what `vllm serve --max-lora-rank` accepts


def build_summary(
    *,
    task: str,
    seed: int,
    steps: int,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    seconds: Mapping[str, float],
    peak_bytes: int,
    base_sha256: tuple[str, str],
    adapter: str | Path,
    skipped_updates: int = 0,
) -> dict[str, Any]:
    """The content of summary.json. An evaluation that the recipe left out is null.

    seconds: wall seconds by phase. base_sha256: hash of the frozen base before and after training;
    they are equal or something is badly wrong. skipped_updates: steps whose gradient was not
    finite; the key is there only when there were any.
    """
    summary = {
        "task": task,
        "seed": seed,
        "steps": steps,
        "before": before,
        "after": after,
        "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
        "peak_bytes": peak_bytes,
        "base_sha256": {"before": base_sha256[0], "after": base_sha256[1]},
        "adapter": str(adapter),
        "versions": environment.versions(),
    }
    return summary | ({"skipped_updates": skipped_updates} if skipped_updates else {})


def vllm_rank(rank: int) -> int:
    """Smallest value of vLLM's --max-lora-rank that holds an adapter of `rank`."""
    for allowed in VLLM_RANKS:
        if rank <= allowed:
            return allowed
    raise QerlError(f"lora.rank {rank}: vLLM serves ranks up to {VLLM_RANKS[-1]}")


def serve_command(base: str, rank: int, name: str, adapter: str | Path) -> str:
    """The `vllm serve` line, shell-quoted, that serves `base` with the adapter under `name`."""
    name = re.sub(r"[^\w.-]+", "-", name).strip("-") or "adapter"
    words = ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", str(vllm_rank(rank))]
    return shlex.join([*words, "--lora-modules", f"{name}={adapter}"])


def next_commands(
    run: str | Path, adapter: str | Path, *, base: str, rank: int, name: str
) -> list[str]:
    """What to type next, each line ready to paste into a shell.

    base: the checkpoint folder or Hub id to serve; name: the adapter's name in requests to vLLM.
    The vLLM line is left out for a rank that vLLM does not serve.
    """
    path = shlex.quote(str(run))
    lines = [f'qerl generate {path} "…"', f"qerl chat {path}", f"qerl eval {path}"]
    lines.append(f"qerl export {path}")
    if rank <= VLLM_RANKS[-1]:
        lines.append(serve_command(base, rank, name, adapter))
    return lines


def samples(groups: Sequence[SampledGroup], n: int = 3) -> list[dict[str, Any]]:
    """`n` completions spread evenly over `groups`: chosen by position, never by reward."""
    n = min(n, len(groups))
    picked = [groups[i * len(groups) // n] for i in range(n)]
    return [
        {
            "prompt": _question(group),
            "completion": group.completions[0].text,
            "reward": group.completions[0].reward,
            "finish_reason": group.completions[0].finish_reason,
        }
        for group in picked
    ]


def _question(group: SampledGroup) -> str:
    messages = group.prompt.messages
    return messages[-1]["content"] if messages else group.prompt.text


def accuracy_table(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Table:
    """Accuracy and mean reward before and after training, with 95% intervals."""
    table = Table("held-out", "accuracy", "95% interval", "mean reward", "problems")
    for label, result in (("before", before), ("after", after)):
        if result is None:
            table.add_row(label, "not measured", "", "", "")
            continue
        low, high = result["ci95"]
        interval = f"{low:.1%} – {high:.1%}"
        reward = f"{result['mean_reward']:.3f}"
        table.add_row(label, f"{result['accuracy']:.1%}", interval, reward, str(result["n"]))
    return table


def change_sentence(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str:
    """One sentence on whether the two intervals are apart; "" when one was not measured."""
    if before is None or after is None:
        return ""
    points = 100 * (after["accuracy"] - before["accuracy"])
    overlap = after["ci95"][0] <= before["ci95"][1] and before["ci95"][0] <= after["ci95"][1]
    tail = "the intervals overlap, so this may be chance" if overlap else "the intervals are apart"
    return f"Change: {points:+.1f} points; {tail}."


def skipped_sentence(skipped: int, steps: int) -> str:
    """What to make of updates whose gradient was not finite; "" when there were none."""
    if not skipped:
        return ""
    return (
        f"{skipped} of {steps} updates skipped: their gradient was not finite (NaN or infinity); "
        "try a lower train.lr or dtype: float32"
    )


def time_table(seconds: Mapping[str, float]) -> Table:
    """Where the time went, longest phase first."""
    total = sum(seconds.values())
    table = Table("phase", "time", "share", show_footer=True)
    for phase, value in sorted(seconds.items(), key=lambda item: -item[1]):
        table.add_row(phase, human_seconds(value), f"{value / total:.0%}" if total else "")
    table.columns[0].footer, table.columns[1].footer = "total", human_seconds(total)
    return table


def sample_lines(rows: Sequence[Mapping[str, Any]], width: int = 300) -> list[Text]:
    """Sample completions as indented text; long ones keep their beginning and end."""
    lines = []
    for row in rows:
        head = f"prompt  {shorten(str(row['prompt']), width)}"
        cut = " [cut at the token limit]" if row.get("finish_reason") == "length" else ""
        body = f"answer  {shorten(str(row['completion']), width)}{cut}   reward {row['reward']:g}"
        lines += [Text(f"  {head}", style="dim"), Text(f"  {body}"), Text("")]
    return lines


def shorten(text: str, width: int) -> str:
    """`text` on one line (newlines shown as ⏎), its middle replaced by … when over `width`.

    Control characters are shown as �: a model must not move the cursor of the terminal.
    """
    text = text.strip().replace("\n", " ⏎ ")
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    if len(text) <= width:
        return text
    keep = (width - 3) // 2
    return f"{text[:keep]} … {text[-keep:]}"


def render(
    summary: Mapping[str, Any],
    run: str | Path,
    *,
    base: str,
    rank: int,
    name: str,
    sample_rows: Sequence[Mapping[str, Any]] = (),
) -> RenderableType:
    """Everything printed at the end of a run, as one rich renderable.

    summary: from `build_summary`; run: the run folder; base, rank, name: see `next_commands`.
    """
    parts: list[RenderableType] = [Text("")]
    parts.append(accuracy_table(summary["before"], summary["after"]))
    if sentence := change_sentence(summary["before"], summary["after"]):
        parts.append(Text(sentence))
    if sentence := skipped_sentence(summary.get("skipped_updates", 0), summary["steps"]):
        parts.append(Text(sentence))
    if sample_rows:
        parts += [Text("\nSample completions", style="bold"), *sample_lines(sample_rows)]
    parts += [time_table(summary["seconds"])]
    parts += [Text(f"Peak memory {human_bytes(summary['peak_bytes'])}. Run folder: {run}")]
    parts += [Text("\nNext", style="bold")]
    commands = next_commands(run, summary["adapter"], base=base, rank=rank, name=name)
    parts += [Text(f"  {line}", no_wrap=True, overflow="ignore") for line in commands]
    return Group(*parts)


def show(renderable: RenderableType, console: Console | None = None) -> None:
    """Print without wrapping or cropping, so that commands can be copied from any width."""
    (console or Console(highlight=False)).print(renderable, soft_wrap=True)
