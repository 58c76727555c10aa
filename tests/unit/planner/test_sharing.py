"""The shares of jobs against progressive filling in exact arithmetic, and who is admitted."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.services.planner.admission.sharing import ShareBounds, ShareClaim, divide, fill
from tests.unit.planner.pools import job

bounds = st.builds(
    lambda least, more, weight: ShareBounds(least, least + more, weight),
    st.integers(1, 4),
    st.one_of(st.integers(0, 8), st.just(math.inf)),
    st.sampled_from([0.5, 1.0, 2.0, 3.0]),
)


def filled(claims: list[ShareBounds], workers: int) -> list[Fraction]:
    """Max-min by its definition: all rise by their weights; who is full stops, and nobody has less
    than its least.
    """
    fixed: dict[int, Fraction] = {}
    while True:
        open_ = [i for i in range(len(claims)) if i not in fixed]
        if not open_:
            break
        left = Fraction(workers) - sum(fixed.values())
        level = left / sum(Fraction(claims[i].weight) for i in open_)
        low = [i for i in open_ if level * Fraction(claims[i].weight) < claims[i].least]
        high = [i for i in open_ if level * Fraction(claims[i].weight) > claims[i].most]
        over = sum(level * Fraction(claims[i].weight) - Fraction(claims[i].most) for i in high)
        under = sum(claims[i].least - level * Fraction(claims[i].weight) for i in low)
        # Of both kinds of bounds the one that moves the level further holds for certain.
        if low and under >= over:
            fixed.update({i: Fraction(claims[i].least) for i in low})
        elif high:
            fixed.update({i: Fraction(claims[i].most) for i in high})
        else:
            fixed.update({i: level * Fraction(claims[i].weight) for i in open_})
    return [fixed[i] for i in range(len(claims))]


@given(st.lists(bounds, min_size=1, max_size=5), st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_shares_are_within_one_worker_of_weighted_max_min(
    claims: list[ShareBounds], more: int
) -> None:
    workers = sum(claim.least for claim in claims) + more
    shares = list(fill({str(i): claim for i, claim in enumerate(claims)}, workers).values())
    for share, exact, claim in zip(shares, filled(claims, workers), claims, strict=True):
        assert abs(share - exact) < 1
        assert claim.least <= share <= claim.most
    assert sum(shares) == min(workers, sum(claim.most for claim in claims))


def shares(
    workers: int, *jobs: PlannedJob, turns: bool = True, **claims: ShareClaim
) -> dict[str, int]:
    ordered = sorted(jobs, key=lambda j: (-j.need.priority, j.submitted_ms))
    return divide(ordered, {"host": workers}, claims, turns).workers


def some(id: str, at: int, **about: Any) -> PlannedJob:
    return job(id, submitted_ms=at, **about)


def test_equal_jobs_share_equally_and_the_first_has_what_is_over() -> None:
    assert shares(9, some("a", 1), some("b", 2)) == {"a": 5, "b": 4}


def test_shares_are_weighted() -> None:
    assert shares(8, some("a", 1), some("b", 2, share=3.0)) == {"a": 2, "b": 6}


def test_four_jobs_on_six_workers_all_run() -> None:
    four = [some(id, at) for at, id in enumerate("abcd")]
    assert shares(6, *four) == {"a": 2, "b": 2, "c": 1, "d": 1}


def test_without_turns_the_last_waits_and_the_others_have_their_floors() -> None:
    four = [some(id, at) for at, id in enumerate("abcd")]
    assert shares(6, *four, turns=False) == {"a": 2, "b": 2, "c": 2}


def test_a_higher_priority_has_what_it_can_use_and_lower_ones_keep_their_floors() -> None:
    found = shares(8, some("a", 1), some("b", 2), some("c", 3, priority=1))
    assert found == {"c": 4, "a": 2, "b": 2}


def test_a_higher_priority_that_needs_all_leaves_the_lower_ones_nothing() -> None:
    found = shares(4, some("a", 1), some("b", 2, priority=1, least=4))
    assert found == {"b": 4}


def test_a_small_job_goes_ahead_of_a_large_one_that_waits_and_makes_room_for_it_later() -> None:
    first, large, small = some("a", 1, least=3, most=3), some("b", 2, least=3), some("c", 3)
    assert shares(5, first, large, small, turns=False) == {"a": 3, "c": 2}
    assert shares(5, large, small, turns=False) == {"b": 3, "c": 2}
    assert shares(4, large, small, turns=False) == {"b": 4}


def test_a_job_that_has_run_keeps_workers_that_nobody_else_may_have() -> None:
    assert shares(1, some("a", 1), turns=False, a=ShareClaim("host")) == {"a": 1}
    assert shares(1, some("a", 1), turns=False) == {}, "it has no core"
    queued = some("a", 1, phase=Phase.QUEUED)
    assert shares(1, queued, turns=False, a=ShareClaim("host")) == {}


def test_what_people_have_put_into_a_job_stays_there() -> None:
    found = shares(8, some("a", 1), some("b", 2), b=ShareClaim("host", pinned=5))
    assert found == {"a": 2, "b": 6}


def test_a_core_waits_for_a_host_that_has_room_for_all_its_ranks() -> None:
    found = divide([job("a", ranks=3)], {"host0": 2, "host1": 2}, {}, True)
    assert found.workers == {} and "no host has 3" in found.refused["a"]
    assert divide([job("a", ranks=3)], {"host0": 2, "host1": 3}, {}, True).homes == {"a": "host1"}
