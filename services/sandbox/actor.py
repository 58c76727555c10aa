"""The sandbox as an actor: jobs loaded into pools, batches in, outcomes out in the same order."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from common.actor import Actor, call
from common.api.sandbox import (
    Loaded,
    LoadJob,
    Outcome,
    Outcomes,
    RewardCall,
    RunTools,
    Sandbox,
    ScoreBatch,
    ToolCall,
)
from common.clock import Clock
from common.errors import NotFound
from common.host import Host
from services.sandbox.pool import Answer, Limits, Pool

JOBS_MOST = 8  # loaded at once; the one that was idle for longest makes room
TIER = "rlimits"  # how code is contained: killable processes with resource limits


class SandboxActor(Actor):
    interface = Sandbox

    def __init__(self, host: Host, clock: Clock, logs: Path | None, limits: Limits) -> None:
        self._host, self._clock, self._logs, self._limits = host, clock, logs, limits
        self._pools: dict[str, Pool] = {}  # in the order of their last use
        self._loading = asyncio.Lock()
        self._outcomes: Counter[str] = Counter()

    def stats(self) -> dict[str, Any]:
        return {
            "jobs": len(self._pools),
            "workers": sum(pool.size for pool in self._pools.values()),
            "replaced": sum(pool.replaced for pool in self._pools.values()),
            **{f"outcomes_{status}": count for status, count in self._outcomes.items()},
        }

    async def stop(self) -> None:
        await asyncio.gather(*(pool.stop() for pool in self._pools.values()))
        self._pools.clear()

    @call(Sandbox.load)
    async def load(self, m: LoadJob) -> Loaded:
        """Idempotent; other code under the same name replaces the job's pool."""
        async with self._loading:
            pool = self._pools.get(m.job)
            if pool is None or pool.code != m:
                log = self._logs / f"sandbox-{m.job}.log" if self._logs else None
                fresh = Pool(self._host, self._clock, m, log, self._limits)
                await fresh.start()
                self._pools[m.job] = fresh
                if pool is not None:
                    await pool.stop()
                await self._make_room()
            return Loaded(job=m.job, workers=self._pools[m.job].size, tier=TIER)

    @call(Sandbox.run)
    async def run(self, m: RunTools) -> Outcomes:
        async def of_job(job: str, calls: list[ToolCall]) -> list[Answer]:
            return await self._pool(job).tools([(c.tool, c.input, c.deadline_s) for c in calls])

        by_job = _by_job(m.calls)
        parts = await asyncio.gather(*(of_job(job, calls) for job, calls in by_job.items()))
        return self._outcomes_of(m.calls, by_job, parts)

    @call(Sandbox.score)
    async def score(self, m: ScoreBatch) -> Outcomes:
        async def of_job(job: str, calls: list[RewardCall]) -> list[Answer]:
            return await self._pool(job).rewards([(c.row, c.turns, c.deadline_s) for c in calls])

        by_job = _by_job(m.calls)
        parts = await asyncio.gather(*(of_job(job, calls) for job, calls in by_job.items()))
        return self._outcomes_of(m.calls, by_job, parts)

    def _pool(self, job: str) -> Pool:
        pool = self._pools.pop(job, None)
        if pool is None:
            raise NotFound(
                f"job {job} is not loaded", where="sandbox/0", fix="call Sandbox.load, then again"
            )
        self._pools[job] = pool
        return pool

    async def _make_room(self) -> None:
        while len(self._pools) > JOBS_MOST:
            await self._pools.pop(next(iter(self._pools))).stop()

    def _outcomes_of(
        self,
        calls: list[Any],
        by_job: dict[str, list[Any]],
        parts: list[list[Answer]],
    ) -> Outcomes:
        answers = {job: iter(part) for job, part in zip(by_job, parts, strict=True)}
        outcomes = []
        for asked in calls:
            answer = next(answers[asked.job])
            self._outcomes[answer.status] += 1
            outcomes.append(
                Outcome(id=asked.id, status=answer.status, value=answer.value, error=answer.error)
            )
        return Outcomes(outcomes)


def _by_job(calls: list[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for asked in calls:
        found.setdefault(asked.job, []).append(asked)
    return found
