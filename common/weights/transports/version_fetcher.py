"""Fetch of a version's missing chunks by the chosen transport; the rest is pulled.

The pull is always available. The measured duration is compared with the prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from meshrl.common.base.errors import CorruptData, MeshError, NotFound
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import events
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.delta.receiver import make_chunks_from_deltas
from meshrl.common.weights.pull.chunk_pull import MissingChunk, pull_chunks
from meshrl.common.weights.store.chunk_cache import VersionToFetch
from meshrl.common.weights.transports.selector import TransportChoice, TransportSelector

TRANSPORT_EVENT = (
    "weights_way"  # a change of transport and its result: `meshrl weights explain` shows it
)
IO_TIMEOUT_S = 10.0  # to check which chunks are there
# Rate of the pull before another transport is considered: below it the network is slow, and
# sending less is what helps. A broadcast ignores a host's rate limits.
FAST_BYTES_PER_S = 100e6
MIN_MEASURED_BYTES = 8 << 20  # below that, the fixed cost of calls dominates


class WeightTransport(Protocol):
    """Transport of versions; the store has all chunks of a published version."""

    @property
    def name(self) -> str:
        """Name for users and for `rollout.weights`."""

    async def receive(self, version: VersionToFetch, target_store: ChunkStore) -> None:
        """Receive missing chunks as files of `target_store`, each verified before it gets its name.

        It may leave chunks missing; received chunks stay after any error. MeshError: it cannot
        continue.
        """


class VersionFetcher:
    """Fetcher of versions, one after the other, for one process."""

    def __init__(
        self, mesh: Mesh, transports: Sequence[WeightTransport], mode: str = "auto"
    ) -> None:
        """Create the fetcher.

        Args:
            transports: The default one (pull) first.
            mode: `auto`, `pull` (the first one), or the name of a transport.
        """
        self._mesh, self._transports, self._mode = mesh, {way.name: way for way in transports}, mode
        self._pull_transport = transports[0]
        self.selector = TransportSelector()
        self._last_report: dict[str, Any] = {}

    async def fetch(self, version: VersionToFetch, target_store: ChunkStore) -> None:
        """Fetch the missing chunks of a version.

        Raises:
            NotFound: The store does not have a chunk.
            CorruptData: The store's chunk is corrupt.
            StorageFull: The disk is full.
        """
        clock, began = self._mesh.clock, self._mesh.clock.monotonic()
        size = version.missing_bytes
        plain = self._pull_transport.name
        if self._mode == "pull" or self._mode in self._transports:
            transport = plain if self._mode == "pull" else self._mode
            choice = TransportChoice(transport, "set by rollout.weights")
        else:
            bound = self._mesh.settings.rate_up or self._mesh.settings.rate_down
            fast = (
                not bound and self.selector.rates_bytes_per_s().get(plain, 0.0) >= FAST_BYTES_PER_S
            )
            choice = self.selector.choose(size, list(self._transports) if fast else [plain])
        way, why, remaining = self._transports[choice.transport], "", version
        if way is self._pull_transport:
            await way.receive(version, target_store)
        else:
            try:
                await way.receive(version, target_store)
            except (NotFound, CorruptData):  # of the store: no other transport can provide it
                raise
            except MeshError as error:
                why = str(error)
            run = self._mesh.host.run_blocking
            lacking = await run(version.find_still_missing, target_store, deadline_s=IO_TIMEOUT_S)
            remaining = replace(version, missing=lacking)
            if lacking and not why:
                why = f"{len(lacking)} of {len(version.missing)} chunks are missing"
        took_s = clock.monotonic() - began
        if why:
            verdict = self.selector.record_failure(choice, why)
        else:
            verdict = self.selector.record_success(choice, size, took_s)
        await self._publish_choice(version.job, choice, size, took_s, verdict)
        if why and remaining.missing:
            await self._pull_transport.receive(remaining, target_store)

    @property
    def last_report(self) -> dict[str, Any] | None:
        """The last transport and its reason for published statistics; None before the first."""
        return self._last_report or None

    async def _publish_choice(
        self, job: str, choice: TransportChoice, size: int, took_s: float, verdict: str
    ) -> None:
        changed = choice.transport != self._last_report.get("way") or choice.replaced_transport
        report = {
            "way": choice.transport,
            "why": choice.reason,
            "verdict": verdict,
            "bytes": size,
            "took_s": round(took_s, 4),
            "predicted_s": choice.predicted_s,
            "rates": {way: round(rate) for way, rate in self.selector.rates_bytes_per_s().items()},
        }
        self._last_report = report
        if changed:
            await publish_transport(self._mesh, job, self._mesh.name, report)


async def publish_transport(mesh: Mesh, job: str, process: str, report: dict[str, Any]) -> None:
    """Publish the event of a changed transport; `process`: its receiver, for users."""
    about = {"job": job, "process": process, "host": mesh.settings.host, **report}
    mesh.telemetry.log.info("weights", **about)
    try:
        await events.append(mesh.state, TRANSPORT_EVENT, about)
    except MeshError as error:  # the record of a choice must not delay weights
        mesh.telemetry.log.warning("weights", error=str(error))


class PullTransport:
    """Transport that makes chunks from deltas and pulls the rest."""

    name = "pull"

    def __init__(self, mesh: Mesh, bulk: BulkClient) -> None:
        self._mesh, self._bulk = mesh, bulk
        self._rate_bytes_per_s: float | None = None  # of the last large pull

    async def receive(self, version: VersionToFetch, target_store: ChunkStore) -> None:
        """Make chunks from deltas where possible, and pull the rest. NotFound, CorruptData,
        StorageFull.
        """
        about = self._mesh, self._bulk
        delta_chunks = await make_chunks_from_deltas(
            *about, version, target_store, self._rate_bytes_per_s
        )
        missing_chunks = [
            MissingChunk(one, size)
            for one, size in version.missing.items()
            if one not in delta_chunks
        ]
        pulled = await pull_chunks(
            *about,
            missing_chunks,
            target_store,
            made_chunks=delta_chunks,
            needed_chunks=version.needed_chunks,
            job=version.job,
            is_joining=version.is_joining,
        )
        if pulled.fetched_bytes >= MIN_MEASURED_BYTES and pulled.duration_s:
            self._rate_bytes_per_s = pulled.fetched_bytes / pulled.duration_s
