"""Shards that listen to an engine: whose a request is, and what of a flush each of them gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from meshrl.common.api.engine import Attach, Finish, Tokens
from meshrl.common.base.errors import Refused
from meshrl.common.generation.contract import NO_FLOATS, Flush, rows_of

EMPTY = Flush(
    ids=np.zeros(0, np.int64),
    counts=np.zeros(0, np.int32),
    tokens=np.zeros(0, np.int32),
    logprobs=NO_FLOATS,
    unmodified=NO_FLOATS,
    versions=np.zeros(0, np.int32),
    finish=np.zeros(0, np.int8),
)


class Attached:
    """A shard that listens, and its requests that are out."""

    def __init__(self, attach: Attach) -> None:
        self.owner, self.incarnation = attach.owner, attach.incarnation
        self.flushes: asyncio.Queue[Tokens | None] = asyncio.Queue()  # None: there come no more
        self.ids: dict[int, int] = {}  # the owner's request -> the engine's


class Shards:
    """Those that listen to the engine called `where`. `weights`: lineage and version of those that
    it has, of which shards hear with all that they get.
    """

    def __init__(self, where: str, weights: Callable[[], tuple[int, int]]) -> None:
        self._where, self._weights = where, weights
        self._owners: dict[str, Attached] = {}
        self._routes: dict[int, tuple[Attached, int]] = {}  # the engine's request -> owner and id
        self._next = 0

    @property
    def requests(self) -> dict[str, int]:
        return {name: len(owner.ids) for name, owner in self._owners.items()}

    @property
    def out(self) -> list[int]:
        return list(self._routes)

    def attach(self, attach: Attach) -> Attached:
        """A shard that listens from now on, instead of its stream before; it hears at once which
        weights the engine has.
        """
        owner = self._owners[attach.owner] = Attached(attach)
        owner.flushes.put_nowait(cut(EMPTY, [], [], *self._weights()))
        return owner

    def listening(self, name: str) -> Attached | None:
        return self._owners.get(name)

    def asking(self, name: str, incarnation: str) -> Attached:
        """The shard whose requests come. Refused when it does not listen."""
        owner = self._owners.get(name)
        if owner is None or owner.incarnation != incarnation:
            raise Refused(f"{name} is not attached", where=self._where, fix="attach first")
        return owner

    def detach(self, owner: Attached) -> list[int]:
        """Forgets a stream, whose requests the engine is to abort: their numbers."""
        if self._owners.get(owner.owner) is owner:
            del self._owners[owner.owner]
        owner.flushes.put_nowait(None)
        ids = list(owner.ids.values())
        owner.ids.clear()
        for i in ids:
            self._routes.pop(i, None)
        return ids

    def number(self, owner: Attached, identity: int) -> int:
        self._next += 1
        self._routes[self._next] = owner, identity
        owner.ids[identity] = self._next
        return self._next

    def route(self, flush: Flush) -> None:
        """Gives each shard its part of a flush, and forgets the requests that have ended."""
        routes = [self._routes.get(i) for i in flush.ids.tolist()]
        owners = {route[0] for route in routes if route is not None}
        for owner in owners:
            mine = [route is not None and route[0] is owner for route in routes]
            owner.flushes.put_nowait(cut(flush, routes, mine, *self._weights()))
        for i in flush.ids[flush.finish != Finish.RUNNING].tolist():
            if (route := self._routes.pop(i, None)) is not None:
                route[0].ids.pop(route[1], None)

    def refuse(self, ids: Sequence[int]) -> None:
        """Ends requests as aborted that the engine has not begun."""
        n = len(ids)
        self.route(
            replace(
                EMPTY,
                ids=np.array(ids, np.int64),
                counts=np.zeros(n, np.int32),
                finish=np.full(n, Finish.ABORTED, np.int8),
            )
        )

    def tell_weights(self) -> None:
        for owner in self._owners.values():
            owner.flushes.put_nowait(cut(EMPTY, [], [], *self._weights()))

    def end(self) -> None:
        for owner in self._owners.values():
            owner.flushes.put_nowait(None)


def cut(
    flush: Flush,
    routes: list[tuple[Attached, int] | None],
    mine: list[bool],
    lineage: int,
    version: int,
) -> Tokens:
    """The part of a flush that belongs to one owner, under the owner's request ids."""
    ids = np.array([r[1] for r, m in zip(routes, mine, strict=True) if m and r], np.int64)
    part = flush if all(mine) else rows_of(flush, np.array(mine))
    return Tokens(
        ids,
        part.counts,
        part.tokens,
        part.logprobs,
        part.unmodified,
        part.versions,
        part.finish,
        version,
        part.experts,
        lineage,
    )
