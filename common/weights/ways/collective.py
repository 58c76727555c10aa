"""By broadcast from the core: gloo, or nccl between GPUs, into one process of each host, which
keeps the chunks for the others. For fast networks: a broadcast costs the sender one copy, and no
delta or relay has to be worked out.

What came before a member was lost stays; the rest is pulled.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from meshrl.common.api.trainer import BroadcastPlace, Gather, Sender, Trainer
from meshrl.common.base.digest import digest_of
from meshrl.common.base.errors import PeerLost, Refused
from meshrl.common.base.host.ports import ANYWHERE, ports
from meshrl.common.base.host.settings import MeshSettings, advertised_host
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.store import host_chunks
from meshrl.common.weights.store.host_chunks import WantedVersion
from meshrl.common.weights.ways.meeting import store_at

AHEAD = 2  # transfers at once: the next one moves while the last is hashed and written
# NCCL's own watch would end the process of an engine for a member that is lost.
QUIET = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}
LOCK = "broadcast"
LOOK_S = 10.0  # to see what this host has
MOST_S = 600.0  # for all of it


def place(settings: MeshSettings) -> dict[str, str]:
    """By which interface or address of this host gloo reaches others: what an operator has set in
    the environment or in the host's settings, else the address of `mesh.bind`. Refused where that
    is all of them.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0] or settings.interface
    if chosen:
        return {"interface": chosen}
    host = advertised_host(settings.bind).strip("[]")
    if ports(settings.bind, "mesh.bind")[0] in ANYWHERE:
        raise Refused(
            "it cannot be told by which interface others reach this host",
            where="mesh.bind",
            fix="Set `interface` in mesh.toml, or GLOO_SOCKET_IFNAME",
        )
    return {"hostname": host}


class BroadcastGroup:
    """One member's part in the group of a sender, rank 0; `stop` ends it from any thread."""

    def __init__(self, told: BroadcastPlace, sender: Sender, where: dict[str, str]) -> None:
        """`where`: see `place`. No two groups have the same name."""
        self._told, self._sender, self._where = told, sender, where
        self._limit = timedelta(seconds=told.wait_s)
        self._device = "cuda" if told.backend == "nccl" else "cpu"
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = 0, 0
        self._group: Any = None
        self._stopped = False

    def join(self, store: Store) -> None:
        """Meets the others at `store`; PeerLost when they do not come in `wait_s`, which also is
        how long one may keep the others waiting.
        """
        known = PrefixStore(self._sender.name, store)
        about = known, self._told.rank, self._told.members
        with _lost(f"the group of {self._told.members} did not meet"):
            if self._told.backend == "nccl":
                os.environ.update(QUIET)
                options: Any = dist.ProcessGroupNCCL.Options()
                options._timeout = self._limit
                self._group = dist.ProcessGroupNCCL(*about, options)
            else:
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._devices = [dist.ProcessGroupGloo.create_device(**self._where)]
                options._timeout = self._limit
                self._group = dist.ProcessGroupGloo(*about, options)

    def send(self, contents: Iterable[Any]) -> None:
        """Sends buffers, each whole. PeerLost."""
        tensors = (torch.frombuffer(one, dtype=torch.uint8).to(self._device) for one in contents)
        for _ in self._broadcast(tensors):
            pass

    def receive(self, sizes: Iterable[int]) -> Iterator[memoryview]:
        """Yields what is sent, in its order; valid until the next is asked for. PeerLost."""
        empty = (torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes)
        for tensor in self._broadcast(empty):
            yield memoryview(tensor.cpu().numpy().data)

    def _broadcast(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Broadcasts all, some of them ahead; each once it has moved."""
        moving: deque[tuple[Any, torch.Tensor]] = deque()
        for tensor in tensors:
            self.check()
            with _lost("a broadcast of weights did not begin"):
                moving.append((self._group.broadcast([tensor], self._options), tensor))
            if len(moving) >= AHEAD:
                yield self._moved(*moving.popleft())
        while moving:
            yield self._moved(*moving.popleft())

    def _moved(self, work: Any, tensor: torch.Tensor) -> torch.Tensor:
        with _lost("a broadcast of weights ended early"):
            work.wait(self._limit)
        return tensor

    def check(self) -> None:
        """Raise PeerLost once this part was stopped."""
        if self._stopped:
            raise PeerLost("the broadcast was ended")

    def stop(self) -> None:
        """Ends this member's part, also while it waits for others; from any thread."""
        self._stopped = True
        if self._group is not None:
            with suppress(RuntimeError):  # it has ended
                self._group.abort()


@contextmanager
def _lost(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's, of whoever is not there; its own types derive from it
        raise PeerLost(f"{what}: {error}", fix="The rest is pulled") from error


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
            lacking = await run(version.still_lacking, into, deadline_s=LOOK_S)
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
            with _lost("nobody is where a broadcast was to be"):
                meeting = told.where, told.members, wait
                store = await run(store_at, *meeting, deadline_s=2 * told.wait_s)
            receiving = (run(part.run, store, deadline_s=MOST_S) for part in parts)
            await asyncio.gather(*receiving)
        finally:
            for part in parts:
                part.stop()
                mesh.telemetry.count("chunks_fetched", part.chunks)
                mesh.telemetry.count("chunks_fetched_bytes", part.bytes)
                mesh.telemetry.count("chunks_damaged", part.damaged)


class _Receiving(BroadcastGroup):
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
        self.join(store)
        chunks = self._sender.chunks
        contents = self.receive(chunks.values())
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
