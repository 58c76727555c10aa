"""Core of a training gang: leases groups, computes rounds, steps, stages and commits versions."""

from __future__ import annotations

from typing import Any

from meshrl.common.api.calls.role import SetTier, TierUsage
from meshrl.common.api.stats import CoreStats
from meshrl.common.api.trainer import (
    BlockResult,
    BroadcastPlan,
    BroadcastRequest,
    LeaveRequest,
    RestageResult,
    RoundLease,
    RoundRequest,
    Trainer,
)
from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.base.errors import NotFound, RankLost, Refused
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.instances.kind_calls import KindCallsMixin
from meshrl.common.mesh.instances.tiers import TierController
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.state import events, jobs
from meshrl.common.state.pool.demand import measurements
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.transports.broadcaster import Broadcaster, make_store_opener
from meshrl.kernels.bin_cost import CostCalibration, estimate_from_flops
from meshrl.services.trainer.core.core_sleep import CoreSleeper
from meshrl.services.trainer.core.first_version import FirstVersionBuilder
from meshrl.services.trainer.core.position import CommittedVersion, TrainingPosition
from meshrl.services.trainer.core.recovery import Recovery
from meshrl.services.trainer.core.step_commits import StepCommitter
from meshrl.services.trainer.core.step_counters import StepCounters
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.hybrids.gradient_collector import GradientCollector
from meshrl.services.trainer.initialization.initial_weights import describe_model
from meshrl.services.trainer.steps.batch import RefillPolicy, compute_staleness
from meshrl.services.trainer.steps.group_intake import GroupIntake
from meshrl.services.trainer.steps.held_out_loss import EVALUATING, HeldOutLoss, make_row_fetcher
from meshrl.services.trainer.steps.step_traces import StepTraceWriter
from meshrl.services.trainer.steps.training_step import TrainingStep
from meshrl.services.trainer.versions.checkpointing import CheckpointWriter
from meshrl.services.trainer.versions.publishing import VersionPublisher
from meshrl.services.trainer.versions.restoring import CheckpointRestorer

MAX_RANK_LOSSES = 3  # losses in a row at one step that end the job: repeating would not help


