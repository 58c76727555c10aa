"""A stopwatch accounts for all of the time since its begin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.random import Random
from meshrl.common.mesh.telemetry import stopwatch
from meshrl.common.mesh.telemetry.stopwatch import UNTIMED, Stopwatch
from meshrl.sim.loop import VirtualClock, run_virtual


def parts_of(watch: Stopwatch) -> list[tuple[str, float]]:
    flat = watch.parts()
    return list(zip(flat[::2], flat[1::2], strict=True))  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.001, 5.0)), max_size=20))
def test_states_follow_each_other_and_fill_the_time(course: list[tuple[str, float]]) -> None:
    async def story(clock: VirtualClock, random: Random) -> None:
        watch, began = Stopwatch(clock, "begin"), clock.monotonic()
        for state, seconds in course:
            watch.enter(state)
            await clock.sleep(seconds)
        lasted_ms = 1000 * (clock.monotonic() - began)
        found = parts_of(watch)
        assert sum(ms for _, ms in found) == pytest.approx(lasted_ms, abs=0.001 * len(found) + 1e-6)
        told = [state for state, _ in found]
        entered = [state for state, _ in course]
        assert told == [s for i, s in enumerate(entered) if i == 0 or s != entered[i - 1]]

    run_virtual(story)


def test_what_comes_after_the_last_part_that_is_kept_counts_as_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopwatch, "MOST", 2)

    async def story(clock: VirtualClock, random: Random) -> None:
        watch = Stopwatch(clock, "a")
        for state in ("b", "c", "d", "e"):
            await clock.sleep(1.0)
            watch.enter(state)
        await clock.sleep(1.0)
        assert parts_of(watch) == [("a", 1000.0), ("b", 1000.0), ("c", 3000.0)]

    run_virtual(story)


def test_what_is_not_traced_can_be_told_all_the_same() -> None:
    UNTIMED.enter("queue")
    assert not hasattr(UNTIMED, "parts")
