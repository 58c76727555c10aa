"""Broadcast transport from the core: gloo, or nccl between GPUs, to one process of each host.

That process saves the chunks for the others. It suits fast networks: a broadcast costs the sender
one copy, and needs neither deltas nor relays. Chunks received before a member was lost are kept;
the others are pulled.
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

from meshrl.common.api.trainer import BroadcastPlan, BroadcastRequest, BroadcastSender, Trainer
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import PeerLost, Refused
from meshrl.common.base.host.listen_addresses import WILDCARD_HOSTS, parse_listen_address
from meshrl.common.base.host.settings import MeshSettings, parse_advertised_host
from meshrl.common.hardware.gpus.nccl_environment import set_nccl_environment
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.store import chunk_cache
from meshrl.common.weights.store.chunk_cache import VersionToFetch
from meshrl.common.weights.transports.rendezvous import open_rendezvous_store

MAX_IN_FLIGHT = 2  # transfers at once: one moves while the previous one is hashed and written
LOCK_NAME = "broadcast"
IO_TIMEOUT_S = 10.0  # to check which chunks this host has
BROADCAST_TIMEOUT_S = 600.0  # for a whole broadcast
STOP_TIMEOUT_S = 30.0  # to abort a group; `ncclCommAbort` waits for the device


def choose_gloo_interface(settings: MeshSettings) -> dict[str, str]:
    """Return the interface or address by which gloo reaches other hosts.

    It is the operator's setting in the environment or in the host's settings, else the address of
    `mesh.bind`. Refused: that address stands for all interfaces.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0] or settings.interface
    if chosen:
        return {"interface": chosen}
    host = parse_advertised_host(settings.bind).strip("[]")
    if parse_listen_address(settings.bind, "mesh.bind")[0] in WILDCARD_HOSTS:
        raise Refused(
            "the network interface of this host cannot be determined",
            where="mesh.bind",
            fix="Set `interface` in mesh.toml, or GLOO_SOCKET_IFNAME",
        )
    return {"hostname": host}


