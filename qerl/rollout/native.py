"""The native engine: samples from the trainer's own modules, so nothing is copied or synced.

Prompts are prefilled once, as packed trees (what they share is computed once a tree); the G rows of
a prompt decode over that shared memory; a finished row leaves its seat at once to one that waits.
The adapter and the exploration noise are live in the modules: a new version needs no action.

Left out here: top-p, top-k and penalties (the recorded log-probs are exactly softmax(logits / T)).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qerl.errors import QerlError
from qerl.pack import TreeBuilder, common_prefix_length
from qerl.policy import Policy
from qerl.rollout.cache import Decode, Prefill, PrefillCache
from qerl.rollout.sampling import sample_tokens, uniforms
from qerl.types import Completion, Group, Prompt, SamplingParams

Progress = Callable[[int], None]


class NativeEngine:
    """Engine over a `Policy`.

    max_rows bounds the completions decoded at once, prefill_tokens the prompt tokens of one
    forward, which are kept until their rows begin; a prompt longer than that goes alone.
    """

    name = "native"

    def __init__(self, policy: Policy, *, max_rows: int = 256, prefill_tokens: int = 4096) -> None:
        self.policy = policy
        self.max_rows, self.prefill_tokens = max_rows, prefill_tokens

    def sync(self, version: int) -> None:
        """Nothing to do: the trainer's adapter is the engine's."""
        assert version == self.policy.version

    def close(self) -> None:
        """Nothing is held between calls."""

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        progress: Progress | None = None,
    ) -> list[Group]:
        """See `Engine.sample`. Raises QerlError for a prompt that leaves no room to answer."""
        self._check_context(prompts, params.max_tokens)
        was_training = self.policy.model.training
        self.policy.model.eval()
        rollout = _Rollout(self, prompts, params, progress)
        rollout.run()
        self.policy.model.train(was_training)
        return rollout.groups

    def _check_context(self, prompts: Sequence[Prompt], max_tokens: int) -> None:
        for prompt in prompts:
            if len(prompt.token_ids) + max_tokens > self.policy.context:
                raise QerlError(
                    f"rollout.max_completion_tokens: prompt {prompt.index} has "
                    f"{len(prompt.token_ids)} tokens, {max_tokens} more pass the model's context "
                    f"of {self.policy.context}; lower it or set task.max_prompt_tokens"
                )


@dataclass(slots=True)
class _Row:
    """A completion under way: its prompt's number in the call, what its draws depend on, and the
    token that is to be decoded next."""

    completion: Completion
    prompt: int
    request: int
    token: int


class _Rollout:
    """One call of `sample`: rows that decode, requests that wait, prompts prefilled for them."""

    def __init__(
        self,
        engine: NativeEngine,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        progress: Progress | None,
    ) -> None:
        self.engine, self.policy = engine, engine.policy
        self.prompts, self.params, self.progress = prompts, params, progress
        self.groups = [Group(prompt, [_empty() for _ in range(params.n)]) for prompt in prompts]
        self.requests = request_ids(prompts, params.n)
        self.common = common_prefix_length([p.token_ids for p in prompts]) if prompts else 0
        self.waiting = deque((p, k) for p in range(len(prompts)) for k in range(params.n))
        self.ready: dict[int, tuple[Prefill, int]] = {}  # prefilled, with its place in the batch
        self.rows: list[_Row] = []
        self.state: Decode | None = None

    def run(self) -> None:
        """Every completion, to its end."""
        self._fill([], self.engine.max_rows)
        while self.rows:
            going = self._sample(self.rows, self._decode())
            freed = [i for i, goes in enumerate(going) if not goes]
            if freed:
                self._fill(freed, len(freed))
        for completion in (c for group in self.groups for c in group.completions):
            completion.text = self._text(completion.token_ids)

    def _fill(self, freed: list[int], count: int) -> None:
        """Give up to `count` seats, the `freed` ones first, to requests that wait; rows whose
        seat nobody takes leave."""
        newcomers = self._begin(count)
        if newcomers:
            self._enter([row.prompt for row in newcomers])
        if self.state is None:
            return
        taken, left = freed[: len(newcomers)], set(freed[len(newcomers) :])
        if newcomers:
            self.state.seat(taken, [row.prompt for row in newcomers])
            for seat, row in zip(taken, newcomers, strict=False):
                self.rows[seat] = row
            self.rows += newcomers[len(taken) :]
        if left:
            index = [i for i in range(len(self.rows)) if i not in left]
            self.state.keep(torch.tensor(index, dtype=torch.int64, device=self.policy.device))
            self.rows = [self.rows[i] for i in index]
        self.state.forget({p for p, _ in self.waiting})

    def _begin(self, count: int) -> list[_Row]:
        """The first tokens of up to `count` requests, from their prompts' last hidden states;
        those that are not finished with them."""
        begun: list[_Row] = []
        while self.waiting and len(begun) < count:
            rows, hidden = [], []
            for _ in range(min(count - len(begun), len(self.waiting))):
                p, k = self.waiting.popleft()
                batch, place = self._prefilled(p)
                completion = self.groups[p].completions[k]
                rows.append(_Row(completion, p, int(self.requests[p, k]), -1))
                hidden.append(batch.hidden[place])
            going = self._sample(rows, torch.stack(hidden))
            begun += [row for row, goes in zip(rows, going, strict=True) if goes]
        return begun

    def _enter(self, numbers: list[int]) -> None:
        """Bring prompts that are new into the decoding memory, and let go of prefills that no
        request waits for."""
        if self.state is None:
            self.state = Decode(self.ready[numbers[0]][0])
        new = [n for n in dict.fromkeys(numbers) if n not in self.state.numbers]
        while new:
            batch = self.ready[new[0]][0]
            some = [n for n in new if self.ready[n][0] is batch]
            self.state.enter(some, batch, [self.ready[n][1] for n in some])
            new = [n for n in new if n not in some]
        waiting = {p for p, _ in self.waiting}
        self.ready = {n: found for n, found in self.ready.items() if n in waiting}

    def _prefilled(self, number: int) -> tuple[Prefill, int]:
        """A prompt's prefill; it takes the prompts after it along, up to `prefill_tokens`."""
        if number not in self.ready:
            stop, tokens = number + 1, len(self.prompts[number].token_ids)
            while stop < len(self.prompts):
                tokens += len(self.prompts[stop].token_ids)
                if tokens > self.engine.prefill_tokens:
                    break
                stop += 1
            batch = self._prefill(self.prompts[number:stop])
            self.ready |= {p: (batch, p - number) for p in range(number, stop)}
        return self.ready[number]

    def _prefill(self, prompts: Sequence[Prompt]) -> Prefill:
        """One packed forward over some of the prompts."""
        builder = TreeBuilder()
        root = builder.add(prompts[0].token_ids[: self.common], 0, ())
        spans = []
        for prompt in prompts:
            start = len(builder.ids)
            builder.add(prompt.token_ids[self.common :], self.common, (root,))
            spans.append((start, len(builder.ids)))
        device, cache = self.policy.device, PrefillCache()
        tree = builder.tree(device)
        out = self.policy.decoder(
            input_ids=torch.tensor([builder.ids], device=device),
            position_ids=torch.tensor([builder.positions], device=device),
            attention_mask=tree.mask,
            past_key_values=cache,
            use_cache=True,
            tree=tree,
        )
        last = torch.tensor([end - 1 for _, end in spans], device=device)
        return Prefill(cache, tree, self.common, spans, out.last_hidden_state[0, last])

    def _decode(self) -> torch.Tensor:
        """The next token of every row -> hidden states [B, hidden]."""
        state = self.state
        assert state is not None
        tokens = torch.tensor([row.token for row in self.rows], device=self.policy.device)
        out = self.policy.decoder(
            input_ids=tokens[:, None],
            position_ids=state.positions[:, None],
            attention_mask=tokens.new_ones(1, 1, 1, 1, dtype=torch.bool),
            past_key_values=state,
            use_cache=True,
            decode=state,
        )
        state.advance()
        return out.last_hidden_state[:, 0]

    def _sample(self, rows: list[_Row], hidden: torch.Tensor) -> list[bool]:
        """Sample and record one token a row; whether it goes on."""
        positions = np.array([len(row.completion.token_ids) for row in rows])
        draw = uniforms(self.params.seed, np.array([row.request for row in rows]), positions)
        found = sample_tokens(self.policy.logits(hidden), self.params.temperature, draw)
        going = []
        for row, token, logp, entropy in zip(rows, *(x.tolist() for x in found), strict=True):
            completion = row.completion
            completion.token_ids.append(token)
            completion.logprobs.append(logp)
            completion.entropies.append(entropy)
            completion.versions.append(self.policy.version)
            row.token = token
            stopped = token in self.policy.eos_ids
            if stopped:
                completion.finish_reason = "stop"
            going.append(not stopped and len(completion.token_ids) < self.params.max_tokens)
        if self.progress is not None:
            self.progress(len(rows))
        return going

    def _text(self, ids: list[int]) -> str:
        text = self.policy.tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def request_ids(prompts: Sequence[Prompt], n: int) -> np.ndarray:
    """int64 [P, n], what a completion's draws depend on: its prompt's index and its number there.

    A prompt that is there twice, from a dataset smaller than a step, goes on counting: two equal
    groups would teach what one does.
    """
    seen: Counter[int] = Counter()
    rows = []
    for prompt in prompts:
        rows.append(prompt.index * 65536 + seen[prompt.index] + np.arange(n))
        seen[prompt.index] += n
    return np.array(rows, dtype=np.int64).reshape(len(prompts), n)


def _empty() -> Completion:
    return Completion([], [], [], [], "length")
