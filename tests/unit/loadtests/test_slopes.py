"""Growth of a quantity, judged by its slope and insensitive to a few outliers."""

from __future__ import annotations

import pytest

from loadtests.soak.__main__ import rise, second_half, share, slope


def test_slope_is_robust_to_outliers() -> None:
    samples = [(float(t), 100.0 + 2.0 * t) for t in range(100)]
    odd = [(t, 10_000.0 if t in (10.0, 50.0, 90.0) else value) for t, value in samples]
    assert slope(samples) == pytest.approx(2.0)
    assert slope(odd) == pytest.approx(2.0, rel=0.1)
    assert rise(samples) == pytest.approx(198.0)
    assert share(samples) == pytest.approx(198.0 / 199.0)
    assert slope([(0.0, 1.0)]) == slope([]) == rise([]) == share([]) == 0.0


def test_initial_rise_alone_is_no_growth() -> None:
    samples = [(float(t), min(t, 50.0)) for t in range(101)]
    assert slope(second_half(samples, 100.0)) == 0.0
