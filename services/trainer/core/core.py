"""The core of a gang: leases groups, has their rounds computed, steps, stages, commits."""

from __future__ import annotations

from typing import Any

from meshrl.common.api.calls.role import Settle, Settled
from meshrl.common.api.stats import CoreStats
from meshrl.common.api.trainer import (
    BroadcastPlace,
    Gather,
    LeaveHybrids,
    Restaged,
    RoundLease,
    RoundRequest,
    RoundResult,
    Trainer,
)
from meshrl.common.api.weights import Group
from meshrl.common.base.errors import NotFound, RankLost, Refused
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.residents.tiers import Tiers
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state import events, jobs
from meshrl.common.state.pool.demand import measured
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.ways.broadcasting import Broadcasts, files_here
from meshrl.kernels.cost import Calibration, expected
from meshrl.services.trainer.core.committing import Commits
from meshrl.services.trainer.core.counters import StepCounters
from meshrl.services.trainer.core.first_version import FirstVersion
from meshrl.services.trainer.core.position import CommittedVersion, Position
from meshrl.services.trainer.core.recovery import Recovery
from meshrl.services.trainer.core.sleeping import CoreSleeper
from meshrl.services.trainer.gang.compute import Compute
from meshrl.services.trainer.hybrids.gradients import Gradients
from meshrl.services.trainer.initial.beginning import outline
from meshrl.services.trainer.steps.batch import Refill, staleness
from meshrl.services.trainer.steps.intake import Intake
from meshrl.services.trainer.steps.step import TrainingStep
from meshrl.services.trainer.steps.timing import StepTimes
from meshrl.services.trainer.versions.checkpointing import Checkpoints
from meshrl.services.trainer.versions.publishing import Publisher
from meshrl.services.trainer.versions.restoring import Restoring

LOSSES = 3  # losses in a row at one step that end the job: repeating mends nothing


