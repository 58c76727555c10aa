"""A rollout shard: takes up the mesh's job, phase by phase, and keeps its engines busy."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from common.errors import MeshError
from common.job.evaluation_plan import AFTER, BEFORE, Plan, bracket, due
from common.job.job_data import JobData
from common.process.failure import FATAL, Failure
from common.runtime.actor import Actor
from common.runtime.mesh import Mesh
from common.runtime.patience import patiently
from common.state import jobs
from common.state.jobs import ACTIVE, Phase
from services.rollout.evaluation import evaluate
from services.rollout.job import LOOK_S, ShardJob

BROKEN = 70  # exit status after an error that nobody foresaw


class RolloutShard(Actor):
    """Serves one job at a time, the oldest that is active."""

    def __init__(self, mesh: Mesh, logs: Path) -> None:
        self.mesh, self.logs = mesh, logs
        self.serving: ShardJob | None = None
        self._changed = asyncio.Event()
        self._lineage = -1  # the job's current lineage
        self._evaluated: set[str] = set()  # what has been evaluated in that lineage
        self._evaluating: set[asyncio.Task[Any]] = set()
        self._background: set[asyncio.Task[Any]] = set()

    def stats(self) -> dict[str, Any]:
        return self.serving.stats() if self.serving else {}

    async def serve(self) -> None:
        """Runs until cancelled."""
        while True:
            row = await self._next_job()
            if row is None:
                await self._pause()
                continue
            await self._serve_or_fail(row)

    async def _serve_or_fail(self, row: jobs.JobRow) -> None:
        """Serves a job. It fails by an error that no restart mends, and the shard is free for the
        next; any other error ends the process, which says of which job it is.
        """
        try:
            await self._serve_job(JobData.of(row.id, row.document, row.run_dir))
        except FATAL as error:
            self.mesh.telemetry.log.error("job failed", job=row.id, error=str(error))
            await self._fail(row.id, str(Failure.of(error)))
        except Exception as error:
            traceback.print_exc()
            told = f"{self.mesh.name} cannot go on: {error!r}"
            self.mesh.host.exit(BROKEN, told, error, row.id)

    async def _fail(self, job: str, why: str) -> None:
        mesh = self.mesh
        await patiently(
            mesh.clock,
            lambda: jobs.set_phase(mesh.state, job, Phase.FAILED, mesh.token, mesh.name, why),
        )

    async def _next_job(self) -> jobs.JobRow | None:
        try:
            rows = await jobs.jobs(self.mesh.state)
        except MeshError:
            return None
        return next((row for row in rows if row.phase in ACTIVE), None)

    async def _pause(self) -> None:
        """Returns when the phase has changed here, after LOOK_S seconds at most."""
        self._changed.clear()
        try:
            async with self.mesh.clock.timeout(LOOK_S, "a change of phase"):
                await self._changed.wait()
        except MeshError:
            return

    async def _serve_job(self, data: JobData) -> None:
        shard = ShardJob(self.mesh, data, self.logs)
        self.serving = shard
        self._lineage = -1
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
        await patiently(self.mesh.clock, shard.sandbox.load)
        await patiently(self.mesh.clock, shard.take_over)
        self._start(shard.ledger.sync_forever())
        self._start(shard.admit_forever())
        while await self._turn(shard):
            await self._pause()

    async def _turn(self, shard: ShardJob) -> bool:
        """One look at the job; False when it has ended."""
        try:
            row = await jobs.job(self.mesh.state, shard.job.id)
            if row is None or row.ended:
                return False
            if row.lineage != self._lineage:
                await self._enter(shard, row)
            await shard.look()
            shard.admitting = row.phase == Phase.TRAINING
            shard.version = row.version
            if self.mesh.name == "rollout/0":
                self._evaluations(shard, row)
        except MeshError as error:
            if not error.retryable:
                raise
            self.mesh.telemetry.log.warning("looking again", error=str(error))
        return True

    async def _enter(self, shard: ShardJob, row: jobs.JobRow) -> None:
        """Goes on in another lineage: its versions are other ones, whatever their numbers."""
        for task in self._evaluating:
            task.cancel()
        await asyncio.gather(*self._evaluating, return_exceptions=True)
        self._evaluated.clear()
        shard.enter(row.lineage, row.version)
        self._lineage = row.lineage

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
        """True the first time that this incarnation asks for `tag`."""
        fresh = tag not in self._evaluated
        self._evaluated.add(tag)
        return fresh

    async def _bracket(self, shard: ShardJob, plan: Plan | None, lineage: int, then: Phase) -> None:
        """The evaluation before or after training, if any, and the phase that follows it."""
        if plan is not None:
            await evaluate(shard, plan, lineage)
        mesh = self.mesh
        await patiently(
            mesh.clock,
            lambda: jobs.set_phase(
                mesh.state, shard.job.id, then, mesh.token, mesh.name, lineage=lineage
            ),
        )
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
