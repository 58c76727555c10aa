"""Receives versions for an engine, and has the trainer write again what the store does not hold as
it was written.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshrl.common.api.trainer import Trainer
from meshrl.common.api.weights import Manifest
from meshrl.common.base.errors import ConfigError, CorruptData, MeshError, NotFound
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.version_image import VersionImage
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.common.weights.transports.collective import CollectiveTransport
from meshrl.common.weights.transports.version_fetcher import PullTransport, VersionFetcher

MAX_RESTAGES = 5  # a version that was damaged each time it was written: the disk does it
# For a trainer that does not answer, because it is being started, or cannot write it again. One
# that replays or holds its next version for an evaluation says so, and is waited for.
RESTAGE_TIMEOUT_S = 600.0


class VersionReceiver:
    def __init__(self, mesh: Mesh, job: str, transport: str = "pull") -> None:
        """`how`: the ways that it may take, `rollout.weights`."""
        self._mesh, self._job, self._trainer = mesh, job, mesh.ref(f"trainer/{job}")
        bulk = BulkClient(mesh)
        self.fetcher = VersionFetcher(
            mesh, [PullTransport(mesh, bulk), CollectiveTransport(mesh, job)], transport
        )
        self._receiver = WeightReceiver(mesh, bulk, self.fetcher, wants_deltas=True)
        self._missing_manifest, self._missing_since_s, self._restages = "", 0.0, 0
        self.pulls, self.pull_s = 0, 0.0  # what has been received, and the last one's seconds

    async def read_manifest(self, manifest: str) -> Manifest:
        return await self._receiver.fetch_manifest(manifest)

    async def receive(
        self, manifest: str, names: Iterable[str] | None = None
    ) -> VersionImage | None:
        """The version's image, or that of its tensors of these `names`; None when the store lacks
        some of it, and it is worth another look because the job has gone on to the next one, or the
        trainer has written it again or is about to. ConfigError when it is not.
        """
        try:
            wanted = None if names is None else dict.fromkeys(names)
            began = self._mesh.clock.monotonic()
            image = await self._receiver.receive(manifest, wanted)
        except (CorruptData, NotFound) as error:
            if not await self._is_superseded(manifest):
                await self._request_restage(manifest, error)
            return None
        self._missing_manifest = ""
        self.pulls, self.pull_s = self.pulls + 1, self._mesh.clock.monotonic() - began
        return image

    async def _is_superseded(self, manifest: str) -> bool:
        """Whether the job has another version by now, so that this one may have been collected."""
        try:
            row = await jobs.read_job(self._mesh.state, self._job)
        except MeshError:
            return False
        return row.manifest != manifest

    async def _request_restage(self, manifest: str, error: MeshError) -> None:
        now, log = self._mesh.job_clock.monotonic(), self._mesh.telemetry.log
        if manifest != self._missing_manifest:
            self._missing_manifest, self._missing_since_s, self._restages = manifest, now, 0
            log.error("weights are damaged", error=str(error), then="the trainer writes them again")
        if self._restages >= MAX_RESTAGES or now - self._missing_since_s > RESTAGE_TIMEOUT_S:
            raise ConfigError(
                f"the weights of the current version cannot be had: {error.message}",
                where=error.where,
                fix="See to the disk that it lies on, then `meshrl resume`: it goes on from the "
                "last checkpoint",
            )
        try:
            answer = await self._trainer.call(Trainer.restage_version, manifest)
        except MeshError as refused:
            log.warning("the trainer cannot write weights again", error=str(refused))
        else:
            self._restages += answer.is_done
            if answer.is_done or answer.retry_later:
                self._missing_since_s = now
