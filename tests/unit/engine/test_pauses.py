"""What an engine says of the time that its token stream stood for new weights."""

from __future__ import annotations

import pytest

from meshrl.services.engine.measurement.pauses import KEPT, Pauses
from tests.unit.common.generation.engines_under_test import StandingClock


def test_pauses_are_counted_beside_steps_and_old_ones_forgotten() -> None:
    clock = StandingClock()
    pauses = Pauses(clock)
    assert pauses.stats.pause_p99_ms == pauses.stats.engine_step_ms == 0
    for seconds in (0.001,) * 98 + (0.5, 0.002):
        with pauses.applying():
            clock.pass_(seconds)
    pauses.stepped(8, 0.08)
    pauses.stepped(0, 0.0)
    stats = pauses.stats
    assert stats.applied == 100
    assert stats.pause_ms == pytest.approx(2.0) and stats.pause_p50_ms == pytest.approx(1.0)
    assert 2.0 < stats.pause_p99_ms <= 500.0
    assert stats.engine_step_ms == pytest.approx(10.0)
    for _ in range(KEPT):
        with pauses.applying():
            clock.pass_(0.004)
    assert pauses.stats.pause_p99_ms == pytest.approx(4.0)


def test_an_update_that_fails_has_paused_too() -> None:
    clock = StandingClock()
    pauses = Pauses(clock)
    with pytest.raises(OSError, match="torn"), pauses.applying():
        clock.pass_(0.25)
        raise OSError("torn")
    assert pauses.stats.pause_ms == 250.0
