"""Which tile, split and layout a product takes: the table on disk and what is read from it."""

from __future__ import annotations

import copy

import pytest
import torch

from qerl_kernels import dispatch, linear, ops, repack
from qerl_kernels.variants import ALL_TARGETS, BEFORE_HOPPER

CPU = torch.device("cpu")
DIRECTIONS = ("forward", "backward", "fp8_forward", "fp8_backward")
POWERS_OF_TWO = {2**i for i in range(10)}


@pytest.fixture
def card(monkeypatch):
    """Pretend that the CPU is a card: card(target, multiprocessors)."""

    def pretend(target: int, multiprocessors: int = 132) -> None:
        monkeypatch.setattr(dispatch, "target_of", lambda device: target)
        monkeypatch.setattr(dispatch, "_multiprocessors", lambda device: multiprocessors)

    return pretend


# --- the table -----------------------------------------------------------------------------------


def test_the_table_says_where_its_numbers_come_from():
    assert isinstance(dispatch.table()["source"], str) and dispatch.table()["source"].strip()
    for name in ("programs_per_sm", "max_splits", "min_groups_per_split"):
        assert dispatch.table()[name] >= 1


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("target", ALL_TARGETS)
def test_every_target_has_tiles_by_rising_m(target, direction):
    tiles = dispatch.tiles(target, direction)
    assert tiles and [t.max_m for t in tiles] == sorted({t.max_m for t in tiles})
    for tile in tiles:
        assert {tile.bm, tile.bn, tile.warps, tile.groups} <= POWERS_OF_TWO
        assert tile.bm >= 16 and tile.stages >= 1 and tile.max_m >= 1
        if direction == "forward":
            # `matmul.in_place` takes rows in blocks of 16 a warp.
            assert tile.bn % (16 * tile.warps) == 0 and tile.groups == 1
        if direction.endswith("backward"):
            assert not tile.split


def test_the_invariant_tile_is_one_of_the_table():
    for entry in dispatch.table()["targets"].values():
        assert set(entry["invariant"]) == set(DIRECTIONS)
        for direction, index in entry["invariant"].items():
            assert index in range(len(entry[direction]))


@pytest.mark.parametrize(
    "target, family",
    [(80, "80"), (86, "80"), (89, "80"), (90, "90"), (100, "100"), (120, "120"), (121, "120")],
)
def test_a_target_takes_the_nearest_family_not_above_it(target, family):
    assert dispatch._family(target) == family
    rows = dispatch.table()["targets"][family]["forward"]
    assert dispatch.tiles(target, "forward") == tuple(dispatch.Tile(**row) for row in rows)


def test_all_tiles_names_every_target():
    assert [target for target, _ in dispatch.all_tiles("backward")] == list(ALL_TARGETS)
    assert dict(dispatch.all_tiles("forward"))[90] == dispatch.tiles(90, "forward")


@pytest.mark.parametrize("target", [75, 70])
def test_cards_before_ampere_are_refused(target, card):
    with pytest.raises(ValueError, match=f"no kernel runs on sm_{target}: compute capability 8.0"):
        dispatch.tiles(target, "forward")
    card(target)
    x, codes = torch.zeros(1, 16, dtype=torch.bfloat16), torch.zeros(8, 16, dtype=torch.int32)
    scales, g = torch.zeros(8, 2, dtype=torch.int32), torch.ones(1)
    with ops.interpreting(), pytest.raises(ValueError, match=f"no kernel runs on sm_{target}"):
        ops.nvfp4_matmul(x, codes, scales, g)


# --- tiles by M ----------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("target", ALL_TARGETS)
def test_the_tile_follows_m_and_past_the_last_one_a_layer_is_unpacked(target, direction, card):
    card(target)
    tiles = dispatch.tiles(target, direction)
    before = 0
    for tile in tiles:
        for m in (before + 1, tile.max_m):
            assert dispatch.fused_tile(direction, m, CPU) is tile
            assert not dispatch.is_large(direction, m, CPU)
        before = tile.max_m
    assert dispatch.is_large(direction, before + 1, CPU)
    assert dispatch.fused_tile(direction, before + 1, CPU) is tiles[-1]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("target", ALL_TARGETS)
def test_batch_invariant_mode_takes_one_tile_for_every_m(target, direction, card):
    card(target)
    sizes = (0, 1, 16, 17, 64, 65, 1024, 1025, 10**6)
    with ops.batch_invariant():
        (tile,) = {dispatch.fused_tile(direction, m, CPU) for m in sizes}
        assert not any(dispatch.is_large(direction, m, CPU) for m in sizes)
        assert dispatch.splits(tile, 1, 4096, 40, CPU) == (1, 40)
    index = dispatch.table()["targets"][dispatch._family(target)]["invariant"][direction]
    assert tile == dispatch.tiles(target, direction)[index]
    assert dispatch.is_large(direction, 10**6, CPU)


