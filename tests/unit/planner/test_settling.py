"""When stage times may move a gang."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.job.config import PlannerConfig
from services.planner.allocation import StageTimes
from services.planner.settling import Watch, following, look
from tests.unit.planner.seen import counters, gang, job

GANGS = [gang(0, "training"), gang(1, "rollout"), gang(2, "rollout")]
MOVING = [*GANGS[:2], gang(2, "rollout", actual_state="starting")]
LOST = [*GANGS[:2], gang(2, "rollout", actual_state="lost")]


def begun() -> Watch:
    """After one look, at 0 s."""
    watch, times = look(following(Watch(), job()), job(), GANGS, counters(0), 0.0)
    assert times is None
    return watch


def test_times_are_told_after_enough_steps() -> None:
    watch, times = look(begun(), job(), GANGS, counters(1), 10.0)
    assert times is None
    assert look(watch, job(), GANGS, counters(2, 3.0), 20.0)[1] == StageTimes(3.0, 1.0)


@pytest.mark.parametrize("other", [{"phase": "baseline"}, {"steps_done": 1}])
def test_nothing_is_looked_at_before_training_is_warm(other: dict[str, object]) -> None:
    assert look(begun(), job(**other), GANGS, counters(9), 10.0) == (begun(), None)


def test_while_a_gang_is_on_its_way_no_window_begins() -> None:
    watch, times = look(begun(), job(), MOVING, counters(9), 10.0)
    assert times is None and watch.window.first is None and watch.observed_s == 0.0
    assert look(begun(), job(), LOST, counters(9), 10.0)[1] is not None


def test_an_interval_lies_between_two_looks() -> None:
    slow = job(config=PlannerConfig(interval_s=10.0))
    assert look(begun(), slow, GANGS, counters(9), 9.9) == (begun(), None)
    assert look(begun(), slow, GANGS, counters(9), 10.0)[1] is not None


@given(st.integers(0, 20), st.integers(2, 40), st.integers(0, 20))
def test_after_a_move_steps_pass_and_the_times_begin_anew(
    moved: int, steps: int, cooldown: int
) -> None:
    cool = job(steps_done=steps, config=PlannerConfig(cooldown_steps=cooldown))
    watch, times = look(begun().moved(moved), cool, GANGS, counters(9), 10.0)
    assert times is None and watch.window.last is not None
    _, times = look(watch, cool, GANGS, counters(11), 20.0)
    assert (times is None) == (steps < moved + cooldown)


def test_a_move_that_a_predecessor_decided_cools_down_too() -> None:
    assert begun().arrived({"step": 7}) == replace(begun(), last_move_step=7)
    assert begun().arrived({"policy": "user"}) == begun()


def test_each_job_is_watched_from_its_own_beginning() -> None:
    watch = begun().moved(7)
    assert following(watch, job(steps_done=11)) is watch
    for other in (job(id="other"), None):
        new = following(watch, other)
        assert new.window.last is None and new.last_move_step < 0 and new.observed_s == 0.0
