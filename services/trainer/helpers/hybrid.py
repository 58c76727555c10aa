"""A hybrid, which is a helper: it computes gradients of rounds for a training gang's core, and owns
no state.

It joins under a generation, gets weights before it asks for work, and never holds a step up: what
it does not bring in time the core computes.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from common.api.role import Drain, Drainable, Drained
from common.api.trainer import (
    JoinHybrids,
    LeaveHybrids,
    Restage,
    RoundLease,
    RoundRequest,
    RoundResult,
    Trainer,
)
from common.errors import Damaged, Fenced, MeshError, NotFound
from common.job.job_data import JobData
from common.model.transfer import Fetcher
from common.runtime.actor import Actor, call
from common.runtime.mesh import Mesh
from common.runtime.patience import Patience
from common.wire.bulk import BulkClient
from services.trainer.arithmetic.learner import Learner
from services.trainer.arithmetic.packing import Bin
from services.trainer.helpers.gradient_transfer import PIECE_S, Outbox

ASK_S = 5.0  # how long the core may hold the question for a round
RETRY_S = 0.3
COMPUTE_S = 600.0
GIVE_S = 30.0  # for an answer, beside the time to fetch the gradient


class Hybrid(Actor):
    """Asks the core for rounds until it is drained."""

    interface = Drainable

    def __init__(self, mesh: Mesh, data: JobData, gang: str, epoch: int, learner: Learner) -> None:
        self.mesh, self.data, self.gang, self.epoch = mesh, data, gang, epoch
        self.learner = learner
        self.bulk = BulkClient(mesh)
        self.outbox = Outbox(mesh, gang)
        self.rounds, self.bins = 0, 0
        self.busy_s = 0.0
        self._core = mesh.ref(f"trainer/{data.id}")
        self._generation = 0  # generation of the join; 0: not joined
        self._fetcher = Fetcher(mesh, self.bulk)
        self._manifest = ""  # names the weights that the learner has
        self._draining = False
        self._left = asyncio.Event()

    async def stop(self) -> None:
        self.outbox.close()

    def stats(self) -> dict[str, Any]:
        return {
            "job": self.data.id,
            "epoch": self.epoch,
            "ready": True,
            "gang": self.gang,
            "core": False,
            "generation": self._generation,
            "rounds": self.rounds,
            "bins": self.bins,
            "busy_s": self.busy_s,
        }

    @call(Drainable.drain)
    async def drain(self, request: Drain) -> Drained:
        """The round at hand is left to the core, which hears of it at once."""
        self._draining = True
        try:
            if self._generation:
                await self._core.call(Trainer.leave, LeaveHybrids(self.gang, self._generation))
        except MeshError as error:  # a core that is away has forgotten it already
            self.mesh.telemetry.log.info("leaving", error=str(error))
        finally:
            self._left.set()
        return Drained()

    async def serve(self) -> None:
        """Serves until drained; a core that is away is asked again, within a bound (`Patience`)."""
        patience = Patience(self.mesh.clock)
        while not self._draining:
            try:
                await self._help()
                patience.succeeded()
            except Fenced as error:  # the core knows this join no more: from the beginning
                self.mesh.telemetry.log.info("joining again", error=str(error))
                self._generation = 0
            except MeshError as error:
                self.mesh.telemetry.log.info("asking again", error=str(error))
                patience.failed(error)
                await self.mesh.clock.sleep(RETRY_S)
        await self._left.wait()  # or whoever drains it would get no answer

    async def _help(self) -> None:
        if not self._generation:
            joined = await self._core.call(Trainer.join, JoinHybrids(self.gang))
            self._generation = joined.generation
        request = RoundRequest(self.gang, self._generation, self._manifest, ASK_S)
        lease = await self._core.call(Trainer.lease_round, request, deadline_s=ASK_S + 5.0)
        if lease.index >= 0:
            await self._give(await self._compute(lease))
        elif lease.manifest:
            await self._fetch(lease.manifest)

    async def _fetch(self, manifest: str) -> None:
        """The weights that rounds will need, before a round is asked for."""
        self._manifest = ""  # whatever happens meanwhile, the learner has no version
        try:
            _, weights = await self._fetcher.fetch(manifest)
        except (Damaged, NotFound) as error:
            self.mesh.telemetry.log.error("weights are damaged", error=str(error))
            await self._core.call(Trainer.restage, Restage(manifest))
            await self.mesh.clock.sleep(RETRY_S)
            return  # it asks for a round again, and learns which weights it needs by then
        load = self.learner.load_weights
        await self.mesh.host.run_blocking(load, weights, deadline_s=COMPUTE_S)
        self._manifest = manifest

    async def _compute(self, lease: RoundLease) -> RoundResult:
        clock = self.mesh.clock
        began = clock.monotonic()
        bins = [bin for arrays in lease.bins if (bin := Bin.from_arrays(arrays)).trained]
        gradient, stats = await self.mesh.host.run_blocking(
            self.learner.round_gradient, bins, deadline_s=COMPUTE_S
        )
        took = clock.monotonic() - began
        self.rounds += 1
        self.bins += len(bins)
        self.busy_s += took
        return RoundResult(
            gang=self.gang,
            generation=self._generation,
            epoch=lease.epoch,
            index=lease.index,
            pieces=await self.outbox.put(gradient),
            stats=asdict(stats),
            busy_s=took,
        )

    async def _give(self, result: RoundResult) -> None:
        """The core fetches the gradient before it answers."""
        deadline_s = GIVE_S + PIECE_S * len(result.pieces)
        await self._core.call(Trainer.round_done, result, deadline_s=deadline_s)
