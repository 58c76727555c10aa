"""How long the contexts of an engine's requests are, from what goes in and what comes out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.api.engine import Finish
from common.generation.contract import Flush, Request


class Contexts:
    """Of all requests that are in work, those that wait among them."""

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
        """These tokens have come, and some requests have ended with them."""
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
