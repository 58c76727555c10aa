"""Stages tokens that are written down while their requests still run, in one row of arrays per
request: taking in what many engines flushed costs no Python per request.

A row moves into the columns of its trajectory's buffer when it is full, when its request is over,
and when somebody reads the trajectory.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshrl.common.base.errors import Overloaded
from meshrl.common.base.experts import NO_EXPERTS, UNKNOWN
from meshrl.common.records.token_record import TokenRows, some
from meshrl.services.rollout.trajectories.trajectory import Trajectory

ROW_BITS = 20  # low bits of a request's number: its row; above them, earlier uses of the row
ROW_TOKENS = 128  # a row is moved once in so many tokens
FIRST_ROWS = 64
NOBODY = -1  # request of a row that is free
_ROW = (1 << ROW_BITS) - 1


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A turn of a trajectory that is out at an engine."""

    id: int
    trajectory: Trajectory
    done: asyncio.Future[int]  # its finish code, once every token of it is written down
    length: int  # the trajectory's length when it was made
    row: int
    staging: Staging

    @property
    def over(self) -> bool:
        """Nothing more is taken in for it."""
        return not self.staging.has(self)

    @property
    def waits(self) -> bool:
        """It has brought no token yet."""
        return self.trajectory.length == self.length

    @property
    def staged(self) -> int:
        return self.staging.used(self.row)

    def settle(self) -> None:
        self.staging.settle(self.row)


class Staging:
    """Rows of requests that are out. A request's number is used once."""

    def __init__(self) -> None:
        self._request = np.full(0, NOBODY, np.int64)
        self._trajectory = np.zeros(0, np.int64)
        self._recorded = np.zeros(0, bool)
        self._used = np.zeros(0, np.int64)
        self._tokens = np.zeros(0, np.int32)  # rows one after the other
        self._logprobs = np.zeros(0, np.float32)
        self._versions = np.zeros(0, np.int32)
        self._experts = NO_EXPERTS  # as long as the others once there are some
        self._of: list[OpenRequest | None] = []
        self._free: list[int] = []
        self._opened = 0
        self._grow()

    def open(self, trajectory: Trajectory, done: asyncio.Future[int]) -> OpenRequest:
        """A new request, whose tokens go to `trajectory`, which has no other one out."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._opened += 1
        number = self._opened << ROW_BITS | row
        request = OpenRequest(number, trajectory, done, trajectory.length, row, self)
        self._request[row], self._trajectory[row] = number, trajectory.id
        self._recorded[row], self._used[row] = trajectory.recorded, 0
        self._of[row] = request
        trajectory.stage(request)
        return request

    def close(self, number: int) -> OpenRequest | None:
        """The request of that number is over, and its tokens are in its trajectory's own columns;
        None if it was over already.
        """
        row = number & _ROW
        if row >= len(self._of) or self._request[row] != number:
            return None
        request = self._of[row]
        assert request is not None
        request.trajectory.stage(None)
        self._of[row] = None
        self._request[row] = NOBODY
        self._free.append(row)
        return request

    def has(self, request: OpenRequest) -> bool:
        return self._of[request.row] is request

    @property
    def out(self) -> int:
        return len(self._of) - len(self._free)

    def _grow(self) -> None:
        rows = len(self._of)
        more = max(FIRST_ROWS, rows)
        if rows + more > _ROW:
            raise Overloaded(f"{rows} requests are out", where="rollout shard")
        self._request = np.append(self._request, np.full(more, NOBODY, np.int64))
        self._trajectory = np.append(self._trajectory, np.zeros(more, np.int64))
        self._recorded = np.append(self._recorded, np.zeros(more, bool))
        self._used = np.append(self._used, np.zeros(more, np.int64))
        tokens = np.zeros(more * ROW_TOKENS, np.int32)
        self._tokens = np.append(self._tokens, tokens)
        self._logprobs = np.append(self._logprobs, tokens.astype(np.float32))
        self._versions = np.append(self._versions, tokens)
        if self._experts.shape[1]:
            self._widen(self._experts.shape[1])
        self._of += [None] * more
        self._free += range(rows + more - 1, rows - 1, -1)

    def _widen(self, width: int) -> None:
        """Room for so many experts of each token; what is written by none is read by none."""
        before, self._experts = self._experts, np.empty((len(self._tokens), width), np.int16)
        if before.shape[1]:
            self._experts[: len(before)] = before
        else:
            self._experts[:] = UNKNOWN

    def rows_of(self, requests: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each request; NOBODY where it is over."""
        rows = requests & _ROW
        known = self._request[np.minimum(rows, len(self._of) - 1)] == requests
        return rows if known.all() else np.where(known, rows, NOBODY)

    def trajectories(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._trajectory[rows]

    def recorded(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._recorded[rows]

    def add(self, rows: NDArray[np.int64], new: TokenRows) -> None:
        """Takes `new` (row i of it belongs to `rows[i]`; a row that comes twice is taken in
        order)."""
        while len(rows):
            mark = np.arange(len(rows))
            place = np.zeros(int(rows.max()) + 1, np.int64)
            place[rows[::-1]] = mark[::-1]  # where rows repeat, the first counts
            first = place[rows] == mark
            if first.all():
                return self._add(rows, new)
            self._add(rows[first], some(new, first))
            rows, new = rows[~first], some(new, ~first)

    def _add(self, rows: NDArray[np.int64], new: TokenRows) -> None:
        for row in rows[self._used[rows] + new.counts > ROW_TOKENS].tolist():
            self.settle(row)
        large = new.counts > ROW_TOKENS
        if large.any():
            ends = np.cumsum(new.counts)
            for i in np.flatnonzero(large).tolist():
                part = slice(int(ends[i] - new.counts[i]), int(ends[i]))
                request = self._of[int(rows[i])]
                assert request is not None
                request.trajectory.sampled(*new.columns(part))
            rows, new = rows[~large], some(new, ~large)
        counts = new.counts
        used = self._used[rows]
        start = rows * ROW_TOKENS + used - (np.cumsum(counts) - counts)
        at = np.repeat(start, counts) + np.arange(len(new.tokens))
        self._tokens[at] = new.tokens
        self._logprobs[at] = new.logprobs
        self._versions[at] = new.versions
        width = new.experts.shape[1]
        if width and not self._experts.shape[1]:
            self._widen(width)
        if self._experts.shape[1]:
            self._experts[at] = new.experts if width else UNKNOWN
        self._used[rows] = used + counts

    # -- what a trajectory's buffer asks -----------------------------------------------------------

    def used(self, row: int) -> int:
        return int(self._used[row])

    def settle(self, row: int) -> None:
        used = int(self._used[row])
        request = self._of[row]
        if not used or request is None:
            return
        part = slice(row * ROW_TOKENS, row * ROW_TOKENS + used)
        self._used[row] = 0
        columns = self._tokens[part], self._logprobs[part], self._versions[part]
        request.trajectory.sampled(*columns, self._experts[part])
