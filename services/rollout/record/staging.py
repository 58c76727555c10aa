"""Staging of written tokens of running requests, in arrays with one row per request. Adding the
flushes of many engines needs no Python code per request.

A row is moved to the columns of its trajectory's buffer when it is full, when its request is
closed, and when the trajectory is read.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshrl.common.base.errors import Overloaded
from meshrl.common.base.expert_routing import NO_EXPERTS, UNKNOWN_EXPERT
from meshrl.common.records.token_records import TokenRows, select_rows
from meshrl.services.rollout.trajectories.trajectory import Trajectory

ROW_BITS = 20  # low bits of a request's number: its row; above them: uses of the row
ROW_TOKENS = 128  # tokens of a row before it is moved
INITIAL_ROWS = 64
NO_REQUEST = -1  # request of a free row
_ROW = (1 << ROW_BITS) - 1


@dataclass(slots=True, eq=False)
class OpenRequest:
    """Request for a turn of a trajectory, running at an engine."""

    id: int
    trajectory: Trajectory
    done: asyncio.Future[int]  # its finish code, once all its tokens are written
    start_length: int  # the trajectory's length at its creation
    row: int
    staging: Staging

    @property
    def is_closed(self) -> bool:
        """True if it accepts no more tokens."""
        return not self.staging.is_open(self)

    @property
    def is_waiting(self) -> bool:
        """True if it has no token yet."""
        return self.trajectory.length == self.start_length

    @property
    def staged_tokens(self) -> int:
        return self.staging.count_staged(self.row)

    def unstage(self) -> None:
        self.staging.unstage(self.row)


class Staging:
    """Rows of running requests. A request's number is used once."""

    def __init__(self) -> None:
        self._request_ids = np.full(0, NO_REQUEST, np.int64)
        self._trajectory_ids = np.zeros(0, np.int64)
        self._recorded = np.zeros(0, bool)
        self._used_tokens = np.zeros(0, np.int64)
        self._tokens = np.zeros(0, np.int32)  # rows one after the other
        self._logprobs = np.zeros(0, np.float32)
        self._versions = np.zeros(0, np.int32)
        self._experts = NO_EXPERTS  # as long as the others once experts are recorded
        self._requests: list[OpenRequest | None] = []
        self._free_rows: list[int] = []
        self._opened_count = 0
        self._grow()

    def open(self, trajectory: Trajectory, done: asyncio.Future[int]) -> OpenRequest:
        """Open a request for the tokens of `trajectory`, which must not have another open
        request.
        """
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self._opened_count += 1
        number = self._opened_count << ROW_BITS | row
        request = OpenRequest(number, trajectory, done, trajectory.length, row, self)
        self._request_ids[row], self._trajectory_ids[row] = number, trajectory.id
        self._recorded[row], self._used_tokens[row] = trajectory.is_recorded, 0
        self._requests[row] = request
        trajectory.set_staged_row(request)
        return request

    def close(self, number: int) -> OpenRequest | None:
        """Close the request of that number and move its tokens to its trajectory; return None if it
        was closed.
        """
        row = number & _ROW
        if row >= len(self._requests) or self._request_ids[row] != number:
            return None
        request = self._requests[row]
        assert request is not None
        request.trajectory.set_staged_row(None)
        self._requests[row] = None
        self._request_ids[row] = NO_REQUEST
        self._free_rows.append(row)
        return request

    def is_open(self, request: OpenRequest) -> bool:
        return self._requests[request.row] is request

    @property
    def open_count(self) -> int:
        return len(self._requests) - len(self._free_rows)

    def _grow(self) -> None:
        rows = len(self._requests)
        more = max(INITIAL_ROWS, rows)
        if rows + more > _ROW:
            raise Overloaded(f"{rows} requests are in flight", where="rollout shard")
        self._request_ids = np.append(self._request_ids, np.full(more, NO_REQUEST, np.int64))
        self._trajectory_ids = np.append(self._trajectory_ids, np.zeros(more, np.int64))
        self._recorded = np.append(self._recorded, np.zeros(more, bool))
        self._used_tokens = np.append(self._used_tokens, np.zeros(more, np.int64))
        tokens = np.zeros(more * ROW_TOKENS, np.int32)
        self._tokens = np.append(self._tokens, tokens)
        self._logprobs = np.append(self._logprobs, tokens.astype(np.float32))
        self._versions = np.append(self._versions, tokens)
        if self._experts.shape[1]:
            self._widen(self._experts.shape[1])
        self._requests += [None] * more
        self._free_rows += range(rows + more - 1, rows - 1, -1)

    def _widen(self, width: int) -> None:
        """Widen the expert columns; unwritten entries are never read."""
        before, self._experts = self._experts, np.empty((len(self._tokens), width), np.int16)
        if before.shape[1]:
            self._experts[: len(before)] = before
        else:
            self._experts[:] = UNKNOWN_EXPERT

    def find_rows(self, requests: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each request; NO_REQUEST if it is closed."""
        rows = requests & _ROW
        known = self._request_ids[np.minimum(rows, len(self._requests) - 1)] == requests
        return rows if known.all() else np.where(known, rows, NO_REQUEST)

    def get_trajectory_ids(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._trajectory_ids[rows]

    def get_recorded(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._recorded[rows]

    def add_tokens(self, rows: NDArray[np.int64], new: TokenRows) -> None:
        """Add `new` tokens: row i belongs to `rows[i]`, and repeated rows are added in order."""
        while len(rows):
            mark = np.arange(len(rows))
            place = np.zeros(int(rows.max()) + 1, np.int64)
            place[rows[::-1]] = mark[::-1]  # where rows repeat, the first counts
            first = place[rows] == mark
            if first.all():
                return self._add_distinct(rows, new)
            self._add_distinct(rows[first], select_rows(new, first))
            rows, new = rows[~first], select_rows(new, ~first)

    def _add_distinct(self, rows: NDArray[np.int64], new: TokenRows) -> None:
        for row in rows[self._used_tokens[rows] + new.counts > ROW_TOKENS].tolist():
            self.unstage(row)
        large = new.counts > ROW_TOKENS
        if large.any():
            ends = np.cumsum(new.counts)
            for i in np.flatnonzero(large).tolist():
                part = slice(int(ends[i] - new.counts[i]), int(ends[i]))
                request = self._requests[int(rows[i])]
                assert request is not None
                request.trajectory.append_sampled(*new.slice_token_columns(part))
            rows, new = rows[~large], select_rows(new, ~large)
        counts = new.counts
        used = self._used_tokens[rows]
        start = rows * ROW_TOKENS + used - (np.cumsum(counts) - counts)
        at = np.repeat(start, counts) + np.arange(len(new.tokens))
        self._tokens[at] = new.tokens
        self._logprobs[at] = new.logprobs
        self._versions[at] = new.versions
        width = new.expert_ids.shape[1]
        if width and not self._experts.shape[1]:
            self._widen(width)
        if self._experts.shape[1]:
            self._experts[at] = new.expert_ids if width else UNKNOWN_EXPERT
        self._used_tokens[rows] = used + counts

    # -- access by a trajectory's buffer ---------------------------------------------------------

    def count_staged(self, row: int) -> int:
        return int(self._used_tokens[row])

    def unstage(self, row: int) -> None:
        used = int(self._used_tokens[row])
        request = self._requests[row]
        if not used or request is None:
            return
        part = slice(row * ROW_TOKENS, row * ROW_TOKENS + used)
        self._used_tokens[row] = 0
        columns = self._tokens[part], self._logprobs[part], self._versions[part]
        request.trajectory.append_sampled(*columns, self._experts[part])
