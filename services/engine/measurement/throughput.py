"""Measures tokens per second by batch size and context while an engine runs, and where their growth
with the batch flattens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshrl.common.api.engine import Finish
from meshrl.common.generation.contract import Flush, Request

WEIGHT = 0.1  # a new step's share in a size's mean: contexts grow, so old steps must fade
ENOUGH = 8  # steps of one size before it counts
GAIN = 0.1  # a size is on the plateau when no larger one brings more than this on top


class Throughput:
    """A running mean for each class of batch sizes (1, 2, 3, 4, 6, 8, 12, 16, 24, ...)."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._steps: dict[int, int] = {}
        self._by_context: dict[tuple[int, int], tuple[float, int]] = {}  # the mean, and its steps

    def stepped(self, batch: int, tokens: int, seconds: float, context: float = 0.0) -> None:
        """Takes in that one or more steps of `batch` requests with `context` tokens each brought
        `tokens` tokens.
        """
        if batch <= 0 or tokens <= 0 or seconds <= 0:
            return
        size, rate = size_class(batch), tokens / seconds
        mean = self._means.get(size, rate)
        self._means[size] = mean + WEIGHT * (rate - mean)
        self._steps[size] = self._steps.get(size, 0) + 1
        place = size, context_class(context)
        mean, steps = self._by_context.get(place, (rate, 0))
        self._by_context[place] = mean + WEIGHT * (rate - mean), steps + 1

    @property
    def table(self) -> dict[int, float]:
        """Tokens per second by batch size, of the sizes that were seen often enough."""
        return {n: self._means[n] for n in sorted(self._means) if self._steps[n] >= ENOUGH}

    @property
    def by_context(self) -> dict[str, float]:
        """Tokens per second by `BATCHxCONTEXT`, the least of each class, of those that were seen
        often enough.
        """
        found = sorted(self._by_context.items())
        return {f"{b}x{c}": round(rate, 1) for (b, c), (rate, steps) in found if steps >= ENOUGH}

    @property
    def plateau(self) -> int:
        """The smallest batch size that is within GAIN of the best; 0 while too little is known.

        The largest size seen is no plateau: throughput may still grow beyond it.
        """
        table = self.table
        if len(table) < 2:
            return 0
        best = max(table.values())
        smallest = next(n for n, rate in table.items() if rate * (1 + GAIN) >= best)
        return smallest if smallest < max(table) else 0

    @property
    def most(self) -> float:
        """Tokens per second that no batch exceeds; 0 while it is not known."""
        return max(self.table.values()) if self.plateau else 0.0


class Contexts:
    """Lengths of the contexts of all requests that are in work, those that wait among them."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}  # tokens by request
        self.tokens = 0  # of all together

    def submitted(self, requests: Sequence[Request]) -> None:
        """The engine has taken these; one that it has already is left alone."""
        for request in requests:
            if request.id not in self._lengths:
                self._lengths[request.id] = len(request.tokens)
                self.tokens += len(request.tokens)

    def flushed(self, flush: Flush) -> None:
        """Takes in tokens that have come, and the ends of requests with them."""
        lengths = self._lengths
        for id, count in zip(flush.ids.tolist(), flush.counts.tolist(), strict=True):
            if id in lengths:
                lengths[id] += count
                self.tokens += count
        for id in flush.ids[np.asarray(flush.finish) != Finish.RUNNING].tolist():
            self.tokens -= lengths.pop(id, 0)

    @property
    def mean(self) -> float:
        """Tokens of a request; 0: there is none."""
        return self.tokens / len(self._lengths) if self._lengths else 0.0


def size_class(batch: int) -> int:
    """The largest of 1, 2, 3, 4, 6, 8, 12, ... that is not above `batch`."""
    power = 1 << (batch.bit_length() - 1)
    return power * 3 // 2 if power > 1 and batch >= power * 3 // 2 else power


def context_class(tokens: float) -> int:
    """The largest power of two from 32 on that is not above so many tokens; 0 below."""
    return 1 << (int(tokens).bit_length() - 1) if tokens >= 32 else 0
