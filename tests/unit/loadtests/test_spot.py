"""Figures of the load test of spot workers."""

from __future__ import annotations

from dataclasses import replace

from loadtests.spot.arms import LateJoin, SpotArm
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
