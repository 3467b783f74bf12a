"""The native engine: samples from the trainer's own modules, so nothing is copied or synced.

Prompts are prefilled once, as one packed tree (what they share is computed once); the G rows of a
prompt decode over that shared memory; a finished row leaves the batch at once. The adapter and the
exploration noise are live in the modules: a new version needs no action.

Left out here: admission of waiting rows while others decode (waves of `max_rows` instead),
top-p, top-k and penalties (the recorded log-probs are then exactly softmax(logits / T)).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from qerl.errors import QerlError
from qerl.pack import TreeBuilder, common_prefix_length
from qerl.policy import Policy
from qerl.rollout.cache import Decode, PrefillCache
from qerl.rollout.sampling import sample_tokens, uniforms
from qerl.types import Completion, Group, Prompt, SamplingParams

Progress = Callable[[int], None]


class NativeEngine:
    """Engine over a `Policy`.

    max_rows bounds the completions decoded at once, prefill_tokens the prompt tokens of one
    forward; a prompt longer than that goes alone.
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
        groups: list[Group] = []
        requests = request_ids(prompts, params.n)
        for wave in self._waves(prompts, params.n):
            groups += self._wave(prompts[wave], requests[wave].ravel(), params, progress)
        self.policy.model.train(was_training)
        return groups

    def _waves(self, prompts: Sequence[Prompt], n: int) -> Iterator[slice]:
        """Consecutive prompts that prefill and decode together, within both bounds."""
        start = 0
        while start < len(prompts):
            stop, tokens = start, 0
            while stop < len(prompts):
                tokens += len(prompts[stop].token_ids)
                if stop > start and (
                    tokens > self.prefill_tokens or (stop + 1 - start) * n > self.max_rows
                ):
                    break
                stop += 1
            yield slice(start, stop)
            start = stop

    def _check_context(self, prompts: Sequence[Prompt], max_tokens: int) -> None:
        for prompt in prompts:
            if len(prompt.token_ids) + max_tokens > self.policy.context:
                raise QerlError(
                    f"rollout.max_completion_tokens: prompt {prompt.index} has "
                    f"{len(prompt.token_ids)} tokens, {max_tokens} more pass the model's context "
                    f"of {self.policy.context}; lower it or set task.max_prompt_tokens"
                )

    def _wave(
        self,
        prompts: Sequence[Prompt],
        ids: np.ndarray,
        params: SamplingParams,
        progress: Progress | None,
    ) -> list[Group]:
        state, hidden = self._prefill(prompts, params)
        groups = [Group(prompt, [_empty() for _ in range(params.n)]) for prompt in prompts]
        live = [c for group in groups for c in group.completions]
        hidden = hidden.repeat_interleave(params.n, 0)
        for position in range(params.max_tokens):
            logits = self.policy.logits(hidden)
            draw = uniforms(params.seed, ids, position)
            tokens, logp, entropy = sample_tokens(logits, params.temperature, draw)
            going = self._record(live, tokens, logp, entropy)
            if progress is not None:
                progress(len(live))
            if not len(going) or position + 1 == params.max_tokens:
                break
            if len(going) < len(live):
                index = torch.from_numpy(going).to(tokens.device)
                state.keep(index)
                tokens, ids, live = tokens[index], ids[going], [live[i] for i in going]
            hidden = self._decode(tokens, state)
        for completion in (c for group in groups for c in group.completions):
            self._finish(completion)
        return groups

    def _prefill(
        self, prompts: Sequence[Prompt], params: SamplingParams
    ) -> tuple[Decode, torch.Tensor]:
        """One packed forward over all prompts -> decode state, last hidden states [P, hidden]."""
        common = common_prefix_length([p.token_ids for p in prompts])
        builder = TreeBuilder()
        root = builder.add(prompts[0].token_ids[:common], 0, ())
        spans = []
        for prompt in prompts:
            start = len(builder.ids)
            builder.add(prompt.token_ids[common:], common, (root,))
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
        state = Decode(cache, tree, common, spans, params.n, params.max_tokens)
        return state, out.last_hidden_state[0, last]

    def _decode(self, tokens: torch.Tensor, state: Decode) -> torch.Tensor:
        """One token for every live row [B] -> hidden states [B, hidden]."""
        out = self.policy.decoder(
            input_ids=tokens[:, None],
            position_ids=state.positions[:, None],
            attention_mask=tokens.new_ones(1, 1, 1, 1, dtype=torch.bool),
            past_key_values=state,
            use_cache=True,
            decode=state,
        )
        state.step += 1
        state.grow()
        return out.last_hidden_state[:, 0]

    def _record(
        self,
        live: list[Completion],
        tokens: torch.Tensor,
        logp: torch.Tensor,
        entropy: torch.Tensor,
    ) -> np.ndarray:
        """Append one token to every live completion; returns the rows that go on."""
        going = []
        columns = zip(tokens.tolist(), logp.tolist(), entropy.tolist(), strict=True)
        for row, (completion, (token, value, h)) in enumerate(zip(live, columns, strict=True)):
            completion.token_ids.append(token)
            completion.logprobs.append(value)
            completion.entropies.append(h)
            completion.versions.append(self.policy.version)
            if token in self.policy.eos_ids:
                completion.finish_reason = "stop"
            else:
                going.append(row)
        return np.array(going, dtype=np.int64)

    def _finish(self, completion: Completion) -> None:
        ids = completion.token_ids
        text = self.policy.tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(text, str)
        completion.text = text


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
