"""Gate between a started Redis and the mesh, as the launcher's for a real one
(`meshrl.launch.redis.mesh_redis`). It compares the state of Redis with the recorded watermark.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from meshrl.common.base.errors import CorruptData, StateUnavailable, StorageFull
from meshrl.common.base.files import corruption
from meshrl.common.state import events
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.server_state import rollback
from meshrl.common.state.server_state.rollback import StateWatermark
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.redis import redis_note as notes
from meshrl.launch.redis.redis_note import RedisNote
from meshrl.launch.redis.redis_watchdog import CHECK_INTERVAL_S
from meshrl.launch.redis.run_watermark import RunRecordReader
from meshrl.sim.mesh.runtime.virtual_redis import VirtualRedis


class VirtualRedisGate:
    """Gate of a virtual Redis. `state` is the owner's connection, which is always admitted. There
    is no Redis file to compare, only its state.
    """

    def __init__(
        self, redis: VirtualRedis, state: StateClient, root: Path, runs: Mapping[str, Path]
    ) -> None:
        """Create a gate. `runs`: the jobs of the mesh with their run directories."""
        self._redis, self._state, self._root, self._runs = redis, state, root, runs
        self._watermark_file = MeshPaths(root).redis_note
        self._records: dict[str, RunRecordReader] = {}
        self._token_floor = 0
        self.watermark = StateWatermark()

    async def admit_mesh(self) -> None:
        """Admit the mesh to the state. Replace a state older than the watermark with an empty one
        first.
        """
        self._watermark_file.parent.mkdir(parents=True, exist_ok=True)

        def damaged(path: Path, _: CorruptData) -> None:
            corruption.quarantine(path, self._root)

        note = notes.read_note(self._watermark_file, damaged)
        self._token_floor, self.watermark = note.token_floor, note.watermark
        current = await self._read_watermark()
        why = rollback.explain_rollback(current, self.watermark)
        if why and not current.is_empty:
            self._redis.restart()
        await self._admit(why)

    async def start_empty(self, rollback_reason: str) -> None:
        """Start with an empty state."""
        self._redis.restart()
        await self._admit(rollback_reason)

    async def save_restored(self) -> None:
        """Save the watermark after the jobs and their lineages are restored."""
        await self._save_watermark()

    async def watch_rollbacks(self) -> AsyncIterator[str]:
        """Yield the reason of each detected rollback."""
        while True:
            await self._redis.clock.sleep(CHECK_INTERVAL_S)
            try:
                why = rollback.explain_rollback(await self._read_watermark(), self.watermark)
                if why:
                    yield why
                elif self._redis.is_owner_only:
                    await self._admit("")
                else:
                    await self._save_watermark()
            except (StateUnavailable, StorageFull, OSError):
                continue

    async def _save_watermark(self) -> None:
        newest = await rollback.read_watermark(self._state, StateWatermark())
        self.watermark = rollback.merge_watermarks([self.watermark, newest])
        notes.write_note(self._watermark_file, RedisNote(self.watermark, {}, self._token_floor))

    async def _read_watermark(self) -> StateWatermark:
        for job, run_dir in self._runs.items():
            self._records.setdefault(job, RunRecordReader(run_dir, job))
        watermarks = [record.read_watermark() for record in self._records.values()]
        self.watermark = rollback.merge_watermarks([self.watermark, *watermarks])
        return await rollback.read_watermark(self._state, self.watermark)

    async def _admit(self, rollback_reason: str) -> None:
        current = await rollback.read_watermark(self._state, self.watermark)
        if not rollback_reason:
            self.watermark = rollback.merge_watermarks([self.watermark, current])
        self._token_floor = rollback.compute_token_floor(
            current, self.watermark, StateWatermark(token=self._token_floor)
        )
        notes.write_note(self._watermark_file, RedisNote(self.watermark, {}, self._token_floor))
        await rollback.raise_token_floor(self._state, self._token_floor)
        if rollback_reason:
            then = corruption.RECOVERY_BY_KIND["redis"]
            event_fields = corruption.make_event_fields(
                "redis", self._root / "redis", rollback_reason, then
            )
            await events.append(
                self._state,
                corruption.CORRUPTION_EVENT,
                event_fields,
                after_id=self.watermark.event,
            )
        self._redis.is_owner_only = False
