"""Stands between a Redis that has started and the mesh, as the launcher does with a real one
(`meshrl.launch.redis.server`): what it holds is compared with what is known of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from meshrl.common.base.errors import Damaged, StateUnavailable, StorageFull
from meshrl.common.base.files import damage
from meshrl.common.state import events
from meshrl.common.state.redis.client import State
from meshrl.common.state.server import rollback
from meshrl.common.state.server.rollback import RollbackMark
from meshrl.directory.places import MeshPlace
from meshrl.launch.redis import note as notes
from meshrl.launch.redis.guard import INTERVAL_S
from meshrl.launch.redis.note import Note
from meshrl.launch.redis.recorded import RunRecord
from meshrl.sim.mesh.world.redis import VirtualRedis


class VirtualGate:
    """`state` is the owner's connection, which is let in always. There is no file of Redis to
    compare: only what it holds is.
    """

    def __init__(
        self, redis: VirtualRedis, state: State, root: Path, runs: Mapping[str, Path]
    ) -> None:
        """`runs`: the jobs of the mesh with their run directories."""
        self._redis, self._state, self._root, self._runs = redis, state, root, runs
        self._note = MeshPlace(root).redis_note
        self._records: dict[str, RunRecord] = {}
        self._floor = 0
        self.known = RollbackMark()

    async def admit(self) -> None:
        """Lets the mesh in, to a state that is no older than what is known of it: an older one is
        replaced by an empty one.
        """
        self._note.parent.mkdir(parents=True, exist_ok=True)

        def damaged(path: Path, _: Damaged) -> None:
            damage.set_aside(path, self._root)

        noted = notes.read(self._note, damaged)
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

    async def returned(self) -> None:
        """The jobs are back, and what lineages they have is durable."""
        await self._take_note()

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
                    await self._take_note()
            except (StateUnavailable, StorageFull, OSError):
                continue

    async def _take_note(self) -> None:
        newest = await rollback.held(self._state, RollbackMark())
        self.known = rollback.joined([self.known, newest])
        notes.write(self._note, Note(self.known, {}, self._floor))

    async def _held(self) -> RollbackMark:
        for job, run_dir in self._runs.items():
            self._records.setdefault(job, RunRecord(run_dir, job))
        told = [record.look() for record in self._records.values()]
        self.known = rollback.joined([self.known, *told])
        return await rollback.held(self._state, self.known)

    async def _let_in(self, why: str) -> None:
        held = await rollback.held(self._state, self.known)
        if not why:
            self.known = rollback.joined([self.known, held])
        self._floor = rollback.floor_above(held, self.known, RollbackMark(token=self._floor))
        notes.write(self._note, Note(self.known, {}, self._floor))
        await rollback.raise_tokens(self._state, self._floor)
        if why:
            then = damage.FATES["redis"]
            told = damage.fields("redis", self._root / "redis", why, then)
            await events.append(self._state, damage.EVENT, told, above=self.known.event)
        self._redis.shut = False
