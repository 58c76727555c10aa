"""A rollout shard: serves one job from before it begins until it has ended, phase by phase, and
keeps its engines busy.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import MeshError, NotFound, Refused
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.evaluation_plan import AFTER, BEFORE, EvaluationPlan, bracket, due
from meshrl.common.mesh.process.ends.failure import FATAL, Failure
from meshrl.common.mesh.runtime.calls.actor import Actor
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state import jobs
from meshrl.common.state.jobs import ACTIVE, Phase
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.workers.names import service
from meshrl.common.weights.store.local_files import local_job
from meshrl.services.rollout.evaluation import evaluate
from meshrl.services.rollout.job import LOOK_S, ShardJob, enter_phase
from meshrl.services.rollout.runner import TrajectoryRunner

BROKEN = 70  # exit status after an error that nobody foresaw


class RolloutShard(Actor):
    """The shard of a job that its process is called after; the first one evaluates."""

    def __init__(self, mesh: Mesh, logs: Path) -> None:
        self.mesh, self.logs = mesh, logs
        _, self.job, self.number = service(mesh.name)
        self.serving: ShardJob | None = None
        self._drains = False  # its host is to become empty
        self._changed = asyncio.Event()
        self._lineage = -1  # the job's current lineage
        self._evaluated: set[str] = set()  # what has been evaluated in that lineage
        self._evaluating: set[asyncio.Task[Any]] = set()
        self._background: set[asyncio.Task[Any]] = set()

    def stats(self) -> dict[str, Any]:
        about = {"job": self.job, "rests": self.rests}
        return about | (self.serving.stats().encoded() if self.serving else {})

    @property
    def rests(self) -> bool:
        """Whether it may go to another host, as its own drains, and has nothing under way."""
        shard = self.serving
        return self._drains and shard is not None and shard.idle and not self._evaluating

    async def serve(self) -> None:
        """Returns when the job has ended, or is not on record any more. It fails by an error that
        no restart mends; any other error ends the process, which is started again.
        """
        try:
            row = await self._begun()
            if row is not None:
                await self._serve(await local_job(self.mesh, row))
        except FATAL as error:
            self.mesh.telemetry.log.error("job failed", job=self.job, error=str(error))
            with suppress(Refused):  # it has ended otherwise meanwhile
                await enter_phase(self.mesh, self.job, Phase.FAILED, str(Failure.of(error)))
        except Exception as error:
            traceback.print_exc()
            told = f"{self.mesh.name} cannot go on: {error!r}"
            self.mesh.host.exit(BROKEN, told, error, self.job)

    async def _begun(self) -> jobs.JobRow | None:
        while True:
            row = await patiently(self.mesh.clock, self._row)
            if row is None or row.ended:
                return None
            if row.phase in ACTIVE:
                return row
            await self._pause()

    async def _row(self) -> jobs.JobRow | None:
        try:
            return await jobs.job(self.mesh.state, self.job)
        except NotFound:
            return None

    async def _pause(self) -> None:
        """Returns when the phase has changed here, after LOOK_S seconds at most."""
        self._changed.clear()
        try:
            async with self.mesh.clock.timeout(LOOK_S, "a change of phase"):
                await self._changed.wait()
        except MeshError:
            return

    async def _serve(self, data: JobData) -> None:
        shard = ShardJob(self.mesh, data, TrajectoryRunner(self.mesh, data, self.logs))
        self.serving = shard
        try:
            await shard.broken.guard(self._served(shard))
        finally:
            try:
                for task in self._background:
                    task.cancel()
                await asyncio.gather(*self._background, return_exceptions=True)
            finally:
                self.serving = None
                await shard.close()

    async def _served(self, shard: ShardJob) -> None:
        await patiently(self.mesh.clock, shard.runner.sandbox.load)
        await patiently(self.mesh.clock, shard.take_over)
        self._start(shard.runner.ledger.sync_forever())
        self._start(shard.admit_forever())
        while await self._turn(shard):
            await self._pause()

    async def _turn(self, shard: ShardJob) -> bool:
        try:
            row = await self._row()
            if row is None or row.ended:
                return False
            if row.lineage != self._lineage:  # its versions are others, whatever their numbers
                for task in self._evaluating:
                    task.cancel()
                await asyncio.gather(*self._evaluating, return_exceptions=True)
                self._evaluated.clear()
                shard.enter(row.lineage, row.version)
                self._lineage = row.lineage
            self.mesh.job_clock.hold(row.paused)
            await shard.look()
            self._drains = await pool.drains(self.mesh.state, self.mesh.settings.host)
            training = row.phase == Phase.TRAINING and not row.paused
            shard.admitting = training and not self._drains
            shard.version = row.version
            if self.number == 0 and not self._drains:
                self._evaluations(shard, row)
        except MeshError as error:
            if not error.retryable:
                raise
            self.mesh.telemetry.log.warning("looking again", error=str(error))
        return True

    def _evaluations(self, shard: ShardJob, row: jobs.JobRow) -> None:
        """Starts the evaluation that this phase or version asks for, once in a lineage."""
        config = shard.config
        if row.phase == Phase.BASELINE and self._once(BEFORE):
            plan = bracket(config, BEFORE, row.version)
            then = Phase.TRAINING if config.budget.steps else Phase.FINISHED
            self._evaluate(self._bracket(shard, plan, row.lineage, then))
        elif row.phase == Phase.EVALUATION and self._once(AFTER):
            plan = bracket(config, AFTER, row.version)
            self._evaluate(self._bracket(shard, plan, row.lineage, Phase.FINISHED))
        elif row.phase == Phase.TRAINING:
            asked = due(config, row.version)
            if asked is not None and self._once(asked.tag):
                self._evaluate(evaluate(shard, asked, row.lineage))

    def _once(self, tag: str) -> bool:
        fresh = tag not in self._evaluated
        self._evaluated.add(tag)
        return fresh

    async def _bracket(
        self, shard: ShardJob, plan: EvaluationPlan | None, lineage: int, then: Phase
    ) -> None:
        """The evaluation before or after training, if any, and the phase that follows it."""
        if plan is not None:
            await evaluate(shard, plan, lineage)
        await enter_phase(self.mesh, self.job, then, lineage=lineage)
        self._changed.set()

    def _evaluate(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._start(work)
        self._evaluating.add(task)
        task.add_done_callback(self._evaluating.discard)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            assert self.serving is not None
            self.serving.broken.fail(error)
