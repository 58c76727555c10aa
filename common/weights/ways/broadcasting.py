"""The publishing side of a broadcast: who asks for a version within a moment of each other forms a
group with the core, once and under a name that no group has had; who comes later fetches for
itself. So nobody waits for anybody who may not come.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from meshrl.common.api.trainer import BroadcastPlace, Gather, Sender
from meshrl.common.base.errors import MeshError
from meshrl.common.base.host.interfaces import address_of
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import looked_at
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.store import host_chunks
from meshrl.common.weights.store.weight_store import store_entry
from meshrl.common.weights.ways.collective import BroadcastGroup, place
from meshrl.common.weights.ways.meeting import listen, place_of, ports_of, store_at

WINDOW_S = 0.3  # hosts hear of a version within milliseconds, and look at what they lack
WAIT_S = 5.0  # that a member may keep the others waiting: long beside moving a chunk of 64 MiB
MOST_S = 600.0  # for all of it
FOUND_S = 10.0  # to look which chunks are here

Files = Callable[[], Awaitable[ChunkStore | None]]


@dataclass
class _Attempt:
    manifest: str
    asked: list[tuple[Gather, asyncio.Future[BroadcastPlace]]] = field(default_factory=list)

    @property
    def lacking(self) -> dict[str, int]:
        """What one of them lacks or more do; each as the first has it."""
        found: dict[str, int] = {}
        for asked, _ in self.asked:
            found |= {d: size for d, size in asked.lacking.items() if d not in found}
        return found

    def answer(self, gathered: BroadcastPlace) -> None:
        for rank, (_, told) in enumerate(self.asked, 1):
            if not told.done():
                told.set_result(replace(gathered, rank=rank) if gathered.where else gathered)


def files_here(mesh: Mesh, bulk: BulkClient) -> Files:
    """The store's own chunks, for who is on its host; elsewhere those that this host keeps."""

    async def files() -> ChunkStore | None:
        return await bulk.local(await store_entry(mesh)) or host_chunks.cache(mesh)

    return files


class Broadcasts:
    """One for a job, in the process of its core."""

    def __init__(self, mesh: Mesh, files: Files, backend: str = "auto") -> None:
        """`files`: the chunks that are files of this host. `backend`: gloo, nccl, or auto: nccl
        where this process and all who ask have a GPU.
        """
        self._mesh, self._files, self._backend = mesh, files, backend
        self._manifest = ""  # what may be asked for
        self._open: _Attempt | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def publish(self, manifest: str) -> None:
        """From now on this version may be asked for, and no earlier one."""
        self._manifest = manifest

    async def gather(self, request: Gather) -> BroadcastPlace:
        """Where the host that asks meets the others. See `BroadcastPlace`."""
        attempt = self._open
        if attempt is None or attempt.manifest != request.manifest:
            if request.manifest != self._manifest or self._tasks:
                return BroadcastPlace()
            attempt = self._open = _Attempt(request.manifest)
            task = asyncio.create_task(self._run(attempt), name="broadcast")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(looked_at)
        told: asyncio.Future[BroadcastPlace] = asyncio.get_running_loop().create_future()
        attempt.asked.append((request, told))
        return await told

    async def stop(self) -> None:
        """Ends what goes on."""
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, attempt: _Attempt) -> None:
        mesh = self._mesh
        try:
            await mesh.clock.sleep(WINDOW_S)
            self._open = None
            await self._send(attempt)
        except (MeshError, OSError) as error:
            mesh.telemetry.count("broadcasts_failed")
            mesh.telemetry.log.warning("a broadcast of weights failed", error=str(error))
        finally:
            if self._open is attempt:
                self._open = None
            attempt.answer(BroadcastPlace())  # to whom nothing was said

    async def _send(self, attempt: _Attempt) -> None:
        mesh, files = self._mesh, await self._files()
        if files is None:
            return
        run = mesh.host.run_blocking

        def files_of_this_size() -> dict[str, int]:
            found = {}
            for digest, size in attempt.lacking.items():
                with suppress(OSError):
                    if os.stat(files.path(digest)).st_size == size and size:
                        found[digest] = size
            return found

        here = await run(files_of_this_size, deadline_s=FOUND_S)
        if not here:
            return
        able = torch.cuda.is_available() and all(asked.cuda for asked, _ in attempt.asked)
        backend = ("nccl" if able else "gloo") if self._backend == "auto" else self._backend
        settings = mesh.settings
        where = place(settings)
        address = where.get("hostname") or address_of(where["interface"])
        with listen(address, ports_of(settings.bind)) as door:
            told = BroadcastPlace(
                place_of(door, mesh.random.token(16)),
                [Sender(mesh.random.token(8), here)],
                members=len(attempt.asked) + 1,
                backend=backend,
                wait_s=WAIT_S,
            )
            sending = Sending(told, files, where)
            store = await run(store_at, told.where, told.members, _WAIT, door, deadline_s=WAIT_S)
            attempt.answer(told)
            try:
                await run(sending.run, store, deadline_s=MOST_S)
            finally:
                sending.stop()
        mesh.telemetry.count("broadcasts")
        mesh.telemetry.count("broadcast_bytes", sum(here.values()))


_WAIT = timedelta(seconds=WAIT_S)


class Sending(BroadcastGroup):
    """A sender's part, on a thread."""

    def __init__(self, told: BroadcastPlace, files: ChunkStore, where: dict[str, str]) -> None:
        super().__init__(told, told.senders[0], where)
        self._files = files

    def run(self, store: Store) -> None:
        """Sends all of its chunks to whoever has joined. PeerLost."""
        self.join(store)
        self.send(map(self._mapped, self._sender.chunks))

    def _mapped(self, digest: str) -> mmap.mmap:
        with self._files.path(digest).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
