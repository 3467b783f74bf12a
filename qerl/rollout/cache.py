"""Key-value memory of a rollout: prompts stored once, suffixes per row.

A row's context is three stretches: the prefix common to all prompts, its own prompt's rest, and
what it has generated. The first two are computed once and shared; only the third belongs to the
row. Attention reads all three and normalises over them together. A recurrent mixer has a state
instead, a prompt's forked to its rows (`qerl.rollout.recurrent`).

Shapes: B rows, P prompts, J key-value heads, R query heads per key-value head, D head size,
C common tokens, L longest own prompt part, t longest suffix so far.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from transformers.cache_utils import Cache

from qerl.model.attention import Tree, softcap_scores
from qerl.rollout.recurrent import Prefilled, Rows, ended

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


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompts after one packed forward: what they share is the tree's first segment, `common`
    tokens long, and then comes one segment a prompt, `spans` in the pack.

    hidden: [P, hidden], of each prompt's last token.
    """

    cache: PrefillCache
    tree: Tree
    common: int
    spans: list[tuple[int, int]]
    hidden: torch.Tensor


class Decode(Cache):
    """Memory and attention of rows that decode: of each, the prompt it continues (`rows` int64
    [B]) and the tokens it has generated (`length` int64 [B]).

    A row that is finished gives its seat to one that waits (`seat`) or leaves (`keep`); a prompt is
    here while it has rows. first: the prefill whose common part all prompts begin with.
    layers: states of the recurrent mixers, where transformers looks for them; None elsewhere.
    """

    def __init__(self, first: Prefill) -> None:
        super().__init__(layers=[])
        self.device = first.hidden.device
        self.common_length = first.common
        self.common = {i: _shared(first.cache, i, first.common) for i in first.cache.keys}
        self.prompts = {i: _no_prompts(pair) for i, pair in self.common.items()}
        self.suffix = {
            i: tuple(_room(x, 0, CHUNK) for x in pair) for i, pair in self.common.items()
        }
        self.ended: dict[int, Rows] = {}  # recurrent states at the prompts' ends
        self.numbers: list[int] = []  # what the engine calls each prompt that is here
        self.lengths = self.rows = self.length = torch.zeros(
            0, dtype=torch.int64, device=self.device
        )
        self.taken = np.zeros(0, dtype=np.int64)  # `length` again, without asking the device
        self.longest = 0

    # ------------------------------------------------------------------------- who is here

    def enter(self, numbers: list[int], batch: Prefill, places: list[int]) -> None:
        """Prompts of a batch, by their places in it, that rows are about to continue."""
        spans = [batch.spans[place] for place in places]
        for layer, pair in _per_prompt(batch.cache, spans).items():
            old = self.prompts[layer]
            self.prompts[layer] = (_stack(old[0], pair[0]), _stack(old[1], pair[1]))
        index = torch.tensor(places, device=self.device)
        for layer, mixer in sorted(batch.cache.mixers.items()):
            here = ended(mixer, batch.common, spans, batch.tree.end[1:][index])
            if layer not in self.ended:
                self.layers += [None] * (layer - len(self.layers))  # type: ignore[list-item]
                self.ended[layer] = here
                self.layers.append(here.take(index[:0]))  # type: ignore[arg-type]
            else:
                self.ended[layer].extend(here)
        own = torch.tensor([end - start for start, end in spans], device=self.device)
        self.lengths = torch.cat([self.lengths, own])
        self.longest = max(self.longest, *(end - start for start, end in spans))
        self.numbers += numbers

    def seat(self, at: list[int], numbers: list[int]) -> None:
        """Rows that begin: the prompts they continue. They take the seats `at` of rows that are
        finished, and those that are left over new ones at the end."""
        place = {number: i for i, number in enumerate(self.numbers)}
        prompts = torch.tensor([place[number] for number in numbers], device=self.device)
        seats, there = torch.tensor(at, dtype=torch.int64, device=self.device), len(at)
        self.rows[seats], self.length[seats], self.taken[at] = prompts[:there], 0, 0
        more = len(numbers) - there
        if more:
            self.rows = torch.cat([self.rows, prompts[there:]])
            self.length = torch.cat([self.length, self.length.new_zeros(more)])
            self.taken = np.concatenate([self.taken, np.zeros(more, dtype=np.int64)])
            for layer, pair in self.suffix.items():
                self.suffix[layer] = tuple(
                    torch.cat([x, x.new_empty(more, *x.shape[1:])]) for x in pair
                )
        for layer, states in self.ended.items():
            rows = self._states(layer)
            rows.put(seats, states.take(prompts[:there]))
            if more:
                rows.extend(states.take(prompts[there:]))
        self._group_rows()

    def keep(self, index: torch.Tensor) -> None:
        """Drop every row but these."""
        self.rows, self.length = self.rows[index], self.length[index]
        self.taken = self.taken[index.cpu().numpy()]
        for layer, (key, value) in self.suffix.items():
            self.suffix[layer] = (key[index], value[index])
        for layer in self.ended:
            self._states(layer).keep(index)
        self._group_rows()

    def forget(self, waiting: Collection[int]) -> None:
        """Drop prompts that no row continues, but those with rows that wait (by number)."""
        here = set(self.rows.tolist())
        kept = [i for i, n in enumerate(self.numbers) if i in here or n in waiting]
        if len(kept) == len(self.numbers):
            return
        index = torch.tensor(kept, dtype=torch.int64, device=self.device)
        place = torch.zeros(len(self.numbers), dtype=torch.int64, device=self.device)
        place[index] = torch.arange(len(kept), device=self.device)
        self.rows, self.lengths = place[self.rows], self.lengths[index]
        self.numbers = [self.numbers[i] for i in kept]
        self.longest = int(self.lengths.max()) if kept else 0
        for layer, (key, value) in self.prompts.items():
            short = slice(self.longest)
            self.prompts[layer] = (key[index][:, :, short], value[index][:, :, short])
        for states in self.ended.values():
            states.keep(index)
        self._group_rows()

    def advance(self) -> None:
        """Every row has one more token. Capacity doubles, so long answers cost what they use."""
        self.length = self.length + 1
        self.taken += 1
        if self.taken.max() == next(iter(self.suffix.values()))[0].shape[2]:
            for layer, pair in self.suffix.items():
                self.suffix[layer] = tuple(torch.cat([x, torch.empty_like(x)], 2) for x in pair)

    def _states(self, layer: int) -> Rows:
        rows = self.layers[layer]
        assert isinstance(rows, Rows)
        return rows

    def _group_rows(self) -> None:
        """Rows of one prompt side by side, padded to the fullest: slot int64 [P, G'], -1 free."""
        counts = torch.bincount(self.rows, minlength=len(self.lengths))
        offset = counts.cumsum(0) - counts
        order = torch.argsort(self.rows, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=self.device) - offset[self.rows[order]]
        self.group_size = int(counts.max()) if len(order) else 0
        self.slot = self.rows * self.group_size + rank

    # --------------------------------------------------------------------------- attention

    @property
    def positions(self) -> torch.Tensor:
        """Position of the token being decoded, int64 [B]."""
        return self.common_length + self.lengths[self.rows] + self.length

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):  # type: ignore[override]
        key, value = self.suffix[layer_idx]
        row = torch.arange(len(self.rows), device=self.device)
        key[row, :, self.length] = key_states[:, :, 0]
        value[row, :, self.length] = value_states[:, :, 0]
        end = int(self.taken.max()) + 1
        return key[:, :, :end], value[:, :, :end]

    def update_recurrent_state(self, recurrent_states, layer_idx, state_idx=0, **kwargs):  # type: ignore[override]
        self._states(layer_idx).recurrent_states[state_idx] = recurrent_states
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
        """bool [B, C + L + t]: padding of shorter prompts and of shorter answers (where an earlier
        row's may stand), and what a window has left behind."""
        device = self.device
        lengths = self.lengths[self.rows][:, None]
        own = torch.arange(self.longest, device=device)[None]
        shared = torch.arange(self.common_length, device=device)[None].expand(len(lengths), -1)
        number = torch.arange(suffix, device=device)[None]
        generated = lengths + number
        hidden = torch.cat([shared < 0, own >= lengths, number > self.length[:, None]], 1)
        if window is not None:
            base = self.common_length
            at = torch.cat([shared, base + own.expand(len(lengths), -1), base + generated], 1)
            hidden |= self.positions[:, None] - at >= window
        return hidden


