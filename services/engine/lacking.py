"""Fetches versions for an engine, and has the trainer write again what the store does not hold as
it was written.
"""

from __future__ import annotations

import torch

from common.api.trainer import Restage, Trainer
from common.errors import ConfigError, Damaged, MeshError, NotFound
from common.model.transfer import Fetcher
from common.runtime.mesh import Mesh
from common.wire.bulk import BulkClient

TRIES = 5  # a version that was damaged each time it was written: the disk does it
# For a trainer that does not answer, because it is being started, or cannot write it again. One
# that replays or holds its next version for an evaluation says so, and is waited for.
PATIENCE_S = 600.0


class Versions:
    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh, self._trainer = mesh, mesh.ref(f"trainer/{job}")
        self._fetcher = Fetcher(mesh, BulkClient(mesh))
        self._lacking, self._since, self._tries = "", 0.0, 0

    async def fetched(self, manifest: str) -> dict[str, torch.Tensor] | None:
        """The version's tensors; None when the store lacks some, and it is worth another look
        because the trainer has written them again or is about to. ConfigError when it is not.
        """
        try:
            _, tensors = await self._fetcher.fetch(manifest)
        except (Damaged, NotFound) as error:
            await self._restaged(manifest, error)
            return None
        self._lacking = ""
        return tensors

    async def _restaged(self, manifest: str, error: MeshError) -> None:
        now, log = self._mesh.clock.monotonic(), self._mesh.telemetry.log
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
            answer = await self._trainer.call(Trainer.restage, Restage(manifest))
        except MeshError as refused:
            log.warning("the trainer cannot write weights again", error=str(refused))
        else:
            self._tries += answer.done
            if answer.done or answer.later:
                self._since = now
