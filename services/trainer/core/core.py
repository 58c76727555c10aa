"""The core of a training gang: it leases groups, has their rounds computed, steps, stages,
commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from common.api.engine import Engine
from common.api.hint import Look
from common.api.role import Drain, Drained
from common.api.trainer import (
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
from common.errors import MeshError, NotFound, RankLost
from common.job.changing import in_force
from common.job.config import JobConfig
from common.job.job_data import JobData
from common.records import damage
from common.runtime.actor import Actor, call
from common.runtime.mesh import Mesh
from common.runtime.patience import patiently
from common.state import events, jobs, registry, steps
from common.wire.bulk import BulkClient
from kernels.cost import Calibration, expected
from services.trainer.arithmetic.learner import Learner
from services.trainer.arithmetic.stats import update_metrics
from services.trainer.core.batch import Batch, Refill, staleness
from services.trainer.core.beginning import Tell, adapt, first_weights, outline, start
from services.trainer.core.checkpointing import Checkpoints
from services.trainer.core.evaluation_gate import evaluated
from services.trainer.core.intake import POLL_S, Intake
from services.trainer.core.publishing import Publisher
from services.trainer.core.recovery import Recovery
from services.trainer.core.step import Step, Stepped
from services.trainer.helpers.gradients import Gradients
from services.trainer.ranks.compute import COMPUTE_S, Compute, LocalCompute
from services.trainer.ranks.losses import RankLosses


class TrainerCore(Actor):
    """Owns parameters and optimizer; hybrids lend it gradients."""

    interface = Trainer

    def __init__(
        self,
        mesh: Mesh,
        data: JobData,
        gang: str,
        epoch: int,
        arithmetic: Learner | Compute,
    ) -> None:
        self.mesh, self.data, self.gang, self.epoch = mesh, data, gang, epoch
        self.learner = arithmetic if isinstance(arithmetic, Learner) else None
        self.bulk = BulkClient(mesh)
        self.ready = False
        self.phase = "starting"  # phase of its work, for its published counters
        self._entered = 0  # phases so far
        self._updating = 0  # the last step that has changed the weights
        self.steps_done, self.lineage, self.manifest = 0, 0, ""
        self.tokens = 0
        self.busy_s, self.wait_s = 0.0, 0.0
        self.warm_fraction = 0.0
        self._restaging = asyncio.Lock()
        self._born = 0  # the lineage that the current version was made in
        self.compute: Compute = (
            LocalCompute(mesh, arithmetic) if isinstance(arithmetic, Learner) else arithmetic
        )
        training, (model, parameters) = data.config.training, outline(data)
        prior = expected(parameters, model.heads * model.head_dim, model.layers)
        costs = Calibration(prior, training.bin_tokens)
        self.gradients = Gradients(mesh, self.compute, gang, training.bin_deadline_s, costs)
        self.publisher = Publisher(mesh, self.bulk, data)
        self.intake = Intake(mesh, self.bulk, data.id)
        self.checkpoints = Checkpoints(mesh, data, self.compute, model, self.enter)

    def enter(self, phase: str, step: int) -> None:
        """A step goes through waiting, computing, updating, staging, checkpointing, committing and
        telling; a checkpoint's writing goes on beside the next ones. Before the first one there is
        restoring and replaying.
        """
        self.phase = phase
        self._entered += 1
        if phase == "updating":
            self._updating = step

    def stats(self) -> dict[str, Any]:
        return {
            "job": self.data.id,
            "epoch": self.epoch,
            "ready": self.ready,
            "gang": self.gang,
            "core": True,
            "phase": self.phase,
            "progress": [self._entered, self.warm_fraction, sum(self.gradients.busy_s.values())],
            "step": self.steps_done,
            "tokens": self.tokens,
            "busy_s": self.busy_s,
            "wait_s": self.wait_s,
            "warm_start": self.warm_fraction,
            "hybrids": self.gradients.hybrids.stages(),
        }

    # -- hybrids ---------------------------------------------------------------------------------

    @call(Trainer.join)
    def join(self, request: JoinHybrids) -> Joined:
        return Joined(self.gradients.joined(request.gang))

    @call(Trainer.leave)
    def leave(self, request: LeaveHybrids) -> Left:
        self.gradients.left(request.gang, request.generation)
        return Left()

    @call(Trainer.lease_round)
    async def lease_round(self, request: RoundRequest) -> RoundLease:
        lease = await self.gradients.lease(request)
        return lease or RoundLease(epoch="", index=-1, manifest="", bins=[])

    @call(Trainer.round_done)
    async def round_done(self, result: RoundResult) -> RoundTaken:
        await self.gradients.done(result)
        return RoundTaken()

    @call(Trainer.restage)
    async def restage(self, request: Restage) -> Restaged:
        """Writes the current version again, as long as no update has changed the weights."""
        async with self._restaging:  # who asks meanwhile finds it done
            if not self.ready or request.manifest != self.manifest:
                return Restaged(False, later=True)
            about = self._born, self.steps_done
            weights = await self.compute.weights()
            done = await self.publisher.stage_again(*about, weights, request.manifest)
        self.mesh.telemetry.log.warning("restage", manifest=request.manifest, done=done)
        # An evaluation may hold the next version back for long, and it comes.
        return Restaged(done, later=not done and self._updating > self.steps_done)

    @call(Trainer.drain)
    def drain(self, request: Drain) -> Drained:
        """A step that is cut off is repeated by the next core, from its own lease of the groups."""
        return Drained()

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
                await self._recover(row)
        self.warm_fraction = 1.0
        if row.phase in (jobs.Phase.QUEUED, jobs.Phase.WARM_START):
            await self._phase(jobs.Phase.BASELINE)
        self.ready = True
        await self.mesh.publish()  # its worker waits for this, and the next renewal is late

    async def _recover(self, row: jobs.JobRow) -> None:
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
        self.steps_done, self.lineage, self.manifest = (
            stands.version,
            stands.lineage,
            stands.manifest,
        )
        self._born, self._updating = stands.born, 0
        self.checkpoints.name, self.checkpoints.step = stands.checkpoint, stands.checkpoint_step
        self.gradients.announce(self.manifest)

    def _make_step(self, number: int, manifest: str, config: JobConfig) -> Step:
        return Step(self.mesh, config, self.compute, self.gradients, number, manifest, self.enter)

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
        run = self.mesh.host.run_blocking
        if self.learner is not None:
            return await run(start, self.data, self.learner, progress, tell, deadline_s=COMPUTE_S)
        weights, cached = await run(first_weights, self.data, progress, tell, deadline_s=COMPUTE_S)
        await self.compute.form()  # now, because ranks hold memory from here on
        if weights is not None:
            await self.compute.load_weights(weights)
        return cached

    async def _commit_initial(self, cached: bool) -> None:
        self.enter("staging", 0)
        weights = await self.compute.weights()
        manifest = await self.publisher.stage(self.lineage, 0, weights, "")
        self.enter("checkpointing", 0)
        account = {"version": 0, "warm_start_cached": cached}
        await self.checkpoints.begin(self.lineage, 0, manifest, weights, account)
        await self.checkpoints.settled(required=True)
        await patiently(
            self.mesh.clock,
            lambda: steps.commit_initial(
                self.mesh.state,
                self.data.id,
                self.mesh.name,
                self.mesh.token,
                self.lineage,
                manifest,
                self.checkpoints.name,
            ),
        )
        self.manifest = manifest
        self.gradients.announce(manifest)

    async def train(self) -> None:
        """Steps until the budget is spent, or the job has ended; RankLost when no step gets done
        because ranks are lost.
        """
        row, losses = await self._row(), RankLosses(self.mesh, self.data.id)
        budget = self.data.config.budget.steps
        while self.steps_done < budget and row.phase not in jobs.ENDED:
            if row.phase != jobs.Phase.TRAINING:
                await self.mesh.clock.sleep(POLL_S)
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
        with self.mesh.loading():
            await self.compute.form()
            await self.checkpoints.settled()
            await self._recover(await self._row())

    # -- a step ----------------------------------------------------------------------------------

    async def _step(self, step: int) -> None:
        clock = self.mesh.clock
        started, waited_before = clock.monotonic(), self.intake.waited_s
        self.enter("waiting", step)
        self.gradients.busy_s = {}
        refill = Refill(self.data.config)
        groups = self.intake.groups(step, self._stale, refill.replaces)
        done = await self._make_step(step, self.manifest, self.data.config).run(groups)
        waited = self.intake.waited_s - waited_before
        busy = clock.monotonic() - started - waited
        done.batch.refilled = refill.count
        metrics = done.batch.metrics() | update_metrics(
            done.bins, done.norm, done.stats, done.counted
        )
        metrics |= {
            "step": step,
            "wait_s": waited,
            "train_s": busy,
            "wall": clock.wall(),
            "workers": dict(self.gradients.busy_s),
        }
        await self._commit(step, done, metrics)
        self.busy_s += clock.monotonic() - started - waited
        self.wait_s += waited
        self.tokens += done.batch.tokens

    def _stale(self, group: Group) -> bool:
        """Whether the group's stored tokens are too old, whatever its row in Redis says."""
        return staleness(group, self.steps_done) > self.data.config.algorithm.max_staleness

    # -- staging and the commit ------------------------------------------------------------------

    async def _commit(self, step: int, done: Stepped, metrics: dict[str, Any]) -> None:
        await evaluated(self.mesh, self.data, step - 1)
        self.enter("staging", step)
        weights = await self.compute.weights()
        manifest = await self.publisher.stage(self.lineage, step, weights, self.manifest)
        if self.checkpoints.due(step):
            self.enter("checkpointing", step)
            account = await self._account(done.batch)
            await self.checkpoints.begin(self.lineage, step, manifest, weights, account)
            metrics["checkpoint_pause_s"] = self.checkpoints.pause_s
        if step == self.data.config.budget.steps:
            await self.checkpoints.settled(required=True)
        self.enter("committing", step)
        record = {
            "ranks": self.compute.ranks,
            "updates": done.updates,
            "settings": in_force(self.data.config),
        }
        committed = await patiently(
            self.mesh.clock,
            lambda: steps.commit_step(
                self.mesh.state,
                self.data.id,
                self.mesh.name,
                self.mesh.token,
                self.lineage,
                step,
                done.batch.groups,
                done.batch.filtered,
                manifest,
                self.checkpoints.name,
                metrics,
                record,
                covered=self.checkpoints.step,
            ),
        )
        self.steps_done, self.manifest, self._born = committed.version, manifest, self.lineage
        self.gradients.announce(manifest)
        self.enter("telling", step)
        await self._tell_engines()

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