class RankLosses:
    """`in_a_row`: those since the last step that got done."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh, self._job = mesh, job
        self.in_a_row = 0

    async def note(self, error: RankLost) -> None:
        """Tell of a loss, once; raise `error` when it is one too many, Fenced without a lease."""
        mesh = self._mesh
        self.in_a_row += 1
        mesh.telemetry.log.warning("step cut off", error=str(error))
        fields = {"job": self._job, "why": str(error)}
        operation = mesh.random.token(8)
        await patiently(
            mesh.clock,
            lambda: events.append_as(
                mesh.state, mesh.name, mesh.token, "rank_lost", fields, operation
            ),
        )
        if self.in_a_row == LOSSES:
            raise error


PHASE_S = 0.1  # between two looks whether the job trains: evaluations before it take minutes


class TrainerCore(Actor):
    """Owns parameters and optimizer; hybrids lend it gradients."""

    interface = Trainer

    def __init__(self, mesh: Mesh, data: JobData, seat: Seat, compute: Compute) -> None:
        self.mesh, self.data, self.seat = mesh, data, seat
        self.compute, self.runner = compute, compute.runner
        self.turns, self.nap = self.runner.turns, self.runner.nap
        self.bulk = BulkClient(mesh)
        self.ready = False
        self.phase = "starting"  # phase of its work, for its published counters
        self._entered = 0  # phases so far
        self.position = Position()
        training, (model, parameters) = data.config.training, outline(data)
        prior = expected(parameters, model.heads * model.head_dim, model.layers)
        costs = Calibration(prior, training.bin_tokens)
        self.gradients = Gradients(mesh, compute, seat.resident, training.bin_deadline_s, costs)
        self.gradients.idle_s = lambda: self.nap.total_s + self.turns.waited_s
        self.publisher = Publisher(mesh, data, compute)
        files = files_here(mesh, self.bulk)
        self.broadcasts = Broadcasts(mesh, files, data.config.rollout.broadcast)
        self.intake = Intake(mesh, self.bulk, data.id)
        self.counters = StepCounters(mesh, self.runner, self.intake)
        self.checkpoints = Checkpoints(mesh, data, compute, model, self.publisher, self.enter)
        self.first = FirstVersion(mesh, data, compute)
        self.commits = Commits(self)
        self.times = StepTimes(mesh, data)
        self.gradients.timed, self.checkpoints.timed = self.times.round, self.times.checkpoint
        self.sleeper = CoreSleeper(self)
        self.tiers = Tiers(mesh, self.sleeper, *mesh.settings.places, turns=self.turns.settle)

    async def stop(self) -> None:
        await self.publisher.stop()
        await self.broadcasts.stop()
        await self.tiers.stop()
        await self.times.close()

    def enter(self, phase: str, step: int) -> None:
        """A step goes through waiting, computing, updating, staging, checkpointing, committing and
        telling; a checkpoint's writing goes on beside the next ones. Before the first one there is
        restoring and replaying.
        """
        self.phase = phase
        self.times.enter(phase)
        self._entered += 1
        if phase == "updating":
            self.position.updating = step

    def stats(self) -> CoreStats:
        counters, gradients, late = self.counters, self.gradients, self.compute.late
        return CoreStats(
            paced=late.get("paced"),
            late=late.get("late"),
            ready=self.ready,
            published=self.publisher.published,
            phase=self.phase,
            progress=[self._entered, self.first.fraction, sum(gradients.busy_s.values())],
            step=self.position.version,
            tokens=counters.tokens,
            busy_s=counters.busy_s,
            wait_s=counters.wait_s,
            work=measured.told(counters.work(gradients)),
            parts=counters.parts.last_seconds,
            bin_tokens_per_s=gradients.rates,
            warm_start=self.first.fraction,
            hybrids=gradients.hybrids.stages(),
        )

    def published(self) -> dict[str, Any]:
        residents = self.seat.stats() | self.tiers.stats() | self.turns.stats()
        return residents | self.publisher.stats() | self.stats().encoded()

    # -- hybrids ---------------------------------------------------------------------------------

    @call(Trainer.join)
    def join(self, helper: str) -> int:
        if why := self.publisher.unhelped:
            raise Refused(why, where=self.mesh.name, fix="set training.dtype to rollout.dtype")
        return self.gradients.joined(helper)

    @call(Trainer.leave)
    def leave(self, request: LeaveHybrids) -> None:
        self.gradients.left(request.helper, request.generation)

    @call(Trainer.lease_round)
    async def lease_round(self, request: RoundRequest) -> RoundLease:
        lease = await self.gradients.lease(request)
        return lease or RoundLease(epoch="", index=-1, manifest="", bins=[])

    @call(Trainer.round_done)
    async def round_done(self, result: RoundResult) -> None:
        await self.gradients.done(result)

    @call(Trainer.gather)
    async def gather(self, request: Gather) -> BroadcastPlace:
        """Where hosts that lack the version committed last meet to have it by broadcast."""
        await self.broadcasts.publish(self.position.manifest)
        return await self.broadcasts.gather(request)

    @call(Trainer.restage)
    async def restage(self, manifest: str) -> Restaged:
        """Writes the current version again, as long as no update has changed the weights."""
        position = self.position
        ready = self.intake.awake.is_set() and self.ready
        if not ready or manifest != position.manifest:
            return Restaged(False, later=True)

        async def mended() -> bool:
            """From the last checkpoint, where other ranks have cut its chunks otherwise."""
            about = self.mesh, self.bulk, self.data, self.compute, self.enter
            name = self.checkpoints.name
            return bool(name) and await Restoring(*about).mended(name, manifest)

        about = position.born, position.version, manifest
        done = await self.publisher.joined_staging(*about, mended)
        self.mesh.telemetry.log.warning("restage", manifest=manifest, done=done)
        if done is None:
            return Restaged(False, later=True)
        # An evaluation may hold the next version back for long, and it comes.
        return Restaged(done, later=not done and position.updating > position.version)

    @call(Trainer.drain)
    def drain(self, request: str) -> None:
        """A step that is cut off is repeated by the next core, from its own lease of the groups."""

    @call(Trainer.settle)
    async def settle(self, wish: Settle) -> Settled:
        return await self.tiers.settle(wish)

    def standing(self, tier: str = "") -> dict[str, Any]:
        """Describe the weights as they are now, kept at `tier`, for a process to go on from."""
        return self.position.described() | {
            "job": self.data.id,
            "tier": str(tier),
            "ranks": self.compute.division.told,
            "checkpoint": self.checkpoints.name,
            "checkpoint_step": self.checkpoints.step,
        }

    def go_on_from(self, there: CommittedVersion) -> None:
        """The compute stands at a committed version, and the job with it."""
        self.position.go_on_from(there)
        self.checkpoints.name, self.checkpoints.step = there.checkpoint, there.checkpoint_step
        self.gradients.announce(self.position.manifest)

    # -- life ------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Puts the learner where the job stands; makes version 0 if there is none."""
        row = await self._row()
        await self.checkpoints.clear(row.checkpoint)
        if row.version < 0:
            if row.phase == jobs.Phase.QUEUED:
                await self._phase(jobs.Phase.WARM_START)
            self.position.lineage = row.lineage  # above 0 where Redis has lost what there was
            with self.mesh.loading():
                cached = await self.first.make()
            await self.commits.first(cached)
        else:
            await self.compute.form()
            self.first.adapt()
            with self.mesh.loading():
                if not await self.sleeper.resumed(row):
                    await self._recover(row)
            await self.publisher.look(self.position.manifest)
        if why := self.publisher.unhelped:
            self.mesh.telemetry.log.warning("no helpers", why=why)
        self.first.fraction = 1.0
        if row.phase in (jobs.Phase.QUEUED, jobs.Phase.WARM_START):
            await self._phase(jobs.Phase.BASELINE)
        self.ready = True
        await self.mesh.publish()  # its worker waits for this, and the next renewal is late

    async def _recover(self, row: jobs.JobRow) -> None:
        self.position.whole = False
        self.go_on_from(await Recovery(self).recover(row))

    def _make_step(self, number: int, manifest: str, config: JobConfig) -> TrainingStep:
        about = self.mesh, config, self.compute, self.gradients, number, manifest
        return TrainingStep(*about, self.enter, self.times.intake)

    async def _row(self) -> jobs.JobRow:
        row = await patiently(self.mesh.clock, lambda: jobs.job(self.mesh.state, self.data.id))
        if row is None:
            raise NotFound(f"the job {self.data.id} is not in Redis any more")
        return row

    async def _phase(self, phase: jobs.Phase) -> None:
        mesh = self.mesh
        about = mesh.state, self.data.id, phase, mesh.token, mesh.name
        await patiently(mesh.clock, lambda: jobs.set_phase(*about))

    async def train(self) -> None:
        """Step until the budget is spent, while the job trains; RankLost when none gets done."""
        row, losses = await self._row(), RankLosses(self.mesh, self.data.id)
        budget = self.data.config.budget.steps
        while self.position.version < budget:
            if row.phase != jobs.Phase.TRAINING:
                await self.mesh.clock.sleep(PHASE_S)
                row = await self._row()
                continue
            try:
                if losses.in_a_row:
                    # The gang is formed anew, where the last committed step left the job.
                    self.enter("forming", self.position.version + 1)
                    self.position.whole = False
                    with self.mesh.loading():
                        await self.compute.form()
                        await self.checkpoints.settled()
                        await self._recover(await self._row())
                await self._step(self.position.version + 1)
                losses.in_a_row = 0
            except RankLost as error:
                await losses.note(error)
        self.phase = "done"
        while True:  # the role process stays until its gang is moved
            await self.mesh.clock.sleep(60.0)

    # -- a step ----------------------------------------------------------------------------------

    async def _step(self, step: int) -> None:
        counters, gradients = self.counters, self.gradients
        self.times.begin(step)
        self.enter("waiting", step)
        gradients.busy_s = {}
        counters.begin()
        refill = Refill(self.data.config)
        longest = self.data.config.algorithm.max_staleness

        def stale(group: Group) -> bool:  # whatever its row in Redis says
            return staleness(group, self.position.version) > longest

        groups = self.intake.groups(step, stale, refill.replaces)
        done = await self._make_step(step, self.position.manifest, self.data.config).run(groups)
        self.position.computed = step
        done.batch.refilled = refill.count
        metrics = counters.metrics(step, done, gradients.busy_s, self.seat.resident)
        await self.commits.step(step, done, metrics, counters.parts)
        counters.commit(done.batch.tokens)
        self.times.ended(done.batch.tokens)
