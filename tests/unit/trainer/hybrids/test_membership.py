"""How hybrids come and go, without a process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.errors import Fenced
from meshrl.services.trainer.hybrids.membership import HybridMembership


def test_a_hybrid_leases_only_what_it_has_the_weights_for() -> None:
    pool = HybridMembership()
    generation = pool.join("g1", 0.0)
    assert pool.stages() == {"g1": "requested"}
    assert not pool.asks("g1", generation, "", "v1", 1.0)
    assert pool.stages() == {"g1": "fetching"}
    assert pool.asks("g1", generation, "v1", "v1", 2.0)
    assert pool.stages() == {"g1": "ready"}
    pool.leased("g1")
    assert pool.asks("g1", generation, "v1", "v1", 3.0)
    assert pool.stages() == {"g1": "active"}
    assert not pool.asks("g1", generation, "v1", "v2", 4.0)
    assert pool.stages() == {"g1": "fetching"}


def test_a_new_version_is_there_to_be_fetched_before_a_hybrid_asks() -> None:
    pool = HybridMembership()
    generation = pool.join("g1", 0.0)
    assert pool.asks("g1", generation, "v1", "v1", 1.0)
    pool.wanted("v1")
    assert pool.stages() == {"g1": "ready"}
    pool.wanted("v2")
    assert pool.stages() == {"g1": "fetching"}


def test_between_two_steps_a_hybrid_stays_ready() -> None:
    pool = HybridMembership()
    generation = pool.join("g1", 0.0)
    assert not pool.asks("g1", generation, "v1", "", 1.0)
    assert pool.stages() == {"g1": "ready"}


def test_what_a_hybrid_says_under_an_earlier_join_is_refused() -> None:
    pool = HybridMembership()
    first = pool.join("g1", 0.0)
    second = pool.join("g1", 1.0)
    with pytest.raises(Fenced):
        pool.asks("g1", first, "v1", "v1", 2.0)
    with pytest.raises(Fenced):
        pool.gives("g1", first, 2.0)
    assert not pool.leave("g1", first)
    assert pool.asks("g1", second, "v1", "v1", 2.0)
    assert pool.leave("g1", second)
    with pytest.raises(Fenced):
        pool.gives("g1", second, 3.0)


def test_a_hybrid_that_is_silent_for_long_has_failed() -> None:
    pool = HybridMembership(silent_s=10.0)
    generation = pool.join("g1", 0.0)
    pool.join("g2", 5.0)
    assert pool.silent(9.0) == []
    assert pool.silent(12.0) == ["g1"]
    assert pool.stages() == {"g2": "requested"}
    with pytest.raises(Fenced):
        pool.gives("g1", generation, 13.0)


actions = st.tuples(
    st.sampled_from(["join", "ask", "give", "leave", "wait"]),
    st.sampled_from(["g1", "g2"]),
    st.integers(0, 6),
)


@given(st.lists(actions, max_size=40))
def test_at_most_the_last_join_of_a_gang_counts(history: list[tuple[str, str, int]]) -> None:
    pool = HybridMembership(silent_s=3.0)
    live: dict[str, tuple[int, float]] = {}
    now, joins = 0.0, 0
    for action, gang, number in history:
        if action == "join":
            joins += 1
            assert pool.join(gang, now) == joins
            live[gang] = joins, now
        elif action == "wait":
            now += number
            failed = {g for g, (_, heard) in live.items() if now - heard > 3.0}
            assert set(pool.silent(now)) == failed
            live = {g: found for g, found in live.items() if g not in failed}
        elif action == "leave":
            ends = gang in live and live[gang][0] == number
            assert pool.leave(gang, number) == ends
            if ends:
                del live[gang]
        elif gang in live and live[gang][0] == number:
            if action == "ask":
                assert pool.asks(gang, number, "v", "v", now)
            else:
                pool.gives(gang, number, now)
            live[gang] = number, now
        else:
            with pytest.raises(Fenced):
                if action == "ask":
                    pool.asks(gang, number, "v", "v", now)
                else:
                    pool.gives(gang, number, now)
        assert set(pool.stages()) == set(live)
