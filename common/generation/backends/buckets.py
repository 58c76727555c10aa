"""Decode buckets: batches of static shapes in which rows decode together.

No step so pays for a new shape, and short sequences do not pay for the context of long ones. A
bucket has a number of lanes and a context, both from a short list; a row runs in a bucket whose
context holds it. Rows in order of length are divided into buckets with the least total cost, by
dynamic programming over the few contexts that occur.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_CONTEXT_TOKENS = 256  # tokens of context; below it attention costs less than a launch
LAUNCH_COST = 8192  # fixed cost of a bucket, in tokens of context of one lane
LANE_COST = 512  # cost of a lane beside its context, in the same unit


@dataclass(frozen=True, order=True)
class GraphBucket:
    """Batch shape: `lanes` rows, each with up to `context` tokens."""

    lanes: int
    context: int  # tokens

    @property
    def cost(self) -> int:
        """Cost of a step of this bucket, in tokens of context of one lane."""
        return LAUNCH_COST + self.lanes * (LANE_COST + self.context)


class GraphBuckets:
    """Bucket shapes for up to `slots` rows of up to `max_length` tokens."""

    def __init__(self, slots: int, max_length: int) -> None:
        sizes = [1, 2, 4, *range(8, 64, 8), *range(64, slots + 32, 32)]
        self.lanes = [n for n in sizes if n < slots] + [next(n for n in sizes if n >= slots)]
        self.contexts = [MIN_CONTEXT_TOKENS]
        while self.contexts[-1] < max_length:
            self.contexts.append(self.contexts[-1] * 2)

    def find_smallest(self, rows: int, longest: int) -> GraphBucket:
        """Return the smallest bucket that holds `rows` rows of up to `longest` tokens."""
        lanes = next(n for n in self.lanes if n >= rows)
        return GraphBucket(lanes, next(c for c in self.contexts if c >= longest))

    def split(self, lengths: NDArray[np.int64]) -> list[tuple[GraphBucket, NDArray[np.int64]]]:
        """Divide rows into buckets; return each with the indices into `lengths`, shortest first."""
        order = np.argsort(lengths, kind="stable")
        cumulative_rows = np.searchsorted(lengths[order], self.contexts, side="right")
        # between rows of different contexts
        cuts = [0, *sorted(set(cumulative_rows.tolist()) - {0})]
        # (least cost, start of its last bucket), up to cut i
        best: list[tuple[int, int]] = [(0, 0)]
        for end in range(1, len(cuts)):
            longest = int(lengths[order[cuts[end] - 1]])
            best.append(
                min(
                    (best[i][0] + self.find_smallest(cuts[end] - cuts[i], longest).cost, i)
                    for i in range(end)
                )
            )
        groups = []
        end = len(cuts) - 1
        while end > 0:
            start = best[end][1]
            rows = order[cuts[start] : cuts[end]]
            groups.append((self.find_smallest(len(rows), int(lengths[rows].max())), np.sort(rows)))
            end = start
        return groups[::-1]
