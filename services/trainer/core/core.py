"""The core of a training gang: it leases groups, has their rounds computed, steps, stages,
commits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from common.api.engine import Engine
from common.api.hint import Look
from common.api.role import Drain, Drained, Settle, Settled
from common.api.trainer import (
    Gather,
    Gathered,
    Joined,
    JoinHybrids,
    LeaveHybrids,
    Left,
    Restage,
    Restaged,
    RoundLease,
    RoundRequest,
    RoundResult,
    RoundTaken,
    Trainer,
)
from common.api.weights import Group
from common.errors import MeshError, NotFound, RankLost, Refused
from common.job.changing import in_force
from common.job.config import JobConfig
from common.job.job_data import JobData
from common.pool import measured
from common.pool.measured import Work
from common.pool.seat import Seat
from common.records import damage
from common.runtime.actor import Actor, call
from common.runtime.mesh import Mesh
from common.runtime.patience import patiently
from common.runtime.residents.tiers import Tiers
from common.state import events, jobs, registry, steps
from common.weights.ways.broadcasting import Broadcasts, files_here
from common.wire.bulk.port import BulkClient
from kernels.cost import Calibration, expected
from services.trainer.arithmetic.stats import update_metrics
from services.trainer.compute.compute import COMPUTE_S, Compute, LocalCompute
from services.trainer.core.recovery import Recovery
from services.trainer.core.sleeping import CoreSleeper
from services.trainer.gang.lost_ranks import RankLosses
from services.trainer.hybrids.gradients import Gradients
from services.trainer.initial.beginning import (
    Pieces,
    Tell,
    adapt,
    first_weights,
    outline,
    start,
)
from services.trainer.steps.batch import Batch, Refill, staleness
from services.trainer.steps.evaluation_gate import evaluated
from services.trainer.steps.intake import Intake
from services.trainer.steps.step import Step, Stepped
from services.trainer.steps.step_parts import PAUSE, StepParts, StepTook
from services.trainer.steps.timing import StepTimes
from services.trainer.versions.checkpointing import Checkpoints
from services.trainer.versions.publishing import NOBODY, Identity, Publisher
from services.trainer.versions.restoring import Restoring

T = TypeVar("T")

EVALUATION = "evaluation"  # the part of a step that its commit waits for one
PHASE_S = 0.1  # between two looks whether the job trains: evaluations before it take minutes
SLICE_S = 0.2  # of a warm start, until others of the gang have their turns: as engines have


class TrainerCore(Actor):
    """Owns parameters and optimizer; hybrids lend it gradients."""

    interface = Trainer

    def __init__(
        self,
        mesh: Mesh,
        data: JobData,
        seat: Seat,
        compute: Compute,
    ) -> None:
        self.mesh, self.data, self.seat = mesh, data, seat
        self.learner = compute.learner if isinstance(compute, LocalCompute) else None
        self.bulk = BulkClient(mesh)
        self.ready = False
        self.phase = "starting"  # phase of its work, for its published counters
        self._entered = 0  # phases so far
        self._updating = 0  # the last step that has changed the weights
        self._computed = 0  # the last step whose updates were all made
        self._staged: tuple[int, Identity] = (0, NOBODY)  # the last of these that is in the store
        self._whole = False  # whether the weights are those of a step, and not being restored
        self.covered = -1  # version of the committed checkpoint, as far as this process knows
        self.steps_done, self.lineage = 0, 0
        self.weights = NOBODY  # of the current version
        self.tokens = 0
        self.busy_s, self.wait_s = 0.0, 0.0
        self.held_s = 0.0  # of busy_s: waited for evaluations
        self.made = 0  # steps that this process has committed
        self.warm_fraction = 0.0
        self._born = 0  # the lineage that the current version was made in
        self.compute, self.runner = compute, compute.runner
        self.turns, self.nap = self.runner.turns, self.runner.nap
        self.parts = StepParts(lambda: mesh.clock.monotonic() - self.nap.total_s)
        training, (model, parameters) = data.config.training, outline(data)
        prior = expected(parameters, model.heads * model.head_dim, model.layers)
        costs = Calibration(prior, training.bin_tokens)
        self.gradients = Gradients(
            mesh, self.compute, seat.resident, training.bin_deadline_s, costs
        )
        self.gradients.idle_s = lambda: self.nap.total_s + self.turns.waited_s
        self.publisher = Publisher(mesh, data, self.compute)
        files = files_here(mesh, self.bulk)
        self.broadcasts = Broadcasts(mesh, files, data.config.rollout.broadcast)
        self.intake = Intake(mesh, self.bulk, data.id)
        self.checkpoints = Checkpoints(mesh, data, self.compute, model, self.publisher, self.enter)
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
            self._updating = step

    @property
    def manifest(self) -> str:
        """Names the current version."""
        return self.weights.manifest

    def stats(self) -> dict[str, Any]:
        return {
            **self.seat.stats(),
            **self.tiers.stats(),
            **self.turns.stats(),
            **self.publisher.stats(),
            **self.compute.late,
            "ready": self.ready,
            "published": self.publisher.published,
            "phase": self.phase,
            "progress": [self._entered, self.warm_fraction, sum(self.gradients.busy_s.values())],
            "step": self.steps_done,
            "tokens": self.tokens,
            "busy_s": self.busy_s,
            "wait_s": self.wait_s,
            "work": measured.told(self._work),
            "parts": self.parts.stats(),
            "bin_tokens_per_s": self.gradients.rates.table,
            "warm_start": self.warm_fraction,
            "hybrids": self.gradients.hybrids.stages(),
        }

    @property
    def _work(self) -> Work:
        return Work(
            steps=self.made,
            busy_s=self.busy_s,
            wait_s=self.wait_s,
            held_s=self.held_s,
            work_s=self.gradients.work_s,
            tokens=self.tokens,
        )

    # -- hybrids ---------------------------------------------------------------------------------

    @call(Trainer.join)
    def join(self, request: JoinHybrids) -> Joined:
        if why := self.publisher.unhelped:
            raise Refused(why, where=self.mesh.name, fix="set training.dtype to rollout.dtype")
        return Joined(self.gradients.joined(request.helper))

    @call(Trainer.leave)
    def leave(self, request: LeaveHybrids) -> Left:
        self.gradients.left(request.helper, request.generation)
        return Left()

    @call(Trainer.lease_round)
    async def lease_round(self, request: RoundRequest) -> RoundLease:
        lease = await self.gradients.lease(request)
        return lease or RoundLease(epoch="", index=-1, manifest="", bins=[])

    @call(Trainer.round_done)
    async def round_done(self, result: RoundResult) -> RoundTaken:
        await self.gradients.done(result)
        return RoundTaken()

    @call(Trainer.gather)
    async def gather(self, request: Gather) -> Gathered:
        """Where hosts that lack the version committed last meet to have it by broadcast."""
        await self.broadcasts.publish(self.manifest)
        return await self.broadcasts.gather(request)

    @call(Trainer.restage)
    async def restage(self, request: Restage) -> Restaged:
        """Writes the current version again, as long as no update has changed the weights."""
        if not self.intake.awake.is_set() or not self.ready or request.manifest != self.manifest:
            return Restaged(False, later=True)
        about = self._born, self.steps_done, request.manifest
        done = await self.publisher.joined_staging(*about, partial(self._mended, request.manifest))
        self.mesh.telemetry.log.warning("restage", manifest=request.manifest, done=done)
        if done is None:
            return Restaged(False, later=True)
        # An evaluation may hold the next version back for long, and it comes.
        return Restaged(done, later=not done and self._updating > self.steps_done)

    async def _mended(self, manifest: str) -> bool:
        """Writes the current version again from the last checkpoint: other ranks have staged it, or
        an earlier MeshRL, in chunks that these would cut otherwise.
        """
        if not self.checkpoints.name:
            return False
        about = self.mesh, self.bulk, self.data, self.compute, self.enter
        return await Restoring(*about).mended(self.checkpoints.name, manifest)

    @call(Trainer.drain)
    def drain(self, request: Drain) -> Drained:
        """A step that is cut off is repeated by the next core, from its own lease of the groups."""
        return Drained()

    @call(Trainer.settle)
    async def settle(self, wish: Settle) -> Settled:
        return await self.tiers.settle(wish)

    def standing(self, tier: str = "") -> dict[str, Any]:
        """What the weights are now, for who goes on from them; version -1: those of none. `tier` is
        where they are kept. `manifest` names them, committed or not; empty: nothing does yet.
        """
        version, born, manifest = -1, self.lineage, ""
        if self._whole and self._updating <= self.steps_done:
            version, born, manifest = self.steps_done, self._born, self.manifest
        elif self._whole and self._updating == self._computed:
            version = self._computed
            manifest = self._staged[1].manifest if self._staged[0] == version else ""
        return {
            "job": self.data.id,
            "lineage": self.lineage,
            "version": version,
            "manifest": manifest,
            "born": born,
            "tier": str(tier),
            "ranks": self.compute.division.told,
            "checkpoint": self.checkpoints.name,
            "checkpoint_step": self.checkpoints.step,
        }

    def stands_at(self, row: jobs.JobRow, about: dict[str, Any]) -> None:
        """The compute goes on from what stood as `about` says, and the job stands as `row` does."""
        self.steps_done, self.lineage = row.version, row.lineage
        self.weights = Identity(row.manifest, row.image, row.masters)
        self._made_anew(about["born"])
        self.checkpoints.name = about["checkpoint"]
        self.checkpoints.step = self.covered = about["checkpoint_step"]
        self.gradients.announce(self.manifest)

    def _made_anew(self, born: int) -> None:
        """The weights are those of `steps_done`; no later step has been computed with them."""
        self._born, self._whole = born, True
        self._updating, self._computed, self._staged = 0, 0, (0, NOBODY)

    # -- life ------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Puts the learner where the job stands; makes version 0 if there is none."""
        row = await self._row()
        await self.checkpoints.clear(row.checkpoint)
        if row.version < 0:
            if row.phase == jobs.Phase.QUEUED:
                await self._phase(jobs.Phase.WARM_START)
            self.lineage = self._born = row.lineage  # above 0 where Redis has lost what there was
            with self.mesh.loading():
                cached = await self._first_weights()
            await self._commit_initial(cached)
        else:
            await self.compute.form()
            if self.learner is not None:
                adapt(self.data, self.learner)
            with self.mesh.loading():
                if not await self.sleeper.resumed(row):
                    await self._recover(row)
            await self.publisher.look(self.manifest)
        if why := self.publisher.unhelped:
            self.mesh.telemetry.log.warning("no helpers", why=why)
        self.warm_fraction = 1.0
        if row.phase in (jobs.Phase.QUEUED, jobs.Phase.WARM_START):
            await self._phase(jobs.Phase.BASELINE)
        self.ready = True
        await self.mesh.publish()  # its worker waits for this, and the next renewal is late

    async def _recover(self, row: jobs.JobRow) -> None:
        self._whole = False
        recovery = Recovery(
            self.mesh,
            self.bulk,
            self.data,
            self.compute,
            self.intake,
            self.publisher,
            self._make_step,
            self.enter,
        )
        stands = await recovery.recover(row)
        self.steps_done, self.lineage, self.weights = stands.version, stands.lineage, stands.weights
        self._made_anew(stands.born)
        self.checkpoints.name, self.checkpoints.step = stands.checkpoint, stands.checkpoint_step
        self.covered = stands.checkpoint_step
        self.gradients.announce(self.manifest)

    def _make_step(self, number: int, manifest: str, config: JobConfig) -> Step:
        about = self.mesh, config, self.compute, self.gradients, number, manifest
        return Step(*about, self.enter, self.times.intake)

    async def _row(self) -> jobs.JobRow:
        row = await patiently(self.mesh.clock, lambda: jobs.job(self.mesh.state, self.data.id))
        if row is None:
            raise NotFound(f"the job {self.data.id} is not in Redis any more")
        return row

    async def _phase(self, phase: jobs.Phase) -> None:
        await patiently(
            self.mesh.clock,
            lambda: jobs.set_phase(
                self.mesh.state, self.data.id, phase, self.mesh.token, self.mesh.name
            ),
        )

    async def _first_weights(self) -> bool:
        """Computes with version 0 from now on; True when its warm start was in the cache."""
        total = max(1, self.data.config.warm_start.steps)

        def progress(step: int, loss: float) -> None:
            self.warm_fraction = step / total

        damaged: list[dict[str, Any]] = []
        cached = await self._made(progress, damaged.append)
        for told in damaged:
            state = self.mesh.state
            await patiently(self.mesh.clock, partial(events.append, state, damage.EVENT, told))
        return cached

    async def _made(self, progress: Callable[[int, float], None], tell: Tell) -> bool:
        if self.learner is not None:
            return await self._by_turns(start(self.data, self.learner, progress, tell))
        weights, cached = await self._by_turns(first_weights(self.data, progress, tell))
        await self.compute.form()  # now, because ranks hold memory from here on
        if weights is not None:
            await self.compute.take(weights)
            await self.compute.taken()
        return cached

    async def _by_turns(self, pieces: Pieces[T]) -> T:
        """What `pieces` returns: a turn for as many as take `SLICE_S`, for others compute here."""
        clock, found = self.mesh.clock, list[T]()

        def compute() -> None:
            until = clock.monotonic() + SLICE_S
            try:
                next(pieces)
                while clock.monotonic() < until:
                    next(pieces)
            except StopIteration as ended:
                found.append(ended.value)

        slice = partial(self.mesh.host.run_blocking, compute, deadline_s=COMPUTE_S)
        while not found:
            await self.turns.run("warm_start", slice)
        return found[0]

    async def _commit_initial(self, cached: bool) -> None:
        self.enter("staging", 0)
        staged = await self._stage(0)
        self.enter("checkpointing", 0)
        account = {"version": 0, "warm_start_cached": cached}
        await self.checkpoints.begin(self.lineage, 0, staged, account)
        await self.checkpoints.settled(required=True)
        await patiently(
            self.mesh.clock,
            lambda: steps.commit_initial(
                self.mesh.state,
                self.data.id,
                self.mesh.name,
                self.mesh.token,
                self.lineage,
                staged.manifest,
                self.checkpoints.name,
                staged.image,
                staged.masters,
            ),
        )
        self.weights, self._whole, self.covered = staged, True, 0
        self.gradients.announce(self.manifest)

    async def train(self) -> None:
        """Steps until the budget is spent, while the job trains: one that has ended may go on.
        RankLost when no step gets done because ranks are lost.
        """
        row, losses = await self._row(), RankLosses(self.mesh, self.data.id)
        budget = self.data.config.budget.steps
        while self.steps_done < budget:
            if row.phase != jobs.Phase.TRAINING:
                await self.mesh.clock.sleep(PHASE_S)
                row = await self._row()
                continue
            try:
                if losses.in_a_row:
                    await self._regain()
                await self._step(self.steps_done + 1)
                losses.in_a_row = 0
            except RankLost as error:
                await losses.note(error)
        self.phase = "done"
        while True:  # the role process stays until its gang is moved
            await self.mesh.clock.sleep(60.0)

    async def _regain(self) -> None:
        """The gang is formed anew, and stands where the last committed step left the job."""
        self.enter("forming", self.steps_done + 1)
        self._whole = False
        with self.mesh.loading():
            await self.compute.form()
            await self.checkpoints.settled()
            await self._recover(await self._row())

    # -- a step ----------------------------------------------------------------------------------

    async def _step(self, step: int) -> None:
        clock = self.mesh.clock
        started, waited_before = clock.monotonic(), self.intake.waited_s
        asleep_before = self.nap.total_s
        turned_before = self.turns.waited_s
        self.times.begin(step)
        self.enter("waiting", step)
        self.gradients.busy_s = {}
        self.parts.began()
        held_before = self.parts.total.get(EVALUATION, 0.0)
        refill = Refill(self.data.config)
        groups = self.intake.groups(step, self._stale, refill.replaces)
        done = await self._make_step(step, self.manifest, self.data.config).run(groups)
        self._computed = step
        self.parts.took("update", done.update_s)
        self.parts.took("compute", self.gradients.busy_s.get(self.seat.resident, 0.0))
        waited = self.intake.waited_s - waited_before
        asleep = self.nap.total_s - asleep_before
        busy = clock.monotonic() - started - waited - asleep
        done.batch.refilled = refill.count
        metrics = done.batch.metrics() | update_metrics(
            done.bins, done.norm, done.stats, done.counted
        )
        turned, workers = self.turns.waited_s - turned_before, dict(self.gradients.busy_s)
        metrics |= asdict(StepTook(step, waited, busy, turned, clock.wall(), workers))
        await self._commit(step, done, metrics)
        asleep = self.nap.total_s - asleep_before
        self.busy_s += clock.monotonic() - started - waited - asleep
        self.wait_s += waited
        self.held_s += self.parts.total.get(EVALUATION, 0.0) - held_before
        self.made += 1
        self.parts.ended()
        self.tokens += done.batch.tokens
        self.times.ended(done.batch.tokens)

    def _stale(self, group: Group) -> bool:
        """Whether the group's stored tokens are too old, whatever its row in Redis says."""
        return staleness(group, self.steps_done) > self.data.config.algorithm.max_staleness

    # -- staging and the commit ------------------------------------------------------------------

    async def _commit(self, step: int, done: Stepped, metrics: dict[str, Any]) -> None:
        with self.parts.of(EVALUATION):
            await evaluated(self.mesh, self.data, step - 1)
        self.enter("staging", step)
        with self.parts.of("stage"):
            staged = await self._stage(step)
        self._staged = step, staged
        if self.checkpoints.due(step):
            self.enter("checkpointing", step)
            account = await self._account(done.batch)
            with self.parts.of("checkpoint"):
                await self.checkpoints.begin(self.lineage, step, staged, account)
            metrics[PAUSE] = self.checkpoints.pause_s
        if step == self.data.config.budget.steps:
            await self.checkpoints.settled(required=True)
        self.enter("committing", step)
        record = {
            "ranks": self.compute.division.told,
            "updates": done.updates,
            "settings": in_force(self.data.config),
        }
        checkpoint, covered = self.checkpoints.name, self.checkpoints.step
        commit = partial(
            steps.commit_step,
            self.mesh.state,
            self.data.id,
            self.mesh.name,
            self.mesh.token,
            self.lineage,
            step,
            done.batch.groups,
            done.batch.filtered,
            staged.manifest,
            checkpoint,
            metrics,
            record,
            covered=covered,
            image=staged.image,
            masters=staged.masters,
        )
        with self.parts.of("commit"):
            committed = await patiently(self.mesh.clock, commit)
        self.covered = covered
        self.steps_done, self.weights, self._born = committed.version, staged, self.lineage
        self.gradients.announce(self.manifest)
        self.enter("telling", step)
        with self.parts.of("tell"):
            await self._tell_engines()

    async def _stage(self, step: int) -> Identity:
        """Writes the weights as they are now as a version that nobody sees yet."""
        staged = await self.publisher.stage(self.lineage, step, self.manifest)
        return Identity(staged.digest, staged.image, staged.masters)

    async def _account(self, batch: Batch) -> dict[str, Any]:
        return await patiently(
            self.mesh.clock,
            lambda: steps.checkpoint_state(
                self.mesh.state, self.data.id, batch.groups, batch.filtered
            ),
        )

    async def _tell_engines(self) -> None:
        """A hint that there is a new version; an engine that misses it looks by itself."""
        try:
            for entry in await registry.entries(self.mesh.state, "engine"):
                if entry.alive:
                    await self.mesh.ref(entry.name).cast(Engine.look, Look("version"))
        except MeshError as error:
            self.mesh.telemetry.log.warning("hint", error=str(error))
