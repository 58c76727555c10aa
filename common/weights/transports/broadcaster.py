"""Publishing side of a broadcast.

Hosts that request a version within `GROUPING_WINDOW_S` form a group with the core, once and under a
new name. Later hosts pull the version. No member waits for a host that may not join.
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

from meshrl.common.api.trainer import BroadcastPlan, BroadcastRequest, BroadcastSender
from meshrl.common.base.errors import MeshError
from meshrl.common.base.host.interfaces import find_address
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import consume_exception
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.store import chunk_cache
from meshrl.common.weights.store.weight_store_client import look_up_store
from meshrl.common.weights.transports.collective import (
    STOP_TIMEOUT_S,
    BroadcastGroup,
    choose_gloo_interface,
)
from meshrl.common.weights.transports.rendezvous import (
    format_rendezvous_url,
    open_listener,
    open_rendezvous_store,
    parse_port_range,
)

GROUPING_WINDOW_S = (
    0.3  # hosts learn of a version within milliseconds, and check what they are missing
)
MEMBER_TIMEOUT_S = (
    5.0  # of a member that delays the others: long compared to moving a chunk of 64 MiB
)
BROADCAST_TIMEOUT_S = 600.0  # for a whole broadcast
IO_TIMEOUT_S = 10.0  # to check which chunks are here

OpenLocalStore = Callable[[], Awaitable[ChunkStore | None]]


@dataclass
class _BroadcastAttempt:
    manifest_digest: str
    requests: list[tuple[BroadcastRequest, asyncio.Future[BroadcastPlan]]] = field(
        default_factory=list
    )

    @property
    def missing_chunks(self) -> dict[str, int]:
        """Chunks that at least one member is missing, with the size given by the first request."""
        found: dict[str, int] = {}
        for request, _ in self.requests:
            found |= {d: size for d, size in request.missing.items() if d not in found}
        return found

    def send_plan(self, plan: BroadcastPlan) -> None:
        for rank, (_, plan_future) in enumerate(self.requests, 1):
            if not plan_future.done():
                plan_future.set_result(replace(plan, rank=rank) if plan.rendezvous_url else plan)


def make_store_opener(mesh: Mesh, bulk: BulkClient) -> OpenLocalStore:
    """Return a function that opens the store on its host, and the chunk cache on other hosts."""

    async def files() -> ChunkStore | None:
        return await bulk.open_local_store(await look_up_store(mesh)) or chunk_cache.open_cache(
            mesh
        )

    return files


class Broadcaster:
    """Broadcaster of a job's versions, one in the process of its core."""

    def __init__(self, mesh: Mesh, open_local_store: OpenLocalStore, backend: str = "auto") -> None:
        """Create the broadcaster.

        Args:
            open_local_store: Opens the chunk files of this host.
            backend: gloo, nccl, or auto: nccl if this process and all members have a GPU.
        """
        self._mesh, self._open_local_store, self._backend = mesh, open_local_store, backend
        self._manifest_digest = ""  # the version that may be requested
        self._open_attempt: _BroadcastAttempt | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def set_version(self, manifest_digest: str) -> None:
        """Set the only version that may be requested from now on."""
        self._manifest_digest = manifest_digest

    async def join_broadcast(self, request: BroadcastRequest) -> BroadcastPlan:
        """Return the requesting host's plan of a broadcast; see `BroadcastPlan`."""
        attempt = self._open_attempt
        if attempt is None or attempt.manifest_digest != request.manifest:
            if request.manifest != self._manifest_digest or self._tasks:
                return BroadcastPlan()
            attempt = self._open_attempt = _BroadcastAttempt(request.manifest)
            task = asyncio.create_task(self._run_attempt(attempt), name="broadcast")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(consume_exception)
        plan_future: asyncio.Future[BroadcastPlan] = asyncio.get_running_loop().create_future()
        attempt.requests.append((request, plan_future))
        return await plan_future

    async def stop(self) -> None:
        """Cancel running broadcasts."""
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run_attempt(self, attempt: _BroadcastAttempt) -> None:
        mesh = self._mesh
        try:
            await mesh.clock.sleep(GROUPING_WINDOW_S)
            self._open_attempt = None
            await self._send_attempt(attempt)
        except (MeshError, OSError) as error:
            mesh.telemetry.count("broadcasts_failed")
            mesh.telemetry.log.warning("a broadcast of weights failed", error=str(error))
        finally:
            if self._open_attempt is attempt:
                self._open_attempt = None
            attempt.send_plan(BroadcastPlan())  # members without a plan

    async def _send_attempt(self, attempt: _BroadcastAttempt) -> None:
        mesh, files = self._mesh, await self._open_local_store()
        if files is None:
            return
        run = mesh.host.run_blocking

        def files_of_this_size() -> dict[str, int]:
            found = {}
            for digest, size in attempt.missing_chunks.items():
                with suppress(OSError):
                    if os.stat(files.chunk_path(digest)).st_size == size and size:
                        found[digest] = size
            return found

        here = await run(files_of_this_size, deadline_s=IO_TIMEOUT_S)
        if not here:
            return
        able = torch.cuda.is_available() and all(
            request.has_cuda for request, _ in attempt.requests
        )
        backend = ("nccl" if able else "gloo") if self._backend == "auto" else self._backend
        settings = mesh.settings
        where = choose_gloo_interface(settings)
        address = where.get("hostname") or find_address(where["interface"])
        with open_listener(address, parse_port_range(settings.bind)) as door:
            plan = BroadcastPlan(
                format_rendezvous_url(door, mesh.random.hex_token(16)),
                [BroadcastSender(mesh.random.hex_token(8), here)],
                world_size=len(attempt.requests) + 1,
                backend=backend,
                max_wait_s=MEMBER_TIMEOUT_S,
            )
            sending = BroadcastSenderGroup(plan, files, where)
            store = await run(
                open_rendezvous_store,
                plan.rendezvous_url,
                plan.world_size,
                _MEMBER_TIMEOUT,
                door,
                deadline_s=MEMBER_TIMEOUT_S,
            )
            attempt.send_plan(plan)
            try:
                await run(sending.run, store, deadline_s=BROADCAST_TIMEOUT_S)
            finally:
                await run(sending.stop, deadline_s=STOP_TIMEOUT_S)
        mesh.telemetry.count("broadcasts")
        mesh.telemetry.count("broadcast_bytes", sum(here.values()))


_MEMBER_TIMEOUT = timedelta(seconds=MEMBER_TIMEOUT_S)


class BroadcastSenderGroup(BroadcastGroup):
    """Sending member of a broadcast, run on a thread."""

    def __init__(
        self, plan: BroadcastPlan, chunks: ChunkStore, gloo_interface: dict[str, str]
    ) -> None:
        super().__init__(plan, plan.senders[0], gloo_interface)
        self._chunks = chunks

    def run(self, store: Store) -> None:
        """Send all its chunks to the members. PeerLost: a member was lost."""
        self.join(store)
        self.send(map(self._map_chunk, self._sender.chunk_bytes))

    def _map_chunk(self, digest: str) -> mmap.mmap:
        with self._chunks.chunk_path(digest).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
