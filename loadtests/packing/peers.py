"""How others put sequences into bins and bins into rounds, for comparison; each gives rounds of
lists of sequences, of at most `budget` tokens a bin.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import cycle
from typing import NamedTuple

from meshrl.kernels.cost import BinCost
from meshrl.kernels.packing import Round

Lengths = list[int]
Peer = Callable[[Lengths, int, int, BinCost], list[Round]]


class Part(NamedTuple):
    """One bin of a partial partition: a single sequence, or two parts that were merged."""

    cost: float
    sequence: int  # -1 if merged
    halves: tuple[Part, Part] | None


def padding(lengths: Lengths, budget: int, ranks: int, cost: BinCost) -> list[Round]:
    """Batches of equal count in the order of arrival, as many as fit if all were the longest."""
    count = max(1, budget // max(lengths))
    batches = [list(range(i, min(i + count, len(lengths)))) for i in range(0, len(lengths), count)]
    return _rounds(batches, ranks)


def first_fit(lengths: Lengths, budget: int, ranks: int, cost: BinCost) -> list[Round]:
    """In the order of arrival, each into the first bin that has room."""
    bins: list[list[int]] = []
    filled: list[int] = []
    for i, length in enumerate(lengths):
        for at, tokens in enumerate(filled):
            if tokens + length <= budget:
                bins[at].append(i)
                filled[at] += length
                break
        else:
            bins.append([i])
            filled.append(length)
    return _rounds(bins, ranks)


def sort_and_snake(lengths: Lengths, budget: int, ranks: int, cost: BinCost) -> list[Round]:
    """Longest first, dealt to the bins forth and back; of as few bins as that fits."""

    def dealt(count: int) -> list[list[int]]:
        bins: list[list[int]] = [[] for _ in range(count)]
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        for i, bin in zip(order, cycle([*bins, *reversed(bins)]), strict=False):
            bin.append(i)
        return bins

    return _rounds(_fewest(dealt, lengths, budget, ranks), ranks)


def karmarkar_karp(lengths: Lengths, budget: int, ranks: int, cost: BinCost) -> list[Round]:
    """The largest differencing method (Karmarkar, Karp 1982) on costs, of as few bins as that fits;
    bins of similar cost share a round. verl balances its micro-batches so.
    """
    costs = [cost.sequence(length) for length in lengths]

    def partitioned(count: int) -> list[list[int]]:
        return _differenced(costs, count)

    bins = _fewest(partitioned, lengths, budget, ranks)
    bins.sort(key=lambda bin: -sum(costs[i] for i in bin))
    return _rounds(bins, ranks)


PEERS: dict[str, Peer] = {
    "padding": padding,
    "first_fit": first_fit,
    "sort_and_snake": sort_and_snake,
    "karmarkar_karp": karmarkar_karp,
}


def _differenced(costs: list[float], count: int) -> list[list[int]]:
    """Always merges the two partial partitions that are least even, the heaviest part of one with
    the lightest of the other. Empty parts are left out.
    """
    heap = [(-c, i, [Part(c, i, None)]) for i, c in enumerate(costs)]
    heapify(heap)
    while len(heap) > 1:
        _, number, parts = heappop(heap)
        _, _, others = heappop(heap)
        both = max(0, len(parts) + len(others) - count)  # those that meet
        alone, meeting = parts[: len(parts) - both], parts[len(parts) - both :]
        merged = alone + others[: len(others) - both]
        for a, b in zip(meeting, reversed(others[len(others) - both :]), strict=True):
            merged.append(Part(a.cost + b.cost, -1, (a, b)))
        merged.sort(key=lambda part: -part.cost)
        least = merged[-1].cost if len(merged) == count else 0.0
        heappush(heap, (least - merged[0].cost, number, merged))
    return [_leaves(part) for part in heap[0][2]] if heap else []


def _leaves(part: Part) -> list[int]:
    found, left = [], [part]
    while left:
        _, sequence, halves = left.pop()
        if halves is not None:
            left += halves
        elif sequence >= 0:
            found.append(sequence)
    return found


def _fewest(
    split: Callable[[int], list[list[int]]], lengths: Lengths, budget: int, ranks: int
) -> list[list[int]]:
    """A split into a multiple of `ranks` bins, the fewest (to one in a hundred) that all fit."""
    count = -(-sum(lengths) // budget)
    while True:
        count = -(-count // ranks) * ranks
        bins = split(count)
        if all(sum(lengths[i] for i in bin) <= budget or len(bin) == 1 for bin in bins):
            return bins
        count += max(ranks, count // 100)


def _rounds(bins: list[list[int]], ranks: int) -> list[Round]:
    bins = bins + [[] for _ in range(-len(bins) % ranks)]
    return [bins[i : i + ranks] for i in range(0, len(bins), ranks)]
