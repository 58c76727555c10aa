"""Jobs that the load test of moves draws, and its figures."""

from __future__ import annotations

import pytest

from loadtests.regret.drawn import LEAST_STEP_S, draw_job, rollout_s, trained_tokens
from loadtests.regret.figures import Compared, errors, figures, good
from meshrl.common.state.events import Event
from meshrl.sim.drift import LinearDrift
from meshrl.sim.mesh.emulated_run import compute_rl_s
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload


def test_seed_determines_the_job() -> None:
    assert draw_job(7) == draw_job(7) != draw_job(8)


def test_thirty_jobs_differ_in_all_parameters_of_a_split() -> None:
    jobs = [draw_job(seed) for seed in range(30)]
    assert {job.workers for job in jobs} == {3, 4, 5, 6, 7, 8}
    assert {job.turns for job in jobs} == {1, 2, 3}
    assert any(job.tool_s.initial for job in jobs) and not all(job.tool_s.initial for job in jobs)
    drifting = [job for job in jobs if job.median_tokens.final > job.median_tokens.initial]
    assert 4 <= len(drifting) <= 15
    for job in jobs:
        decode_ms, plateau, _ = job.engine_speed.split("/")
        pace = float(decode_ms) / 1e3, int(plateau)
        assert rollout_s(job, job.workers - 1, *pace) >= 0.99 * LEAST_STEP_S


def test_a_third_of_the_default_splits_is_far_from_optimal() -> None:
    """Check that two training gangs are better if the core alone takes twice as long as rollout."""
    slow = 0
    for seed in range(30):
        job = draw_job(seed)
        decode_ms, plateau, _ = job.engine_speed.split("/")
        beside_s = rollout_s(job, job.workers - 1, float(decode_ms) / 1e3, int(plateau))
        slow += trained_tokens(job) / float(job.training_speed.split("/")[0]) > 2 * beside_s
    assert slow >= 10


def test_each_split_has_an_engine_and_the_core() -> None:
    assert list(EmulatedWorkload(workers=4).static_splits) == [0, 1, 2]


def test_drifting_value_is_interpolated_over_the_run() -> None:
    job = EmulatedWorkload(steps=11, tool_s=LinearDrift(0.0, 2.0))
    assert [
        job.tool_s.get_value(job.compute_progress(version)) for version in (-1, 0, 5, 10, 12)
    ] == [0, 0, 1, 2, 2]


def test_rows_have_tool_times_and_groups_without_variance() -> None:
    job = EmulatedWorkload(
        steps=10,
        groups_per_step=10,
        tool_s=LinearDrift(0.0, 1.0),
        equal_reward_share=LinearDrift(0.0, 0.5),
    )
    rows = job.build_rows()
    first, last = rows[:20], rows[80:100]
    assert sum(row["alike"] for row in first) <= 2 and 8 <= sum(row["alike"] for row in last) <= 11
    assert [row["tool_s"] for row in (rows[0], rows[99])] == [0.0, 1.0]


TOLD: dict[str, object] = {"predicted_s": 2.0, "observed_s": 2.5, "paid": True, "undone": False}


def make_comparison(planner_s: float, *judged: dict[str, object]) -> Compared:
    return Compared("a", {0: 120.0, 1: 100.0, 2: 150.0}, planner_s, len(judged), judged)


def test_regret_is_time_over_the_best_static_split() -> None:
    one = make_comparison(110.0)
    assert one.best == 1
    assert one.regret == pytest.approx(0.1) and one.default_loses == pytest.approx(0.2)


def test_figures_cover_all_jobs_and_judged_moves() -> None:
    undone: dict[str, object] = {
        "predicted_s": 3.0,
        "observed_s": 4.0,
        "paid": False,
        "undone": True,
    }
    found = figures([make_comparison(100.0, TOLD), make_comparison(110.0, TOLD, undone)], "real_")
    assert found["real_moves"] == 3 and found["real_far_defaults"] == 2
    assert found["real_moves_that_paid"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["real_undone"] == 1
    assert found["real_regret_p50"] == pytest.approx(0.05)
    assert found["real_prediction_error_p50"] == pytest.approx(0.2)
    assert not good(found, "real_")


def test_move_without_an_observation_has_no_error() -> None:
    assert errors([{"predicted_s": 2.0, "observed_s": 0.0}, {"predicted_s": 2.0}]) == []


@pytest.mark.parametrize(
    ("planner_s", "told", "reached"),
    [
        (105.0, TOLD | {"observed_s": 2.1}, True),
        (115.0, TOLD | {"observed_s": 2.1}, False),
        (105.0, TOLD, False),
        (105.0, TOLD | {"observed_s": 2.1, "paid": False}, False),
    ],
)
def test_run_is_good_if_moves_pay_are_predicted_and_lose_little(
    planner_s: float, told: dict[str, object], reached: bool
) -> None:
    assert good(figures([make_comparison(planner_s, told)])) is reached


def test_run_without_judged_moves_is_not_good() -> None:
    assert not good(figures([make_comparison(100.0)]))


def test_rl_phase_of_the_demo_ends_with_its_last_step() -> None:
    """Check that evaluations before and after the phase are excluded."""
    told: list[Event] = [
        Event("1", 1000, "phase", {"phase": "baseline"}),
        Event("2", 4000, "phase", {"phase": "training"}),
        Event("3", 5000, "step", {}),
        Event("4", 9500, "step", {}),
        Event("5", 9600, "phase", {"phase": "evaluation"}),
    ]
    assert compute_rl_s(told) == 5.5
