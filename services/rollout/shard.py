"""Rollout shard: it serves one job, phase by phase, from before its start to its end, and keeps its
engines busy.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshrl.common.api.rollout import HeldOutRequest, HeldOutRows, Rollout
from meshrl.common.base.errors import MeshError, NotFound, Refused
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.evaluation_plan import (
    AFTER,
    BEFORE,
    EvaluationPlan,
    plan_boundary_evaluation,
    plan_step_evaluation,
)
from meshrl.common.mesh.process.diagnosis.failure import FATAL_ERRORS, Failure
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable, retry
from meshrl.common.state import jobs
from meshrl.common.state.jobs import ACTIVE_PHASES, Phase
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.process_names import parse_service_name
from meshrl.common.weights.store.job_files import open_local_job
from meshrl.services.rollout.evaluation import evaluate
from meshrl.services.rollout.held_out_rows import encode_held_out
from meshrl.services.rollout.runner import TrajectoryRunner
from meshrl.services.rollout.shard_job import POLL_S, ShardJob, set_job_phase

EXIT_UNEXPECTED = 70  # exit status after an unexpected error


class RolloutShard(Actor):
    """Shard of the job in its process name; the first shard also evaluates."""

    interface = Rollout

    def __init__(self, mesh: Mesh, logs: Path) -> None:
        self.mesh, self.logs = mesh, logs
        _, self.job, self.number = parse_service_name(mesh.name)
        self.shard_job: ShardJob | None = None
        self._host_drains = False  # its host drains
        self._phase_changed = asyncio.Event()
        self._lineage = -1  # the job's current lineage
        self._evaluated_tags: set[str] = set()  # completed evaluations in that lineage
        self._evaluation_tasks: set[asyncio.Task[Any]] = set()
        self._background_tasks: set[asyncio.Task[Any]] = set()

    def stats(self) -> dict[str, Any]:
        about = {"job": self.job, "safe_to_evict": self.is_drained, "rests": self.is_drained}
        return about | (self.shard_job.stats().encode() if self.shard_job else {})

    @call(Rollout.encode_held_out)
    async def encode_held_out(self, request: HeldOutRequest) -> HeldOutRows:
        """Encode rows of the held-out set for the core, which measures their loss."""
        if self.shard_job is None:
            raise ServiceUnavailable(f"{self.mesh.name} has not loaded job {self.job} yet")
        return await encode_held_out(self.shard_job, request)

    @property
    def is_drained(self) -> bool:
        """True if it may move to another host: its host drains, and no work is in progress."""
        shard = self.shard_job
        return (
            self._host_drains and shard is not None and shard.is_idle and not self._evaluation_tasks
        )

    async def serve(self) -> None:
        """Serve until the job has ended, or is no longer recorded. Raise errors that a restart
        cannot fix; any other error ends the process, which is restarted.
        """
        try:
            row = await self._wait_for_start()
            if row is not None:
                await self._serve_job(await open_local_job(self.mesh, row))
        except FATAL_ERRORS as error:
            self.mesh.telemetry.log.error("job failed", job=self.job, error=str(error))
            with suppress(Refused):  # it has ended otherwise
                await set_job_phase(
                    self.mesh, self.job, Phase.FAILED, str(Failure.from_error(error))
                )
        except Exception as error:
            traceback.print_exc()
            reason = f"{self.mesh.name} cannot continue: {error!r}"
            self.mesh.host.exit(EXIT_UNEXPECTED, reason, error, self.job)

    async def _wait_for_start(self) -> jobs.JobRow | None:
        while True:
            row = await retry(self.mesh.clock, self._read_row)
            if row is None or row.is_terminal:
                return None
            if row.phase in ACTIVE_PHASES:
                return row
            await self._wait_for_change()

    async def _read_row(self) -> jobs.JobRow | None:
        try:
            return await jobs.read_job(self.mesh.state, self.job)
        except NotFound:
            return None

    async def _wait_for_change(self) -> None:
        """Wait until the phase has changed here, at most POLL_S seconds."""
        self._phase_changed.clear()
        try:
            async with self.mesh.clock.timeout(POLL_S, "waiting for a change of phase"):
                await self._phase_changed.wait()
        except MeshError:
            return

    async def _serve_job(self, data: JobData) -> None:
        shard = ShardJob(self.mesh, data, TrajectoryRunner(self.mesh, data, self.logs))
        self.shard_job = shard
        try:
            await shard.first_error.guard(self._run_job(shard))
        finally:
            try:
                for task in self._background_tasks:
                    task.cancel()
                await asyncio.gather(*self._background_tasks, return_exceptions=True)
            finally:
                self.shard_job = None
                await shard.close()

    async def _run_job(self, shard: ShardJob) -> None:
        await retry(self.mesh.clock, shard.runner.sandbox_client.load_job)
        await retry(self.mesh.clock, shard.take_over)
        self._start_task(shard.runner.ledger.sync_forever())
        self._start_task(shard.admit_forever())
        while await self._poll(shard):
            await self._wait_for_change()

    async def _poll(self, shard: ShardJob) -> bool:
        try:
            row = await self._read_row()
            if row is None or row.is_terminal:
                return False
            if row.lineage != self._lineage:  # its versions differ, whatever their numbers
                for task in self._evaluation_tasks:
                    task.cancel()
                await asyncio.gather(*self._evaluation_tasks, return_exceptions=True)
                self._evaluated_tags.clear()
                shard.enter_lineage(row.lineage, row.version)
                self._lineage = row.lineage
            self.mesh.job_clock.set_paused(row.is_paused)
            seeds = row.phase == Phase.TRAINING and row.seed_ms >= 0
            shard.runner.router.set_seeding(row.seed_ms / 1000 if seeds else None)
            await shard.poll_engines()
            self._host_drains = await pool.is_draining(self.mesh.state, self.mesh.settings.host)
            training = row.phase == Phase.TRAINING and not row.is_paused
            shard.admission_open = training and not self._host_drains
            shard.version = row.version
            if self.number == 0 and not self._host_drains:
                self._start_due_evaluation(shard, row)
        except MeshError as error:
            if not error.retryable:
                raise
            self.mesh.telemetry.log.warning("retrying", error=str(error))
        return True

    def _start_due_evaluation(self, shard: ShardJob, row: jobs.JobRow) -> None:
        """Start the evaluation that this phase or version requires, once per lineage."""
        config = shard.config
        if row.phase == Phase.BASELINE and self._claim_evaluation(BEFORE):
            plan = plan_boundary_evaluation(config, BEFORE, row.version)
            then = Phase.TRAINING if config.budget.steps else Phase.FINISHED
            self._start_evaluation(self._run_bracket(shard, plan, row.lineage, then))
        elif row.phase == Phase.EVALUATION and self._claim_evaluation(AFTER):
            plan = plan_boundary_evaluation(config, AFTER, row.version)
            self._start_evaluation(self._run_bracket(shard, plan, row.lineage, Phase.FINISHED))
        elif row.phase == Phase.TRAINING:
            step_plan = plan_step_evaluation(config, row.version)
            if step_plan is not None and self._claim_evaluation(step_plan.tag):
                self._start_evaluation(evaluate(shard, step_plan, row.lineage))

    def _claim_evaluation(self, tag: str) -> bool:
        fresh = tag not in self._evaluated_tags
        self._evaluated_tags.add(tag)
        return fresh

    async def _run_bracket(
        self, shard: ShardJob, plan: EvaluationPlan | None, lineage: int, next_phase: Phase
    ) -> None:
        """Run the evaluation before or after training, if any, and enter the next phase."""
        if plan is not None:
            await evaluate(shard, plan, lineage)
        await set_job_phase(self.mesh, self.job, next_phase, lineage=lineage)
        self._phase_changed.set()

    def _start_evaluation(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._start_task(work)
        self._evaluation_tasks.add(task)
        task.add_done_callback(self._evaluation_tasks.discard)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._background_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            assert self.shard_job is not None
            self.shard_job.first_error.fail(error)
