"""The parts of a step are those of the last one that was committed."""

from __future__ import annotations

import pytest

from meshrl.services.trainer.steps.step_parts import StepParts
from tests.unit.common.generation.engines_under_test import StandingClock


def test_parts_add_up_within_a_step_and_over_all() -> None:
    clock = StandingClock()
    parts = StepParts(clock.monotonic)
    for seconds in (1.0, 3.0):
        parts.began()
        for _ in range(2):
            with parts.of("stage"):
                clock.pass_(seconds)
        parts.took("update", 0.25)
        parts.ended()
    assert parts.last_seconds == {"stage": 6.0, "update": 0.25}
    assert parts.total == {"stage": 8.0, "update": 0.5}


def test_a_step_that_was_cut_off_shows_in_the_sum_alone() -> None:
    clock = StandingClock()
    parts = StepParts(clock.monotonic)
    parts.began()
    with pytest.raises(KeyError), parts.of("stage"):
        clock.pass_(2.0)
        raise KeyError
    parts.began()
    with parts.of("commit"):
        clock.pass_(0.5)
    parts.ended()
    assert parts.last_seconds == {"commit": 0.5}
    assert parts.total == {"stage": 2.0, "commit": 0.5}
