"""A cache is sent after its session wherever something of it can come in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.api.stats import EngineStats
from meshrl.services.rollout.routing.cache_moves import (
    AGAIN,
    ENOUGH,
    REMEMBERED,
    STEP_TOKENS,
    MoveCosts,
    helpful,
)

durations = st.floats(1e-6, 1e4)


def costs(rate: float = 1e4, past: list[float] | None = None, size: int = 1000) -> MoveCosts:
    made = MoveCosts()
    made.published(EngineStats(cache_bytes_per_token=size, prefill_tokens_per_s=rate))
    for first_s in past or []:
        made.moved(first_s)
    return made


@given(st.floats(0, 1e6), st.lists(durations, max_size=40), st.integers(0, 200_000))
def test_it_is_sent_unless_all_is_computed_before_any_can_come(
    rate: float, past: list[float], tokens: int
) -> None:
    made = costs(rate, past)
    choice = helpful(tokens, made)
    if tokens <= STEP_TOKENS:
        assert choice.answer == "recompute"
    elif not rate or len(past) < ENOUGH:
        assert choice.answer == "move"
    else:
        assert made.first_s is not None
        assert (choice.answer == "move") == (tokens / rate > made.first_s)
    assert choice.reason


def test_an_engine_that_takes_nothing_over_is_sent_nothing() -> None:
    assert helpful(100_000, MoveCosts()).answer == "recompute"
    assert helpful(100_000, costs(size=0)).answer == "recompute"
    assert {costs(size=0).choose(100_000).answer for _ in range(2 * AGAIN)} == {"recompute"}


@pytest.mark.parametrize("stalled", [100.0, 1e4])
def test_a_move_that_was_stalled_changes_nothing(stalled: float) -> None:
    made = costs(past=[0.01] * 4 + [stalled])
    assert made.first_s == 0.01


def test_old_moves_are_forgotten_and_empty_ones_say_nothing() -> None:
    made = costs(past=[9.0] * REMEMBERED + [0.01] * REMEMBERED)
    assert made.first_s == 0.01
    made.moved(0.0)
    assert made.first_s == 0.01


def test_what_was_found_useless_is_measured_anew() -> None:
    made = costs(rate=1e6, past=[5.0] * ENOUGH)
    answers = [made.choose(6000).answer for _ in range(2 * AGAIN)]
    assert answers.count("move") == 2 and answers[AGAIN - 1] == "move"
    assert {made.choose(STEP_TOKENS).answer for _ in range(2 * AGAIN)} == {"recompute"}
