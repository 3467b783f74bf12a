"""Intervals and tests against values worked out by hand or printed in textbooks."""

import math

import pytest

from qerl.stats import Z95, wilson


def test_wilson_at_a_half():
    # p = 1/2: the centre is 1/2 and the half-width z / (2·sqrt(n + z²)), here n = 100.
    half = Z95 / (2 * math.sqrt(100 + Z95**2))
    assert wilson(50, 100) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-12)
    assert wilson(50, 100) == pytest.approx((0.4038, 0.5962), abs=5e-5)


def test_wilson_published_example():
    # Newcombe, Statistics in Medicine 17 (1998) 857, table I: 81 of 263.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_wilson_at_the_ends():
    # k = 0: the interval is [0, z²/(n + z²)]; k = n is its mirror image.
    upper = Z95**2 / (20 + Z95**2)
    assert wilson(0, 20) == pytest.approx((0.0, upper), abs=1e-12)
    assert wilson(20, 20) == pytest.approx((1 - upper, 1.0), abs=1e-12)
    assert wilson(0, 7)[0] == 0.0 and wilson(7, 7)[1] == 1.0


def test_wilson_inverts_the_score_test():
    # Both bounds p solve |k/n - p| = z·sqrt(p(1-p)/n).
    for p in wilson(34, 200):
        assert abs(34 / 200 - p) == pytest.approx(Z95 * math.sqrt(p * (1 - p) / 200), abs=1e-12)
