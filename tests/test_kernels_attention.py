"""Paged decode attention with shared prompts, interpreted and on the CPU, against float64."""

import contextlib

import numpy as np
import pytest
import torch
from torch.library import opcheck

from qerl_kernels import launch, reference
from qerl_kernels.ops.attention import decode_attention

INPUTS = ("q", "k_pages", "v_pages", "block_table", "lengths", "group_start", "prefix_table",
          "prefix_length")  # fmt: skip
# Relative error of rounding to a dtype.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24, torch.float64: 0}
# (rows, prompt tokens) of each group, own tokens of each row: no prompt, a ragged one, no own
# tokens, one token, more than a split.
GROUPS = ((3, 37), (1, 0), (2, 20))
OWN = (5, 0, 17, 1, 270, 16)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def pool(shape, dtype, generator):
    if dtype != torch.uint8:
        return torch.randn(shape, generator=generator).to(dtype)
    found = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return torch.where(found & 0x7F == 0x7F, 0, found)  # no NaN


def case(size=64, kv_heads=1, repeat=4, dtype=torch.bfloat16, stored=None, groups=GROUPS, own=OWN):
    """The op's keyword arguments; every place that no row owns holds NaN, or the largest byte."""
    generator, page, rows = rng(size + repeat), 16, len(own)
    prompts = [tokens for _, tokens in groups]
    wide = [-(-max(tokens, 1) // page) + 1 for tokens in (max(prompts), max(own))]
    counts = (len(groups) * wide[0], rows * wide[1])
    order = torch.randperm(sum(counts) + 1, generator=generator).int()
    tables = [part.view(-1, w) for part, w in zip(order[:-1].split(counts), wide, strict=True)]
    shape = (sum(counts) + 1, page, kv_heads, size)
    k, v = (pool(shape, stored or dtype, generator) for _ in range(2))
    for table, lengths in zip(tables, (prompts, own), strict=True):
        for pages, length in zip(table, lengths, strict=True):
            place = torch.arange(length, len(pages) * page)
            at = pages[place // page].long(), place % page
            k[at] = v[at] = 0x7E if stored else torch.nan
    counts = torch.tensor([n for n, _ in groups])
    prefix = int32(prompts)
    lengths = prefix.repeat_interleave(counts)
    found = dict(
        q=torch.randn(rows, kv_heads * repeat, size, generator=generator).to(dtype),
        k_pages=k, v_pages=v, block_table=tables[1], prefix_table=tables[0],
        lengths=torch.cat([lengths, lengths.new_zeros(rows - len(lengths))]) + int32(own),
        group_start=torch.cat([int32([0]), counts.cumsum(0).int()]), prefix_length=prefix,
    )  # fmt: skip
    if stored:
        found["k_scale"] = torch.rand(kv_heads, generator=generator) * 0.01
        found["v_scale"] = torch.rand(1, generator=generator) * 0.01
    return found


def run(path, **arguments):
    with launch.interpreting() if path == "kernel" else contextlib.nullcontext():
        return decode_attention(**arguments)


def bounds(a, softcap=0.0, window=0):
    """(truth, error allowed) for outputs and for lse, from the arithmetic.

    A score's error: the product's fp32 accumulation over D, at most |q|·|k|, a rounding of it in
    either base, and with a soft-cap a few roundings of the cap. A weight e^score inherits it, the
    norm does too; weights are rounded to 16 bits for the product with values; sums have as many
    terms as there are keys; the output is rounded once.
    """
    size, scale = a["q"].shape[-1], a["q"].shape[-1] ** -0.5
    options = dict(scale=scale, softcap=softcap, window=window)
    truth, lse = reference.decode_attention(**a, **options)
    bytes_ = a["v_pages"].dtype == torch.uint8
    magnitude = a["v_pages"] & 0x7F if bytes_ else a["v_pages"].abs()
    sums, _ = reference.decode_attention(**a | {"v_pages": magnitude}, **options)
    key = a["k_pages"].view(torch.float8_e4m3fn) if bytes_ else a["k_pages"]
    largest = key.double().nan_to_num().norm(dim=-1).amax()
    if "k_scale" in a:
        largest = largest * a["k_scale"].amax()
    score = scale * a["q"].double().norm(dim=-1).amax() * largest
    eps = 0.0 if a["q"].dtype == torch.float64 else 2**-23
    slack = eps if eps else 2**-51
    delta = score * (size + 4) * slack + softcap * 8 * slack
    keys = a["lengths"].amax() + 8
    dtype = a["q"].dtype
    product = torch.float16 if bytes_ and dtype == torch.bfloat16 else dtype
    allowed = sums * (ROUNDING[product] + 2 * delta + keys * slack) + truth.abs() * ROUNDING[dtype]
    if product == torch.float16:  # its subnormals: 2**-25 at each weight, and at the output
        value = a["v_pages"].view(torch.float8_e4m3fn) if bytes_ else a["v_pages"]
        largest = value.double().nan_to_num().abs().amax() * a.get("v_scale", torch.ones(1))
        allowed += 2**-25 * (keys * largest + (dtype == torch.float16))
    return truth, allowed + 1e-30, lse, delta + (keys + lse.abs().nan_to_num(posinf=0)) * slack


def close(found, a, **options):
    out, lse = found
    truth, allowed, true_lse, lse_allowed = bounds(a, **options)
    dead = a["lengths"] == 0
    assert out.dtype == a["q"].dtype and lse.dtype == torch.promote_types(out.dtype, torch.float32)
    assert ((out.double() - truth).abs() <= allowed).all()
    assert (out[dead] == 0).all() and (lse[dead] == -torch.inf).all()
    assert ((lse - true_lse)[~dead].abs() <= lse_allowed[~dead]).all()


SHAPES = {
    "bf16 GQA4": dict(),
    "fp32 GQA7 D80": dict(size=80, repeat=7, dtype=torch.float32),
    "fp16 MHA D128": dict(size=128, kv_heads=2, repeat=1, dtype=torch.float16),
    "fp32 GQA16": dict(repeat=16, dtype=torch.float32),
    "bf16 bytes D128": dict(size=128, kv_heads=2, stored=torch.uint8),
    "fp16 bytes D64": dict(stored=torch.uint8, dtype=torch.float16),
    "fp32 bytes D80": dict(size=80, stored=torch.uint8, dtype=torch.float32),
}


@pytest.mark.parametrize("path", ["kernel", "cpu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, path):
    a = case(**SHAPES[shape])
    close(run(path, **a), a)


@pytest.mark.parametrize("path", ["kernel", "cpu"])
@pytest.mark.parametrize("options", [dict(window=25), dict(window=1), dict(softcap=3.0)], ids=str)
def test_window_and_softcap(path, options):
    """A window that ends inside own tokens, one that reaches into the prompt, and both at once."""
    a = case(size=64, repeat=2, dtype=torch.float32, own=(5, 0, 40, 1, 31, 16))
    close(run(path, **a, **options), a, **options)


def test_cpu_in_float64():
    a = case(dtype=torch.float64, repeat=7)
    close(run("cpu", **a, window=30, softcap=2.0), a, window=30, softcap=2.0)


@pytest.mark.parametrize("path", ["kernel", "cpu"])
def test_rows_that_see_little_or_nothing(path):
    """Length 0, rows past the last group, an empty group, and queries inside the prompt."""
    a = case(groups=((2, 0), (0, 9), (3, 37)), own=(3, 4, 1, 1, 1, 8), dtype=torch.float32)
    a["lengths"] = int32([0, 4, 37, 12, 1, 8])
    found = run(path, **a)
    a["lengths"][5] = 0
    close(found, a)


@pytest.mark.parametrize("length", [0, 30, 1000])
@pytest.mark.parametrize("path", ["kernel", "cpu"])
def test_a_batch_padded_with_rows_of_no_group(path, length):
    """As a CUDA graph of a fixed size has: whole blocks past the last group, and metadata that is
    the beginning of a larger buffer."""
    a = case(groups=((2, 20),), own=(5, 1), dtype=torch.float32)
    live = dict(a)
    a["q"] = torch.cat([a["q"], torch.ones(62, *a["q"].shape[1:])])
    a["block_table"] = torch.cat([a["block_table"], int32([[0] * a["block_table"].shape[1]] * 62)])
    a["lengths"] = torch.cat([a["lengths"], int32([length] * 62)])
    a["group_start"] = int32([0, 2, 64, 64])[:2]
    a["prefix_length"] = int32([20, 20, 20])[:1]
    a["prefix_table"] = torch.cat([a["prefix_table"]] * 3)[:1]
    out, lse = run(path, **a)
    assert (out[2:] == 0).all() and (lse[2:] == -torch.inf).all()
    close((out[:2], lse[:2]), live)


@pytest.mark.parametrize("path", ["kernel", "cpu"])
def test_no_prompts_or_no_own_tokens_at_all(path):
    a = case(groups=((2, 20),), own=(0, 0), dtype=torch.float32)
    a["block_table"] = a["block_table"][:, :0]
    close(run(path, **a), a)
    a = case(groups=((2, 0),), own=(3, 20), dtype=torch.float32)
    a["prefix_table"] = a["prefix_table"][:, :0]
    close(run(path, **a), a)
    empty = case(groups=((0, 3),), own=(1,))
    found = run(path, **empty | {k: empty[k][:0] for k in ("q", "block_table", "lengths")})
    assert [x.shape for x in found] == [(0, 4, 64), (0, 4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_finite_byte_is_decoded_exactly(dtype):
    """Values: one visible key a row, so its weight is 1, and 256 dimensions."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    pages = torch.zeros(1, 16, 1, 256, dtype=torch.uint8)
    pages[0, 0, 0] = codes
    out, _ = run("kernel", **one_row(torch.zeros(1, 1, 256, dtype=dtype), pages))
    assert torch.equal(out[0, 0], codes.view(torch.float8_e4m3fn).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_finite_byte_is_decoded_exactly_as_a_key(dtype, monkeypatch):
    """256 keys, each one byte in the first dimension; a 1 in the query makes it the score.

    The scores are caught on their way into the softmax, products of one fp32 number each.
    """
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    pages = torch.zeros(16, 16, 1, 64, dtype=torch.uint8)
    pages.view(256, 64)[:, 0] = codes
    q = torch.zeros(1, 1, 64, dtype=dtype)
    q[..., 0] = 1
    seen, matmul = [], np.matmul

    def spy(a, b, **options):
        seen.append(matmul(a, b, **options))
        return seen[-1]

    monkeypatch.setattr("triton.runtime.interpreter.np.matmul", spy)
    run("kernel", **one_row(q, pages, length=256))
    # Eight products a tile: the first four make the scores, and byte 0 is in the first of them.
    found = torch.cat([torch.from_numpy(x[0].copy()) for x in seen[::8]])
    assert torch.equal(found * 256, codes.view(torch.float8_e4m3fn).float())


def one_row(q, pages, length=1):
    table = torch.arange(pages.shape[0], dtype=torch.int32)[None]
    none = torch.zeros(1, 0, dtype=torch.int32)
    return dict(q=q, k_pages=pages, v_pages=pages, block_table=table, lengths=int32([length]),
                group_start=int32([0, 1]), prefix_length=int32([0]), prefix_table=none)  # fmt: skip


@pytest.fixture
def row_by_row(monkeypatch):
    """Interpreted products one row at a time, as a tensor core's rows know nothing of each other.

    NumPy's BLAS orders a row's sum by its place in the tile.
    """
    matmul = np.matmul

    def rows(a, b, **options):
        return np.stack([matmul(row[None], b, **options)[0] for row in a])

    monkeypatch.setattr("triton.runtime.interpreter.np.matmul", rows)


def alone(a, row):
    """The same row as a batch of its own."""
    group = int((a["group_start"][1:] <= row).sum())
    one = {name: a[name][row : row + 1] for name in ("q", "block_table", "lengths")}
    mine = {name: a[name][group : group + 1] for name in ("prefix_table", "prefix_length")}
    return a | one | mine | {"group_start": int32([0, 1])}


@pytest.mark.parametrize("stored", [None, torch.uint8])
@pytest.mark.parametrize("path", ["kernel", "cpu"])
def test_a_row_has_the_same_bits_alone_and_among_seventeen(path, stored, row_by_row):
    own = (5, 0, 17, 1, 270, 16, 2, 3, 33, 4, 5, 6, 7, 8, 64, 65, 9)
    a = case(groups=((11, 300), (1, 0), (5, 20)), own=own, stored=stored)
    with launch.batch_invariant(path == "cpu"):  # the kernels need no mode
        out, lse = run(path, **a, window=100)
        for row in (0, 4, 10, 11, 16):
            mine, my_lse = run(path, **alone(a, row), window=100)
            assert torch.equal(mine[0], out[row]) and torch.equal(my_lse[0], lse[row])


@pytest.mark.parametrize("path", ["kernel", "cpu"])
def test_replaying_a_sequence_as_rows_gives_the_bits_of_decoding(path, row_by_row):
    """Positions 30 … 45 of one sequence, some inside the prompt of 40, as 16 rows of one call."""
    a = case(groups=((16, 40),), own=(6,) * 16, repeat=2)
    a["block_table"] = a["block_table"][:1].expand(16, -1).contiguous()
    a["lengths"] = torch.arange(31, 47, dtype=torch.int32)
    with launch.batch_invariant(path == "cpu"):
        out, _ = run(path, **a)
        for row in (0, 9, 15):
            assert torch.equal(run(path, **alone(a, row))[0][0], out[row])


def test_pools_interleaved_by_page_and_tables_that_are_slices():
    a = case(dtype=torch.float32)
    both = torch.stack([a["k_pages"], a["v_pages"]], 1)
    padded = {name: torch.cat([a[name]] * 2, 1)[:, : a[name].shape[1]]
              for name in ("block_table", "prefix_table")}  # fmt: skip
    found = run("kernel", **a | padded | dict(k_pages=both[:, 0], v_pages=both[:, 1]))
    for x, y in zip(found, run("kernel", **a), strict=True):
        assert torch.equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [None, torch.uint8])
@pytest.mark.parametrize("size", [64, 96, 256])
def test_long_contexts_where_splits_grow(size, stored):
    """Beyond 16 · 256 tokens a split is longer than 256."""
    a = case(size=size, repeat=2, groups=((2, 4500),), own=(4200, 3), stored=stored)
    close(run("kernel", **a), a)


@pytest.mark.parametrize("path", ["kernel", "cpu"])
@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(q=torch.zeros(6, 64)), "q must be floats"),
        (dict(q=torch.zeros(6, 4, 64, dtype=torch.int32)), "q must be floats"),
        (dict(k_pages=torch.zeros(9, 16, 64)), "k_pages must be .pages, page_size, J, D."),
        (dict(k_pages=torch.zeros(9, 16, 3, 64)), "q has 4 heads, no multiple of the 3"),
        (dict(k_pages=torch.zeros(9, 12, 1, 64)), "power of two"),
        (dict(k_pages=torch.zeros(9, 16, 1, 32)), "k_pages must be .*64"),
        (dict(v_pages=torch.zeros(1, 16, 1, 64)), "v_pages must be"),
        (dict(v_pages=torch.zeros(1, dtype=torch.uint8)), "v_pages must be float32"),
        (dict(block_table=torch.zeros(5, 1, dtype=torch.int32)), "block_table must be int32 .6"),
        (dict(lengths=torch.zeros(6)), "lengths must be int32 .6"),
        (dict(group_start=int32([0, 6])), "group_start must be int32 .4"),
        (dict(prefix_table=int32([0])), "prefix_table must be int32 .3"),
        (dict(prefix_length=torch.zeros(3)), "prefix_length must be int32"),
        (dict(k_scale=torch.ones(2)), "k_scale must be float32 .1"),
        (dict(v_scale=torch.ones(1).double()), "v_scale must be float32 .1"),
        (dict(softcap=-1.0), "softcap must not be negative"),
        (dict(window=-1), "window must not be negative"),
    ],
)
def test_what_does_not_fit_is_refused(path, changed, message):
    with pytest.raises(ValueError, match=message):
        run(path, **case(dtype=torch.float32) | changed)


def strided(x, dim):
    return torch.stack([x, x], dim).select(dim, 0)


def test_memory_that_kernels_cannot_read_is_refused():
    a = case(dtype=torch.float32)
    bytes_ = case(size=62, stored=torch.uint8)
    wide = case(size=264)
    for arguments, message in [
        (a | dict(q=strided(a["q"], -1)), "q must be contiguous"),
        (a | dict(lengths=strided(a["lengths"], -1)), "lengths must be contiguous"),
        (a | dict(block_table=strided(a["block_table"], -1)), "block_table must have stride 1"),
        (a | dict(k_pages=strided(a["k_pages"], 2)), "k_pages must be contiguous within a page"),
        (a | dict(v_pages=strided(a["v_pages"], 1)), "v_pages must have the page stride"),
        (a | dict(v_pages=strided(a["v_pages"], -1)), "v_pages must have stride 1"),
        (bytes_, "k_pages must have a head size, page stride and offset of whole"),
        (wide, "head size of at most 256"),
        (case(repeat=17), "at most 16 heads for each of k_pages' heads, found 17"),
        (a | dict(q=a["q"].double(), k_pages=a["k_pages"].double(), v_pages=a["v_pages"].double()),
         "q must be bfloat16 or float16 or float32"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            run("kernel", **arguments)


def test_the_launcher_takes_no_cpu_tensors():
    from qerl_kernels.attention import decode_attention as launcher

    a = case()
    with pytest.raises(ValueError, match="q must be on a CUDA device"):
        launcher(*(a[name] for name in INPUTS), None, None, 1.0, 0.0, 0)


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(group_start=int32([0, 4, 3, 6])), "group_start must rise"),
        (dict(group_start=int32([1, 3, 4, 6])), "group_start must rise"),
        (dict(group_start=int32([0, 3, 4, 7])), "group_start must rise"),
        (dict(prefix_length=int32([37, 0, 999])), "prefix_length reaches 999 tokens"),
        (dict(lengths=int32([999, 0, 0, 0, 0, 0])), "lengths beyond the prefix reaches 962"),
    ],
)
def test_values_are_checked_where_reading_them_is_free(changed, message):
    with pytest.raises(ValueError, match=message):
        run("cpu", **case() | changed)


def test_there_is_no_gradient():
    a = case(dtype=torch.float32)
    a["q"].requires_grad_()
    with pytest.raises(ValueError, match="no gradient"):
        decode_attention(**a)
    with torch.no_grad():
        assert not decode_attention(**a)[0].requires_grad


def test_operator_registration():
    a = case(stored=torch.uint8)
    flat = (*(a[name] for name in INPUTS), a["k_scale"], a["v_scale"], 0.125, 3.0, 20)
    opcheck(torch.ops.qerl.decode_attention.default, flat)
    meta = decode_attention(**{name: x.to("meta") for name, x in a.items()})
    assert [x.shape for x in meta] == [(6, 4, 64), (6, 4)]
    assert [x.dtype for x in meta] == [torch.bfloat16, torch.float32]
    compiled = torch.compile(decode_attention, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(**a), decode_attention(**a), strict=True):
        assert torch.equal(x, y)


def test_variants_name_every_argument():
    from qerl_kernels.attention import variants

    found = list(variants())
    for v in found:
        assert sorted([*v.types, *v.constexprs]) == sorted(v.function.arg_names)
        assert v.divisible <= v.types.keys()
    assert len({(v.kernel, v.tile) for v in found}) == len(found)