class RankLossCounter:
    """Counter of rank losses in a row; `consecutive` counts those since the last finished step."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh, self._job = mesh, job
        self.consecutive = 0

    async def record(self, error: RankLost) -> None:
        """Count a rank loss and append it to the events in Redis.

        Raises `error` at the MAX_RANK_LOSSES-th loss in a row, and Fenced without this process's
        lease.
        """
        mesh = self._mesh
        self.consecutive += 1
        mesh.telemetry.log.warning("step aborted", error=str(error))
        fields = {"job": self._job, "why": str(error)}
        operation = mesh.random.hex_token(8)
        await retry(
            mesh.clock,
            lambda: events.append_fenced_event(
                mesh.state, mesh.name, mesh.token, "rank_lost", fields, operation
            ),
        )
        if self.consecutive == MAX_RANK_LOSSES:
            raise error


PHASE_POLL_S = 0.1  # between two checks whether the job trains: earlier evaluations take minutes


class TrainerCore(KindCallsMixin):
    """Actor that owns a job's parameters and optimizer; hybrids send their gradients to it."""

    interface = Trainer

    def __init__(
        self, mesh: Mesh, data: JobData, placement: Placement, compute: GangCompute
    ) -> None:
        self.mesh, self.data, self.placement = mesh, data, placement
        self.compute, self.runner, self.kinds = compute, compute.runner, compute.kinds
        self.time_slices, self.sleep_timer = self.runner.time_slices, self.runner.sleep_timer
        self.bulk = BulkClient(mesh)
        self.is_ready = False
        self.phase = "starting"  # for its published counters
        self.last_step = data.config.budget.steps  # lower after an early stop
        self._phase_count = 0  # entered so far
        self.position = TrainingPosition()
        training, (model, parameters) = data.config.training, describe_model(data)
        prior = estimate_from_flops(parameters, model.num_heads * model.head_dim, model.num_layers)
        costs = CostCalibration(prior, training.bin_tokens)
        self.gradients = GradientCollector(
            mesh, compute, placement.instance, training.bin_deadline_s, costs
        )
        self.gradients.measure_idle_s = lambda: (
            self.sleep_timer.total_s + self.time_slices.wait_time_s
        )
        self.publisher = VersionPublisher(mesh, data, compute)
        files = make_store_opener(mesh, self.bulk)
        self.broadcasts = Broadcaster(mesh, files, data.config.rollout.broadcast)
        self.intake = GroupIntake(mesh, self.bulk, data.id)
        self.counters = StepCounters(mesh, self.runner, self.intake)
        self.checkpoints = CheckpointWriter(
            mesh, data, compute, model, self.publisher, self.enter_phase
        )
        self.first_version = FirstVersionBuilder(mesh, data, compute)
        self.committer = StepCommitter(self)
        self.held_out_loss = HeldOutLoss(
            mesh, data.config, compute, make_row_fetcher(mesh, data.id)
        )
        self.step_traces = StepTraceWriter(mesh, data)
        self.gradients.on_round_computed, self.checkpoints.on_written = (
            self.step_traces.add_round,
            self.step_traces.add_checkpoint,
        )
        self.sleeper = CoreSleeper(self)
        self.tiers = TierController(
            mesh,
            self.sleeper,
            self.kinds,
            set_time_slicing=self.time_slices.set_enabled,
        )

    async def stop(self) -> None:
        """Stop publishing, broadcasts and tier moves, and close the traces."""
        await self.publisher.stop()
        await self.broadcasts.stop()
        await self.tiers.stop()
        await self.step_traces.close()

    def enter_phase(self, phase: str, step: int) -> None:
        """Record the current phase of a step for the traces and the published counters.

        A step has the phases waiting, computing, updating, evaluating (the held-out loss), staging,
        checkpointing, committing and telling (engines are notified). Writing a checkpoint overlaps
        with the next phases. After a start or a rank loss the phases are forming, restoring and
        replaying.
        """
        self.phase = phase
        self.step_traces.enter_phase(phase)
        self._phase_count += 1
        if phase == "updating":
            self.position.updating_step = step

    def stats(self) -> CoreStats:
        """Return the core's own counters."""
        counters, gradients, late_counts = self.counters, self.gradients, self.compute.late_counts
        return CoreStats(
            emulated_count=late_counts.get("emulated_count"),
            late_count=late_counts.get("late_count"),
            ready=self.is_ready,
            published=self.publisher.published_dtypes,
            phase=self.phase,
            progress=[
                self._phase_count,
                self.first_version.warm_start_fraction,
                sum(gradients.busy_s.values()),
            ],
            step=self.position.version,
            tokens=counters.tokens,
            busy_s=counters.busy_s,
            wait_s=counters.wait_s,
            work=measurements.encode_work(counters.get_work(gradients)),
            parts=counters.part_timer.rounded_last_step_s,
            bin_tokens_per_s=gradients.bin_tokens_per_s,
            warm_start=self.first_version.warm_start_fraction,
            hybrids=gradients.hybrids.get_stages(),
            gradient_transfer_s=round(gradients.transfer_s, 4),
        )

    def collect_stats(self) -> dict[str, Any]:
        """Return the counters that the process publishes: the core's, and those of its parts."""
        stats = self.placement.initial_stats() | self.tiers.stats() | self.time_slices.stats()
        return stats | self.publisher.stats() | self.stats().encode()

    # -- hybrids ---------------------------------------------------------------------------------

    @call(Trainer.join_hybrid)
    def join_hybrid(self, instance: str) -> int:
        """Add a hybrid, or add it again, and return the generation for its requests.

        Rounds that an earlier process of the instance leased become free. Raises Refused if the
        job's dtypes allow no hybrids.
        """
        if why := self.publisher.hybrid_rejection:
            raise Refused(why, where=self.mesh.name, fix="Set training.dtype to rollout.dtype")
        return self.gradients.add_hybrid(instance)

    @call(Trainer.leave_hybrid)
    def leave_hybrid(self, request: LeaveRequest) -> None:
        """Remove a hybrid, unless a later generation has joined."""
        self.gradients.remove_hybrid(request.instance, request.generation)

    @call(Trainer.lease_round)
    async def lease_round(self, request: RoundRequest) -> RoundLease:
        """Lease a round to a hybrid; wait up to `request.wait_s` seconds for one.

        Without a round, return a lease of index -1. Raises Fenced for an outdated generation.
        """
        return await self.gradients.lease_round(request)

    @call(Trainer.complete_block)
    async def complete_block(self, result: BlockResult) -> None:
        """Accept the sum of the gradients of a leased block."""
        await self.gradients.accept_result(result)

    @call(Trainer.join_broadcast)
    async def join_broadcast(self, request: BroadcastRequest) -> BroadcastPlan:
        """Add a host to the broadcast of the last committed version; return its plan."""
        await self.broadcasts.set_version(self.position.manifest)
        return await self.broadcasts.join_broadcast(request)

    @call(Trainer.restage_version)
    async def restage_version(self, manifest: str) -> RestageResult:
        """Stage the current version again, because the store has lost or corrupted its chunks.

        If an update has changed the weights, repair the version from the last checkpoint. The
        result asks to retry later if `manifest` is not the current version, or the write is still
        in progress.
        """
        position = self.position
        is_ready = self.intake.is_awake.is_set() and self.is_ready
        if not is_ready or manifest != position.manifest:
            return RestageResult(False, retry_later=True)

        async def repair_from_checkpoint() -> bool:
            """Write the version from the last checkpoint, whose ranks may have cut other chunks."""
            restorer = CheckpointRestorer(
                self.mesh, self.bulk, self.data, self.compute, self.enter_phase
            )
            name = self.checkpoints.last_name
            return bool(name) and await restorer.repair_version(name, manifest)

        version_key = position.origin_lineage, position.version, manifest
        is_restaged = await self.publisher.join_restaging(*version_key, repair_from_checkpoint)
        self.mesh.telemetry.log.warning("restage", manifest=manifest, done=is_restaged)
        if is_restaged is None:
            return RestageResult(False, retry_later=True)
        # An evaluation may delay the next version for long, but it comes.
        return RestageResult(
            is_restaged, retry_later=not is_restaged and position.updating_step > position.version
        )

    @call(Trainer.drain)
    def drain(self, reason: str) -> None:
        """Do nothing: the next core repeats an interrupted step, whose groups stay leased to the
        job.
        """

    @call(Trainer.set_tier)
    async def set_tier(self, desired: SetTier) -> TierUsage:
        """Move the core's tensors to a tier, and return the bytes that it uses afterwards."""
        return await self.tiers.set_tier(desired)

    def describe_state(self, tier: str = "") -> dict[str, Any]:
        """Return the position, job and checkpoint to store with offloaded tensors at `tier`.

        A later process compares them before it resumes from these tensors.
        """
        return self.position.describe() | {
            "job": self.data.id,
            "tier": str(tier),
            "ranks": self.compute.division.document,
            "checkpoint": self.checkpoints.last_name,
            "checkpoint_step": self.checkpoints.last_step,
        }

    def resume_from(self, committed: CommittedVersion) -> None:
        """Set the position to a committed version, and offer its weights to hybrids.

        The tensors must already be those of that version.
        """
        self.position.resume_from(committed)
        self.checkpoints.last_name, self.checkpoints.last_step = (
            committed.checkpoint,
            committed.checkpoint_step,
        )
        self.gradients.announce_weights(self.position.manifest)

    # -- life cycle --------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Restore the learner at the job's committed version; create version 0 if there is none.

        Move a queued job to its next phase, set `is_ready`, and publish it. A warm start or a
        replay may take hours.
        """
        row = await self._read_job()
        await self.checkpoints.clear_unfinished(row.checkpoint)
        if row.version < 0:
            if row.phase == jobs.Phase.QUEUED:
                await self._set_job_phase(jobs.Phase.WARM_START)
            self.position.lineage = row.lineage  # above 0 if Redis has lost the job's versions
            with self.mesh.loading():
                cached = await self.first_version.build()
            await self.committer.commit_first_version(cached)
        else:
            await self.compute.form_group()
            self.first_version.add_adapters()
            with self.mesh.loading():
                if not await self.sleeper.try_resume(row):
                    await self._recover_state(row)
            await self.publisher.load_version(self.position.manifest)
        if why := self.publisher.hybrid_rejection:
            self.mesh.telemetry.log.warning("no hybrids", why=why)
        self.first_version.warm_start_fraction = 1.0
        if row.phase in (jobs.Phase.QUEUED, jobs.Phase.WARM_START):
            await self._set_job_phase(jobs.Phase.BASELINE)
        self.is_ready = True
        await self.mesh.publish()  # its worker waits for this, and the next renewal would be late

    async def _recover_state(self, row: jobs.JobRow) -> None:
        """Restore the state of the job's committed version, and set the position to it."""
        self.position.is_complete = False
        self.resume_from(await Recovery(self).recover(row))

    def _make_step(self, number: int, manifest: str, config: JobConfig) -> TrainingStep:
        step_inputs = self.mesh, config, self.compute, self.gradients, number, manifest
        return TrainingStep(*step_inputs, self.enter_phase, self.step_traces.intake)

    async def _read_job(self) -> jobs.JobRow:
        """Read the job's row; raise NotFound if Redis no longer has it."""
        row = await retry(self.mesh.clock, lambda: jobs.read_job(self.mesh.state, self.data.id))
        if row is None:
            raise NotFound(f"job {self.data.id} is not in Redis any more")
        return row

    async def _set_job_phase(self, phase: jobs.Phase) -> None:
        mesh = self.mesh
        phase_args = mesh.state, self.data.id, phase, mesh.token, mesh.name
        await retry(mesh.clock, lambda: jobs.set_phase(*phase_args))

    async def run_steps(self) -> None:
        """Run steps until the budget is spent, then sleep until cancelled.

        Steps pause while the job is not in its training phase. After a lost rank, form the gang
        again and repeat the step; raise RankLost at the MAX_RANK_LOSSES-th loss in a row.
        """
        row, losses = await self._read_job(), RankLossCounter(self.mesh, self.data.id)
        self.last_step = row.last_step
        while self.position.version < self.last_step:
            if row.phase != jobs.Phase.TRAINING:
                await self.mesh.clock.sleep(PHASE_POLL_S)
                row = await self._read_job()
                continue
            try:
                if losses.consecutive:
                    # The gang is formed again, at the last committed step of the job.
                    self.enter_phase("forming", self.position.version + 1)
                    self.position.is_complete = False
                    with self.mesh.loading():
                        await self.compute.form_group()
                        await self.checkpoints.wait_until_written()
                        await self._recover_state(await self._read_job())
                await self._run_step(self.position.version + 1)
                losses.consecutive = 0
            except RankLost as error:
                await losses.record(error)
        self.phase = "done"
        while True:  # the role process stays until its gang is moved
            await self.mesh.clock.sleep(60.0)

    # -- a step ----------------------------------------------------------------------------------

    async def _run_step(self, step: int) -> None:
        """Lease groups, compute and commit one step."""
        counters, gradients = self.counters, self.gradients
        self.step_traces.begin_step(step)
        self.enter_phase("waiting", step)
        gradients.busy_s = {}
        counters.begin_step()
        refill = RefillPolicy(self.data.config)
        max_staleness = self.data.config.algorithm.max_staleness

        def is_stale(group: TrajectoryGroup) -> bool:  # the group's row in Redis may be wrong
            return compute_staleness(group, self.position.version) > max_staleness

        groups = self.intake.stream_groups(step, is_stale, refill.try_replace)
        result = await self._make_step(step, self.position.manifest, self.data.config).run(groups)
        self.position.computed_step = step
        result.batch.refilled_count = refill.replaced_count
        metrics = counters.build_metrics(step, result, gradients.busy_s, self.placement.instance)
        if self.held_out_loss.is_due(step):
            self.enter_phase(EVALUATING, step)
            with counters.part_timer.measure(EVALUATING):
                metrics |= await self.held_out_loss.measure()
        await self.committer.commit_step(step, result, metrics, counters.part_timer)
        counters.commit_step(result.batch.token_count)
        self.step_traces.end_step(result.batch.token_count)
