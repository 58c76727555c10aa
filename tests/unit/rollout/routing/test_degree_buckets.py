"""Buckets that follow the engines that exist."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.services.rollout.routing.cmlfq import Scheduler
from meshrl.services.rollout.routing.degree_buckets import LEAST_PAST, MeasuredEngine, buckets_of
from meshrl.services.rollout.routing.lengths import LengthTrees, Past
from meshrl.services.rollout.routing.queues import LengthBucket, assign

LONGEST, BATCH = 4096, 16

engines = st.lists(
    st.builds(
        MeasuredEngine,
        degree=st.sampled_from([1, 2, 4, 8]),
        tokens=st.integers(0, 10_000),
        busy_s=st.floats(0.0, 100.0),
    ),
    min_size=1,
    max_size=8,
)


@given(engines, st.lists(st.integers(1, LONGEST), max_size=60))
def test_each_degree_has_a_bucket_and_its_engines_are_assigned_to_it(
    there: list[MeasuredEngine], past: list[int]
) -> None:
    buckets = buckets_of(there, past, LONGEST, BATCH)
    degrees = sorted({engine.degree for engine in there})
    bounds = [bucket.max_tokens for bucket in buckets]
    assert len(buckets) == len(degrees) and bounds == sorted(set(bounds))
    assert bounds[-1] >= LONGEST and {bucket.batch for bucket in buckets} == {BATCH}
    named = {f"engine/{number}": engine.degree for number, engine in enumerate(there)}
    places = assign(named, buckets)
    assert {named[name]: place for name, place in places.items()} == {
        degree: place for place, degree in enumerate(degrees)
    }


def test_bounds_divide_the_tokens_as_the_measured_rates_are() -> None:
    past = [100] * 90 + [1000] * 9
    equal = [MeasuredEngine(1, 9000, 90.0), MeasuredEngine(4, 9000, 90.0)]
    assert buckets_of(equal, past, LONGEST, BATCH)[0].max_tokens == 100, "half of all tokens"
    slow = [MeasuredEngine(1, 9000, 9.0), MeasuredEngine(4, 9000, 90.0)]
    assert buckets_of(slow, past, LONGEST, BATCH)[0].max_tokens == 1000, "ten elevenths"
    unknown = [MeasuredEngine(1), MeasuredEngine(4)]
    assert buckets_of(unknown, past, LONGEST, BATCH)[0].max_tokens == 100, "by workers: a fifth"


TINY, HUGE = 5e-324, sys.float_info.max


@pytest.mark.parametrize(
    ("small_s", "large_s", "bound"),
    [
        (1.1e-308, 1.1e-308, LONGEST // 2),
        (TINY, 1.0, LONGEST - 1),
        (1.0, TINY, 1),
        (HUGE, HUGE, LONGEST // 2),
        (HUGE, 1.0, 1),
        (TINY, HUGE, LONGEST - 1),
    ],
)
def test_bounds_follow_rates_beyond_the_range_of_floats(
    small_s: float, large_s: float, bound: int
) -> None:
    engines = [MeasuredEngine(1, 512, small_s), MeasuredEngine(2, 512, large_s)]
    buckets = buckets_of(engines, [], LONGEST, BATCH)
    assert [bucket.max_tokens for bucket in buckets] == [bound, LONGEST]
    again = buckets_of([*engines, *engines], [], LONGEST, BATCH)
    assert [bucket.max_tokens for bucket in again] == [bound, LONGEST], "sums are no trouble either"


def test_one_engine_has_one_bucket_however_short_it_was_busy() -> None:
    [bucket] = buckets_of([MeasuredEngine(1, 512, 1.1e-308)], [], LONGEST, BATCH)
    assert bucket.max_tokens == LONGEST


def test_without_a_history_bounds_divide_the_longest_length() -> None:
    buckets = buckets_of(
        [MeasuredEngine(1), MeasuredEngine(1), MeasuredEngine(2)],
        [7] * (LEAST_PAST - 1),
        LONGEST,
        BATCH,
    )
    assert [bucket.max_tokens for bucket in buckets] == [LONGEST // 2, LONGEST]
    assert [bucket.share for bucket in buckets] == [2.0, 1.0]


def test_buckets_change_when_engines_come_or_go_and_not_when_they_get_faster() -> None:
    whole = [LengthBucket(LONGEST, BATCH)]
    past = [Past(0, (), 100)] * 30 + [Past(0, (), 1000)] * 30
    scheduler = Scheduler(whole, 1, LengthTrees(past), follows=True)
    small, large = MeasuredEngine(1, 5000, 50.0), MeasuredEngine(4, 5000, 25.0)
    assert scheduler.follow({"a": small})
    assert len(scheduler.buckets) == 1
    assert scheduler.follow({"a": small, "b": large})
    [short, long] = scheduler.buckets
    assert short.max_tokens < long.max_tokens == LONGEST
    assert not scheduler.follow({"a": MeasuredEngine(1, 9000, 9.0), "b": large})
    assert scheduler.buckets == [short, long]
    assert not scheduler.follow({}), "nobody is there: they may come back"
    assert not scheduler.follow({"b": large, "c": small}), "the same degrees: whose is whose stays"
    assert scheduler.follow({"c": small}) and len(scheduler.buckets) == 1


def test_buckets_of_a_job_file_stay_as_they_are() -> None:
    declared = [LengthBucket(100, 4), LengthBucket(1000, 8)]
    scheduler = Scheduler(declared, 1, LengthTrees())
    assert not scheduler.follow({"a": MeasuredEngine(1), "b": MeasuredEngine(4)})
    assert scheduler.buckets == declared
