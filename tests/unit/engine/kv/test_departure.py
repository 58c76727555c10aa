"""Order in which caches leave an engine whose host is about to end, against all other orders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from meshrl.services.engine.kv.departure import DepartingCache, order_departures

SECONDS = st.floats(0.001, 100.0)
CACHES = st.lists(st.tuples(SECONDS, SECONDS), max_size=5).map(
    lambda pairs: [DepartingCache(n, 100 + n, *pair) for n, pair in enumerate(pairs)]
)


def sum_saved(order: Sequence[DepartingCache], end_s: float) -> float:
    """Return the seconds that the caches have saved which arrived by then, also in part."""
    saved_s = 0.0
    for cache in order:
        share = min(1.0, max(0.0, end_s) / cache.transfer_s)
        saved_s, end_s = saved_s + share * cache.saved_s, end_s - cache.transfer_s
    return saved_s


@given(CACHES, st.floats(0.0, 300.0), st.floats(0.0, 1.0))
def test_no_order_saves_more_whenever_the_host_ends(
    caches: list[DepartingCache], left_s: float, share: float
) -> None:
    chosen, end_s = order_departures(caches, left_s), share * left_s
    best = max(sum_saved(order, end_s) for order in permutations(caches))
    assert sum_saved(chosen, end_s) >= best - 1e-9 * (1 + best)


@given(CACHES, st.floats(0.0, 300.0))
def test_only_caches_for_which_there_is_time_leave(
    caches: list[DepartingCache], left_s: float
) -> None:
    chosen = order_departures(caches, left_s)
    assert len(set(chosen)) == len(chosen) and set(chosen) <= set(caches)
    if chosen:  # each begins in time
        assert sum(cache.transfer_s for cache in chosen[:-1]) < left_s
    if len(chosen) < len(caches):  # and none was left out that had begun in time
        assert sum(cache.transfer_s for cache in chosen) >= left_s - 1e-9
    values = [cache.value for cache in chosen]
    assert values == sorted(values, reverse=True)
    assert all(cache.value <= min(values, default=0.0) for cache in set(caches) - set(chosen)) or (
        not chosen
    )
