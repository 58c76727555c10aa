"""Deltas are from what most hosts hold, and from an anchor for those behind."""

from __future__ import annotations

import itertools

from meshrl.common.api.transfer.deltas import Base
from meshrl.services.weights.deltas import MOST_BASES, VersionHolder, bases


def version(number: int, lineage: int = 0) -> Base:
    return Base(lineage, number, f"{lineage}-{number}")


def held(*numbers: int, anchor: int | None = None) -> list[VersionHolder]:
    mark = None if anchor is None else version(anchor)
    return [VersionHolder(0.0, version(number), mark) for number in numbers]


def test_nobody_receives() -> None:
    assert bases([], 16) == []


def test_all_have_the_last_one() -> None:
    assert bases(held(7, 7, 7), 16) == [version(7)]


def test_most_have_the_last_one() -> None:
    assert bases(held(7, 7, 6), 0) == [version(7)]
    assert bases(held(7, 7) + held(5, 6, anchor=4), 4) == [version(7), version(4)]
    assert bases(held(7, 7, 6, 6, 5), 4) == [version(7), version(6)]  # who has no anchor yet


def test_of_as_many_the_newest_is_first() -> None:
    assert bases(held(6, 7), 16)[0] == version(7)
    newer = VersionHolder(0.0, version(2, lineage=1))
    assert bases([*held(7), newer], 16)[0] == version(2, lineage=1)


def test_whatever_hosts_hold_few_are_made_and_the_commonest_is_among_them() -> None:
    for numbers in itertools.product(range(4), repeat=4):
        for anchors in (0, 2):
            found = bases(held(*numbers, anchor=0), anchors)
            assert 1 <= len(found) <= MOST_BASES and len(set(map(repr, found))) == len(found)
            most = max(numbers.count(number) for number in numbers)
            assert numbers.count(found[0].version) == most
