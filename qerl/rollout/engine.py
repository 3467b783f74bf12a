"""What the loop needs from whatever samples; `native` is one, a served engine may be another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from qerl.types import Group, Prompt, SamplingParams


class Engine(Protocol):
    """Samples groups of completions from the current policy. name: as in `rollout.engine`."""

    name: str

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[Group]:
        """n completions for each prompt, in the order of the prompts.

        Log-probs are those of the distribution really sampled. `progress` hears how many new
        tokens were decoded since its last call.
        """
        ...

    def sync(self, version: int) -> None:
        """The adapter was written to: what follows must be sampled from it, as this version."""
        ...

    def close(self) -> None:
        """Give back what the engine holds."""
        ...
