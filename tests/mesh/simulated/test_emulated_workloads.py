"""Durations of emulated workloads on the virtual mesh, compared with arithmetic."""

from __future__ import annotations

from statistics import fmean

import pytest

from meshrl.sim.drift import LinearDrift
from meshrl.sim.mesh.emulated_run import run_workload
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload

STEPS = 9  # three times as many as the gate admits at once
TOKENS = 20  # duration of every turn
PROMPT = 2  # tokens of it


def job(**changes: object) -> EmulatedWorkload:
    """Return a job with trajectories of one length: two workers, an engine and the core."""
    settings: dict[str, object] = {
        "workers": 2,
        "steps": STEPS,
        "groups_per_step": 2,
        "group_size": 4,
        "median_tokens": LinearDrift(TOKENS, TOKENS),
        "log_sigma": LinearDrift(0.0, 0.0),
        "bin_tokens": 22,
        "engine_speed": "100/64/100000",
        "training_speed": "100000/10",
        "allows_moves": False,
    }
    return EmulatedWorkload(**(settings | changes))  # type: ignore[arg-type]


def step_s(workload: EmulatedWorkload) -> float:
    """Return the mean seconds of a step over twice as many steps as the gate admits."""
    found = run_workload(workload)
    assert not found.failures and not found.moves
    assert len(found.steps_s) == STEPS - 1
    return fmean(found.steps_s[-6:])


@pytest.mark.deep
def test_training_time_is_tokens_over_speed_plus_an_update() -> None:
    """Expect eight bins of 22 tokens at 22 per second, one after the other, then half a second."""
    assert step_s(job(training_speed="22/500")) == pytest.approx(8.0 + 0.5, rel=0.1)


@pytest.mark.deep
def test_hybrid_takes_half_of_the_bins() -> None:
    workload = job(training_speed="22/500", workers=3, hybrid_count=1)
    assert step_s(workload) == pytest.approx(4.0 + 0.5, rel=0.1)


@pytest.mark.rotating(2)
def test_rollout_time_above_the_plateau_grows_with_the_batch() -> None:
    """Check the rollout time beyond the plateau.

    The gate admits 24 trajectories at a time, three steps' worth. They advance a token in 24 / 4
    decode steps of 0.1 s: 20 tokens take 12 s, for three steps.
    """
    assert step_s(job(engine_speed="100/4/100000")) == pytest.approx(12.0 / 3, rel=0.1)


@pytest.mark.deep
def test_turn_and_tool_times_are_per_trajectory() -> None:
    """Check that turns and tools take a trajectory's own time.

    Two turns of 2 s, and tools of 4 s after each: 12 s for the three steps that are admitted.
    """
    workload = job(turns=2, tool_s=LinearDrift(4.0, 4.0), bin_tokens=256)
    assert step_s(workload) == pytest.approx(12.0 / 3, rel=0.1)


@pytest.mark.deep
def test_lengths_and_tool_times_drift_during_the_run() -> None:
    workload = job(median_tokens=LinearDrift(5, 40), tool_s=LinearDrift(0.0, 6.0), bin_tokens=256)
    found = run_workload(workload)
    assert not found.failures
    assert fmean(found.steps_s[-2:]) > 3 * fmean(found.steps_s[:2])


@pytest.mark.rotating(2)
def test_planner_moves_a_gang_to_slow_training() -> None:
    found = run_workload(job(workers=3, training_speed="22/500", allows_moves=True, steps=12))
    assert [(move["from"], move["to"]) for move in found.moves] == [("rollout", "training")]
    assert found.moves[0]["at_s"] > 0
