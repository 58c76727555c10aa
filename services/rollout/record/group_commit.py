"""Group commit: tokens that all engines send within a few milliseconds are written as one record,
and count from then on.

A turn ends, and its trajectory continues, once its last token is written. Tokens for a closed
request are dropped from ledger and trajectory alike, so both always have the same tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np

from meshrl.common.api.engine import FinishReason, TokenBatch
from meshrl.common.base.encoding.messages import Array
from meshrl.common.base.errors import BadMessage
from meshrl.common.base.expert_routing import concatenate_experts
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.telemetry.stopwatch import NULL_STOPWATCH
from meshrl.common.records.token_records import TokenRows, select_rows
from meshrl.services.rollout.record.staging import NO_REQUEST, OpenRequest, Staging
from meshrl.services.rollout.trajectories.trajectory import Trajectory

WINDOW_S = 0.01  # half of an engine's flush interval; the first flush is not delayed
BACKLOG_TOKENS = 1 << 20  # limit of pending tokens while the disk is full


class TokenWriter(Protocol):
    async def write_tokens(self, rows: TokenRows) -> None:
        """Write tokens to the ledger; return when they are written."""


class GroupCommit:
    """Group commit of a shard: it numbers requests and merges the flushes of engines."""

    def __init__(self, mesh: Mesh, writer: TokenWriter) -> None:
        self._mesh, self._writer = mesh, writer
        self.sampled_tokens = 0  # tokens, including evaluation
        self.recorded_tokens = 0  # of recorded trajectories, without evaluation
        self._staging = Staging()
        self._timed_requests: list[OpenRequest] = []  # whose stopwatch waits for the first token
        self._layers: list[
            list[TokenBatch]
        ] = []  # the n-th flush of each engine since the last commit
        self._layer_depths: dict[str, int] = {}  # engine -> its flushes in `_layers`
        self._backlog_tokens = 0
        self._committed_at_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def open_request(self, trajectory: Trajectory) -> OpenRequest:
        request = self._staging.open(trajectory, asyncio.get_running_loop().create_future())
        if trajectory.stopwatch is not NULL_STOPWATCH:
            self._timed_requests.append(request)
        return request

    def close_request(self, request: OpenRequest) -> bool:
        return self._staging.close(request.id) is not None

    def abort(self, engine: str, requests: Iterable[int]) -> None:
        """Abort requests of a lost engine, after its flushed tokens."""
        ids = np.fromiter(requests, np.int64)
        none = np.zeros(0, np.int32)
        if len(ids):
            zeros = np.zeros(len(ids), np.int32)
            ends = np.full(len(ids), FinishReason.ABORTED, np.int8)
            floats = none.astype(np.float32)
            self._enqueue_flush(engine, TokenBatch(ids, zeros, none, floats, floats, none, ends, 0))

    async def add_flush(self, engine: str, flush: TokenBatch) -> None:
        """Add an engine's flush; wait only while the writer is blocked. Raise BadMessage if the
        lengths of its columns differ, as they would shift those of other engines.
        """
        n, total = len(flush.request_ids), int(flush.token_counts.sum())
        sizes = len(flush.token_counts) - n, len(flush.finish_reasons) - n
        lengths = len(flush.tokens), len(flush.logprobs), len(flush.token_versions)
        if any(sizes) or set(lengths) != {total} or (n and int(flush.token_counts.min()) < 0):
            raise BadMessage(f"flush of {n} requests has arrays of {lengths} tokens", where=engine)
        codes = set(flush.finish_reasons.tolist())
        if not codes <= _FINISH_CODES:
            raise BadMessage(f"flush has unknown finish codes in {codes}", where=engine)
        experts = flush.expert_ids
        if experts.dtype != np.int16 or experts.ndim != 2 or len(experts) not in (0, total):
            shape = f"{experts.dtype}{list(experts.shape)}"
            raise BadMessage(f"flush of {total} tokens has experts of {shape}", where=engine)
        self._enqueue_flush(engine, flush)
        if self._backlog_tokens > BACKLOG_TOKENS:
            await self.wait_until_written()

    async def wait_until_written(self) -> None:
        """Wait until all received tokens are written."""
        if self._task is not None:
            with self._mesh.wait("the write of received tokens", on="disk"):
                await asyncio.wait([self._task])

    def _enqueue_flush(self, engine: str, flush: TokenBatch) -> None:
        depth = self._layer_depths.get(engine, 0)
        self._layer_depths[engine] = depth + 1
        if depth == len(self._layers):
            self._layers.append([])
        self._layers[depth].append(flush)
        self._backlog_tokens += len(flush.tokens)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="group commit")

    async def _run(self) -> None:
        clock = self._mesh.clock
        try:
            while self._layers:
                pause_s = self._committed_at_s + WINDOW_S - clock.monotonic()
                if pause_s > 0:
                    await clock.sleep(pause_s)
                self._committed_at_s = clock.monotonic()
                flushes = [flush for layer in self._layers for flush in layer]
                self._layers, self._layer_depths, self._backlog_tokens = [], {}, 0
                await self._commit(flushes)
        except (
            Exception
        ) as error:  # otherwise tokens that cannot be written would be awaited forever
            self._mesh.host.exit(70, f"{self._mesh.name} cannot write tokens: {error!r}", error)
        finally:
            self._task = None

    async def _commit(self, flushes: list[TokenBatch]) -> None:
        requests = np.concatenate([f.request_ids for f in flushes])
        finish = np.concatenate([f.finish_reasons for f in flushes])
        new = TokenRows(
            trajectory_ids=requests,
            counts=_concatenate([f.token_counts for f in flushes], np.int32),
            tokens=_concatenate([f.tokens for f in flushes], np.int32),
            logprobs=_concatenate([f.logprobs for f in flushes], np.float32),
            versions=_concatenate([f.token_versions for f in flushes], np.int32),
            expert_ids=concatenate_experts((f.expert_ids, len(f.tokens)) for f in flushes),
        )
        rows = self._staging.find_rows(requests)
        row_mask = (rows != NO_REQUEST) & (new.counts > 0) & self._staging.get_recorded(rows)
        if row_mask.any():  # written to the ledger under the trajectories' numbers
            chosen = new if row_mask.all() else select_rows(new, row_mask)
            ids = self._staging.get_trajectory_ids(rows[row_mask])
            await self._writer.write_tokens(replace(chosen, trajectory_ids=ids))
            rows = self._staging.find_rows(requests)  # some may be closed now
        row_mask = (rows != NO_REQUEST) & (new.counts > 0)
        accepted = new if row_mask.all() else select_rows(new, row_mask)
        self.sampled_tokens += len(accepted.tokens)
        self.recorded_tokens += int(new.counts[row_mask & self._staging.get_recorded(rows)].sum())
        self._staging.add_tokens(rows[row_mask], accepted)
        if self._timed_requests:
            self._timed_requests = [
                request for request in self._timed_requests if not _mark_decoding(request)
            ]
        over = (rows != NO_REQUEST) & (finish != FinishReason.RUNNING)
        for number, code in zip(requests[over].tolist(), finish[over].tolist(), strict=True):
            request = self._staging.close(number)
            if request is not None and not request.done.done():
                request.done.set_result(code)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


def _mark_decoding(request: OpenRequest) -> bool:
    """Mark a request as decoding, with its stopwatch. Return True if it no longer waits for its
    first token.
    """
    if not request.is_closed:
        if request.is_waiting:
            return False
        request.trajectory.stopwatch.enter("decode")
    return True


def _concatenate(parts: list[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(parts, dtype=dtype, casting="same_kind")


_FINISH_CODES = {
    FinishReason.RUNNING,
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORTED,
}  # that a flush may contain
