"""What the checks share: each thing is made once, when the first check asks for it.

A thing that cannot be made is a QerlError for whoever asked first, and the reason why it was "not
checked" for everyone after: one cause, one failure in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from qerl.config import Recipe
from qerl.errors import QerlError

if TYPE_CHECKING:
    import torch

    from qerl.memory import Plan
    from qerl.policy import Policy
    from qerl.rollout.native import NativeEngine
    from qerl.tasks import Task
    from qerl.types import Group, Prompt

Needs = Literal["recipe", "tokenizer", "model"]
T = TypeVar("T")

LOOKED_AT = 1000  # rows whose prompts are rendered
PROBES = 8  # prompts the model answers


class NotChecked(Exception):
    """A check could not be made; the message is the reason."""


class Context:
    """One recipe under examination. Properties raise as the head of this file says."""

    def __init__(
        self, recipe: Recipe, *, offline: bool, reward: Any, say: Callable[[str], None]
    ) -> None:
        self.recipe, self.offline, self.reward, self.say = recipe, offline, reward, say
        self._made: dict[str, Any] = {}
        self._failed: dict[str, str] = {}
        self._error: QerlError | None = None
        self._blame = ""

    def require(self, needs: Needs) -> None:
        """Make what a check of this kind stands on."""
        if needs == "tokenizer":
            _ = self.tokenizer
        elif needs == "model":
            _ = self.policy

    def close(self) -> None:
        """Give the memory back."""
        self._made.clear()

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` returns, made at the first call under this name."""
        if name in self._failed:
            raise NotChecked(self._failed[name])
        if name not in self._made:
            try:
                self._made[name] = make()
            except NotChecked as reason:
                self._failed[name] = str(reason)
                raise
            except QerlError as error:
                # What this stands on may have failed with the same error: blame that.
                if error is not self._error:
                    self._error, self._blame = error, f"it needs the {name}, which failed ({error})"
                self._failed[name] = self._blame
                raise
        return self._made[name]

    # ------------------------------------------------------------------------- machine and model

    @property
    def device(self) -> tuple[torch.device, torch.dtype]:
        def make() -> tuple[torch.device, torch.dtype]:
            from qerl.device import resolve_device, resolve_dtype

            device = resolve_device(self.recipe.device)
            return device, resolve_dtype(self.recipe.dtype, device)

        return self.once("device", make)

    @property
    def source(self) -> Path:
        """The model's directory; fetched if need be."""
        return self.once("model", self._source)

    def _source(self) -> Path:
        from qerl.model.load import resolve_model

        if self.offline:
            return offline_model(self.recipe.model)
        return resolve_model(self.recipe.model, self.say, self.recipe.trust_remote_code)[0]

    @property
    def config(self) -> Any:
        """The model's transformers configuration, without its quantization."""

        def make() -> Any:
            from transformers import AutoConfig

            try:
                code = self.recipe.trust_remote_code
                config = AutoConfig.from_pretrained(self.source, trust_remote_code=code)
            except (OSError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise QerlError(f"model: '{self.source}' has no usable config: {reason}") from error
            if hasattr(config, "quantization_config"):
                config.quantization_config = None
                delattr(config, "quantization_config")
            return config

        return self.once("model configuration", make)

    @property
    def context_length(self) -> int | None:
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    @property
    def tokenizer(self) -> Any:
        def make() -> Any:
            from qerl.model.load import load_tokenizer

            return load_tokenizer(self.source, self.recipe.trust_remote_code)

        return self.once("tokenizer", make)

    @property
    def plan(self) -> Plan:
        def make() -> Plan:
            from qerl.memory import plan

            device, dtype = self.device
            name = str(dtype).removeprefix("torch.")
            return plan(self.recipe, self.config, device=str(device), dtype=name)

        return self.once("memory plan", make)

    @property
    def available_bytes(self) -> int:
        """Free memory of the run's device."""
        device, _ = self.device
        if device.type == "cuda":
            import torch

            return self.once("free memory", lambda: torch.cuda.mem_get_info(device)[0])
        return self.once("free memory", available_memory)

    # --------------------------------------------------------------------------- task and prompts

    @property
    def task(self) -> Task:
        return self.once("task", self._task)

    def _task(self) -> Task:
        from qerl.tasks import load_task

        if self.offline:
            for key in ("dataset", "eval_dataset"):
                source = getattr(self.recipe.task, key)
                if source is not None and not Path(source).expanduser().exists():
                    raise NotChecked(f"offline, and task.{key} '{source}' is no local file")
        return load_task(self.recipe, self.reward)

    @property
    def prompts(self) -> list[Prompt]:
        """Training prompts, evenly spaced over the rows, whatever their length."""

        def make() -> list[Prompt]:
            rows = self.task.train_rows()
            return self._render(rows, spread(len(rows), LOOKED_AT))

        return self.once("training prompts", make)

    @property
    def held_out(self) -> list[Prompt]:
        """Held-out prompts, whatever their length."""

        def make() -> list[Prompt]:
            rows = self.task.eval_rows(self.recipe.eval.prompts)
            return self._render(rows, spread(len(rows), LOOKED_AT))

        return self.once("held-out prompts", make)

    def _render(self, rows: Sequence[Any], indices: Sequence[int]) -> list[Prompt]:
        from qerl.tasks.prompts import Renderer

        anything = self.recipe.model_copy(deep=True)
        anything.task.max_prompt_tokens = None
        renderer = Renderer(self.tokenizer, anything, None)
        made = [renderer(i, rows[i]) for i in indices]
        return [prompt for prompt in made if prompt is not None]

    @property
    def prompt_limit(self) -> int | None:
        """Longest prompt that leaves room for a completion, in tokens (None: no limit known)."""
        context = self.context_length
        if context is None:
            return None
        r = self.recipe
        reserve = max(r.rollout.max_completion_tokens, r.eval.max_completion_tokens or 0)
        return context - reserve

    def fitting(self, prompts: Sequence[Prompt], n: int) -> list[Prompt]:
        """n of the prompts a run would keep, evenly spaced. Raises NotChecked if none fits."""
        limits = [self.prompt_limit, self.recipe.task.max_prompt_tokens]
        limit = min((value for value in limits if value is not None), default=2**31)
        kept = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
        if not kept:
            raise NotChecked(f"no prompt fits into {limit} tokens")
        return [kept[i] for i in spread(len(kept), n)]

    # -------------------------------------------------------------------------------- live policy

    @property
    def policy(self) -> Policy:
        return self.once("loaded model", self._policy)

    def _policy(self) -> Policy:
        import torch

        from qerl.policy import load_policy

        if self.plan.total > self.available_bytes:
            raise NotChecked("the memory plan is larger than the memory there is")
        init = self.recipe.lora.init
        if self.offline and init is not None and not Path(init).expanduser().exists():
            raise NotChecked(f"offline, and lora.init '{init}' is no local folder")
        local = self.recipe.model_copy(update={"model": str(self.source)})
        try:
            return load_policy(local, self.say)
        except torch.OutOfMemoryError as error:
            raise QerlError(f"model: the GPU's memory ran out: {error}".splitlines()[0]) from error

    @property
    def engine(self) -> NativeEngine:
        def make() -> NativeEngine:
            from qerl.rollout.native import NativeEngine

            return NativeEngine(self.policy, max_rows=self.recipe.rollout.max_rows)

        return self.once("engine", make)

    @property
    def samples(self) -> list[Group]:
        """Scored groups of a few training prompts, sampled as a training step does (no noise)."""
        return self.once("samples", self._samples)

    def _samples(self) -> list[Group]:
        from qerl.reward import score_groups
        from qerl.types import SamplingParams

        r = self.recipe.rollout
        params = SamplingParams(
            r.group_size, r.max_completion_tokens, r.temperature, self.recipe.seed
        )
        groups = self.engine.sample(self.fitting(self.prompts, PROBES), params)
        score_groups(groups, self.task.rewards)
        return groups


def spread(length: int, n: int) -> list[int]:
    """At most n positions, evenly spaced over `length`: files are often sorted."""
    n = min(n, length)
    return [i * length // n for i in range(n)]


def offline_model(model: str) -> Path:
    """The model's directory if it is on this machine. Raises NotChecked if it would be fetched."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    from qerl import demo_model
    from qerl.home import qerl_home
    from qerl.model.load import resolve_model

    if model == demo_model.MODEL_ID:
        cached = qerl_home() / "models" / model
        if not (cached / "config.json").exists():
            raise NotChecked(f"offline, and the demo model is not in {qerl_home()} yet")
    elif not Path(model).expanduser().exists() and model.count("/") == 1 and model[0] not in ".~/":
        try:
            return Path(huggingface_hub.snapshot_download(model, local_files_only=True))
        except LocalEntryNotFoundError:
            raise NotChecked(f"offline, and '{model}' is not in the Hub's local cache") from None
    return resolve_model(model)[0]


def available_memory() -> int:
    """Bytes this process may still take: the machine's, or what a container's limit leaves."""
    import psutil

    free = psutil.virtual_memory().available
    limit, stat = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat")
    if not (limit.exists() and stat.exists()):
        return free
    text = limit.read_text().strip()
    if text == "max":
        return free
    used = dict(line.split() for line in stat.read_text().splitlines())
    return min(free, int(text) - int(used["anon"]))
