"""Stands between a Redis that has started and the mesh, as the launcher does with a real one
(`meshrl.launch.redis.server`): what it holds is compared with what is known of it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

from common.errors import Damaged, StateUnavailable, StorageFull
from common.records import damage
from common.state import rollback
from common.state.client import State
from common.state.events import order
from common.state.keys import EVENTS
from common.state.rollback import Mark
from meshrl.launch.places import MeshPlace
from meshrl.launch.redis import note as notes
from meshrl.launch.redis.guard import INTERVAL_S
from meshrl.launch.redis.note import Note
from meshrl.launch.redis.recorded import recorded
from sim.mesh.job import JOB
from sim.mesh.redis import VirtualRedis


class VirtualGate:
    """`state` is the owner's connection, which is let in always. There is no file of Redis to
    compare: only what it holds is.
    """

    def __init__(self, redis: VirtualRedis, state: State, root: Path) -> None:
        self._redis, self._state, self._root = redis, state, root
        self._note = MeshPlace(root).redis_note
        self._floor = 0
        self.known = Mark()

    async def admit(self) -> None:
        """Lets the mesh in, to a state that is no older than what is known of it: an older one is
        replaced by an empty one.
        """
        self._note.parent.mkdir(parents=True, exist_ok=True)
        noted = self._noted()
        self._floor, self.known = noted.floor, noted.mark
        held = await self._held()
        why = rollback.older(held, self.known)
        if why and not held.empty:
            self._redis.restart()
        await self._let_in(why)

    async def begin_anew(self, why: str) -> None:
        """Begins without what there is."""
        self._redis.restart()
        await self._let_in(why)

    async def went_back(self) -> AsyncIterator[str]:
        """Each time that it is not what it was: why."""
        while True:
            await self._redis.clock.sleep(INTERVAL_S)
            try:
                why = rollback.older(await self._held(), self.known)
                if why:
                    yield why
                elif self._redis.shut:
                    await self._let_in("")
                else:
                    newest = await rollback.held(self._state, Mark())
                    self.known = rollback.joined([self.known, newest])
                    notes.write(self._note, Note(self.known, {}, self._floor))
            except (StateUnavailable, StorageFull, OSError):
                continue

    def _noted(self) -> Note:
        try:
            return notes.read(self._note)
        except Damaged:
            damage.set_aside(self._note, self._root)
            return Note()

    async def _held(self) -> Mark:
        self.known = rollback.joined([self.known, recorded(self._root, JOB)])
        return await rollback.held(self._state, self.known)

    async def _let_in(self, why: str) -> None:
        held = await rollback.held(self._state, self.known)
        self._floor = rollback.floor_above(held, self.known, Mark(token=self._floor))
        notes.write(self._note, Note(self.known, {}, self._floor), durable=True)
        await rollback.raise_tokens(self._state, self._floor)
        if why:
            then = damage.FATES["redis"].then
            told = damage.fields("redis", self._root / "redis", why, then)
            ms = max(int(self._redis.clock.wall() * 1000), order(self.known.event)[0] + 1)
            fields = ("kind", damage.EVENT, "fields", json.dumps(told), "extra", "{}")
            await self._state.command("XADD", EVENTS, f"{ms}-0", *fields)
        self._redis.shut = False
