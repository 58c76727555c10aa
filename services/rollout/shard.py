"""A rollout shard: takes up the mesh's job, phase by phase, and keeps its engines busy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from common.actor import Actor, cast
from common.api.hint import Look
from common.api.rollout import Rollout
from common.errors import MeshError
from common.evaluations import AFTER, BEFORE, Plan, bracket, due
from common.jobdata import JobData
from common.mesh import Mesh
from common.patience import patiently
from common.state import jobs
from services.rollout.evaluation import evaluate
from services.rollout.job import LOOK_S, ShardJob

ACTIVE = ("baseline", "training", "evaluation")
ENDED = ("finished", "failed", "stopped")


class RolloutShard(Actor):
    """Serves one job at a time, the oldest that is active."""

    interface = Rollout

    def __init__(self, mesh: Mesh, logs: Path) -> None:
        self.mesh, self.logs = mesh, logs
        self.serving: ShardJob | None = None
        self._changed = asyncio.Event()
        self._evaluated: set[str] = set()
        self._background: set[asyncio.Task[Any]] = set()

    @cast(Rollout.look)
    def look(self, hint: Look) -> None:
        self._changed.set()

    def stats(self) -> dict[str, Any]:
        return self.serving.stats() if self.serving else {}

    async def serve(self) -> None:
        """Runs until cancelled."""
        while True:
            row = await self._next_job()
            if row is None:
                await self._pause()
                continue
            data = JobData.of(row.id, row.document, row.run_dir)
            await self._serve_job(data)

    async def _next_job(self) -> jobs.JobRow | None:
        try:
            rows = await jobs.jobs(self.mesh.state)
        except MeshError:
            return None
        return next((row for row in rows if row.phase in ACTIVE), None)

    async def _pause(self) -> None:
        """Until a hint comes, LOOK_S at most."""
        self._changed.clear()
        try:
            async with self.mesh.clock.timeout(LOOK_S, "a hint"):
                await self._changed.wait()
        except MeshError:
            return

    async def _serve_job(self, data: JobData) -> None:
        shard = ShardJob(self.mesh, data, self.logs)
        self.serving = shard
        self._evaluated.clear()
        try:
            await patiently(self.mesh.clock, shard.outside.load)
            await patiently(self.mesh.clock, shard.take_over)
            self._start(shard.ledger.sync_forever())
            self._start(shard.admit_forever())
            while await self._turn(shard):
                await self._pause()
        finally:
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            self.serving = None
            await shard.close()

    async def _turn(self, shard: ShardJob) -> bool:
        """One look at the job; False when it has ended."""
        try:
            row = await jobs.job(self.mesh.state, shard.job.id)
            if row is None or row.phase in ENDED:
                return False
            await shard.look()
            shard.admitting = row.phase == "training"
            if self.mesh.name == "rollout/0":
                self._evaluations(shard, row)
        except MeshError as error:
            if not error.retryable:
                raise
            self.mesh.telemetry.log.warning("looking again", error=str(error))
        return True

    def _evaluations(self, shard: ShardJob, row: jobs.JobRow) -> None:
        """Starts the evaluation that this phase or version asks for, once."""
        config = shard.config
        if row.phase == "baseline" and self._once(BEFORE):
            plan = bracket(config, BEFORE, row.version)
            self._start(self._bracket(shard, plan, "training"))
        elif row.phase == "evaluation" and self._once(AFTER):
            plan = bracket(config, AFTER, row.version)
            self._start(self._bracket(shard, plan, "finished"))
        elif row.phase == "training":
            asked = due(config, row.version)
            if asked is not None and self._once(asked.tag):
                self._start(evaluate(shard, asked))

    def _once(self, tag: str) -> bool:
        """True the first time that this incarnation asks for `tag`."""
        fresh = tag not in self._evaluated
        self._evaluated.add(tag)
        return fresh

    async def _bracket(self, shard: ShardJob, plan: Plan | None, then: str) -> None:
        """The evaluation before or after training, if any, and the phase that follows it."""
        if plan is not None:
            await evaluate(shard, plan)
        await patiently(
            self.mesh.clock,
            lambda: jobs.set_phase(
                self.mesh.state, shard.job.id, then, self.mesh.token, self.mesh.name
            ),
        )
        self._changed.set()

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.mesh.host.exit(70, f"{self.mesh.name} cannot go on: {error!r}")
