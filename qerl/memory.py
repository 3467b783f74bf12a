"""The plan (bytes predicted before a run) and the meter (bytes and seconds measured in it).

The plan counts what is resident: weights, adapters, optimizer, KV cache. Activations and the
allocator's own waste are not in it; the meter's peak is the truth.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.config import Recipe
from qerl.errors import QerlError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn


class PhaseTimer:
    """Wall and CPU seconds by phase: `with timer("rollout"): …`.

    A phase inside another takes its time out of the outer one, so the sum over phases never
    exceeds the time that passed. CPU seconds count every thread of this process.
    sync: called at each phase border so that queued GPU work is charged to the phase that queued it
    (`torch.cuda.synchronize`); None on a CPU.
    """

    def __init__(self, sync: Callable[[], object] | None = None):
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._lap: dict[str, float] = {}
        self._sync = sync
        self._mark = (0.0, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._charge()
        self._stack.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def lap(self) -> dict[str, float]:
        """Wall seconds by phase since the last lap: what one step took."""
        self._charge()
        spent = {name: s - self._lap.get(name, 0.0) for name, s in self.seconds.items()}
        self._lap = dict(self.seconds)
        return {name: s for name, s in spent.items() if s > 0}

    def _charge(self) -> None:
        if self._stack and self._sync is not None:
            self._sync()
        now = (time.perf_counter(), time.process_time())
        if self._stack:
            phase = self._stack[-1]
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now[0] - self._mark[0]
            self.cpu_seconds[phase] = self.cpu_seconds.get(phase, 0.0) + now[1] - self._mark[1]
        self._mark = now


class Meter:
    """Peak memory of this process: CUDA's allocator peak on a GPU, else the resident set's peak.

    On a GPU the peak counts from the last `reset`; a CPU's counts from the start of the process.
    """

    def __init__(self, device: str = "cpu"):
        self.device = device

    @property
    def _on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def reset(self) -> None:
        if self._on_gpu:
            import torch

            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        if self._on_gpu:
            import torch

            return torch.cuda.max_memory_allocated(self.device)
        return peak_resident_bytes()

    def current_bytes(self) -> int:
        if self._on_gpu:
            import torch

            return torch.cuda.memory_allocated(self.device)
        import psutil

        return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """Largest resident set this process ever had.

    Linux's VmHWM where there is one: `ru_maxrss` survives exec, so that a child can report its
    parent's peak.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# QLoRA (arXiv 2305.14314, section 3): a scale in 8 bits for 64 weights, one in 32 for 256 of those.
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
_ADAPTER_BYTES = 4 * (1 + 1 + 2)  # fp32 master, its gradient, AdamW's two moments


@dataclass(frozen=True, slots=True)
class PlanLine:
    name: str
    bytes: int
    note: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Predicted resident bytes, one line a part; what is not counted is said in the table."""

    device: str
    dtype: str
    lines: tuple[PlanLine, ...]

    @property
    def total(self) -> int:
        return sum(line.bytes for line in self.lines)

    def as_dict(self) -> dict[str, Any]:
        parts = {line.name: {"bytes": line.bytes, "note": line.note} for line in self.lines}
        return {"device": self.device, "dtype": self.dtype, "total": self.total, "parts": parts}

    def table(self) -> Table:
        from rich.table import Table

        from qerl.console import human_bytes

        title = f"Memory plan on {self.device}, {self.dtype}"
        table = Table("part", "bytes", "how", title=title, show_footer=True)
        table.columns[1].justify = "right"
        for line in self.lines:
            table.add_row(line.name, human_bytes(line.bytes), line.note)
        table.columns[0].footer, table.columns[1].footer = "total", human_bytes(self.total)
        table.columns[2].footer = "activations and allocator waste not counted"
        return table


@dataclass(frozen=True, slots=True)
class _Linear:
    """A decoder linear: name, N outputs, K inputs."""

    name: str
    n: int
    k: int


def plan(
    recipe: Recipe,
    model_config: Any,
    *,
    device: str | None = None,
    dtype: str | None = None,
    prompt_tokens: int | None = None,
) -> Plan:
    """Bytes a run of `recipe` keeps resident, counted on the model's meta skeleton (no weights).

    model_config: a transformers configuration of a causal language model.
    device, dtype: what the recipe's "auto" stands for; None resolves it for this machine.
    prompt_tokens: longest prompt; None takes task.max_prompt_tokens, else 512, and says so.
    Raises QerlError when transformers has no causal model for the configuration.
    """
    device = device or _resolve_device(recipe)
    dtype = dtype or _resolve_dtype(recipe, device)
    model = _skeleton(model_config)
    head = model.get_output_embeddings()
    linears = _linears(model, head)
    size = _DTYPE_BYTES[dtype]
    lines = (
        *_weight_lines(recipe, model, linears, device, size),
        _adapter_line(recipe, linears),
        _cache_line(recipe, model_config, linears, size, prompt_tokens),
        *_state_lines(recipe, model, size),
    )
    return Plan(device, dtype, lines)


def _resolve_device(recipe: Recipe) -> str:
    """A device the recipe names is taken at its word: a plan for a GPU needs no GPU."""
    if recipe.device != "auto":
        return recipe.device
    from qerl.device import resolve_device

    return str(resolve_device("auto"))


def _resolve_dtype(recipe: Recipe, device: str) -> str:
    if recipe.dtype != "auto":
        return recipe.dtype
    return "float32" if device == "cpu" else "bfloat16"


def _skeleton(model_config: Any) -> Any:
    """What is loaded: the checkpoint's own class, without the towers that are left out."""
    import copy

    import torch

    from qerl.model import towers

    model = towers.skeleton(copy.deepcopy(model_config), torch.bfloat16)
    towers.leave_out_towers(model)
    return model


