"""Receives versions for an engine, and has the trainer write again what the store does not hold as
it was written.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshrl.common.api.trainer import Trainer
from meshrl.common.api.weights import Manifest
from meshrl.common.base.errors import ConfigError, Damaged, MeshError, NotFound
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.images import Image
from meshrl.common.weights.receive import Receiver
from meshrl.common.weights.ways.bringing import Bringing, PullPath
from meshrl.common.weights.ways.collective import Collective

TRIES = 5  # a version that was damaged each time it was written: the disk does it
# For a trainer that does not answer, because it is being started, or cannot write it again. One
# that replays or holds its next version for an evaluation says so, and is waited for.
PATIENCE_S = 600.0


class Versions:
    def __init__(self, mesh: Mesh, job: str, how: str = "pull") -> None:
        """`how`: the ways that it may take, `rollout.weights`."""
        self._mesh, self._job, self._trainer = mesh, job, mesh.ref(f"trainer/{job}")
        bulk = BulkClient(mesh)
        self.bringing = Bringing(mesh, [PullPath(mesh, bulk), Collective(mesh, job)], how)
        self._receiver = Receiver(mesh, bulk, self.bringing, follows=True)
        self._lacking, self._since, self._tries = "", 0.0, 0
        self.pulls, self.pull_s = 0, 0.0  # what has been received, and the last one's seconds

    async def described(self, manifest: str) -> Manifest:
        return await self._receiver.manifest(manifest)

    async def received(self, manifest: str, names: Iterable[str] | None = None) -> Image | None:
        """The version's image, or that of its tensors of these `names`; None when the store lacks
        some of it, and it is worth another look because the job has gone on to the next one, or the
        trainer has written it again or is about to. ConfigError when it is not.
        """
        try:
            wanted = None if names is None else dict.fromkeys(names)
            began = self._mesh.clock.monotonic()
            image = await self._receiver.receive(manifest, wanted)
        except (Damaged, NotFound) as error:
            if not await self._passed(manifest):
                await self._restaged(manifest, error)
            return None
        self._lacking = ""
        self.pulls, self.pull_s = self.pulls + 1, self._mesh.clock.monotonic() - began
        return image

    async def _passed(self, manifest: str) -> bool:
        """Whether the job has another version by now, so that this one may have been collected."""
        try:
            row = await jobs.job(self._mesh.state, self._job)
        except MeshError:
            return False
        return row.manifest != manifest

    async def _restaged(self, manifest: str, error: MeshError) -> None:
        now, log = self._mesh.job_clock.monotonic(), self._mesh.telemetry.log
        if manifest != self._lacking:
            self._lacking, self._since, self._tries = manifest, now, 0
            log.error("weights are damaged", error=str(error), then="the trainer writes them again")
        if self._tries >= TRIES or now - self._since > PATIENCE_S:
            raise ConfigError(
                f"the weights of the current version cannot be had: {error.message}",
                where=error.where,
                fix="See to the disk that it lies on, then `meshrl resume`: it goes on from the "
                "last checkpoint",
            )
        try:
            answer = await self._trainer.call(Trainer.restage, manifest)
        except MeshError as refused:
            log.warning("the trainer cannot write weights again", error=str(refused))
        else:
            self._tries += answer.done
            if answer.done or answer.later:
                self._since = now
