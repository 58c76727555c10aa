"""A hybrid, which is a helper: it computes gradients of rounds for a training gang's core, and owns
no state.

It joins under a generation, gets weights before it asks for work, and never holds a step up: what
it does not bring in time the core computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from meshrl.common.api.calls.role import Resting, Settle, Settled
from meshrl.common.api.stats import HybridStats
from meshrl.common.api.trainer import LeaveHybrids, RoundLease, RoundRequest, RoundResult, Trainer
from meshrl.common.base.errors import Damaged, Fenced, MeshError, NotFound
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.pace import training_profile
from meshrl.common.mesh.residents.tiers import Keep, KeepsNothing, Take, Tiers
from meshrl.common.mesh.residents.turns import Turns
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import Patience
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.receive import Receiver
from meshrl.services.trainer.arithmetic.learner import Learner
from meshrl.services.trainer.arithmetic.memory import LearnerMemory, taken_again
from meshrl.services.trainer.arithmetic.stats import BinStats
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.compute.gradient_transfer import PIECE_S, Outbox
from meshrl.services.trainer.compute.piece_runner import Padding

T = TypeVar("T")

ASK_S = 5.0  # how long the core may hold the question for a round
RETRY_S = 0.3
COMPUTE_S = 600.0
GIVE_S = 30.0  # for an answer, beside the time to fetch the gradient


class Hybrid(KeepsNothing, Actor):
    """Asks the core for rounds until it is drained."""

    interface = Resting

    def __init__(self, mesh: Mesh, data: JobData, seat: Seat, learner: Learner) -> None:
        self.mesh, self.data, self.seat = mesh, data, seat
        self.learner = learner
        self.bulk = BulkClient(mesh)
        self.outbox = Outbox(mesh, seat.resident)
        self.turns = Turns(mesh, seat.keeper, seat.resident, seat.generation, enabled=seat.turns)
        pace = data.config.training.pace
        self._pace = training_profile(pace) if pace else None
        self._padding = Padding(mesh.clock)
        self.rounds, self.bins = 0, 0
        self.busy_s = 0.0
        self._core = mesh.ref(f"trainer/{data.id}")
        self._generation = 0  # generation of the join; 0: not joined
        self._receiver = Receiver(mesh, self.bulk, follows=True)
        self._manifest = ""  # names the weights that the learner has
        self._draining = False
        self._left = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self._learner_used = asyncio.Lock()  # one piece of arithmetic at a time, none asleep
        self._memory: LearnerMemory | None = None  # what was given back
        self.tiers = Tiers(mesh, self, *mesh.settings.places, turns=self.turns.settle)

    async def stop(self) -> None:
        await self.tiers.stop()
        self.outbox.close()

    def stats(self) -> HybridStats:
        paced = self._padding.late if self._pace is not None else {}
        return HybridStats(
            paced=paced.get("paced"),
            late=paced.get("late"),
            joined=self._generation,
            rounds=self.rounds,
            bins=self.bins,
            busy_s=self.busy_s,
        )

    def published(self) -> dict[str, Any]:
        residents = self.seat.stats() | self.turns.stats() | self.tiers.stats()
        return residents | self.stats().encoded()

    @call(Resting.drain)
    async def drain(self, request: str) -> None:
        """The round at hand is left to the core, which hears of it at once."""
        self._draining = True
        self._awake.set()
        try:
            await self._leave()
        finally:
            self._left.set()

    @call(Resting.settle)
    async def settle(self, wish: Settle) -> Settled:
        return await self.tiers.settle(wish)

    @property
    def bytes(self) -> int:
        return self.learner.bytes if self._memory is None else 0

    async def sleep(self, keep: Keep) -> None:
        """It leaves: the core has its rounds computed by others, and the store has the weights."""
        self._awake.clear()
        try:
            await self._leave()
            await self._learner_used.acquire()  # until it wakes; the round at hand ends first
            try:
                self._generation, self._manifest = 0, ""
                memory = await self._blocking(LearnerMemory, self.learner)
                try:
                    await self._blocking(memory.give_back)
                except Exception:
                    await self._blocking(memory.take_again)  # of any content: weights come anew
                    raise
                self._memory = memory
            except BaseException:
                self._learner_used.release()
                raise
        except BaseException:
            self._awake.set()
            raise

    async def wake(self, take: Take) -> None:
        """It joins again under a new generation, and gets the weights as any that joins does."""
        assert self._memory is not None, "it sleeps"
        await taken_again(self._memory, self._blocking, self.mesh.name)
        self._memory = None
        self._generation = 0
        self._learner_used.release()
        self._awake.set()

    async def _leave(self) -> None:
        generation, self._generation = self._generation, 0
        try:
            if generation:
                await self._core.call(Trainer.leave, LeaveHybrids(self.seat.resident, generation))
        except MeshError as error:  # a core that is away has forgotten it already
            self.mesh.telemetry.log.info("leaving", error=str(error))

    async def serve(self) -> None:
        """Serves until drained; a core that is away is asked again, within a bound (`Patience`)."""
        patience = Patience(self.mesh.job_clock)
        while not self._draining:
            await self._awake.wait()
            if self._draining:
                break
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
            self._generation = await self._core.call(Trainer.join, self.seat.resident)
        request = RoundRequest(self.seat.resident, self._generation, self._manifest, ASK_S)
        lease = await self._core.call(Trainer.lease_round, request, deadline_s=ASK_S + 5.0)
        if lease.index >= 0:
            result = await self._compute(lease)
            # The core fetches the gradient before it answers.
            deadline_s = GIVE_S + PIECE_S * len(result.pieces)
            await self._core.call(Trainer.round_done, result, deadline_s=deadline_s)
        elif lease.manifest:
            await self._fetch(lease.manifest)

    async def _fetch(self, manifest: str) -> None:
        """The weights that rounds will need, before a round is asked for."""
        self._manifest = ""  # whatever happens meanwhile, the learner has no version
        try:
            weights = (await self._receiver.receive(manifest)).tensors
        except (Damaged, NotFound) as error:
            self.mesh.telemetry.log.error("weights are damaged", error=str(error))
            await self._core.call(Trainer.restage, manifest)
            await self.mesh.clock.sleep(RETRY_S)
            return  # it asks for a round again, and learns which weights it needs by then
        load = self.learner.load_weights
        async with self._computing():
            await self.turns.run("sync", lambda: self._blocking(load, weights))
            self._manifest = manifest

    @asynccontextmanager
    async def _computing(self) -> AsyncIterator[None]:
        """A use of the learner; Fenced when it was to sleep before it came to that."""
        if not self._awake.is_set():
            raise Fenced("it sleeps", where=self.mesh.name)
        async with self._learner_used:
            yield

    async def _compute(self, lease: RoundLease) -> RoundResult:
        clock = self.mesh.clock
        began = clock.monotonic() - self.turns.waited_s
        bins = [bin for arrays in lease.bins if (bin := Bin.from_arrays(arrays)).trained]

        async def compute() -> tuple[Tensor, BinStats]:
            tokens = sum(len(bin.tokens) for bin in bins)
            seconds = self._pace.train_s(tokens) if self._pace is not None else 0.0
            work = partial(self._blocking, self.learner.round_gradient, bins)
            return await self._padding.take(seconds, work) if seconds else await work()

        async with self._computing():
            gradient, stats = await self.turns.run("train_step", compute)
        took = clock.monotonic() - self.turns.waited_s - began
        self.rounds += 1
        self.bins += len(bins)
        self.busy_s += took
        return RoundResult(
            helper=self.seat.resident,
            generation=self._generation,
            epoch=lease.epoch,
            index=lease.index,
            pieces=await self.outbox.put(gradient),
            stats=asdict(stats),
            busy_s=took,
        )

    async def _blocking(self, work: Callable[..., T], *args: Any) -> T:
        return await self.mesh.host.run_blocking(work, *args, deadline_s=COMPUTE_S)
