"""Whether a quantity grows is judged by its slope, whatever a few samples say."""

from __future__ import annotations

import pytest

from loadtests.soak.__main__ import rise, second_half, share, slope


def test_a_slope_is_that_of_most_pairs() -> None:
    samples = [(float(t), 100.0 + 2.0 * t) for t in range(100)]
    odd = [(t, 10_000.0 if t in (10.0, 50.0, 90.0) else value) for t, value in samples]
    assert slope(samples) == pytest.approx(2.0)
    assert slope(odd) == pytest.approx(2.0, rel=0.1)
    assert rise(samples) == pytest.approx(198.0)
    assert share(samples) == pytest.approx(198.0 / 199.0)
    assert slope([(0.0, 1.0)]) == slope([]) == rise([]) == share([]) == 0.0


def test_what_rises_at_first_only_does_not_grow() -> None:
    samples = [(float(t), min(t, 50.0)) for t in range(101)]
    assert slope(second_half(samples, 100.0)) == 0.0