def _shared(prefill: PrefillCache, layer: int, common: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [J, C, D] of the common prefix."""
    return prefill.keys[layer][0, :, :common], prefill.values[layer][0, :, :common]


def _per_prompt(
    cache: PrefillCache, spans: list[tuple[int, int]]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [P, J, L, D] of the prompts' own parts by layer, zero-padded on the right."""
    longest = max(end - start for start, end in spans)

    def padded(whole: torch.Tensor) -> torch.Tensor:
        out = _room(whole[0], len(spans), longest).zero_()
        for row, (start, end) in enumerate(spans):
            out[row, :, : end - start] = whole[0, :, start:end]
        return out

    return {i: (padded(cache.keys[i]), padded(cache.values[i])) for i in cache.keys}


def _room(like: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """[rows, J, tokens, D] for a [J, *, D]."""
    return like.new_empty(rows, like.shape[0], tokens, like.shape[2])


def _no_prompts(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return _room(pair[0], 0, 0), _room(pair[1], 0, 0)


def _stack(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[P, J, L, D] and [Q, J, M, D] -> [P + Q, J, max(L, M), D], padded with zeros."""
    longest = max(first.shape[2], second.shape[2])
    return torch.cat(
        [torch.nn.functional.pad(x, (0, 0, 0, longest - x.shape[2])) for x in (first, second)]
    )
