"""Reader of the time slices of a running mesh's gangs from their slice schedulers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

from meshrl.common.base.errors import MeshError
from meshrl.common.state.pool.workers.rows import Gang
from meshrl.directory.directory_paths import MeshPaths
from meshrl.directory.owner_mesh import open_owner_mesh
from meshrl.view.guard import WarningGuard
from meshrl.view.mesh.gang_slices import read_gang_slices
from meshrl.view.mesh.slice_frames import WINDOW_S, GangSlicesFrame, build_slices_frame

if TYPE_CHECKING:
    from meshrl.common.mesh.runtime.mesh import Mesh

READ_TIMEOUT_S = 3.0  # for all gangs: the rest of a frame is shown without them
READ_INTERVAL_S = 1.0  # between two reads of a live view


class SliceObserver:
    """Observer of gangs in time slices; it connects when there is one, and once."""

    def __init__(self, place: MeshPaths) -> None:
        self._place, self._guard = place, WarningGuard()
        self._connection = AsyncExitStack()
        self._mesh: Mesh | None = None
        self._frames: tuple[GangSlicesFrame, ...] = ()
        self._read_task: asyncio.Task[None] | None = None
        self._next_read_s = 0.0  # monotonic

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._read_task is not None:
            self._read_task.cancel()
            await asyncio.wait([self._read_task], timeout=READ_TIMEOUT_S)
        with self._guard("the end of the connection to the mesh"):
            await self._connection.aclose()

    def poll_frames(self, gangs: Sequence[Gang]) -> tuple[GangSlicesFrame, ...]:
        """Return the last read frames of the gangs, and start the next read if it is due.

        The caller never waits: a silent scheduler delays neither a view nor a recorder.
        """
        is_reading = self._read_task is not None and not self._read_task.done()
        if gangs and not is_reading and time.monotonic() >= self._next_read_s:
            self._next_read_s = time.monotonic() + READ_INTERVAL_S
            self._read_task = asyncio.create_task(self._refresh(gangs), name="read time slices")
        names = {gang.id for gang in gangs}
        return tuple(frame for frame in self._frames if frame.gang in names)

    async def _refresh(self, gangs: Sequence[Gang]) -> None:
        with self._guard("the view of time slices"):
            self._frames = await self.read_frames(gangs)

    async def read_frames(self, gangs: Sequence[Gang]) -> tuple[GangSlicesFrame, ...]:
        """Return the frames of gangs in time slices, with the error of a silent scheduler."""
        if not gangs:
            return ()
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                connected = await self._connect()
                found = await asyncio.gather(*(self._read_frame(connected, one) for one in gangs))
        except (TimeoutError, MeshError) as error:
            why = str(error) or f"its scheduler has not answered for {READ_TIMEOUT_S:g} s"
            found = [GangSlicesFrame(gang.id, error=why) for gang in gangs]
        if all(frame.error for frame in found):  # the mesh may have restarted
            self._mesh = None
            await self._connection.aclose()
        return tuple(found)

    async def _connect(self) -> Mesh:
        if self._mesh is None:
            self._mesh = await self._connection.enter_async_context(open_owner_mesh(self._place))
        return self._mesh

    async def _read_frame(self, mesh: Mesh, gang: Gang) -> GangSlicesFrame:
        now_s = time.time()
        try:
            found = await read_gang_slices(mesh, gang, now_s - WINDOW_S)
        except MeshError as error:
            return GangSlicesFrame(gang.id, error=error.message)
        return build_slices_frame(gang, found, now_s)
