"""Small exact statistics for held-out accuracy. Imports nothing."""

from __future__ import annotations

import math

Z95 = 1.959963984540054  # 97.5% quantile of the standard normal


def wilson(k: int, n: int) -> tuple[float, float]:
    """95% Wilson score interval (lower, upper) of a proportion, k successes in n trials.

    Source: Wilson, JASA 22 (1927) 209. Unlike the normal interval it stays inside [0, 1]
    and has a width at k = 0 and k = n.
    """
    assert 0 <= k <= n and n > 0, (k, n)
    share, z2 = k / n, Z95 * Z95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # At the ends one bound is exactly 0 or 1; rounding must not put it outside.
    return (0.0 if k == 0 else centre - half), (1.0 if k == n else centre + half)
