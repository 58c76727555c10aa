"""Group commit: the tokens that all engines send within a few milliseconds are written as one
record, and count from then on.

A turn ends, and its trajectory wakes, once its last token is written. What comes for a request that
is over is dropped, from ledger and trajectory alike: neither ever holds a token that the other does
not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np

from meshrl.common.api.engine import Finish, Tokens
from meshrl.common.base.encoding.messages import Array
from meshrl.common.base.errors import BadMessage
from meshrl.common.base.experts import laid_out
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.telemetry.stopwatch import UNTIMED
from meshrl.common.records.token_record import TokenRows, some
from meshrl.services.rollout.record.staging import NOBODY, OpenRequest, Staging
from meshrl.services.rollout.trajectories.trajectory import Trajectory

WINDOW_S = 0.01  # half of what an engine gathers before it flushes; the first flush waits for none
BACKLOG_TOKENS = 1 << 20  # more than these are not taken in while the disk is full


class TokenWriter(Protocol):
    async def tokens(self, rows: TokenRows) -> None:
        """Writes tokens down; returns when they are."""


class GroupCommit:
    """Where a shard's requests get their numbers and its engines' flushes meet."""

    def __init__(self, mesh: Mesh, writer: TokenWriter) -> None:
        self._mesh, self._writer = mesh, writer
        self.sampled = 0  # tokens, evaluation's too
        self.recorded = 0  # of trajectories that are written down: evaluation's are not
        self._staging = Staging()
        self._timed: list[OpenRequest] = []  # whose first token is waited for by a stopwatch
        self._layers: list[list[Tokens]] = []  # the n-th flush of each engine since the last commit
        self._depth: dict[str, int] = {}  # engine -> its flushes in `_layers`
        self._backlog = 0
        self._committed_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def open(self, trajectory: Trajectory) -> OpenRequest:
        request = self._staging.open(trajectory, asyncio.get_running_loop().create_future())
        if trajectory.watch is not UNTIMED:
            self._timed.append(request)
        return request

    def forget(self, request: OpenRequest) -> bool:
        return self._staging.close(request.id) is not None

    def abort(self, engine: str, requests: Iterable[int]) -> None:
        """Ends requests of an engine that has gone, after what it had flushed."""
        ids = np.fromiter(requests, np.int64)
        none = np.zeros(0, np.int32)
        if len(ids):
            zeros = np.zeros(len(ids), np.int32)
            ends = np.full(len(ids), Finish.ABORTED, np.int8)
            floats = none.astype(np.float32)
            self._add(engine, Tokens(ids, zeros, none, floats, floats, none, ends, 0))

    async def put(self, engine: str, flush: Tokens) -> None:
        """Takes an engine's flush in; waits only while the writer cannot write. BadMessage when its
        columns do not fit: they would shift those of other engines.
        """
        n, total = len(flush.ids), int(flush.counts.sum())
        sizes = len(flush.counts) - n, len(flush.finish) - n
        lengths = len(flush.tokens), len(flush.logprobs), len(flush.versions)
        if any(sizes) or set(lengths) != {total} or (n and int(flush.counts.min()) < 0):
            raise BadMessage(f"a flush of {n} requests and {lengths} tokens", where=engine)
        codes = set(flush.finish.tolist())
        if not codes <= _CODES:
            raise BadMessage(f"a flush with finish codes {codes}", where=engine)
        experts = flush.experts
        if experts.dtype != np.int16 or experts.ndim != 2 or len(experts) not in (0, total):
            told = f"{experts.dtype}{list(experts.shape)}"
            raise BadMessage(f"a flush of {total} tokens, and experts {told}", where=engine)
        self._add(engine, flush)
        if self._backlog > BACKLOG_TOKENS:
            await self.settled()

    async def settled(self) -> None:
        """Returns when what has arrived is written down."""
        if self._task is not None:
            with self._mesh.wait("tokens to be written", on="disk"):
                await asyncio.wait([self._task])

    def _add(self, engine: str, flush: Tokens) -> None:
        depth = self._depth.get(engine, 0)
        self._depth[engine] = depth + 1
        if depth == len(self._layers):
            self._layers.append([])
        self._layers[depth].append(flush)
        self._backlog += len(flush.tokens)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="group commit")

    async def _run(self) -> None:
        clock = self._mesh.clock
        try:
            while self._layers:
                pause_s = self._committed_s + WINDOW_S - clock.monotonic()
                if pause_s > 0:
                    await clock.sleep(pause_s)
                self._committed_s = clock.monotonic()
                flushes = [flush for layer in self._layers for flush in layer]
                self._layers, self._depth, self._backlog = [], {}, 0
                await self._commit(flushes)
        except Exception as error:  # tokens that cannot be written would be waited for without end
            self._mesh.host.exit(70, f"{self._mesh.name} cannot write tokens: {error!r}", error)
        finally:
            self._task = None

    async def _commit(self, flushes: list[Tokens]) -> None:
        requests = np.concatenate([f.ids for f in flushes])
        finish = np.concatenate([f.finish for f in flushes])
        new = TokenRows(
            ids=requests,
            counts=_joined([f.counts for f in flushes], np.int32),
            tokens=_joined([f.tokens for f in flushes], np.int32),
            logprobs=_joined([f.logprobs for f in flushes], np.float32),
            versions=_joined([f.versions for f in flushes], np.int32),
            experts=laid_out((f.experts, len(f.tokens)) for f in flushes),
        )
        rows = self._staging.rows_of(requests)
        wanted = (rows != NOBODY) & (new.counts > 0) & self._staging.recorded(rows)
        if wanted.any():  # goes to the ledger, under the trajectories' numbers
            chosen = new if wanted.all() else some(new, wanted)
            ids = self._staging.trajectories(rows[wanted])
            await self._writer.tokens(replace(chosen, ids=ids))
            rows = self._staging.rows_of(requests)  # some may be over by now
        wanted = (rows != NOBODY) & (new.counts > 0)
        taken = new if wanted.all() else some(new, wanted)
        self.sampled += len(taken.tokens)
        self.recorded += int(new.counts[wanted & self._staging.recorded(rows)].sum())
        self._staging.add(rows[wanted], taken)
        if self._timed:
            self._timed = [request for request in self._timed if not _decodes(request)]
        over = (rows != NOBODY) & (finish != Finish.RUNNING)
        for number, code in zip(requests[over].tolist(), finish[over].tolist(), strict=True):
            request = self._staging.close(number)
            if request is not None and not request.done.done():
                request.done.set_result(code)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


def _decodes(request: OpenRequest) -> bool:
    """Whether a request waits for its first token no more; its stopwatch hears of that."""
    if not request.over:
        if request.waits:
            return False
        request.trajectory.watch.enter("decode")
    return True


def _joined(parts: list[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(parts, dtype=dtype, casting="same_kind")


_CODES = {Finish.RUNNING, Finish.STOP, Finish.LENGTH, Finish.ABORTED}  # that a flush may bring
