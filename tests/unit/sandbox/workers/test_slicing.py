"""Slice policy of the worker pool, as pure functions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.mesh.process.child_handle import ProcessUsage
from meshrl.services.sandbox.workers.slice_policy import (
    CallDurationAverage,
    compute_charged_s,
    compute_slice_size,
    should_add_worker,
)


@given(st.integers(1, 10_000), st.floats(0, 100))
def test_slice_is_never_empty_and_contains_little_work(waiting: int, mean_call_s: float) -> None:
    size = compute_slice_size(waiting, mean_call_s)
    assert 1 <= size <= min(waiting, 64)
    assert size == 1 or size * mean_call_s <= 0.002


def test_short_calls_are_batched_and_long_calls_run_alone() -> None:
    assert compute_slice_size(4, 20e-6) == 4
    assert compute_slice_size(1000, 20e-6) == 64
    assert compute_slice_size(4, 1.0) == 1


def test_mean_duration_follows_the_calls() -> None:
    durations = CallDurationAverage()
    for _ in range(50):
        durations.add(0.4, 4)
    assert abs(durations.mean_s - 0.1) < 0.001


def test_pool_grows_for_a_backlog_or_long_calls_up_to_its_limit() -> None:
    assert not should_add_worker(10, 20e-6, 0.0, 2, 4)
    assert should_add_worker(10_000, 20e-6, 0.0, 2, 4)
    assert should_add_worker(1, 20e-6, 0.2, 2, 4)
    assert not should_add_worker(0, 20e-6, 9.0, 2, 4)
    assert not should_add_worker(10_000, 1.0, 9.0, 4, 4)


def test_sleeping_is_charged_and_waiting_for_a_core_is_not() -> None:
    before = ProcessUsage(1.0, 5.0, "R")
    assert compute_charged_s(4.0, ProcessUsage(1.5, 8.5, "R"), before) == 0.5
    assert compute_charged_s(4.0, ProcessUsage(1.0, 5.0, "S"), before) == 4.0
    assert compute_charged_s(1.0, ProcessUsage(4.0, 5.0, "R"), before) == 3.0
