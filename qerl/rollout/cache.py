"""Key-value memory of a rollout: prompts stored once, suffixes per row.

A row's context is three stretches: the prefix common to all prompts, its own prompt's rest, and
what it has generated. The first two are computed once and shared; only the third belongs to the
row. Attention reads all three and normalises over them together. A recurrent mixer has a state
instead, a prompt's forked to its rows (`qerl.rollout.recurrent`).

Shapes: B rows, P prompts, J key-value heads, R query heads per key-value head, D head size,
C common tokens, L longest own prompt part, S suffix capacity, t suffix tokens so far.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache

from qerl.model.attention import Tree, softcap_scores
from qerl.rollout.recurrent import Prefilled, Rows, fork

CHUNK = 64  # suffix tokens a row has room for at first


class PrefillCache(Cache):
    """Keeps each layer's keys and values of one packed forward: [1, J, T, D] a layer.

    mixers: what recurrent layers have instead.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.mixers: dict[int, Prefilled] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):  # type: ignore[override]
        self.keys[layer_idx], self.values[layer_idx] = key_states, value_states
        return key_states, value_states

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, *, conv_kernel_size, **kwargs):  # type: ignore[override]
        assert state_idx == 0
        self.mixers[layer_idx] = Prefilled(conv_states, conv_kernel_size)
        return conv_states

    def update_recurrent_state(self, recurrent_states, layer_idx, state_idx=0, **kwargs):  # type: ignore[override]
        self.mixers[layer_idx].states = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx=None, state_idx=None) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class Decode(Cache):
    """Cache and attention of decoding rows, `rows_of_prompt` rows a prompt at the start.

    tree: what was prefilled, the common part as its first segment and then one a prompt.
    lengths: int64 [P], tokens of each prompt beyond the common part. capacity: longest suffix.
    layers: states of the recurrent mixers, where transformers looks for them; None elsewhere.
    """

    def __init__(
        self,
        prefill: PrefillCache,
        tree: Tree,
        common: int,
        spans: list[tuple[int, int]],
        rows_of_prompt: int,
        capacity: int,
    ) -> None:
        super().__init__(layers=[])
        device = tree.positions.device
        self.common_length = common
        self.lengths = torch.tensor([end - start for start, end in spans], device=device)
        self.longest = max(end - start for start, end in spans)
        self.common = {i: _shared(prefill, i, common) for i in prefill.keys}
        self.prompts = {i: _per_prompt(prefill, i, spans) for i in prefill.keys}
        self.rows = torch.arange(len(spans), device=device).repeat_interleave(rows_of_prompt)
        self.step = 0
        self.suffix: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, key in prefill.keys.items():
            shape = (len(self.rows), key.shape[1], min(capacity, CHUNK), key.shape[3])
            value_shape = (*shape[:3], prefill.values[layer].shape[3])
            self.suffix[layer] = (key.new_empty(shape), key.new_empty(value_shape))
        for layer, mixer in sorted(prefill.mixers.items()):
            self.layers += [None] * (layer - len(self.layers))  # type: ignore[list-item]
            self.layers.append(fork(mixer, common, spans, tree.end[1:], self.rows))  # type: ignore[arg-type]
        self._group_rows()

    def grow(self) -> None:
        """Make room for the next token: capacity doubles, so long answers cost what they use."""
        for layer, pair in self.suffix.items():
            if pair[0].shape[2] == self.step:
                key, value = (
                    torch.cat([x, x.new_empty(*x.shape[:2], self.step, x.shape[3])], 2)
                    for x in pair
                )
                self.suffix[layer] = (key, value)

    def _group_rows(self) -> None:
        """Rows of one prompt side by side, padded to the fullest: slot int64 [P, G'], -1 free.

        Rows are always in the order of their prompts, so a row's place is its rank there.
        """
        counts = torch.bincount(self.rows, minlength=len(self.lengths))
        offset = counts.cumsum(0) - counts
        rank = torch.arange(len(self.rows), device=self.rows.device) - offset[self.rows]
        self.group_size = int(counts.max())
        self.slot = self.rows * self.group_size + rank

    @property
    def positions(self) -> torch.Tensor:
        """Position of the token being decoded, int64 [B]."""
        return self.common_length + self.lengths[self.rows] + self.step

    def keep(self, index: torch.Tensor) -> None:
        """Drop every row but these (ascending): finished rows leave at once."""
        self.rows = self.rows[index]
        for layer, (key, value) in self.suffix.items():
            self.suffix[layer] = (key[index], value[index])
        for states in self.layers:
            if isinstance(states, Rows):
                states.keep(index)
        self._group_rows()

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):  # type: ignore[override]
        key, value = self.suffix[layer_idx]
        key[:, :, self.step] = key_states[:, :, 0]
        value[:, :, self.step] = value_states[:, :, 0]
        end = self.step + 1
        return key[:, :, :end], value[:, :, :end]

    def update_recurrent_state(self, recurrent_states, layer_idx, state_idx=0, **kwargs):  # type: ignore[override]
        rows = self.layers[layer_idx]
        assert isinstance(rows, Rows)
        rows.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx=None, state_idx=None) -> bool:
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query [B, H, 1, D], suffix key and value [B, J, t, D] -> [B, 1, H, D]."""
        layer = self._owner(layer, key)
        rows, heads = query.shape[0], key.shape[1]
        q = query.reshape(rows, heads, -1, query.shape[-1]) * scale  # [B, J, R, D]
        parts = [
            self._common_scores(layer, q),
            self._prompt_scores(layer, q),
            q @ key.transpose(-1, -2),
        ]
        scores = softcap_scores(torch.cat(parts, -1).float(), softcap)
        scores = scores.masked_fill(self._hidden(key.shape[2], window)[:, None, None], -torch.inf)
        weights = torch.softmax(scores, -1).to(value.dtype)
        common, prompt, suffix = weights.split([p.shape[-1] for p in parts], -1)
        out = suffix @ value
        out += self._gather(self._grouped(prompt) @ self.prompts[layer][1][:, :, None])
        if self.common_length:
            shared = common.transpose(0, 1).flatten(1, 2) @ self.common[layer][1]
            out += shared.unflatten(1, (rows, -1)).transpose(0, 1)
        return out.reshape(rows, 1, -1, value.shape[-1])

    def _owner(self, layer: int, key: torch.Tensor) -> int:
        """The layer whose keys these are: another one where a layer has none of its own (Gemma 4's
        last layers read those of an earlier layer), known by their place in memory."""
        if layer in self.suffix:
            return layer
        return next(i for i, (k, _) in self.suffix.items() if k.data_ptr() == key.data_ptr())

    def _common_scores(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """[B, J, R, C]: all rows at once against the prefix they share."""
        flat = q.transpose(0, 1).flatten(1, 2)  # [J, B·R, D]
        scores = flat @ self.common[layer][0].transpose(-1, -2)
        return scores.unflatten(1, (q.shape[0], -1)).transpose(0, 1)

    def _prompt_scores(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """[B, J, R, L]: each row against its own prompt, read once for the whole group."""
        key = self.prompts[layer][0][:, :, None]  # [P, J, 1, L, D]
        return self._gather(self._grouped(q) @ key.transpose(-1, -2))

    def _grouped(self, x: torch.Tensor) -> torch.Tensor:
        """[B, J, R, *] -> [P, J, G', R, *]; free places are zero."""
        out = x.new_zeros(len(self.lengths) * self.group_size, *x.shape[1:])
        out[self.slot] = x
        return out.unflatten(0, (-1, self.group_size)).transpose(1, 2)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[P, J, G', R, *] -> [B, J, R, *]: the inverse."""
        return x.transpose(1, 2).flatten(0, 1)[self.slot]

    def _hidden(self, suffix: int, window: int | None) -> torch.Tensor:
        """bool [B, C + L + t]: padding of shorter prompts, and what a window has left behind."""
        device = self.rows.device
        lengths = self.lengths[self.rows][:, None]
        own = torch.arange(self.longest, device=device)[None]
        shared = torch.arange(self.common_length, device=device)[None].expand(len(lengths), -1)
        generated = lengths + torch.arange(suffix, device=device)[None]
        hidden = torch.cat([shared < 0, own >= lengths, generated < 0], 1)
        if window is not None:
            base = self.common_length
            at = torch.cat([shared, base + own.expand(len(lengths), -1), base + generated], 1)
            hidden |= self.positions[:, None] - at >= window
        return hidden


def _shared(prefill: PrefillCache, layer: int, common: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [J, C, D] of the common prefix."""
    return prefill.keys[layer][0, :, :common], prefill.values[layer][0, :, :common]


def _per_prompt(
    prefill: PrefillCache, layer: int, spans: list[tuple[int, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [P, J, L, D] of the prompts' own parts, zero-padded on the right."""
    longest = max(end - start for start, end in spans)
    padded = []
    for whole in (prefill.keys[layer], prefill.values[layer]):
        out = whole.new_zeros(len(spans), whole.shape[1], longest, whole.shape[3])
        for row, (start, end) in enumerate(spans):
            out[row, :, : end - start] = whole[0, :, start:end]
        padded.append(out)
    return padded[0], padded[1]
