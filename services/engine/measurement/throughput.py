"""Measures tokens per second by batch size and context while an engine runs, and where their growth
with the batch flattens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshrl.common.api.engine import FinishReason
from meshrl.common.generation.engine_contract import EngineOutput, GenerationRequest

EWMA_WEIGHT = 0.1  # a new step's share in a size's mean: contexts grow, so old steps must fade
MIN_STEPS = 8  # steps of one size before it counts
PLATEAU_GAIN = 0.1  # a size is on the plateau when no larger one brings more than this on top


class Throughput:
    """A running mean for each class of batch sizes (1, 2, 3, 4, 6, 8, 12, 16, 24, ...)."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._steps: dict[int, int] = {}
        self._by_context: dict[tuple[int, int], tuple[float, int]] = {}  # the mean, and its steps

    def add_steps(
        self, batch: int, tokens: int, seconds: float, context_tokens: float = 0.0
    ) -> None:
        """Takes in that one or more steps of `batch` requests with `context` tokens each brought
        `tokens` tokens.
        """
        if batch <= 0 or tokens <= 0 or seconds <= 0:
            return
        size, rate = size_class(batch), tokens / seconds
        mean = self._means.get(size, rate)
        self._means[size] = mean + EWMA_WEIGHT * (rate - mean)
        self._steps[size] = self._steps.get(size, 0) + 1
        place = size, context_class(context_tokens)
        mean, steps = self._by_context.get(place, (rate, 0))
        self._by_context[place] = mean + EWMA_WEIGHT * (rate - mean), steps + 1

    @property
    def tokens_per_s_by_batch(self) -> dict[int, float]:
        """Tokens per second by batch size, of the sizes that were seen often enough."""
        return {n: self._means[n] for n in sorted(self._means) if self._steps[n] >= MIN_STEPS}

    @property
    def tokens_per_s_by_context(self) -> dict[str, float]:
        """Tokens per second by `BATCHxCONTEXT`, the least of each class, of those that were seen
        often enough.
        """
        found = sorted(self._by_context.items())
        return {f"{b}x{c}": round(rate, 1) for (b, c), (rate, steps) in found if steps >= MIN_STEPS}

    @property
    def plateau_batch(self) -> int:
        """The smallest batch size that is within GAIN of the best; 0 while too little is known.

        The largest size seen is no plateau: throughput may still grow beyond it.
        """
        table = self.tokens_per_s_by_batch
        if len(table) < 2:
            return 0
        best = max(table.values())
        smallest = next(n for n, rate in table.items() if rate * (1 + PLATEAU_GAIN) >= best)
        return smallest if smallest < max(table) else 0

    @property
    def max_tokens_per_s(self) -> float:
        """Tokens per second that no batch exceeds; 0 while it is not known."""
        return max(self.tokens_per_s_by_batch.values()) if self.plateau_batch else 0.0


class ContextLengths:
    """Lengths of the contexts of all requests that are in work, those that wait among them."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}  # tokens by request
        self.total_tokens = 0  # of all together

    def add_requests(self, requests: Sequence[GenerationRequest]) -> None:
        """The engine has taken these; one that it has already is left alone."""
        for request in requests:
            if request.id not in self._lengths:
                self._lengths[request.id] = len(request.tokens)
                self.total_tokens += len(request.tokens)

    def add_flush(self, flush: EngineOutput) -> None:
        """Takes in tokens that have come, and the ends of requests with them."""
        lengths = self._lengths
        for id, count in zip(flush.ids.tolist(), flush.counts.tolist(), strict=True):
            if id in lengths:
                lengths[id] += count
                self.total_tokens += count
        for id in flush.ids[np.asarray(flush.finish_reasons) != FinishReason.RUNNING].tolist():
            self.total_tokens -= lengths.pop(id, 0)

    @property
    def mean_tokens(self) -> float:
        """Tokens of a request; 0: there is none."""
        return self.total_tokens / len(self._lengths) if self._lengths else 0.0


def size_class(batch: int) -> int:
    """The largest of 1, 2, 3, 4, 6, 8, 12, ... that is not above `batch`."""
    power = 1 << (batch.bit_length() - 1)
    return power * 3 // 2 if power > 1 and batch >= power * 3 // 2 else power


def context_class(tokens: float) -> int:
    """The largest power of two from 32 on that is not above so many tokens; 0 below."""
    return 1 << (int(tokens).bit_length() - 1) if tokens >= 32 else 0
