"""Receiver of weight versions for an engine, which has the trainer restage corrupt ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from meshrl.common.api.trainer import Trainer
from meshrl.common.api.weights import Manifest
from meshrl.common.base.errors import ConfigError, CorruptData, MeshError, NotFound
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.manifest import RowRange
from meshrl.common.weights.layout.version_image import VersionImage
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.common.weights.transports.collective import CollectiveTransport
from meshrl.common.weights.transports.version_fetcher import PullTransport, VersionFetcher

MAX_RESTAGES = 5  # limit for a version that is corrupt after each write: the disk is at fault
# Limit for a trainer that starts up or cannot write the version again. A trainer that replays or
# delays its next version for an evaluation reports that, and has no limit.
RESTAGE_TIMEOUT_S = 600.0
SUPERSEDED_POLL_S = 0.5  # between checks for a newer version while the first one arrives
# First versions that are given up for newer ones, in a row: a host that takes longer than a step to
# receive a version serves an older one.
MAX_SUPERSEDED = 2


class VersionReceiver:
    def __init__(self, mesh: Mesh, job: str, transport: str = "pull") -> None:
        """Initialize; `transport` names the permitted transports, the job's `rollout.weights`."""
        self._mesh, self._job, self._trainer = mesh, job, mesh.ref(f"trainer/{job}")
        bulk = BulkClient(mesh)
        self.fetcher = VersionFetcher(
            mesh, [PullTransport(mesh, bulk), CollectiveTransport(mesh, job)], transport
        )
        self._receiver = WeightReceiver(mesh, bulk, self.fetcher, wants_deltas=True)
        self._missing_manifest, self._missing_since_s, self._restages = "", 0.0, 0
        self.pulls, self.pull_s = 0, 0.0  # versions received, and duration of the last pull
        self.superseded = 0  # first versions given up for newer ones

    async def read_manifest(self, manifest: str) -> Manifest:
        return await self._receiver.fetch_manifest(manifest)

    async def receive(
        self, manifest: str, names: Iterable[str] | None = None
    ) -> VersionImage | None:
        """Return the image of a version, or of its tensors with these `names`.

        Return None if a retry is useful: the store lacks some of it, and the job has a newer
        version, or the trainer has written it again or is about to. Until this process has a
        version, None also means that a newer one was committed. Raise ConfigError if a
        retry is useless.
        """
        try:
            required_names = None if names is None else dict.fromkeys(names)
            began = self._mesh.clock.monotonic()
            image = await self._receive_newest(manifest, required_names)
        except (CorruptData, NotFound) as error:
            if not await self._is_superseded(manifest):
                await self._request_restage(manifest, error)
            return None
        if image is None:
            return None
        self._missing_manifest = ""
        self.pulls, self.pull_s = self.pulls + 1, self._mesh.clock.monotonic() - began
        return image

    async def _receive_newest(
        self, manifest: str, selection: Mapping[str, RowRange | None] | None
    ) -> VersionImage | None:
        """Receive a version; give up the first one of this process if the job has a newer one.

        Chunks that have arrived stay on the host, for the newer version too.
        """
        receiving = asyncio.create_task(self._receiver.receive(manifest, selection), name="weights")
        try:
            while self.pulls == 0 and self.superseded < MAX_SUPERSEDED:
                done, _ = await asyncio.wait([receiving], timeout=SUPERSEDED_POLL_S)
                if done:
                    break
                if await self._is_superseded(manifest):
                    self.superseded += 1
                    self._mesh.telemetry.log.info("a newer version", instead_of=manifest)
                    return None
            return await receiving
        finally:
            if not receiving.done():
                receiving.cancel()
                await asyncio.gather(receiving, return_exceptions=True)

    async def _is_superseded(self, manifest: str) -> bool:
        """Return True if the job has a newer version, so that this one may have been collected."""
        try:
            row = await jobs.read_job(self._mesh.state, self._job)
        except MeshError:
            return False
        return row.manifest != manifest

    async def _request_restage(self, manifest: str, error: MeshError) -> None:
        now, log = self._mesh.job_clock.monotonic(), self._mesh.telemetry.log
        if manifest != self._missing_manifest:
            self._missing_manifest, self._missing_since_s, self._restages = manifest, now, 0
            log.error("weights are corrupt", error=str(error), then="the trainer rewrites them")
        if self._restages >= MAX_RESTAGES or now - self._missing_since_s > RESTAGE_TIMEOUT_S:
            raise ConfigError(
                f"the weights of the current version cannot be fetched: {error.message}",
                where=error.where,
                fix=(
                    "Check the disk of the weights, then run `meshrl resume`, which continues "
                    "from the last checkpoint"
                ),
            )
        try:
            answer = await self._trainer.call(Trainer.restage_version, manifest)
        except MeshError as refused:
            log.warning("the trainer cannot rewrite weights", error=str(refused))
        else:
            self._restages += answer.is_done
            if answer.is_done or answer.retry_later:
                self._missing_since_s = now
