"""Seconds in places are exact, whenever they are asked for."""

from __future__ import annotations

import pytest

from meshrl.common.base.job_clock import JobClock
from meshrl.common.base.occupancy import Occupancy
from tests.unit.common.generation.engines_under_test import StandingClock


def test_those_who_are_there_now_count_up_to_now() -> None:
    clock = StandingClock()
    found = Occupancy(clock.monotonic)
    with found.within("tool"):
        clock.pass_(2.0)
        with found.within("tool"), found.within("engine"):
            clock.pass_(3.0)
            assert (found.seconds("tool"), found.seconds("engine")) == (8.0, 3.0)
            assert found.count("tool") == 2
        clock.pass_(1.0)
    clock.pass_(100.0)
    assert (found.seconds("tool"), found.seconds("engine")) == (9.0, 3.0)
    assert (found.seconds("nowhere"), found.count("nowhere")) == (0.0, 0.0)


def test_who_leaves_by_an_error_is_there_no_more() -> None:
    clock = StandingClock()
    found = Occupancy(clock.monotonic)
    with pytest.raises(KeyError), found.within("tool"):
        clock.pass_(1.0)
        raise KeyError
    clock.pass_(1.0)
    assert found.seconds("tool") == 1.0


def test_a_count_holds_from_when_it_was_put_and_nothing_counts_in_a_pause() -> None:
    clock = StandingClock()
    job = JobClock(clock)
    found = Occupancy(job.monotonic)
    found.put("running", 3)
    clock.pass_(2.0)
    found.put("running", 1)
    clock.pass_(2.0)
    job.hold(True)
    clock.pass_(50.0)
    assert found.seconds("running") == 8.0
    job.hold(False)
    clock.pass_(0.5)
    assert found.seconds("running") == 8.5