def _linears(model: nn.Module, head: nn.Module | None) -> list[_Linear]:
    from torch import nn

    return [
        _Linear(name, module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


def _weight_lines(
    recipe: Recipe, model: nn.Module, linears: list[_Linear], device: str, size: int
) -> list[PlanLine]:
    """Packed linears, everything else, and what the device needs to multiply by packed weights."""
    count = sum(line.n * line.k for line in linears)
    other = sum(p.numel() for p in model.parameters()) - count  # tied weights are listed once
    rest = PlanLine("embeddings, head, norms", other * size, f"{other:,} parameters × {size} B")
    if recipe.format == "bf16":
        note = f"{count:,} parameters × {size} B, not quantized"
        return [PlanLine("linear weights", count * size, note), rest]
    if recipe.format == "nf4":
        note = f"{count:,} parameters in NF4, {NF4_BITS:.3f} bits each"
        return [PlanLine("linear weights", round(count * NF4_BITS / 8), note), rest]
    packed = sum(nvfp4_bytes(line.n, line.k) for line in linears)
    lines = [PlanLine("linear weights", packed, f"{count:,} parameters in NVFP4, 4.5 bits each")]
    if device == "cpu":
        note = f"dequantized copy the CPU multiplies by, {size} B a parameter"
        lines.append(PlanLine("CPU weight cache", count * size, note))
    else:
        largest = max(line.n * line.k for line in linears)
        note = "one dequantized layer, the largest"
        lines.append(PlanLine("dequantization workspace", largest * size, note))
    return [*lines, rest]


def nvfp4_bytes(n: int, k: int) -> int:
    """Bytes of an N×K NVFP4 weight: two codes a byte, an E4M3 scale per 16, one fp32 scale."""
    return n * k // 2 + n * k // 16 + 4


def _adapter_line(recipe: Recipe, linears: list[_Linear]) -> PlanLine:
    from peft.utils.other import get_pattern_key

    lora, patterns = recipe.lora, recipe.lora.rank_pattern
    chosen = [line for line in linears if _is_target(line.name, lora.targets)]
    if not chosen:
        raise QerlError(f"lora.targets {lora.targets!r}: no linear layer matches; use 'all-linear'")
    ranks = [patterns.get(get_pattern_key(list(patterns), x.name), lora.rank) for x in chosen]
    count = sum(rank * (line.n + line.k) for rank, line in zip(ranks, chosen, strict=True))
    low, high = min(ranks), max(ranks)
    rank = f"rank {low}" if low == high else f"ranks {low} to {high}"
    note = f"{count:,} parameters, {rank}, × 16 B (fp32 weight, gradient, two moments)"
    return PlanLine("adapter and optimizer", count * _ADAPTER_BYTES, note)


def _is_target(name: str, targets: str | list[str]) -> bool:
    """PEFT's rule: a list holds whole dotted suffixes, a string is a regular expression."""
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith("." + target) for target in targets)


def _cache_line(
    recipe: Recipe, model_config: Any, linears: list[_Linear], size: int, prompt: int | None
) -> PlanLine:
    """KV cache of a full batch: rows × tokens × K and V widths of every layer (an upper bound)."""
    rollout, rows = recipe.rollout, _rows(recipe)
    given = prompt or recipe.task.max_prompt_tokens
    tokens = (given or 512) + rollout.max_completion_tokens
    assumed = "" if given else ", of which 512 assumed for the prompt"
    width = _kv_width(model_config, linears)
    note = f"{rows} rows × {tokens} tokens × {width * size:,} B{assumed}"
    return PlanLine("KV cache", rows * tokens * width * size, note)


def _rows(recipe: Recipe) -> int:
    rollout = recipe.rollout
    return min(rollout.prompts_per_step * rollout.group_size, rollout.max_rows)


def _state_lines(recipe: Recipe, model: nn.Module, size: int) -> list[PlanLine]:
    """States of gated DeltaNet layers: H·K·V in fp32 and the convolution's C·W a row and layer."""
    from qerl.model.recurrent import is_gated_delta

    mixers: list[Any] = [module for module in model.modules() if is_gated_delta(module)]
    if not mixers:
        return []
    a_row = sum(
        4 * m.num_v_heads * m.head_k_dim * m.head_v_dim + size * m.conv1d.weight.numel()
        for m in mixers
    )
    rows = _rows(recipe)
    note = f"{rows} rows × {a_row:,} B, {len(mixers)} layers, whatever the length"
    return [PlanLine("recurrent states", rows * a_row, note)]


def _kv_width(model_config: Any, linears: list[_Linear]) -> int:
    """Numbers cached per token over all layers: outputs of the k and v projections, where the
    model has them apart, else layers × 2 × KV heads × head size from the configuration."""
    outputs = [line.n for line in linears if line.name.endswith((".k_proj", ".v_proj"))]
    if outputs:
        return sum(outputs)
    text = model_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers * 2 * heads * head_size
