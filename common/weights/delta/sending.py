"""The sender's side: makes the deltas from what receivers hold to a version that was staged, beside
everything else.

A sender keeps no weights for it: the chunks of both versions are files of its host, of which two
are mapped at a time. Bases are what receivers have acknowledged, as the store tells; so a receiver
that failed in the middle of one delta gets the next one from what it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import accumulate, zip_longest

from meshrl.common.api.transfer.deltas import Base, BeginDelta, ChunkDelta, DeltaSet, StageDelta
from meshrl.common.api.weights import STORE, Fetch, Tensor, Weights
from meshrl.common.base.errors import MeshError, NotFound
from meshrl.common.job.config import TrainingConfig
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import looked_at
from meshrl.common.mesh.runtime.tasks import all_of
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.delta.codec import Pair, grouped, paired
from meshrl.common.weights.delta.files import delta_of, keep
from meshrl.common.weights.store import host_chunks
from meshrl.common.weights.store.weight_store import store_entry

ASKING_S = 2.0  # of a step, at most, that go by until the store has said whether deltas are wanted
ONE_S = 120.0  # to make the delta of a chunk and put it
# Of chunks whose deltas lie in one blob, and are told of together: receivers apply them while the
# next are made. Less, and small files cost more than what is in them.
GROUP_BYTES = 32 << 20
AT_ONCE = 2  # chunks of which deltas are made at a time: one is written while another is encoded


class DeltaSender:
    """One in each process that stages versions of a job. To leave it ends what goes on."""

    def __init__(
        self,
        mesh: Mesh,
        bulk: BulkClient,
        job: str,
        config: TrainingConfig,
        *,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        """`config`: of the job, whether deltas are made, and which versions are anchors."""
        self._mesh, self._bulk, self._job, self._config = mesh, bulk, job, config
        self._group_bytes = group_bytes
        self._task: asyncio.Task[None] | None = None
        self._trouble = ""  # of an error that was not foreseen, until deltas are made again

    async def __aenter__(self) -> DeltaSender:
        return self

    async def __aexit__(self, *about: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Ends what goes on: receivers pull the rest in full."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def begin(
        self,
        target: Base,
        *,
        chunks: Collection[str] | None = None,
        part: int = 0,
        parts: int = 1,
    ) -> bool:
        """Begins with the deltas to a version that is staged and not committed, of all its chunks
        or of some: one of `parts` processes that do. Once it returns, whoever asks for them is told
        to wait. False where nobody on another host receives, or the store does not answer: then
        there are none, and nothing is lost.
        """
        await self.stop()  # to an earlier version, which nobody will need
        if self._config.deltas == "off":
            return False
        anchors, host = self._config.delta_anchors, self._mesh.settings.host
        asked = BeginDelta(self._job, target, anchors, part, parts, host)
        try:
            async with self._mesh.clock.timeout(ASKING_S, "deltas to be asked for"):
                bases = (await self._mesh.ref(STORE).call(Weights.begin_delta, asked)).bases
        except MeshError as error:
            self._failed(error)
            return False
        if bases:
            made = _DeltaRound(self._mesh, self._bulk, target, part, self._group_bytes)

            async def make_all() -> None:
                try:
                    await made.since(bases, chunks)
                except Exception as error:  # nobody awaits this: it is told here or nowhere
                    self._failed(error)
                    with suppress(MeshError):
                        await made.told([], bases[0], whole=True)  # nobody waits for the rest
                else:
                    self._trouble = ""

            self._task = asyncio.create_task(make_all(), name=f"deltas to version {target.version}")
            self._task.add_done_callback(looked_at)
        else:
            self._trouble = ""  # of deltas that nobody wants any more
        return bool(bases)

    async def done(self) -> None:
        """Returns once what goes on is at its end."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _failed(self, error: Exception) -> None:
        """Versions go in full then. An error of a type that nobody has foreseen is a defect, or of
        this host: a person is to see to it.
        """
        telemetry = self._mesh.telemetry
        telemetry.count("deltas_failed")
        if isinstance(error, MeshError):
            telemetry.log.warning("no delta", error=str(error))
            return
        self._trouble = f"{type(error).__name__}: {error}"
        then = "versions go in full"
        telemetry.log.error("no delta", error=self._trouble, then=then, exc_info=error)

    def stats(self) -> dict[str, str]:
        """Why deltas cannot be made at the moment; empty: they can, or none are wanted."""
        return {"deltas_trouble": self._trouble}


class _DeltaRound:
    def __init__(
        self, mesh: Mesh, bulk: BulkClient, target: Base, part: int, group_bytes: int
    ) -> None:
        self._mesh, self._bulk, self._target, self._part = mesh, bulk, target, part
        self._group_bytes = group_bytes
        self._tensors: list[Tensor] | None = None

    async def since(self, bases: Sequence[Base], chunks: Collection[str] | None) -> None:
        groups = [list(grouped(await self._pairs(one, chunks), self._group_bytes)) for one in bases]
        for row in zip_longest(*groups, fillvalue=[]):
            for base, pairs in zip(bases, row, strict=True):
                found = await self._some(pairs)
                if found and not await self.told(found, base):
                    return
        await self.told([], bases[0], whole=True)

    async def _pairs(self, base: Base, chunks: Collection[str] | None) -> list[Pair]:
        """The chunks of which there may be deltas from a base; none if that is no more."""
        store, run = self._mesh.ref(STORE), self._mesh.host.run_blocking
        if self._tensors is None:
            target = await store.call(Weights.manifest, Fetch(self._target.digest))
            self._tensors = target.tensors
        with suppress(NotFound):
            before = await store.call(Weights.manifest, Fetch(base.digest))
            found = await run(paired, before.tensors, self._tensors, deadline_s=ONE_S)
            return [pair for pair in found if chunks is None or pair.new in chunks]
        return []

    async def _some(self, pairs: Sequence[Pair]) -> list[ChunkDelta]:
        """The deltas of some chunks, in one blob that is stored; of those whose chunks are on this
        host, and that are worth it.
        """
        mesh, run = self._mesh, self._mesh.host.run_blocking
        entry = await store_entry(mesh)
        stored, cache = await self._bulk.local(entry), host_chunks.cache(mesh)
        places = [place for place in (stored, cache) if place]
        limit, made = asyncio.Semaphore(AT_ONCE), dict[Pair, bytes]()

        async def one(pair: Pair) -> None:
            async with limit:
                delta = await run(delta_of, places, pair, deadline_s=ONE_S)
            if delta is not None:
                made[pair] = delta

        await all_of(one(pair) for pair in pairs)
        if not made:
            return []
        blob = b"".join(made.values())
        if stored is not None:
            digest = await run(keep, stored, blob, deadline_s=ONE_S)
        else:
            digest = await self._bulk.put(entry, blob)
        mesh.telemetry.count("deltas_made", len(made))
        mesh.telemetry.count("deltas_made_bytes", len(blob))
        ends = list(accumulate(map(len, made.values()), initial=0))
        return [
            ChunkDelta(pair.old, pair.new, digest, begin, len(made[pair]))
            for pair, begin in zip(made, ends, strict=False)
        ]

    async def told(self, found: list[ChunkDelta], base: Base, *, whole: bool = False) -> bool:
        request = StageDelta(DeltaSet(base, self._target, found), self._part, whole)
        return await self._mesh.ref(STORE).call(Weights.stage_delta, request)