def test_without_the_mode_tiles_and_splits_follow_the_batch(card):
    """What the mode is there to prevent, at the sizes the tests of it use."""
    assert len({dispatch.fused_tile("forward", m, CPU) for m in (1, 17, 70)}) == 3
    assert len({dispatch.fused_tile("backward", m, CPU) for m in (1, 17, 70)}) == 2
    card(80, 1)
    chosen = [dispatch.fused_tile("forward", m, CPU) for m in (1, 33)]
    splits = [dispatch.splits(t, m, 32, 9, CPU) for t, m in zip(chosen, (1, 33), strict=True)]
    assert splits == [(2, 5), (1, 9)]
    with ops.batch_invariant():
        assert ops.is_batch_invariant()
        with ops.batch_invariant(False):
            assert not ops.is_batch_invariant()
    assert not ops.is_batch_invariant()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_threshold_decides_which_kernel_runs(direction, card, monkeypatch):
    """At the last `max_m` the fused kernel, one row later the unpacked layer."""
    card(80)
    ran: list[str] = []

    def record(name: str, result: torch.Tensor):
        return lambda *_: ran.append(name) or result

    w = torch.zeros(16, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(linear, "unpack", record("unpack", w))
    for m in (256, 257):
        y = torch.zeros(m, 16, dtype=torch.bfloat16)
        monkeypatch.setattr(linear, "nvfp4_matmul", record("fused", y))
        monkeypatch.setattr(linear, "nvfp4_matmul_t", record("fused", y))
        rest = (torch.zeros(16, 16, dtype=torch.int32), torch.zeros(16, 2, dtype=torch.int32))
        with ops.interpreting():
            if direction == "forward":
                linear.matmul(y, *rest, torch.ones(1), None)
            else:
                linear.matmul_t(y, *rest, torch.ones(1), 16)
    assert ran == ["fused", "unpack"]


# --- splits along K ------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3, 4, 7, 8, 9, 40, 41, 216])
@pytest.mark.parametrize("n", [1, 64, 5120, 27648])
def test_splits_cover_every_group_once(groups, n):
    least, most = (dispatch.table()[k] for k in ("min_groups_per_split", "max_splits"))
    for target in (80, 90, 100, 120):
        for tile in dispatch.tiles(target, "forward"):
            for m in (1, tile.bm, tile.max_m):
                count, each = dispatch.splits(tile, m, n, groups, CPU)
                assert (count, each) == dispatch.splits(tile, m, n, groups, CPU)
                # As the kernel cuts: every split has work, the last one what is left.
                cut = [range(i * each, min((i + 1) * each, groups)) for i in range(count)]
                assert [g for part in cut for g in part] == list(range(groups)) and all(cut)
                assert 1 <= count <= most and (count == 1 or each >= least)


def test_splits_fill_the_card_and_no_more(card):
    card(90, 132)
    tile = dispatch.tiles(90, "forward")[0]
    # 2 programs a multiprocessor are wanted: 264.
    assert dispatch.splits(tile, 1, 264 * tile.bn, 216, CPU) == (1, 216)
    assert dispatch.splits(tile, 1, 132 * tile.bn, 216, CPU) == (2, 108)
    assert dispatch.splits(tile, 1, 1, 216, CPU) == (16, 14)
    card(90, 20)
    assert dispatch.splits(tile, 1, 20 * tile.bn, 216, CPU) == (2, 108)


def test_a_tile_that_may_not_split_does_not():
    assert dispatch.splits(dispatch.Tile(16, 16, 64, 4, 3), 1, 64, 216, CPU) == (1, 216)


# --- what differs between cards and Tritons ------------------------------------------------------


@pytest.mark.parametrize("version", [(3, 6), (3, 7), (3, 8), (3, 9), (3, 10), (4, 0)])
@pytest.mark.parametrize("target", ALL_TARGETS)
def test_flags_and_lane_order(target, version, monkeypatch, card):
    """wgmma (90) and tcgen05 (100) never take the wide order; mma.sync does before Triton 3.8."""
    monkeypatch.setattr(dispatch, "_triton_version", lambda: version)
    card(target)
    wide = target not in (90, 100) and version in ((3, 6), (3, 7))
    expected = {"FMA": target in BEFORE_HOPPER, "WIDE": wide, "BY_LANE": target != 100}
    assert dispatch.target_flags(target) == expected == dispatch.flags(CPU)
    assert dispatch.lane_order(CPU) == ("wide" if wide else "paired")
    assert dispatch.lane_order(CPU) in repack.ORDERS


@pytest.mark.parametrize("target, like", [(87, 80), (103, 100), (110, 100), (122, 120)])
def test_a_card_between_ours_is_treated_like_the_one_below(target, like):
    assert dispatch.target_flags(target) == dispatch.target_flags(like)
    assert dispatch.tiles(target, "forward") == dispatch.tiles(like, "forward")


@pytest.mark.parametrize("target", [86, 89, 103, 121])
def test_a_measured_card_of_its_own_in_the_table_keeps_its_code(target, monkeypatch):
    """Thresholds are data: an entry of its own must not change what the kernels are."""
    monkeypatch.setattr(dispatch, "_triton_version", lambda: (3, 7))
    before = dispatch.target_flags(target)
    data = copy.deepcopy(dispatch.table())
    data["targets"][str(target)] = data["targets"][dispatch._family(target)]
    monkeypatch.setattr(dispatch, "table", lambda: data)
    assert dispatch._family(target) == str(target)
    assert dispatch.target_flags(target) == before


@pytest.mark.parametrize("text, found", [("3.7.1", (3, 7)), ("3.10.0+git1a2b", (3, 10))])
def test_triton_version_is_two_numbers(text, found, monkeypatch):
    monkeypatch.setattr("triton.__version__", text)
    assert dispatch._triton_version.__wrapped__() == found


def test_repack_arranges_for_the_card_at_hand(card, monkeypatch):
    """`ops.repack` asks the dispatch: the same layer differs between two cards' memory."""
    monkeypatch.setattr(dispatch, "_triton_version", lambda: (3, 7))
    packed = torch.arange(64, dtype=torch.uint8).view(1, 64)
    scale, g = torch.ones(1, 8).to(torch.float8_e4m3fn), torch.ones(1)
    for target, order in ((90, "paired"), (89, "wide")):
        card(target)
        codes, _ = ops.repack(packed, scale, g)
        assert torch.equal(codes, repack.repack(packed, scale, order=order)[0])
    assert not torch.equal(*(repack.repack(packed, scale, order=o)[0] for o in repack.ORDERS))
