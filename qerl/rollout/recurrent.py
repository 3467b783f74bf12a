"""What recurrent mixers remember during a rollout: a state a prompt, forked to its rows.

transformers' mixers read and write a cache layer with `conv_states` and `recurrent_states`; `Rows`
is one. Its size does not depend on the length of anything: a row costs H·K·V fp32 numbers and C·W
of the model's type a layer (Qwen3.6-27B: 151 MB over its 48 layers).

Shapes: B rows, P prompts, T packed prompt tokens, C channels of the short convolution and W its
width, H heads, K and V their key and value sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Prefilled:
    """One mixer's inputs to its convolution, [1, C, T], with its width, and the states [1 +
    segments, H, K, V] that segments of the packed tree end in (`qerl.model.recurrent`)."""

    inputs: torch.Tensor
    width: int
    states: torch.Tensor | None = None


class Rows:
    """One mixer's states of decoding rows, as transformers' mixers use them.

    conv_states[0]: [B, C, W], the last W inputs of a row, written in place. recurrent_states[0]:
    f32 [B, H, K, V].
    """

    record_past = False  # no row ever takes a token back

    def __init__(self, conv: torch.Tensor, recurrent: torch.Tensor) -> None:
        self.conv_states = {0: conv}
        self.recurrent_states = {0: recurrent}

    def take(self, index: torch.Tensor) -> Rows:
        """A copy of these rows."""
        return Rows(self.conv_states[0][index], self.recurrent_states[0][index])

    def keep(self, index: torch.Tensor) -> None:
        """Drop every row but these."""
        self.conv_states[0] = self.conv_states[0][index]
        self.recurrent_states[0] = self.recurrent_states[0][index]

    def put(self, index: torch.Tensor, rows: Rows) -> None:
        """Other rows in the places of these."""
        self.conv_states[0][index] = rows.conv_states[0]
        self.recurrent_states[0][index] = rows.recurrent_states[0]

    def extend(self, rows: Rows) -> None:
        """More rows at the end."""
        self.conv_states[0] = torch.cat([self.conv_states[0], rows.conv_states[0]])
        both = [self.recurrent_states[0], rows.recurrent_states[0]]
        self.recurrent_states[0] = torch.cat(both)


def ended(
    prefilled: Prefilled, common: int, spans: list[tuple[int, int]], ends: torch.Tensor
) -> Rows:
    """States at the ends of prompts, a row each: what their completions begin with.

    The prompts share their first `common` tokens, packed first; spans: where the rest of each
    is packed. ends: int64 [P], number of the state each prompt ends in.
    """
    assert prefilled.states is not None, "the mixer kept no state"
    width, total = prefilled.width, prefilled.inputs.shape[2]
    # A prompt shorter than the convolution has zeros in front of it, kept at index `total`.
    index = torch.full((len(spans), width), total)
    for row, (start, end) in enumerate(spans):
        path = [*range(common)[-width:], *range(start, end)][-width:]
        index[row, width - len(path) :] = torch.tensor(path)
    padded = torch.nn.functional.pad(prefilled.inputs[0], (0, 1))
    conv = padded[:, index.to(padded.device)].transpose(0, 1)  # [P, C, W]
    return Rows(conv.contiguous(), prefilled.states[ends])