class BroadcastGroup:
    """One member of a sender's group; the sender has rank 0, and `stop` works from any thread."""

    def __init__(
        self, plan: BroadcastPlan, sender: BroadcastSender, gloo_interface: dict[str, str]
    ) -> None:
        """Create the member. Group names are unique.

        Args:
            gloo_interface: Result of `choose_gloo_interface`.
        """
        self._plan, self._sender, self._gloo_interface = plan, sender, gloo_interface
        self._timeout = timedelta(seconds=plan.max_wait_s)
        self._device = "cuda" if plan.backend == "nccl" else "cpu"
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = 0, 0
        self._group: Any = None
        self._stopped = False

    def join(self, store: Store) -> None:
        """Join the group at `store`.

        `max_wait_s` of the plan limits this and each later wait. PeerLost: a member is missing.
        ConfigError: a variable of NCCL would end this process when a member is lost.
        """
        known = PrefixStore(self._sender.group, store)
        about = known, self._plan.rank, self._plan.world_size
        with _as_peer_lost(f"the rendezvous of {self._plan.world_size} members failed"):
            if self._plan.backend == "nccl":
                set_nccl_environment()
                options: Any = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                self._group = dist.ProcessGroupNCCL(*about, options)
            else:
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._devices = [dist.ProcessGroupGloo.create_device(**self._gloo_interface)]
                options._timeout = self._timeout
                self._group = dist.ProcessGroupGloo(*about, options)

    def send(self, contents: Iterable[Any]) -> None:
        """Send buffers, each as one broadcast. PeerLost: a member was lost."""
        tensors = (torch.frombuffer(one, dtype=torch.uint8).to(self._device) for one in contents)
        for _ in self._broadcast(tensors):
            pass

    def receive(self, sizes: Iterable[int]) -> Iterator[memoryview]:
        """Yield received buffers in order, each valid until the next request. PeerLost."""
        empty = (torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes)
        for tensor in self._broadcast(empty):
            yield memoryview(tensor.cpu().numpy().data)

    def _broadcast(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Broadcast tensors with some in flight, and yield each once it has moved."""
        moving: deque[tuple[Any, torch.Tensor]] = deque()
        for tensor in tensors:
            self.check_not_stopped()
            with _as_peer_lost("a broadcast of weights did not start"):
                moving.append((self._group.broadcast([tensor], self._options), tensor))
            if len(moving) >= MAX_IN_FLIGHT:
                yield self._wait_for_work(*moving.popleft())
        while moving:
            yield self._wait_for_work(*moving.popleft())

    def _wait_for_work(self, work: Any, tensor: torch.Tensor) -> torch.Tensor:
        with _as_peer_lost("a broadcast of weights ended early"):
            work.wait(self._timeout)  # with a deadline NCCL blocks the host too
        self.check_not_stopped()  # an aborted NCCL broadcast ends without an error
        return tensor

    def check_not_stopped(self) -> None:
        """Raise PeerLost once this member was stopped."""
        if self._stopped:
            raise PeerLost("the broadcast was stopped")

    def stop(self) -> None:
        """Stop this member, also while it waits for others; callable from any thread."""
        self._stopped = True
        if self._group is not None:
            with suppress(RuntimeError):  # the group has ended
                self._group.abort()


@contextmanager
def _as_peer_lost(message: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch raises subtypes of it for lost members
        raise PeerLost(f"{message}: {error}", fix="Wait: the missing chunks are pulled") from error


class CollectiveTransport:
    """Receiving side of broadcasts of a job's core."""

    name = "collective"

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh = mesh
        self._trainer = mesh.ref(f"trainer/{job}")

    async def receive(self, version: VersionToFetch, target_store: ChunkStore) -> None:
        """Receive missing chunks by a broadcast.

        Processes of a host receive one after the other, so that all but the first find the chunks
        there.

        Raises:
            PeerLost: A member was lost.
            StorageFull: The disk is full.
        """
        mesh, run = self._mesh, self._mesh.host.run_blocking
        async with chunk_cache.fetch_lock(
            mesh, target_store.directory / chunk_cache.LOCKS_FOLDER / LOCK_NAME
        ):
            lacking = await run(version.find_still_missing, target_store, deadline_s=IO_TIMEOUT_S)
            if not lacking:
                return
            await chunk_cache.free_space(
                mesh, target_store, sum(lacking.values()), version.needed_chunks
            )
            request = BroadcastRequest(version.manifest_digest, lacking, torch.cuda.is_available())
            plan = await self._trainer.call(Trainer.join_broadcast, request)
            if plan.rendezvous_url:
                await self._receive_chunks(plan, lacking, target_store)

    async def _receive_chunks(
        self, plan: BroadcastPlan, missing: dict[str, int], target_store: ChunkStore
    ) -> None:
        mesh, run = self._mesh, self._mesh.host.run_blocking
        where = choose_gloo_interface(mesh.settings)
        parts = [
            _BroadcastReceiverGroup(plan, sender, missing, target_store, where)
            for sender in plan.senders
        ]
        wait = timedelta(seconds=plan.max_wait_s)
        try:
            with _as_peer_lost("no sender is at the rendezvous of a broadcast"):
                meeting = plan.rendezvous_url, plan.world_size, wait
                store = await run(open_rendezvous_store, *meeting, deadline_s=2 * plan.max_wait_s)
            receiving = (run(part.run, store, deadline_s=BROADCAST_TIMEOUT_S) for part in parts)
            await asyncio.gather(*receiving)
        finally:
            stopping = (run(part.stop, deadline_s=STOP_TIMEOUT_S) for part in parts)
            await asyncio.gather(*stopping, return_exceptions=True)
            for part in parts:
                mesh.telemetry.count("chunks_fetched", part.received_chunks)
                mesh.telemetry.count("chunks_fetched_bytes", part.received_bytes)
                mesh.telemetry.count("chunks_damaged", part.corrupt_chunks)


class _BroadcastReceiverGroup(BroadcastGroup):
    def __init__(
        self,
        plan: BroadcastPlan,
        sender: BroadcastSender,
        missing: dict[str, int],
        target_store: ChunkStore,
        gloo_interface: dict[str, str],
    ) -> None:
        super().__init__(plan, sender, gloo_interface)
        self.received_chunks = self.received_bytes = self.corrupt_chunks = 0
        self._missing, self._target_store = missing, target_store

    def run(self, store: Store) -> None:
        """Save the missing chunks among those received. PeerLost, StorageFull."""
        self.join(store)
        chunks = self._sender.chunk_bytes
        contents = self.receive(chunks.values())
        for digest, content in zip(chunks, contents, strict=True):
            self.check_not_stopped()
            if digest not in self._missing:
                continue
            if compute_digest(content) != digest:
                self.corrupt_chunks += 1
                continue
            self._target_store.save(digest, content)
            self.received_chunks += 1
            self.received_bytes += len(content)
