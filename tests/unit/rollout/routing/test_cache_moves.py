"""Moving or computing again: by what was measured, as soon as something was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.routing.cache_moves import (
    AGAIN,
    ENOUGH,
    PROBES,
    RECOMPUTED,
    RECOMPUTED_ACROSS,
    REMEMBERED,
    MoveCosts,
    cheaper,
)

BYTES = 1000  # of a token
sizes = st.integers(1, 10**10)
durations = st.floats(1e-6, 1e4)
moves = st.lists(st.tuples(sizes, durations), max_size=40)
tokens = st.integers(0, 200_000)


def costs(
    rate: float = 1e4, past: list[tuple[int, float]] | None = None, across: bool = False
) -> MoveCosts:
    made = MoveCosts(across)
    made.published({"cache_bytes_per_token": BYTES, "prefill_tokens_per_s": rate})
    for size, seconds in past or []:
        made.moved(size, seconds)
    return made


def line(latency: float, per_byte: float, *counts: int) -> list[tuple[int, float]]:
    """Moves of so many tokens that took exactly that."""
    return [(n * BYTES, latency + n * BYTES * per_byte) for n in counts]


@given(moves, st.floats(0, 1e6), tokens, tokens, st.booleans())
def test_it_moves_iff_that_takes_no_longer(past, rate, cached, known, across) -> None:  # type: ignore[no-untyped-def]
    made = costs(rate, past, across)
    choice = cheaper(cached, known, made)
    if cached == 0:
        assert choice.answer == "recompute"
    elif rate == 0 or len(past) < ENOUGH:
        limit = RECOMPUTED_ACROSS if across else RECOMPUTED
        assert (choice.answer == "move") == (known > limit)
    else:
        move_s = made.move_s(cached)
        assert move_s is not None and move_s >= 0
        assert (choice.answer == "move") == (move_s <= min(cached, known) / rate)
    assert choice.reason


@given(moves.filter(lambda past: len(past) >= ENOUGH), tokens, st.integers(0, 10**5))
def test_more_never_takes_less(past, count, more) -> None:  # type: ignore[no-untyped-def]
    made = costs(past=past)
    assert made.move_s(count) <= made.move_s(count + more)


@given(
    st.floats(0.001, 1),
    st.floats(1e-11, 1e-6),
    st.lists(st.integers(1, 16).map(lambda n: 2**n), min_size=3, max_size=12, unique=True),
    tokens,
)
def test_a_latency_and_a_rate_are_found(latency, per_byte, counts, count) -> None:  # type: ignore[no-untyped-def]
    made = costs(past=line(latency, per_byte, *counts))
    expected = latency + count * BYTES * per_byte
    assert made.move_s(count) == pytest.approx(expected, rel=1e-3)


@given(st.integers(0, 7), st.floats(0, 1e3))
def test_a_move_that_was_stalled_changes_little(which, factor) -> None:  # type: ignore[no-untyped-def]
    past = line(0.02, 1e-9, 100, 300, 1000, 3000, 10_000, 20_000, 40_000, 80_000)
    size, seconds = past[which]
    past[which] = (size, seconds * max(factor, 1e-3))
    for count in (100, 5000, 40_000):
        expected = 0.02 + count * BYTES * 1e-9
        assert costs(past=past).move_s(count) == pytest.approx(expected, rel=0.05)


def test_moves_of_one_size_say_little_of_others() -> None:
    made = costs(past=line(0.03, 0, 1000, 1000, 1001, 1002))
    assert made.move_s(10) == pytest.approx(0.03), "it may be all latency"
    assert made.move_s(100_000) == pytest.approx(3.0, rel=0.01), "it may be all bytes"


def test_old_moves_are_forgotten() -> None:
    made = costs(past=line(5.0, 1e-6, *range(100, 3000, 100)))
    for past in line(0.01, 1e-9, *range(100, 100 + 100 * REMEMBERED, 100)):
        made.moved(*past)
    assert made.move_s(1000) == pytest.approx(0.011)


def test_what_came_without_bytes_or_time_tells_nothing() -> None:
    made = costs()
    for past in [(0, 1.0), (100, 0.0)] * ENOUGH:
        made.moved(*past)
    assert made.move_s(5) is None


def test_an_engine_that_takes_nothing_over_computes() -> None:
    made = costs(past=line(0.0, 1e-12, 1, 10, 100))
    made.published({"version": 3})
    assert cheaper(10_000, 10_000, made).answer == "recompute"
    assert made.choose(10_000, 10_000).answer == "recompute"


def test_only_what_is_cached_is_saved() -> None:
    made = costs(rate=1e4, past=line(0.5, 0, 10, 100, 1000))
    assert cheaper(6000, 9000, made).answer == "move"
    assert cheaper(4000, 90_000, made).answer == "recompute"
    assert cheaper(90_000, 4000, made).answer == "recompute", "the rest of it serves nobody"


def test_what_was_too_slow_for_long_is_tried_again() -> None:
    made = costs(past=line(100.0, 0, 10, 100, 1000))
    answers = [made.choose(8000, 8000).answer for _ in range(2 * AGAIN)]
    assert answers.count("move") == 2 and answers[AGAIN - 1] == "move"
    assert "anew" in [made.choose(8000, 8000) for _ in range(AGAIN)][-1].reason
    for past in line(0.001, 0, *range(10, 170, 10)):
        made.moved(*past)
    assert made.choose(8000, 8000).answer == "move"


def test_short_contexts_are_not_tried_again() -> None:
    made = costs(past=line(100.0, 0, 10, 100, 1000))
    assert {made.choose(300, 300).answer for _ in range(3 * AGAIN)} == {"recompute"}


def test_the_first_few_move_to_be_measured_and_no_more_if_that_fails() -> None:
    fresh = MoveCosts()
    fresh.published({"cache_bytes_per_token": 1000, "prefill_tokens_per_s": 100.0})
    answers = [fresh.choose(300, 300) for _ in range(2 * PROBES)]
    assert [a.answer for a in answers] == ["move"] * PROBES + ["recompute"] * PROBES
    assert "to measure it" in answers[0].reason
    for size in (100_000, 200_000, 300_000):
        fresh.moved(size, size / 1e6)
    assert fresh.choose(300, 300).answer == "move"  # 0.3 s beside 3 s
