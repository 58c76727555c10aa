"""Traces of spot workers, and figures of the load test."""

from __future__ import annotations

import itertools
from dataclasses import replace

from loadtests.spot.arms import LateJoin, SpotArm
from loadtests.spot.availability import Segment, compute_mean_workers, draw_trace
from loadtests.spot.figures import compare

ARM = SpotArm(
    name="reserved",
    summary={
        "tokens_trained": 1000,
        "tokens_rolled_out": 1000,
        "tokens_sampled": 960,
        "trained": 20,
        "filtered": 0,
        "staleness_max": 0,
        "cost_per_million_tokens": 2.0,
    },
    audit={"lost": 0, "trained_twice": 0},
    rl_s=10.0,
    handovers_s=[],
    host={"valid": 1, "host_cores": 1.0, "late_share": None},
    kills=0,
    noticed=0,
    unsent=0,
    joined=[],
)


def test_traces_of_a_seed_are_equal_and_lose_all_workers_once() -> None:
    for seed in range(20):
        trace = draw_trace(seed, 180.0, 3)
        assert trace == draw_trace(seed, 180.0, 3)
        assert any(one.workers == 0 for one in trace)
        assert all(0 <= one.workers <= 3 for one in trace)
        changes = itertools.pairwise(trace)
        assert all(a.start_s < b.start_s and a.workers != b.workers for a, b in changes)
        assert 1.0 < compute_mean_workers(trace, 180.0) < 2.5


def test_mean_workers_are_weighted_by_time() -> None:
    assert compute_mean_workers([Segment(0.0, 2), Segment(6.0, 0)], 8.0) == 1.5


def test_figures_compare_the_trace_with_other_arms() -> None:
    trace = replace(
        ARM,
        name="trace",
        rl_s=5.0,
        handovers_s=[0.1, 0.3],
        kills=2,
        unsent=4,
        joined=[LateJoin(4.0, 8.0, 2.0), LateJoin(5.0, None, None)],
    )
    found = compare([ARM, trace])
    assert (found["ratio_reserved"], found["ratio_always"]) == (2.0, None)
    assert (found["first_token_s_median"], found["late_joiners"]) == (8.0, 2)
    assert found["join_s_max"] == 5.0
    assert (found["handover_s"], found["handovers"]) == (0.3, 2)
    assert found["valid"] == 1


def test_tokens_that_a_trajectory_already_had_are_redone() -> None:
    assert ARM.tokens_redone == 0
    again = replace(ARM, summary=ARM.summary | {"tokens_sampled": 990}, unsent=3)
    assert again.tokens_redone == 33
