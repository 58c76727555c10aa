"""Decode batches are cut where it costs least, and every row runs once in a shape that holds it."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.generation.steps.buckets import GraphBuckets

SLOTS, LENGTH = 48, 5000
BUCKETS = GraphBuckets(SLOTS, LENGTH)
lengths_of = st.lists(st.integers(1, LENGTH), min_size=1, max_size=SLOTS)


def cheapest(lengths: list[int]) -> int:
    """The least cost of all ways to cut the sorted rows where they need another context."""
    ordered = sorted(lengths)
    contexts = [BUCKETS.fitting(1, length).context for length in ordered]
    borders = [i for i in range(1, len(ordered)) if contexts[i] != contexts[i - 1]]
    costs = []
    for cuts in range(len(borders) + 1):
        for places in itertools.combinations(borders, cuts):
            runs = itertools.pairwise([0, *places, len(ordered)])
            costs.append(sum(BUCKETS.fitting(b - a, ordered[b - 1]).cost for a, b in runs))
    return min(costs)


@given(lengths=lengths_of)
def test_every_row_is_in_one_bucket_that_holds_it(lengths: list[int]) -> None:
    groups = BUCKETS.split(np.array(lengths))
    rows = [int(row) for _, chosen in groups for row in chosen]
    assert sorted(rows) == list(range(len(lengths)))
    for bucket, chosen in groups:
        assert len(chosen) <= bucket.lanes
        assert max(lengths[row] for row in chosen) <= bucket.context


@given(lengths=lengths_of)
@settings(max_examples=60)
def test_no_other_cut_costs_less(lengths: list[int]) -> None:
    found = sum(bucket.cost for bucket, _ in BUCKETS.split(np.array(lengths)))
    assert found <= cheapest(lengths)


def test_one_long_row_does_not_make_the_short_ones_long() -> None:
    groups = GraphBuckets(64, 32768).split(np.array([32000] + [200] * 63))
    assert [(b.lanes, b.context, len(rows)) for b, rows in groups] == [
        (64, 256, 63),
        (1, 32768, 1),
    ]


def test_shapes_are_few() -> None:
    buckets = GraphBuckets(512, 32768)
    assert len(buckets.lanes) * len(buckets.contexts) < 250
    assert max(b / a for a, b in itertools.pairwise(buckets.lanes)) <= 2
