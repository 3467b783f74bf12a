"""What commands about a finished run have in common: opening it, and a line that counts tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from qerl.cli_output import Output, quiet

if TYPE_CHECKING:
    from qerl.policy import Policy
    from qerl.run import Run
    from qerl.run_folder import RunFolder

Which = Literal["last", "best", "base"]


@contextmanager
def opened(folder: RunFolder, which: Which, out: Output) -> Iterator[Run]:
    """A run with its model, closed after the block."""
    with quiet(), counting(f"loading {folder.path}"):
        from qerl.run import open_run

        run = open_run(folder.path, which=which, say=out.note)
    with run:
        yield run


def adapter_label(policy: Policy, which: Which) -> str:
    """What is measured. An adapter whose every B is zero changes nothing and is called untrained:
    its accuracy is the base's and must not pass for a result."""
    from qerl.adapter import adapter_state

    if which == "base":
        return "base"
    state = adapter_state(policy.model)
    trained = any(bool(tensor.any()) for name, tensor in state.items() if "lora_B" in name)
    return which if trained else "untrained"


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], None]]:
    """On a terminal, one line with the tokens heard so far, gone after the block."""
    from qerl.console import Screen

    tokens = 0
    with Screen(0) as screen:
        screen.status(what)

        def heard(new: int) -> None:
            nonlocal tokens
            tokens += new
            screen.status(f"{what}: {tokens} tokens")

        yield heard


def accuracy_text(result: dict[str, Any]) -> str:
    """An evaluation in a few words; needs no torch, unlike `qerl.run.accuracy_line`."""
    low, high = result["ci95"]
    return f"{result['accuracy']:.1%} correct (95% {low:.1%} to {high:.1%}, n = {result['n']})"
