"""By broadcast from the core: gloo, or nccl between GPUs, into one process of each host, which
keeps the chunks for the others. For fast networks: a broadcast costs the sender one copy, and no
delta or relay has to be worked out.

What came before a member was lost stays; the rest is pulled.
"""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from common.api.trainer import BroadcastPlace, Gather, Sender, Trainer
from common.base.digest import digest_of
from common.base.errors import PeerLost
from common.mesh.runtime.mesh import Mesh
from common.weights.chunks.chunks import ChunkStore
from common.weights.store import host_chunks
from common.weights.ways.base import WantedVersion
from common.weights.ways.group import GroupPart, place
from common.weights.ways.meeting import store_at

LOCK = "broadcast"
LOOK_S = 10.0  # to see what this host has
MOST_S = 600.0  # for all of it


class Collective:
    """The receiving side of broadcasts of a job's core."""

    name = "collective"

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh = mesh
        self._trainer = mesh.ref(f"trainer/{job}")

    async def receive(self, version: WantedVersion, into: ChunkStore) -> None:
        """PeerLost when a member was lost, StorageFull. Processes of a host do it one after the
        other, so that all but the first find the chunks there.
        """
        mesh, run = self._mesh, self._mesh.host.run_blocking
        async with host_chunks.turn(mesh, into.directory / host_chunks.LOCKS / LOCK):
            lacking = await run(_still, version.lacking, into, deadline_s=LOOK_S)
            if not lacking:
                return
            await host_chunks.make_room(mesh, into, sum(lacking.values()), version.needed)
            asked = Gather(version.manifest, lacking, torch.cuda.is_available())
            told = await self._trainer.call(Trainer.gather, asked)
            if told.where:
                await self._received(told, lacking, into)

    async def _received(
        self, told: BroadcastPlace, lacking: dict[str, int], into: ChunkStore
    ) -> None:
        mesh, run = self._mesh, self._mesh.host.run_blocking
        where = place(mesh.settings)
        parts = [_Receiving(told, sender, lacking, into, where) for sender in told.senders]
        wait = timedelta(seconds=told.wait_s)
        try:
            store = await run(_met, told, wait, deadline_s=2 * told.wait_s)
            receiving = (run(part.run, store, deadline_s=MOST_S) for part in parts)
            await asyncio.gather(*receiving)
        finally:
            for part in parts:
                part.stop()
                mesh.telemetry.count("chunks_fetched", part.chunks)
                mesh.telemetry.count("chunks_fetched_bytes", part.bytes)
                mesh.telemetry.count("chunks_damaged", part.damaged)


class _Receiving(GroupPart):
    """What comes of one sender, on a thread."""

    def __init__(
        self,
        told: BroadcastPlace,
        sender: Sender,
        lacking: dict[str, int],
        into: ChunkStore,
        where: dict[str, str],
    ) -> None:
        super().__init__(told, sender, where)
        self.chunks = self.bytes = self.damaged = 0
        self._lacking, self._into = lacking, into

    def run(self, store: Store) -> None:
        """Keeps what lacks here of all that comes. PeerLost, StorageFull."""
        chunks = self._sender.chunks
        contents = self.join(store).receive(chunks.values())
        for digest, content in zip(chunks, contents, strict=True):
            self.check()
            if digest not in self._lacking:
                continue
            if digest_of(content) != digest:
                self.damaged += 1
                continue
            self._into.keep(digest, content)
            self.chunks += 1
            self.bytes += len(content)


def _met(told: BroadcastPlace, wait: timedelta) -> Store:
    """The store at which all meet. PeerLost when nobody serves it any more."""
    try:
        return store_at(told.where, told.members, wait)
    except RuntimeError as error:
        raise PeerLost(f"nobody is where a broadcast was to be: {error}") from error


def _still(lacking: dict[str, int], into: ChunkStore) -> dict[str, int]:
    """Those that are not there by now."""
    return {d: size for d, size in lacking.items() if not os.path.exists(into.path(d))}
