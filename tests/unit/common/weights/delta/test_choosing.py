"""A chunk is made of a delta where that is sooner than pulling it."""

from __future__ import annotations

import pytest

from meshrl.common.weights.delta.choosing import delta_first, worth_waiting

MIB = 1 << 20
SLOW, FAST = 25e6, 5e9  # bytes a second: 200 Mbit/s, and more than a core applies


@pytest.mark.parametrize("rate", [1e5, SLOW, 3e8])
def test_on_a_slow_link_a_small_delta_is_sooner(rate: float) -> None:
    assert delta_first(MIB // 50, 4 * MIB, rate) and worth_waiting(rate)
    assert not delta_first(4 * MIB, 4 * MIB, rate)


def test_on_a_fast_one_the_chunk_itself_is() -> None:
    assert not delta_first(MIB // 50, 4 * MIB, FAST) and not worth_waiting(FAST)


def test_where_nobody_knows_how_fast_it_is_bytes_decide() -> None:
    assert delta_first(MIB, 4 * MIB, None) and not delta_first(4 * MIB - 1, 4 * MIB, None)
    assert worth_waiting(None)
