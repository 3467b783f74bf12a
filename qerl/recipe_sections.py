"""The sections of a recipe, such as `lora:` and `rollout:`. Imports no torch.

Every field carries its own help text; `qerl explain KEY` and the JSON Schema are made from it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

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
    rslora: bool = Field(
        default=False, description="Scale by alpha/sqrt(rank) instead of alpha/rank (rsLoRA)."
    )
    rank_pattern: dict[str, int] = Field(
        default_factory=dict,
        description="Modules with a rank of their own: a regular expression on the end of the "
        "name, and the rank.",
    )
    alpha_pattern: dict[str, float] = Field(
        default_factory=dict, description="The same for alpha: modules with one of their own."
    )
    init: str | None = Field(
        default=None,
        description="Directory or Hub id of a PEFT LoRA adapter to start from (null: fresh). Its "
        "rank, alpha, rslora, patterns and targets take the place of those here.",
    )

    @property
    def largest_rank(self) -> int:
        """The rank that a server has to make room for."""
        return max([self.rank, *self.rank_pattern.values()])

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
