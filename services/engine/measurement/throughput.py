"""Throughput of a running engine in tokens per second by batch size and context."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshrl.common.api.engine import FinishReason
from meshrl.common.generation.engine_contract import EngineOutput, GenerationRequest

EWMA_WEIGHT = 0.1  # weight of a new step: contexts grow, so old steps must fade
MIN_STEPS = 8  # steps of one size before it counts
PLATEAU_GAIN = 0.1  # a size is on the plateau if no larger one gains more than this


class Throughput:
    """Running mean of the throughput by batch size class (1, 2, 3, 4, 6, 8, 12, 16, 24, ...)."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._steps: dict[int, int] = {}
        self._by_context: dict[tuple[int, int], tuple[float, int]] = {}  # mean and number of steps

    def add_steps(
        self, batch: int, tokens: int, seconds: float, context_tokens: float = 0.0
    ) -> None:
        """Add one or more steps of `batch` requests with `context_tokens` tokens each that sampled
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
        """Tokens per second by batch size, for sizes with enough measurements."""
        return {n: self._means[n] for n in sorted(self._means) if self._steps[n] >= MIN_STEPS}

    @property
    def tokens_per_s_by_context(self) -> dict[str, float]:
        """Tokens per second by `BATCHxCONTEXT`, the lower bound of each class, for those with
        enough measurements.
        """
        found = sorted(self._by_context.items())
        return {f"{b}x{c}": round(rate, 1) for (b, c), (rate, steps) in found if steps >= MIN_STEPS}

    @property
    def plateau_batch(self) -> int:
        """Smallest batch size within GAIN of the best throughput; 0 while too little is known.

        The largest measured size is no plateau, because throughput may still grow beyond it.
        """
        table = self.tokens_per_s_by_batch
        if len(table) < 2:
            return 0
        best = max(table.values())
        smallest = next(n for n, rate in table.items() if rate * (1 + PLATEAU_GAIN) >= best)
        return smallest if smallest < max(table) else 0

    @property
    def max_tokens_per_s(self) -> float:
        """Tokens per second that no batch exceeds; 0 while unknown."""
        return max(self.tokens_per_s_by_batch.values()) if self.plateau_batch else 0.0


class ContextLengths:
    """Context lengths of all requests in work, including waiting ones."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}  # tokens by request
        self._sessions: dict[int, int] = {}  # by request
        self.total_tokens = 0  # of all requests

    def add_requests(self, requests: Sequence[GenerationRequest]) -> None:
        """Add requests that the engine accepted; ignore one that is present already."""
        for request in requests:
            if request.id not in self._lengths:
                self._lengths[request.id] = len(request.tokens)
                self._sessions[request.id] = request.session
                self.total_tokens += len(request.tokens)

    def add_flush(self, flush: EngineOutput) -> None:
        """Add the tokens and finished requests of a flush."""
        lengths = self._lengths
        for id, count in zip(flush.ids.tolist(), flush.counts.tolist(), strict=True):
            if id in lengths:
                lengths[id] += count
                self.total_tokens += count
        for id in flush.ids[np.asarray(flush.finish_reasons) != FinishReason.RUNNING].tolist():
            self.total_tokens -= lengths.pop(id, 0)
            self._sessions.pop(id, None)

    def list_requests(self) -> dict[int, tuple[int, int]]:
        """Return session and tokens of each request. Safe to call on another thread."""
        lengths = dict(self._lengths)
        return {id: (s, lengths[id]) for id, s in dict(self._sessions).items() if id in lengths}

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a request; 0 if there is none."""
        return self.total_tokens / len(self._lengths) if self._lengths else 0.0


def size_class(batch: int) -> int:
    """Return the largest of 1, 2, 3, 4, 6, 8, 12, ... that is at most `batch`."""
    power = 1 << (batch.bit_length() - 1)
    return power * 3 // 2 if power > 1 and batch >= power * 3 // 2 else power


def context_class(tokens: float) -> int:
    """Return the largest power of two, at least 32, that is at most `tokens`; 0 below 32."""
    return 1 << (int(tokens).bit_length() - 1) if tokens >= 32 else 0
