"""The receiver's side: makes chunks of a version of those that this host has of another one, before
what is left is pulled in full.

Nothing fails for a delta: the one that is not there, is not for what this host has, or does not
make what its name says leaves its chunk to the pull.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from meshrl.common.api.transfer.deltas import AskDeltas, Base, ChunkDelta, Deltas, Received
from meshrl.common.api.weights import STORE, Manifest, Weights
from meshrl.common.base.errors import BadMessage, Damaged, DeadlineExceeded, MeshError
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.delta.choosing import delta_first, worth_waiting
from meshrl.common.weights.delta.files import make
from meshrl.common.weights.store import host_chunks
from meshrl.common.weights.store.host_chunks import WantedVersion
from meshrl.common.weights.store.weight_store import get

WAIT_S = 2.0  # for more deltas that are of use: groups of chunks take fractions of it
LEAST_RATE = 1e6  # bytes a second at which chunks are thought to be pulled, where nobody knows
ONE_S = 120.0  # to apply one
ASKING_S = 2.0  # to acknowledge a version
AT_ONCE = 2  # chunks that are made at a time: one is written while another is put together
FETCHED_AT_ONCE = 2  # blobs: one comes while the other is asked for
LOOK_S = 0.005  # how often one looks whether another process has made a chunk
STANDS_S = 2.0  # that one waits for it: it is stopped, or has no end


async def from_deltas(
    mesh: Mesh,
    bulk: BulkClient,
    version: WantedVersion,
    into: ChunkStore,
    rate: float | None = None,
) -> set[str]:
    """Makes what it can of the chunks that lack of a version, as files of a host's cache; the
    digests of those that it has made. `rate`: bytes a second that arrive here, if it is known.

    The files that it made are right, and noted as such. Whatever cannot be made is left out.
    """
    making = _Making(mesh, bulk, version, into, rate)
    try:
        if version.lacking:
            await making.all(version.manifest)
    except MeshError as error:
        mesh.telemetry.log.warning("no deltas", error=str(error))
    return making.made


async def acknowledge(mesh: Mesh, manifest: Manifest, digest: str) -> None:
    """Tells the store that this host has a version whole, from which later deltas may be then. To
    be called on other hosts than the store's, once all of its chunks are files there. It is no harm
    if it fails.
    """
    target = Base(manifest.lineage, manifest.version, digest)
    told = Received(mesh.settings.host, target, manifest.job)
    try:
        async with mesh.clock.timeout(ASKING_S, "a version to be acknowledged"):
            await mesh.ref(STORE).call(Weights.received, told)
    except MeshError as error:
        mesh.telemetry.log.warning("a version is not acknowledged", error=str(error))


class _Making:
    def __init__(
        self,
        mesh: Mesh,
        bulk: BulkClient,
        version: WantedVersion,
        into: ChunkStore,
        rate: float | None,
    ) -> None:
        self._mesh, self._bulk, self._into, self._rate = mesh, bulk, into, rate
        self._sizes, self._missing = version.lacking, dict(version.lacking)
        self._job, self._needed = version.job, {*version.needed, *version.lacking}
        self.made: set[str] = set()
        self._fetching = asyncio.Semaphore(FETCHED_AT_ONCE)
        self._applying = asyncio.Semaphore(AT_ONCE)
        self._stalls = False  # the way of the deltas: no more of them are fetched

    async def all(self, manifest: str) -> None:
        clock, host, known = self._mesh.clock, self._mesh.settings.host, 0
        patience_s = WAIT_S if worth_waiting(self._rate) else 0.0
        until = clock.monotonic() + patience_s
        going_on: list[asyncio.Task[None]] = []
        try:
            while self._missing and not self._stalls:
                wait_s = max(0.0, until - clock.monotonic())
                asked = AskDeltas(manifest, host, known, wait_s)
                answer: Deltas = await self._mesh.ref(STORE).call(Weights.deltas, asked)
                known += len(answer.chunks)
                of_use = await self._of_use(answer.chunks)
                for blob, deltas in of_use.items():
                    going_on.append(asyncio.create_task(self._some(blob, deltas)))
                if of_use:
                    until = clock.monotonic() + patience_s
                if not answer.more or clock.monotonic() >= until:
                    break
            if going_on:
                await asyncio.wait(going_on)
        finally:
            for task in going_on:
                task.cancel()
            await asyncio.gather(*going_on, return_exceptions=True)

    async def _of_use(self, deltas: Sequence[ChunkDelta]) -> dict[str, list[ChunkDelta]]:
        """Those that make a missing chunk sooner than it is pulled, of one that is here; one for
        each chunk, by the blob in which they lie.
        """

        def look() -> list[ChunkDelta]:
            return [delta for delta in sooner if self._into.has(delta.old)]

        sooner = [
            delta
            for delta in deltas
            if delta.new in self._missing
            and delta_first(delta.size, self._missing[delta.new], self._rate)
        ]
        found: dict[str, list[ChunkDelta]] = {}
        for delta in await self._mesh.host.run_blocking(look, deadline_s=ONE_S):
            if self._missing.pop(delta.new, None) is not None:
                found.setdefault(delta.blob, []).append(delta)
        return found

    async def _some(self, digest: str, deltas: Sequence[ChunkDelta]) -> None:
        # From the store, not from peers: to be told of one takes as long as such a blob does.
        mesh, what = self._mesh, "deltas of weights"
        try:
            room = sum(self._sizes[delta.new] for delta in deltas)
            within_s = room / (self._rate or LEAST_RATE) + WAIT_S  # the chunks are here by then
            about, job, needed = (mesh, self._bulk, digest, what), self._job, self._needed
            async with self._fetching:
                if self._stalls:
                    return
                blob = await get(*about, job=job, needed=needed, within_s=within_s)
            await host_chunks.make_room(mesh, self._into, room, needed)
        except MeshError as error:
            self._stalls = self._stalls or isinstance(error, DeadlineExceeded)
            mesh.telemetry.log.warning("deltas are left out", blob=digest, error=str(error))
            return
        await asyncio.gather(*(self._one(delta, memoryview(blob)) for delta in deltas))

    async def _one(self, delta: ChunkDelta, blob: memoryview) -> None:
        mesh, clock = self._mesh, self._mesh.clock
        part = blob[delta.offset : delta.offset + delta.size]
        about = self._into, delta.old, part, delta.new
        try:
            async with self._applying:
                until, run = clock.monotonic() + STANDS_S, mesh.host.run_blocking
                while await run(make, *about, clock.monotonic() >= until, deadline_s=ONE_S) is None:
                    await clock.sleep(LOOK_S)
        except (BadMessage, Damaged) as error:
            mesh.telemetry.count("deltas_refused")
            mesh.telemetry.log.warning("a delta is refused", chunk=delta.new, error=str(error))
        except MeshError as error:
            mesh.telemetry.log.warning("a delta is left out", chunk=delta.new, error=str(error))
        else:
            self.made.add(delta.new)
            mesh.telemetry.count("deltas_applied")
            mesh.telemetry.count("deltas_applied_bytes", delta.size)
