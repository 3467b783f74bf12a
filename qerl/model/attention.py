"""One attention function for packed training and for decoding over shared prompt caches.

It is registered with transformers under the name "qerl", so that every decoder that calls the
attention interface can use it. What a call means is said by the context passed along as a keyword:

- `tree=Tree(...)`: packed tokens [1, T] that form a tree (a common prefix, prompts, completions);
- `decode=Decode(...)`: one new token a row, over a prefix shared by all rows, a prompt cache
  shared by the rows of a group, and the row's own suffix (`qerl.rollout.cache`);
- neither: transformers' own scaled-dot-product attention.

The same `Tree` and `Decode` reach recurrent mixers (`qerl.model.recurrent`), where there are any.

Sliding windows and logit soft-caps arrive as transformers passes them, and are measured in
positions, not in packed indices. Shapes: H query heads, J key-value heads, R = H/J, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qerl.errors import QerlError

if TYPE_CHECKING:
    from qerl.rollout.cache import Decode

NAME = "qerl"


@dataclass(frozen=True, slots=True)
class Level:
    """The segments of one depth of the tree, as a padded batch.

    query: int64 [S, L], packed indices of the segments' tokens; key: int64 [S, K], those of their
    ancestors and themselves; visible: bool [S, L, K]. Padding repeats index 0 and is invisible
    (a padded query sees one key, so that its softmax is defined; its output is dropped).
    before, lengths: int64 [S], tokens of a segment's ancestors and its own: in `key` the first
    stand in front of the second. start: int64 [S], the recurrent state a segment begins with,
    numbered over the whole tree: 0 the empty one, then one a segment, level after level.
    """

    query: torch.Tensor
    key: torch.Tensor
    visible: torch.Tensor
    before: torch.Tensor
    lengths: torch.Tensor
    start: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tree:
    """Who sees whom among T packed tokens, without a [T, T] mask.

    positions: int64 [T]. place: int64 [T], where each token's output stands in the levels'
    outputs, flattened one after another. end: int64 [segments], the recurrent state each segment
    ends in, numbered as in `Level.start`.
    """

    levels: list[Level]
    positions: torch.Tensor
    place: torch.Tensor
    end: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        """A 4-D mask makes transformers build none of its own; `qerl_attention` ignores it."""
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.positions.device)


def qerl_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tree: Tree | None = None,
    decode: Decode | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [b, H, t, D], key and value [b, J, s, D] -> ([b, t, H, D], None).

    Raises QerlError for attention sinks (`s_aux`), which none of the three ways below computes.
    """
    if kwargs.get("s_aux") is not None:
        raise QerlError(
            f"model: {type(module).__name__} has attention sinks, which are not supported; name "
            f"a model without them"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if decode is not None:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        return decode.attend(layer, query, key, value, scale, sliding_window, softcap), None
    if tree is not None:
        return _tree_attention(query, key, value, tree, scale, sliding_window, softcap), None
    if softcap is not None:
        visible = _causal(query, key) if attention_mask is None else attention_mask
        return _attend(query, key, value, visible, scale, softcap).transpose(1, 2), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """bool [t, s]: the queries are the last t of s positions."""
    t, s = query.shape[2], key.shape[2]
    return torch.ones(t, s, dtype=torch.bool, device=query.device).tril(s - t)


def _tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: Tree,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """[1, H, T, D] -> [1, T, H, D], one batched attention a level."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for level in tree.levels:
        visible = level.visible
        if window is not None:
            at = tree.positions
            visible = visible & (at[level.query][:, :, None] - at[level.key][:, None] < window)
        q, k, v = query[level.query], key[level.key], value[level.key]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = _attend(q, k, v, visible[:, None], scale, softcap)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[tree.place][None]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Grouped-query attention; [S, H, L, D] and [S, J, K, D] -> [S, H, L, D]."""
    if softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scale, enable_gqa=True
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = softcap_scores(query @ key.transpose(-1, -2) * scale, softcap)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype) @ value


def softcap_scores(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """cap · tanh(scores / cap) (Gemma 2, section 2), or the scores themselves."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def register() -> None:
    """Make `attn_implementation="qerl"` known to transformers (idempotent)."""
    AttentionInterface.register(NAME, qerl_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
