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
    if k % 128:
        other = "wide" if order == "paired" else "paired"
        assert not same(repack.unrepack(codes, scales, k, order=other)[0], packed)


def test_all_bytes_and_all_scales_survive():
    packed = torch.arange(256, dtype=torch.uint8).repeat(1, 127 * 8 // 256 + 1)[:, : 127 * 8]
    scale = torch.arange(127, dtype=torch.uint8)[None].view(torch.float8_e4m3fn)
    codes, scales = repack.repack(packed, scale)
    again = repack.unrepack(codes, scales, 127 * 16)
    assert same(again[0][:, 8:], packed[:, 8:]) and same(again[1], scale)  # block 0 has scale 0
    assert set(packed[0, 8:].tolist()) == set(range(256))


@pytest.mark.parametrize("zero", [0x00, 0x80])
def test_a_block_with_a_zero_scale_comes_back_canonical(zero):
    packed, scale = weight(3, 64)
    scale.view(torch.uint8)[1, 2] = zero
    codes, scales = repack.repack(packed, scale)
    again, stored = repack.unrepack(codes, scales, 64)
    assert again[1, 16:24].tolist() == [0] * 8 and stored.view(torch.uint8)[1, 2] == 0
    again[1, 16:24] = packed[1, 16:24]
    assert same(again, packed)


def test_bits_per_weight_and_the_padding():
    codes, scales = repack.repack(*weight(8, 256))
    assert 8 * (codes.nbytes + scales.nbytes) == 4.5 * 8 * 256
    codes, scales = repack.repack(*weight(8, 144))
    lane = codes.view(8, 2, 4, 4)[:, 1]
    assert (lane[:, :, 1:] == 0).all() and (scales.view(torch.uint8).view(8, 16)[:, 9:] == 0).all()


@pytest.mark.parametrize("order", repack.ORDERS)
def test_rows_stay_where_they_are(order):
    """Any slice of rows is a packed weight, and rows put together pack like their parts."""
    packed, scale = weight(24, 144)
    codes, scales = repack.repack(packed, scale, order=order)
    for rows in (slice(0, 7), slice(7, 24), slice(5, 6)):
        again = repack.unrepack(codes[rows], scales[rows], 144, order=order)
        assert same(again[0], packed[rows]) and same(again[1], scale[rows])
    parts = [repack.repack(packed[r], scale[r], order=order) for r in (slice(0, 7), slice(7, 24))]
    assert torch.equal(torch.cat([c for c, _ in parts]), codes)
    assert torch.equal(torch.cat([s for _, s in parts]), scales)


def test_what_cannot_be_repacked_is_refused_by_name():
    packed, scale = weight(4, 64)
    with pytest.raises(ValueError, match=r"layers.0.q: K must be a multiple of 16, found 72"):
        repack.repack(torch.zeros(4, 36, dtype=torch.uint8), scale, name="layers.0.q")
    with pytest.raises(ValueError, match="layers.0.q must be uint8"):
        repack.repack(packed.int(), scale, name="layers.0.q")
    with pytest.raises(ValueError, match="order must be one of paired, wide, found 'narrow'"):
        repack.repack(packed, scale, order="narrow")
    codes, scales = repack.repack(packed, scale)
    with pytest.raises(ValueError, match="codes must be int32"):
        repack.unrepack(codes, scales, 192)
    with pytest.raises(ValueError, match="scales must be int32"):
        repack.unrepack(codes, scales[:, :1], 64)
    with pytest.raises(ValueError, match="K must be a multiple of 16, found 60"):
        repack.unrepack(codes, scales, 60)


@pytest.mark.parametrize(
    "byte, value", [(0x7F, "nan"), (0xFF, "nan"), (0x81, "-0.00195"), (0xFE, "-448")]
)
def test_scales_are_checked_by_value(byte, value):
    _, scale = weight(4, 64)
    scale.view(torch.uint8)[2, 3] = byte
    with pytest.raises(ValueError, match=rf"layers.1.up: block scale \[2, 3\] is {value}"):
        ops.check_values(scale, torch.ones(1), "layers.1.up")


@pytest.mark.parametrize("g", [0.0, -1.0, float("inf"), float("nan")])
def test_the_divisor_is_checked_by_value(g):
    _, scale = weight(4, 64)
    with pytest.raises(ValueError, match="layers.1.up: global scale is"):
        ops.check_values(scale, torch.tensor([g]), "layers.1.up")


def test_good_values_pass():
    _, scale = weight(4, 64)
    scale.view(torch.uint8)[0, :2] = torch.tensor([0x00, 0x80], dtype=torch.uint8)
    ops.check_values(scale, torch.tensor([2688.0]))


def test_negative_zero_codes_are_kept():
    packed = torch.full((1, 8), 0x88, dtype=torch.uint8)
    scale = torch.ones(1, 1).to(torch.float8_e4m3fn)
    assert same(repack.unrepack(*repack.repack(packed, scale), 16)[0], packed)
    assert layout.unpack(packed).tolist() == [[8] * 16]
