"""The demo model, trained for a few steps, merged both ways: what it learnt is still there."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_home import shared_home

from qerl.export_merged import export_merged

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("demo")]


def test_bf16_keeps_everything(demo_run, tmp_path: Path):
    with shared_home():
        made = export_merged(demo_run.folder.path, tmp_path / "made", method="bf16")
    assert made.measure == "accuracy", "the short run must learn more than chance"
    assert made.share >= 0.95
    assert made.export.distance < 0.01 * made.base.distance


def test_nvfp4_keeps_nine_tenths_within_a_tenth_in_bf16(demo_run, tmp_path: Path):
    """Full demo runs kept 96% with no layer in bf16; rounding alone kept 0 to 8% of them."""
    with shared_home():
        made = export_merged(demo_run.folder.path, tmp_path / "made", method="nvfp4")
    assert made.share >= 0.9
    assert made.export.distance < 0.2 * made.base.distance
    assert len(made.kept) < 60
