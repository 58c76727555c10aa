"""Streams to the shards that are attached to an engine, and the owners of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from meshrl.common.api.engine import AttachStream, FinishReason, TokenBatch
from meshrl.common.base.errors import Refused
from meshrl.common.generation.engine_contract import NO_FLOATS, EngineOutput, select_requests

EMPTY_FLUSH = EngineOutput(
    ids=np.zeros(0, np.int64),
    counts=np.zeros(0, np.int32),
    tokens=np.zeros(0, np.int32),
    logprobs=NO_FLOATS,
    raw_logprobs=NO_FLOATS,
    versions=np.zeros(0, np.int32),
    finish_reasons=np.zeros(0, np.int8),
)


class AttachedShard:
    """Attached shard and its running requests."""

    def __init__(self, attach: AttachStream) -> None:
        self.owner, self.incarnation = attach.owner, attach.incarnation
        self.flushes: asyncio.Queue[TokenBatch | None] = asyncio.Queue()  # None ends the stream
        self.engine_ids: dict[int, int] = {}  # the owner's request id -> the engine's


class ShardStreams:
    """Shards that are attached to the engine `engine_name`.

    `weights` returns lineage and version of the engine's weights, which every batch carries.
    """

    def __init__(self, engine_name: str, weights: Callable[[], tuple[int, int]]) -> None:
        self._engine_name, self._weights = engine_name, weights
        self._owners: dict[str, AttachedShard] = {}
        self._routes: dict[
            int, tuple[AttachedShard, int]
        ] = {}  # the engine's request id -> owner and the owner's id
        self._last_id = 0

    @property
    def request_counts(self) -> dict[str, int]:
        return {name: len(owner.engine_ids) for name, owner in self._owners.items()}

    @property
    def open_requests(self) -> list[int]:
        return list(self._routes)

    def attach(self, attach: AttachStream) -> AttachedShard:
        """Attach a shard in place of its previous stream, and send it the weight version."""
        owner = self._owners[attach.owner] = AttachedShard(attach)
        owner.flushes.put_nowait(cut_flush(EMPTY_FLUSH, [], [], *self._weights()))
        return owner

    def find_shard(self, name: str) -> AttachedShard | None:
        return self._owners.get(name)

    def require_shard(self, name: str, incarnation: str) -> AttachedShard:
        """Return the shard that sends requests; raise Refused if it is not attached."""
        owner = self._owners.get(name)
        if owner is None or owner.incarnation != incarnation:
            raise Refused(f"{name} is not attached", where=self._engine_name, fix="Attach first")
        return owner

    def detach(self, owner: AttachedShard) -> list[int]:
        """Detach a stream and return its request ids, which the engine is to abort."""
        if self._owners.get(owner.owner) is owner:
            del self._owners[owner.owner]
        owner.flushes.put_nowait(None)
        ids = list(owner.engine_ids.values())
        owner.engine_ids.clear()
        for i in ids:
            self._routes.pop(i, None)
        return ids

    def register_request(self, owner: AttachedShard, request_id: int) -> int:
        self._last_id += 1
        self._routes[self._last_id] = owner, request_id
        owner.engine_ids[request_id] = self._last_id
        return self._last_id

    def route(self, flush: EngineOutput) -> None:
        """Send each shard its part of a flush, and drop finished requests."""
        routes = [self._routes.get(i) for i in flush.ids.tolist()]
        owners = {route[0] for route in routes if route is not None}
        for owner in owners:
            mine = [route is not None and route[0] is owner for route in routes]
            owner.flushes.put_nowait(cut_flush(flush, routes, mine, *self._weights()))
        for i in flush.ids[flush.finish_reasons != FinishReason.RUNNING].tolist():
            if (route := self._routes.pop(i, None)) is not None:
                route[0].engine_ids.pop(route[1], None)

    def reject(self, ids: Sequence[int]) -> None:
        """End requests as aborted that the engine has not begun."""
        n = len(ids)
        self.route(
            replace(
                EMPTY_FLUSH,
                ids=np.array(ids, np.int64),
                counts=np.zeros(n, np.int32),
                finish_reasons=np.full(n, FinishReason.ABORTED, np.int8),
            )
        )

    def publish_weights(self) -> None:
        for owner in self._owners.values():
            owner.flushes.put_nowait(cut_flush(EMPTY_FLUSH, [], [], *self._weights()))

    def close(self) -> None:
        for owner in self._owners.values():
            owner.flushes.put_nowait(None)


def cut_flush(
    flush: EngineOutput,
    routes: list[tuple[AttachedShard, int] | None],
    selected: list[bool],
    lineage: int,
    version: int,
) -> TokenBatch:
    """Return one owner's part of a flush, under the owner's request ids."""
    ids = np.array([r[1] for r, m in zip(routes, selected, strict=True) if m and r], np.int64)
    part = flush if all(selected) else select_requests(flush, np.array(selected))
    return TokenBatch(
        ids,
        part.counts,
        part.tokens,
        part.logprobs,
        part.raw_logprobs,
        part.versions,
        part.finish_reasons,
        version,
        part.experts,
        lineage,
    )
