"""Figures of a job that changes during its run, and its lengths."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from loadtests.elastic.__main__ import JOB, MOST, figures, good
from loadtests.paced.job import lengths
from loadtests.paced.running import Arm, ratio_span, take
from meshrl.common.state.events import Event

HONEST = {"late_share": 0.01, "host_cores": 1.0, "valid": 1}


def commit(ms: int, train_s: float, wait_s: float) -> Event:
    return Event(str(ms), ms, "step", {"metrics": {"train_s": train_s, "wait_s": wait_s}})


def move(started_ms: int, finished_ms: int, policy: str = "stage_time") -> Event:
    about = {"started_ms": started_ms, "finished_ms": finished_ms, "policy": policy}
    return Event(str(finished_ms), finished_ms, "move", about | {"from": "rollout"})


def make_arm(name: str, rl_s: float, **changes: Any) -> Arm:
    waited_s = (9.0, 0.0, 0.0, 1.0, 1.5, 3.0, 3.0)
    steps = [{"train_s": 1.0, "wait_s": wait_s, "tokens_trained": 1} for wait_s in waited_s]
    steps.insert(3, {"train_s": 0.0, "wait_s": 1.0, "tokens_trained": 0})  # all were filtered
    return Arm(name, rl_s, steps, honest=dict(HONEST), cpu_s=100.0, **changes)


def make_moving_arm(rl_s: float, switch_ms: int = 2000, planner_cpu_s: float = 1.0) -> Arm:
    moves = [{"started_ms": 0, "finished_ms": switch_ms}]
    return make_arm("planner", rl_s, moves=moves, planner_cpu_s=planner_cpu_s)


def test_arm_time_lasts_from_training_to_its_last_settled_move() -> None:
    found = Arm("planner")
    told = [
        Event("500", 500, "phase", {"phase": "training"}),
        commit(1000, 1.0, 0.0),
        move(1500, 3500),
        move(2000, 3000, "user"),
        move(4000, 5000, "unpaid"),
        commit(9000, 1, 0),
    ]
    take(found, told)
    assert found.rl_s == 8.5 and len(found.steps) == 2
    assert len(found.moves) == 1 and found.switches_s == [2.0, 1.0]


def test_span_is_the_range_of_wait_to_train_ratios() -> None:
    """Check that the first step is excluded, because it waits for the first groups."""
    assert ratio_span(make_arm("static", 1.0)) == pytest.approx(4.0)


def test_times_are_relative_to_the_best_and_worst_static_split() -> None:
    statics = [
        make_arm("static_2", 150.0),
        make_arm("static_3", 100.0),
        make_arm("static_4", 120.0),
    ]
    found = figures(make_moving_arm(102.0), statics, workers=6, wall_s=500.0)
    assert found["ratio_best_static"] == 1.02 and found["ratio_worst_static"] == 0.68
    assert found["moves"] == 1 and found["switch_s"] == 2.0
    assert found["switch_share"] == pytest.approx(2.0 / (6 * 102.0), abs=1e-4)
    assert found["planner_cpu_share"] == 0.01
    assert found["valid"] == 1 and good(found)


@pytest.mark.parametrize(
    ("planner", "wall_s"),
    [
        (make_moving_arm(108.0), 500.0),
        (make_moving_arm(102.0, switch_ms=30_000), 500.0),
        (make_moving_arm(102.0, planner_cpu_s=3.0), 500.0),
        (make_arm("planner", 102.0), 500.0),
        (make_moving_arm(102.0), 721.0),
    ],
)
def test_result_below_a_bound_is_not_good(planner: Arm, wall_s: float) -> None:
    statics = [make_arm("static_2", 150.0), make_arm("static_3", 100.0)]
    assert not good(figures(planner, statics, workers=6, wall_s=wall_s))


def test_busy_host_or_constant_job_makes_a_run_invalid() -> None:
    busy = make_arm("static_2", 150.0)
    busy.honest["valid"] = 0
    still = make_arm("static_2", 150.0)
    still.steps = [{"train_s": 1.0, "wait_s": 1.0, "tokens_trained": 1}] * 7
    for static in (busy, still):
        assert figures(make_moving_arm(102.0), [static], workers=6, wall_s=500.0)["valid"] == 0


def test_tail_grows_and_median_stays() -> None:
    job = JOB.with_steps(28)
    batch = job.groups_per_step * job.group_size
    drawn = lengths(job, 0, MOST)
    first, last = drawn[:batch], drawn[27 * batch : 28 * batch]
    assert max(first) < 60 and max(last) == MOST
    assert median(last) == pytest.approx(median(first), abs=1.0)
    assert sum(last) > 1.4 * sum(first)
    assert lengths(job, 0, MOST) == drawn != lengths(job, 1, MOST)
