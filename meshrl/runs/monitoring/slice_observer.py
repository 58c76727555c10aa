"""Reader of the time slices of a running mesh's gangs from their slice schedulers."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

from meshrl.common.base.errors import MeshError
from meshrl.common.state.pool.workers.rows import Gang
from meshrl.directory.directory_paths import MeshPaths
from meshrl.directory.owner_mesh import open_owner_mesh
from meshrl.view.mesh.gang_slices import is_time_sliced, read_gang_slices
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot
from meshrl.view.mesh.slice_frames import WINDOW_S, GangSlicesFrame, build_slices_frame

if TYPE_CHECKING:
    from meshrl.common.mesh.runtime.mesh import Mesh

READ_TIMEOUT_S = 3.0  # for all gangs: the rest of a frame is shown without them


class SliceObserver:
    """Observer of all gangs in time slices; it connects when there is one, and once."""

    def __init__(self, place: MeshPaths) -> None:
        self._place = place
        self._connection = AsyncExitStack()
        self._mesh: Mesh | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._connection.aclose()

    async def read_frames(self, mesh: MeshSnapshot) -> tuple[GangSlicesFrame, ...]:
        """Return the frames of gangs in time slices, with the error of a silent scheduler."""
        gangs = [gang for gang in mesh.gangs if is_time_sliced(gang)]
        if not gangs:
            return ()
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                connected = await self._connect()
                found = await asyncio.gather(*(self._read_frame(connected, one) for one in gangs))
        except (TimeoutError, MeshError) as error:
            why = str(error) or f"no answer within {READ_TIMEOUT_S:g} s"
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
