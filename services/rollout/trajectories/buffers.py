"""The tokens of one trajectory, in columns that grow. The buffer is their only owner: a trajectory
is a view of it, and staging holds its newest ones for a while.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.base.experts import NO_EXPERTS, UNKNOWN

NOT_SAMPLED = -1  # weight version of a token that the model did not sample
FIRST_TOKENS = 64  # room that a buffer begins with

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
ExpertIds = NDArray[np.int16]


class StagedRow(Protocol):
    """Where the newest tokens lie while a request is out; see `staging.py`."""

    @property
    def staged(self) -> int:
        """Tokens that are there."""

    def settle(self) -> None:
        """Moves them into the buffer's own columns."""


class TokenBuffer:
    """Ids, log-probabilities, weight versions and experts, one entry of each a token."""

    __slots__ = ("_experts", "_length", "_logprobs", "_row", "_tokens", "_versions")

    def __init__(self) -> None:
        self._row: StagedRow | None = None  # while a request is out
        self._length = 0  # tokens in the columns
        self._tokens = np.zeros(FIRST_TOKENS, np.int32)
        self._logprobs = np.zeros(FIRST_TOKENS, np.float32)
        self._versions = np.full(FIRST_TOKENS, NOT_SAMPLED, np.int32)
        self._experts = NO_EXPERTS  # beside the others, once there are some

    @property
    def length(self) -> int:
        """Tokens that count, the staged ones too."""
        if self._row is None:
            return self._length
        return self._length + self._row.staged

    @property
    def tokens(self) -> Ints:
        """int32 [length]."""
        self._settle()
        return self._tokens[: self._length]

    @property
    def logprobs(self) -> Floats:
        """float32 [length]; 0 where nothing was sampled."""
        self._settle()
        return self._logprobs[: self._length]

    @property
    def versions(self) -> Ints:
        """int32 [length], of the weights that sampled each token; NOT_SAMPLED elsewhere."""
        self._settle()
        return self._versions[: self._length]

    @property
    def experts(self) -> ExpertIds:
        """int16 [length, layers x k] as `common.base.experts` has them; NO_EXPERTS if none
        came."""
        self._settle()
        return self._experts[: self._length]

    def stage(self, row: StagedRow | None) -> None:
        """Where the newest tokens lie from now on; None: nowhere but here."""
        self._settle()
        self._row = row

    def sampled(
        self, tokens: Ints, logprobs: Floats, versions: Ints, experts: ExpertIds = NO_EXPERTS
    ) -> None:
        """Takes tokens of the model, [n] each, experts [n, layers x k] or NO_EXPERTS."""
        where = self._room(len(tokens))
        self._tokens[where] = tokens
        self._logprobs[where] = logprobs
        self._versions[where] = versions
        self._routed(where, experts)

    def appended(self, ids: list[int]) -> None:
        """Takes tokens that the model did not sample."""
        where = self._room(len(ids))
        self._tokens[where] = ids
        self._logprobs[where] = 0.0
        self._versions[where] = NOT_SAMPLED
        self._routed(where, NO_EXPERTS)

    def clear(self) -> None:
        """Drops all tokens."""
        self._settle()
        self._length = 0

    def _settle(self) -> None:
        if self._row is not None:
            self._row.settle()

    def _room(self, n: int) -> slice:
        end = self._length + n
        if end > len(self._tokens):
            self._grow(max(end, 2 * len(self._tokens)) - len(self._tokens))
        where = slice(self._length, end)
        self._length = end
        return where

    def _grow(self, extra: int) -> None:
        self._tokens = np.concatenate([self._tokens, np.zeros(extra, np.int32)])
        self._logprobs = np.concatenate([self._logprobs, np.zeros(extra, np.float32)])
        self._versions = np.concatenate([self._versions, np.full(extra, NOT_SAMPLED, np.int32)])
        if width := self._experts.shape[1]:
            unknown = np.full((extra, width), UNKNOWN, np.int16)
            self._experts = np.concatenate([self._experts, unknown])

    def _routed(self, where: slice, experts: ExpertIds) -> None:
        """Notes the experts of tokens that there is room for; NO_EXPERTS: unknown."""
        width = experts.shape[1]
        if width and not self._experts.shape[1]:
            self._experts = np.full((len(self._tokens), width), UNKNOWN, np.int16)
        if self._experts.shape[1]:
            self._experts[where] = experts if width else UNKNOWN
