"""Recurrent mixers (gated DeltaNet: Qwen3.5 and its kin) over packed trees of tokens.

Attention can be told with a mask who sees whom; a recurrence cannot, and would run on from one
completion into the next. So its state is forked: every segment of the tree begins with the state
that its parent ended in, and with its parent's last inputs to the short convolution. A prompt is
computed once, for sampling and for training, and gradients of its completions add up in its state.

The mixer's forward stays transformers' own, with its projections on packed tokens. It calls two
functions of its module, the convolution and the delta rule (kernels of flash-linear-attention and
causal-conv1d where these are installed, PyTorch otherwise); on a mixer that was enabled here, these
run level by level over the `tree` passed along as a keyword. Without one they are what they were:
one token a row over a cache of states (`qerl.rollout.recurrent`) needs nothing else.

A level's segments run as one batch padded to the longest, so a level costs segments × longest in
the delta rule (not in projections or MLP). Padding has beta 0 and no decay: it leaves states alone.

Formulas: Yang et al. 2024 (arXiv 2412.06464), eq. 10: S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_tᵀ)
+ beta_t v_t k_tᵀ. Shapes: T packed tokens, S segments of a level, L the longest of them, C channels
of the convolution and W its width, H heads, K and V their key and value sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from qerl.errors import QerlError
from qerl.model.attention import Level, Tree

CONVOLUTION = "causal_conv1d_fn"
RULE = "torch_chunk_gated_delta_rule"
STEP = "torch_recurrent_gated_delta_rule"
MASKED = {"full_attention", "sliding_attention"}  # what `qerl_attention` computes
CHUNK = 64  # tokens the delta rule solves at once; its padding unit

Function = Callable[..., Any]


def enable(decoder: nn.Module) -> list[nn.Module]:
    """Let the decoder's recurrent mixers take a `tree`; returns them (idempotent).

    Raises QerlError, naming the layers, for a decoder with layers that cannot be packed: another
    recurrence, a convolution over tokens, a kind of attention without a rule for its mask.
    """
    mixers = [module for module in decoder.modules() if is_gated_delta(module)]
    _refuse_others(decoder, mixers)
    for mixer in mixers:
        _rebind(mixer)
    return mixers


def is_gated_delta(module: nn.Module) -> bool:
    """Whether a module mixes tokens by a short convolution and the gated delta rule.

    Known by the functions that its forward calls, not by the name of its class.
    """
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and {CONVOLUTION, RULE, STEP} <= set(code.co_names)


def _refuse_others(decoder: nn.Module, mixers: list[nn.Module]) -> None:
    """QerlError when a layer is neither attention nor one of `mixers`."""
    kinds = list(getattr(getattr(decoder, "config", None), "layer_types", None) or [])
    odd = sorted(set(kinds) - MASKED - {"linear_attention"})
    if not odd and kinds.count("linear_attention") != len(mixers):
        odd = ["linear_attention"]
    inside = {part for mixer in mixers for part in mixer.modules()}
    odd += [
        f"{name} ({type(module).__name__})"
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Conv1d) and module not in inside
    ][:1]
    if not odd and not mixers and getattr(decoder, "_is_stateful", False):
        odd = ["a recurrent state"]
    if odd:
        raise QerlError(
            f"model: {type(decoder).__name__} has layers that can be neither masked nor forked "
            f"where completions leave their prompt ({', '.join(odd)}); name a model of full or "
            f"sliding attention and gated DeltaNet layers (Llama, Qwen, Gemma, Mistral, Phi)"
        )


def _rebind(mixer: nn.Module) -> None:
    """Give this one mixer transformers' forward again, with functions that know trees.

    Other models of the same class, such as a test's reference, are left alone.
    """
    plain = inspect.unwrap(type(mixer).forward)
    assert isinstance(plain, FunctionType)
    known = plain.__globals__
    changed = {
        **known,
        CONVOLUTION: _over_tree(known[CONVOLUTION], tree_convolution),
        RULE: _over_tree(known[RULE], tree_delta_rule),
    }
    forward = FunctionType(
        plain.__code__, changed, plain.__name__, plain.__defaults__, plain.__closure__
    )
    forward.__kwdefaults__ = plain.__kwdefaults__
    mixer.forward = MethodType(forward, mixer)


def _over_tree(plain: Function, branching: Function) -> Function:
    """`plain`, or `branching` around it for a call that passes a tree."""

    def function(*args: Any, tree: Tree | None = None, **kwargs: Any) -> Any:
        if tree is None:
            return plain(*args, **kwargs)
        return branching(plain, tree, *args, **kwargs)

    return function


def tree_convolution(
    plain: Function,
    tree: Tree,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Causal depthwise convolution along every path; x [1, C, T], weight [C, W] -> [1, C, T].

    A segment's first tokens see the last W - 1 of its ancestors, or zeros before the first token.
    """
    reach = weight.shape[-1] - 1
    tokens, outputs = x[0].T, []
    for level in tree.levels:
        index, before_all = _with_context(level, reach)
        rows = tokens[index].masked_fill(before_all[:, :, None], 0).transpose(1, 2)
        out = plain(rows, weight, bias, activation=activation)[:, :, reach:]
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[tree.place].T[None]


def _with_context(level: Level, reach: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed indices of each segment's tokens behind `reach` of its ancestors', int64
    [S, reach + L], and where there is no such token, bool of the same shape."""
    steps = torch.arange(-reach, level.query.shape[1], device=level.key.device)
    column = level.before[:, None] + steps
    # Past a shorter segment's end the index is arbitrary: those outputs are dropped.
    return level.key.gather(1, column.clamp(0, level.key.shape[1] - 1)), column < 0


def tree_delta_rule(
    plain: Function,
    tree: Tree,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    initial_state: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule along every path.

    query, key: [1, T, H, K]; value: [1, T, H, V]; g (log decay), beta: [1, T, H].
    Returns ([1, T, H, V], states): states f32 [1 + segments, H, K, V], the empty one and then
    each segment's last, level after level (`Tree.end` numbers them); None if not asked for.
    """
    assert initial_state is None, "a packed tree begins without a state"
    empty = (1, key.shape[2], key.shape[3], value.shape[3])
    states, outputs = torch.zeros(empty, dtype=torch.float32, device=key.device), []
    for level in tree.levels:
        longest = level.query.shape[1]
        past = torch.arange(longest, device=key.device) >= level.lengths[:, None]
        q, k, v, decay, rate = (x[0][level.query] for x in (query, key, value, g, beta))
        deeper = level is not tree.levels[-1]
        out, last = plain(
            q,
            k,
            v,
            g=decay.masked_fill(past[:, :, None], 0),
            beta=rate.masked_fill(past[:, :, None], 0),
            initial_state=states[level.start],
            output_final_state=output_final_state or deeper,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **_chunk(longest, key.device),
        )
        outputs.append(out.flatten(0, 1))
        if last is not None:
            states = torch.cat([states, last.float()])
    out = torch.cat(outputs)[tree.place][None]
    return out, states if output_final_state else None


def _chunk(longest: int, device: torch.device) -> dict[str, int]:
    """PyTorch's rule pads to whole chunks: shorter ones for short segments (a GPU's are fixed)."""
    if device.type != "cpu":
        return {}
    return {"chunk_size": min(CHUNK, 1 << max(longest - 1, 1).bit_length())}
