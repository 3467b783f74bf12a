"""`qerl::decode_attention`: one query a row over paged keys and values with shared prompts."""

import torch
from torch import Tensor

from qerl_kernels.attention_cpu import Paged, check_shapes, decode_attention_cpu
from qerl_kernels.launch import cpu_or_interpreter, lazy
from qerl_kernels.ops.library import LIB, define

define(
    "decode_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor lengths,"
    " Tensor group_start, Tensor prefix_table, Tensor prefix_length, Tensor? k_scale,"
    " Tensor? v_scale, float scale, float softcap, int window) -> (Tensor, Tensor)"
)


def _decode_attention_fake(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor,
    group_start: Tensor, prefix_table: Tensor, prefix_length: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None, scale: float, softcap: float, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    paged = Paged(
        k_pages, v_pages, block_table, lengths, group_start, prefix_table, prefix_length,
        k_scale, v_scale,
    )  # fmt: skip
    check_shapes(q, paged, softcap, window)
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=dtype)


_cuda = lazy("attention", "decode_attention")
LIB.impl("decode_attention", cpu_or_interpreter(decode_attention_cpu, _cuda), "CPU")
LIB.impl("decode_attention", _cuda, "CUDA")
torch.library.register_fake("qerl::decode_attention", _decode_attention_fake, lib=LIB)
_op_decode_attention = torch.ops.qerl.decode_attention.default


def decode_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor,
    group_start: Tensor, prefix_table: Tensor, prefix_length: Tensor, *,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, scale: float | None = None,
    softcap: float = 0.0, window: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of one query a row over its group's prompt and its own tokens.

    Returns out [R, H, D] in q's dtype and lse [R, H], the natural logarithm of each softmax's
    denominator, fp32. Key-value head j serves query heads j·H/J … (j+1)·H/J - 1.

    q: [R, H, D]. k_pages, v_pages: the pool [pages, page_size, J, D], in q's dtype or as bytes of
    E4M3 (uint8, none of them NaN); page_size a power of two. A pool may have any distance from
    page to page but is contiguous within one.
    Rows of a group are neighbours: group g has rows group_start[g] … group_start[g+1] - 1
    (int32 [P+1], from 0). Its prompt is prefix_length[g] tokens (int32 [P]), any number, in pages
    prefix_table[g] (int32 [P, *]). A row's own tokens follow, from the start of the first page of
    block_table[r] (int32 [R, *]). Entries beyond what lengths call for are never used. Tables may
    be column slices of wider ones.
    lengths: int32 [R], tokens a row's query sees, its own included: its position + 1. It may end
    inside the prompt. A row of length 0, or past the last group, is inactive: out 0, lse -inf.
    scale: of scores, default D**-0.5. k_scale, v_scale: float32 [1] or [J], what stored keys and
    values are multiplied by. softcap: scores become softcap · tanh(score / softcap), 0 for none
    (Gemma 2, section 2). window: a query at position p sees keys j with p - j < window, 0 for all.

    A row's result depends on that row and its group's prompt alone, bit for bit: on a GPU always,
    on a CPU under `batch_invariant`. Rows that replay earlier positions (lengths counting up over
    the same tables) therefore give what decoding gave.
    Raises ValueError for shapes, dtypes or strides that do not fit together, and where a gradient
    is asked for: there is none. Values in tables are trusted on a GPU, where reading them would
    stall it (lengths are cut to what the tables hold); on a CPU lengths and groups are checked.
    """
    inputs = (q, k_pages, v_pages)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise ValueError("decode_attention has no gradient: call it under torch.no_grad()")
    return _op_decode_attention(
        q, k_pages, v_pages, block_table, lengths, group_start, prefix_table, prefix_length,
        k_scale, v_scale, q.shape[-1] ** -0.5 if scale is None else scale, softcap, window,
    )  # fmt: skip
