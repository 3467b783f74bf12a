"""Groups -> packed micro-batches without padding, every prompt computed once.

Tokens of a micro-batch form a tree: what all its prompts have in common, then each prompt's own
part, then that prompt's completions. A token sees itself and its ancestors; positions count along
the path. The last token of a completion predicts nothing and is left out. A recurrent mixer has no
mask: its state is forked where the tree branches (`qerl.model.recurrent`).

Shapes: T packed tokens, N trained (completion) tokens, S segments of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from qerl.model.attention import Level, Tree
from qerl.types import Completion, Group


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed forward.

    input_ids, positions: int64 [1, T]. predict: int64 [N], packed index whose output predicts the
    token. targets: int64 [N]. completions: the answers in packed order; row: int64 [N], which of
    them a trained token belongs to. groups: the groups inside.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    tree: Tree
    predict: torch.Tensor
    targets: torch.Tensor
    row: torch.Tensor
    completions: list[Completion]
    groups: list[Group]

    def per_token(self, values: Sequence[float]) -> torch.Tensor:
        """One value per completion -> f32 [N]."""
        return torch.tensor(values, dtype=torch.float32, device=self.row.device)[self.row]

    def recorded(self) -> torch.Tensor:
        """The sampler's log-probs, f32 [N]."""
        flat = [value for c in self.completions for value in c.logprobs]
        return torch.tensor(flat, dtype=torch.float32, device=self.row.device)


class TreeBuilder:
    """Collects segments; a segment's tokens see those of `parents` and, causally, each other."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.spans: list[range] = []
        self.parents: list[tuple[int, ...]] = []

    def add(self, ids: Sequence[int], start: int, parents: tuple[int, ...]) -> int:
        """Append a segment whose first token is at position `start`; returns its number.

        parents: its ancestors, the root first.
        """
        first = len(self.ids)
        self.ids.extend(ids)
        self.positions.extend(range(start, start + len(ids)))
        self.spans.append(range(first, len(self.ids)))
        self.parents.append(parents)
        return len(self.spans) - 1

    def tree(self, device: torch.device) -> Tree:
        """Attention and recurrence of the segments: one padded batch for each depth."""
        levels, place, offset = [], torch.zeros(len(self.ids), dtype=torch.int64), 0
        start, end = self._states()
        for numbers in self._depths():
            level = self._level(numbers, start)
            width = level.query.shape[1]
            for row, number in enumerate(numbers):
                span = self.spans[number]
                place[span.start : span.stop] = offset + row * width + torch.arange(len(span))
            offset += level.query.numel()
            levels.append(_to(level, device))
        positions = torch.tensor(self.positions, device=device)
        return Tree(levels, positions, place.to(device), torch.tensor(end, device=device))

    def _depths(self) -> list[list[int]]:
        """Numbers of the segments of each depth; one without tokens is in none."""
        depths: dict[int, list[int]] = {}
        for number, parents in enumerate(self.parents):
            if self.spans[number]:
                depths.setdefault(len(parents), []).append(number)
        return [depths[depth] for depth in sorted(depths)]

    def _states(self) -> tuple[list[int], list[int]]:
        """The states that each segment begins with and ends in, numbered as in `Level.start`.

        A segment without tokens ends where it begins.
        """
        state = {number: i + 1 for i, number in enumerate(n for d in self._depths() for n in d)}
        end = [0] * len(self.spans)
        start = [0] * len(self.spans)
        for number in sorted(range(len(self.spans)), key=lambda i: len(self.parents[i])):
            parents = self.parents[number]
            start[number] = end[parents[-1]] if parents else 0
            end[number] = state.get(number, start[number])
        return start, end

    def _level(self, numbers: list[int], start: list[int]) -> Level:
        own = [list(self.spans[i]) for i in numbers]
        seen = [[t for p in (*self.parents[i], i) for t in self.spans[p]] for i in numbers]
        query, key = _padded(own), _padded(seen)
        whole = torch.tensor([len(s) for s in seen])
        lengths = torch.tensor([len(o) for o in own])
        before = whole - lengths
        column = torch.arange(key.shape[1])
        # the query's own place among its keys
        last = before[:, None] + torch.arange(query.shape[1])
        visible = (column[None, None] <= last[:, :, None]) & (column[None] < whole[:, None])[
            :, None
        ]
        return Level(
            query, key, visible, before, lengths, torch.tensor([start[i] for i in numbers])
        )


def _padded(rows: list[list[int]]) -> torch.Tensor:
    """int64 [S, longest], zero-padded on the right."""
    out = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


def _to(level: Level, device: torch.device) -> Level:
    return Level(*(getattr(level, field.name).to(device) for field in fields(level)))


def common_prefix_length(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all prompts share, leaving at least one of its own to each."""
    limit = min(map(len, prompts)) - 1
    first = prompts[0]
    for i in range(limit):
        if any(prompt[i] != first[i] for prompt in prompts):
            return i
    return limit


def pack(groups: Sequence[Group], budget: int, device: torch.device) -> list[MicroBatch]:
    """Split groups into micro-batches of at most `budget` packed tokens.

    A group is never split: one larger than the budget gets a micro-batch of its own.
    """
    batches: list[list[Group]] = []
    for group in groups:
        if batches and packed_tokens([*batches[-1], group]) <= budget:
            batches[-1].append(group)
        else:
            batches.append([group])
    return [pack_one(batch, device) for batch in batches]


def packed_tokens(groups: Sequence[Group]) -> int:
    """T of the micro-batch these groups would make."""
    prompts = [g.prompt.token_ids for g in groups]
    shared = common_prefix_length(prompts)
    own = sum(len(p) - shared for p in prompts)
    return shared + own + sum(len(c.token_ids) - 1 for g in groups for c in g.completions)


def pack_one(groups: Sequence[Group], device: torch.device) -> MicroBatch:
    """All groups in one micro-batch."""
    shared = common_prefix_length([g.prompt.token_ids for g in groups])
    builder = TreeBuilder()
    root = builder.add(groups[0].prompt.token_ids[:shared], 0, ())
    predict: list[int] = []
    for group in groups:
        ids = group.prompt.token_ids
        prompt = builder.add(ids[shared:], shared, (root,))
        last = len(builder.ids) - 1
        for completion in group.completions:
            first = len(builder.ids)
            builder.add(completion.token_ids[:-1], len(ids), (root, prompt))
            predict += [last, *range(first, len(builder.ids))]
    completions = [c for g in groups for c in g.completions]
    return MicroBatch(
        input_ids=torch.tensor([builder.ids], device=device),
        positions=torch.tensor([builder.positions], device=device),
        tree=builder.tree(device),
        predict=torch.tensor(predict, device=device),
        targets=torch.tensor([t for c in completions for t in c.token_ids], device=device),
        row=torch.tensor(
            [i for i, c in enumerate(completions) for _ in c.token_ids], device=device
        ),
        completions=completions,
        groups=list(groups),
    )
