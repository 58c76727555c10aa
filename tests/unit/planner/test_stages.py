"""Stage times from counters."""

from types import SimpleNamespace
from typing import Any

from services.planner.stages import StageWindow, read


def look(step: int, groups: int, busy: float, trained: float, incarnation: str = "a") -> list[Any]:
    def entry(kind: str, name: str, **stats: Any) -> SimpleNamespace:
        stats["job"] = "job"
        return SimpleNamespace(kind=kind, name=name, incarnation=incarnation, stats=stats)

    return [
        entry("engine", "engine/g1", occupied_s=busy),
        entry("engine", "engine/g2", occupied_s=busy),
        entry("rollout", "rollout/0", groups=groups),
        entry("trainer", "trainer/job", busy_s=trained, step=step),
    ]


def test_times_are_per_step_and_per_present_gang() -> None:
    window = StageWindow(groups_per_step=16).observed(read("job", look(4, 64, 10.0, 4.0)))
    assert window.times() is None
    window = window.observed(read("job", look(8, 128, 12.0, 8.0)))
    times = window.times()
    assert times is not None
    assert (times.rollout_s, times.train_s) == (0.5, 1.0)


def test_a_restarted_process_begins_a_new_window() -> None:
    window = StageWindow(groups_per_step=16).observed(read("job", look(4, 64, 10.0, 4.0)))
    window = window.observed(read("job", look(8, 128, 12.0, 8.0, incarnation="b")))
    assert window.times() is None


def test_other_jobs_do_not_count() -> None:
    assert read("other", look(4, 64, 10.0, 4.0)).engines == 0
