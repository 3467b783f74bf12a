"""The in-memory layout: byte-exact both ways, row by row, and checked where values are read."""

from __future__ import annotations

import pytest
import torch

from qerl_kernels import layout, ops, repack


def weight(n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes as codes and every positive scale byte in turn."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scale = 1 + torch.arange(n * (k // 16)) % 126
    return packed, scale.to(torch.uint8).view(n, -1).view(torch.float8_e4m3fn)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("order", repack.ORDERS)
@pytest.mark.parametrize("k", [16, 48, 112, 128, 144, 576, 3584])
def test_there_and_back_is_byte_exact(k, order):
    packed, scale = weight(17, k)
    codes, scales = repack.repack(packed, scale, order=order)
    assert codes.shape == (17, 16 * repack.groups(k)) and scales.shape == (17, 2 * repack.groups(k))
    again = repack.unrepack(codes, scales, k, order=order)
    assert same(again[0], packed) and same(again[1], scale)
    other = "wide" if order == "paired" else "paired"
    assert not same(repack.unrepack(codes, scales, k, order=other)[0], packed)


def test_all_bytes_and_all_scales_survive():
    packed = torch.arange(256, dtype=torch.uint8).repeat(1, 127 * 8 // 256 + 1)[:, : 127 * 8]
    scale = torch.arange(127, dtype=torch.uint8)[None].view(torch.float8_e4m3fn)
    codes, scales = repack.repack(packed, scale)
    again = repack.unrepack(codes, scales, 127 * 16)
    assert same(again[0][:, 8:], packed[:, 8:]) and same(again[1], scale)  # block 0 has scale 0
    assert set(packed[0, 8:].tolist()) == set(range(256))


def test_a_scale_s_stored_byte_is_its_exponent_and_fraction():
    """s = 2^(e − 21) · (1 + f/8) of the byte with its nibbles swapped back; e never 0 or 31."""
    scale = torch.arange(1, 127, dtype=torch.uint8)[None].view(torch.float8_e4m3fn)
    stored = repack.encode_scales(scale).long()
    code = (stored & 15) << 4 | stored >> 4
    exponent, fraction = code >> 3, code & 7
    assert ((exponent > 0) & (exponent < 31)).all()
    value = torch.exp2((exponent - 21).double()) * (1 + fraction.double() / 8)
    assert torch.equal(value, scale.double())


@pytest.mark.parametrize("zero", [0x00, 0x80])
def test_a_block_with_a_zero_scale_comes_back_canonical(zero):
    packed, scale = weight(3, 64)
    scale.view(torch.uint8)[1, 2] = zero
    given, want = packed.clone(), scale.view(torch.uint8).clone()
    codes, scales = repack.repack(packed, scale)
    assert same(packed, given) and same(scale, want)  # the inputs are left alone
    again, stored = repack.unrepack(codes, scales, 64)
    given[1, 16:24] = want[1, 2] = 0
    assert same(again, given) and same(stored, want)


@pytest.mark.parametrize("k", [128, 256, 3584])
def test_four_and_a_half_bits_a_weight(k):
    codes, scales = repack.repack(*weight(8, k))
    assert 8 * (codes.nbytes + scales.nbytes) == 4.5 * 8 * k


@pytest.mark.parametrize("order", repack.ORDERS)
@pytest.mark.parametrize("k", [16, 48, 112, 144, 576])
def test_the_padding_is_zero(k, order):
    """What a weight with zero codes and zero scales up to the next 128 packs to, to the bit."""
    packed, scale = weight(8, k)
    codes, scales = repack.repack(packed, scale, order=order)
    missing = -k % 128
    more = torch.nn.functional.pad(packed, (0, missing // 2))
    bytes_ = torch.nn.functional.pad(scale.view(torch.uint8), (0, missing // 16))
    full = repack.repack(more, bytes_, order=order)
    assert torch.equal(full[0], codes) and torch.equal(full[1], scales)
    pairs = -(-(k % 128) // 64)  # of words that hold a step; of each lane's two
    assert (codes.view(8, -1, 4, 4)[:, -1, :, 2 * pairs :] == 0).all()
    assert (scales.view(torch.uint8).view(8, -1, 8)[:, -1, k // 16 % 8 :] == 0).all()


@pytest.mark.parametrize("order", repack.ORDERS)
def test_each_code_lies_with_the_lane_that_multiplies_it(order):
    """One nonzero code a row, at k = row: in its group, with its lane, in its pair of words."""
    k = torch.arange(256)
    codes = torch.zeros(256, 256, dtype=torch.uint8)
    codes[k, k] = 15
    ones = torch.full((256, 16), 0x38, dtype=torch.uint8)
    words, _ = repack.repack(layout.pack(codes), ones, order=order)
    inside = k % 16
    lane = inside % 8 // 2 if order == "paired" else inside // 4
    found = (words.view(256, 2, 4, 2, 2) != 0).any(-1).nonzero()  # row, group, lane, pair
    assert torch.equal(found, torch.stack([k, k // 128, lane, k % 128 // 64], 1))


@pytest.mark.parametrize("order", repack.ORDERS)
def test_every_word_is_the_code_of_some_weight(order):
    """Back and there: arbitrary words, each bit of them a bit of a code."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-(2**31), 2**31, (64, 32), generator=generator).to(torch.int32)
    _, scales = repack.repack(*weight(64, 256), order=order)
    again = repack.repack(*repack.unrepack(codes, scales, 256, order=order), order=order)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


@pytest.mark.parametrize("order", repack.ORDERS)
def test_rows_stay_where_they_are(order):
    """Any slice of rows is a packed weight; q, k and v put together pack like their parts."""
    packed, scale = weight(24, 144)
    codes, scales = repack.repack(packed, scale, order=order)
    for rows in (slice(0, 7), slice(7, 24), slice(5, 6), slice(3, 3), slice(1, 24, 5)):
        again = repack.unrepack(codes[rows], scales[rows], 144, order=order)
        assert same(again[0], packed[rows]) and same(again[1], scale[rows])
    q_k_v = (slice(0, 12), slice(12, 17), slice(17, 24))
    parts = [repack.repack(packed[r], scale[r], order=order) for r in q_k_v]
    assert torch.equal(torch.cat([c for c, _ in parts]), codes)
    assert torch.equal(torch.cat([s for _, s in parts]), scales)


def test_what_cannot_be_repacked_is_refused_by_name():
    packed, scale = weight(4, 64)
    with pytest.raises(ValueError, match=r"layers.0.q: K must be a multiple of 16, found 72"):
        repack.repack(torch.zeros(4, 36, dtype=torch.uint8), scale, name="layers.0.q")
    with pytest.raises(ValueError, match="layers.0.q must be uint8"):
        repack.repack(packed.int(), scale, name="layers.0.q")
    with pytest.raises(ValueError, match=r"scale must be float8_e4m3fn .* \[4, 4\]"):
        repack.repack(packed, scale[:3])
    with pytest.raises(ValueError, match=r"scale must be float8_e4m3fn .* found torch.float32"):
        repack.repack(packed, scale.float())


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c, s: (c, s, 192), r"codes must be int32 \[N, 32\] \(repacked\) for K = 192"),
        (lambda c, s: (c.long(), s, 64), r"codes must be int32 .* found int64 \[4, 16\]"),
        (lambda c, s: (c[0], s, 64), r"codes must be int32 .* found int32 \[16\]"),
        (lambda c, s: (c, s[:, :1], 64), r"scales must be int32 \[4, 2\] .* \[4, 1\]"),
        (lambda c, s: (c, s[:3], 64), r"scales must be int32 \[4, 2\] .* \[3, 2\]"),
        (lambda c, s: (c, s.view(torch.uint8), 64), "scales must be int32 .* found uint8"),
        (lambda c, s: (c, s, 60), "K must be a multiple of 16, found 60"),
    ],
)
def test_what_is_no_repacked_weight_is_refused(change, message):
    codes, scales = repack.repack(*weight(4, 64))
    repack.check_repacked(codes, scales, 64)
    with pytest.raises(ValueError, match=message):
        repack.check_repacked(*change(codes, scales))
    with pytest.raises(ValueError, match=message):
        repack.unrepack(*change(codes, scales))


def test_an_unknown_order_is_refused():
    packed, scale = weight(4, 64)
    with pytest.raises(ValueError, match="order must be one of paired, wide, found 'narrow'"):
        repack.repack(packed, scale, order="narrow")
    with pytest.raises(ValueError, match="order must be one of paired, wide, found ''"):
        repack.unrepack(*repack.repack(packed, scale), 64, order="")


@pytest.mark.parametrize(
    "byte, value", [(0x7F, "nan"), (0xFF, "nan"), (0x81, "-0.00195"), (0xFE, "-448")]
)
@pytest.mark.parametrize("dtype", layout.SCALE_DTYPES)
def test_scales_are_checked_by_value(byte, value, dtype):
    """The first bad one is named."""
    _, scale = weight(4, 64)
    scale = scale.view(dtype)
    scale.view(torch.uint8)[2, 3] = scale.view(torch.uint8)[3, 0] = byte
    with pytest.raises(ValueError, match=rf"layers.1.up: block scale \[2, 3\] is {value}"):
        ops.check_values(scale, torch.ones(1), "layers.1.up")


@pytest.mark.parametrize("g", [0.0, -0.0, -1.0, float("inf"), -float("inf"), float("nan")])
def test_the_divisor_is_checked_by_value(g):
    _, scale = weight(4, 64)
    with pytest.raises(ValueError, match=f"layers.1.up: global scale is {g}; it must be positive"):
        ops.check_values(scale, torch.tensor([g]), "layers.1.up")


@pytest.mark.parametrize("g", [torch.ones(2), torch.ones(1, dtype=torch.float64)])
def test_the_divisor_is_one_float32(g):
    _, scale = weight(4, 64)
    with pytest.raises(ValueError, match="global_scale must be one float32"):
        ops.check_values(scale, g, "layers.1.up")


def test_good_values_pass():
    _, scale = weight(4, 64)
    scale.view(torch.uint8)[0, :2] = torch.tensor([0x00, 0x80], dtype=torch.uint8)
    ops.check_values(scale, torch.tensor([2688.0]))


def test_negative_zero_codes_are_kept():
    packed = torch.full((1, 8), 0x88, dtype=torch.uint8)
    scale = torch.ones(1, 1).to(torch.float8_e4m3fn)
    assert same(repack.unrepack(*repack.repack(packed, scale), 16)[0], packed)
    assert layout.unpack(packed).tolist() == [[8] * 16]


def test_column_major_scales_and_names_in_every_message():
    packed = torch.zeros(16, 64, dtype=torch.uint8)
    scale = torch.full((8, 16), 0x38, dtype=torch.uint8).t()
    straight = scale.contiguous()
    for one, other in zip(
        repack.repack(packed, scale), repack.repack(packed, straight), strict=True
    ):
        assert torch.equal(one, other)
    e4m3 = straight.view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="layers.0.q: scale must be"):
        repack.repack(packed, e4m3[:, :3], name="layers.0.q")
    with pytest.raises(ValueError, match="layers.0.q: global_scale must be"):
        repack.check_values(e4m3, torch.ones(2), "layers.0.q")
