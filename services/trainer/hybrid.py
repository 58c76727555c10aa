"""A hybrid: lends a training gang's core gradients of bins, and owns nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from common.actor import Actor, call
from common.api.role import Drain, Drained, Role
from common.api.trainer import BinLease, BinRequest, BinResult, Trainer
from common.bulk import BulkClient
from common.errors import MeshError
from common.jobdata import JobData
from common.mesh import Mesh
from common.model.transfer import fetch
from services.trainer.batching import Bin
from services.trainer.learner import Learner

ASK_S = 5.0  # how long the core may hold the question for a bin
RETRY_S = 0.3
COMPUTE_S = 600.0


class Hybrid(Actor):
    """Asks the core for bins until it is drained."""

    interface = Role

    def __init__(self, mesh: Mesh, data: JobData, gang: str, epoch: int, learner: Learner) -> None:
        self.mesh, self.data, self.gang, self.epoch = mesh, data, gang, epoch
        self.learner = learner
        self.bulk = BulkClient(mesh)
        self.bins = 0
        self.busy_s = 0.0
        self._manifest = ""
        self._draining = False

    def stats(self) -> dict[str, Any]:
        return {
            "job": self.data.id,
            "epoch": self.epoch,
            "ready": True,
            "gang": self.gang,
            "core": False,
            "bins": self.bins,
            "busy_s": self.busy_s,
        }

    @call(Role.drain)
    def drain(self, request: Drain) -> Drained:
        """The bin at hand is left to the core."""
        self._draining = True
        return Drained(0)

    async def serve(self) -> None:
        """Until drained; a core that is away is asked again."""
        core = self.mesh.ref(f"trainer/{self.data.id}")
        while not self._draining:
            try:
                request = BinRequest(self.gang, ASK_S)
                lease = await core.call(Trainer.lease_bin, request, deadline_s=ASK_S + 5.0)
                if lease.index >= 0:
                    result = await self._compute(lease)
                    await core.call(Trainer.bin_done, result)
            except MeshError as error:
                self.mesh.telemetry.log.info("asking again", error=str(error))
                await self.mesh.clock.sleep(RETRY_S)

    async def _compute(self, lease: BinLease) -> BinResult:
        clock = self.mesh.clock
        if lease.manifest != self._manifest:
            _, weights = await fetch(self.mesh, self.bulk, lease.manifest)
            load = self.learner.load_weights
            await self.mesh.host.run_blocking(load, weights, deadline_s=COMPUTE_S)
            self._manifest = lease.manifest
        began = clock.monotonic()
        bins = [Bin.from_arrays(arrays) for arrays in lease.bins]
        gradient, stats = await self.mesh.host.run_blocking(
            self.learner.round_gradient, bins, deadline_s=COMPUTE_S
        )
        took = clock.monotonic() - began
        self.bins += 1
        self.busy_s += took
        return BinResult(
            gang=self.gang,
            step=lease.step,
            version=lease.version,
            epoch=lease.epoch,
            index=lease.index,
            manifest=lease.manifest,
            gradient=gradient.numpy(),
            stats=asdict(stats),
            busy_s=took,
        )
