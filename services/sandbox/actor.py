"""The actor of the sandbox: it loads jobs, takes batches of calls, and answers in the same
order.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from common.api.sandbox import (
    EndSessions,
    Loaded,
    LoadJob,
    Outcome,
    Outcomes,
    RewardBatch,
    RunTools,
    Sandbox,
)
from common.clock import Clock
from common.errors import NotFound, Refused
from common.job import builtin, isolation
from common.process.host import Host
from common.runtime.actor import Actor, call, cast
from common.runtime.waits import WaitTable
from services.sandbox.answer import Answer
from services.sandbox.ends import Ends
from services.sandbox.isolation import cgroups, tiers
from services.sandbox.isolation.interpreters import Interpreter, interpreter_of
from services.sandbox.isolation.jail_launcher import JailLauncher
from services.sandbox.isolation.pytest_packages import with_pytest
from services.sandbox.isolation.slots import JailSlots
from services.sandbox.jailed import Jailed
from services.sandbox.jobs import LoadedJob, trusted
from services.sandbox.workers.pool import Pool, PoolLimits

JOBS_MOST = 8  # loaded at once; the one that was idle for longest makes room
SWEEP_S = 5.0  # between two looks for sessions that are idle


class SandboxActor(Actor):
    interface = Sandbox

    def __init__(
        self,
        host: Host,
        clock: Clock,
        logs: Path | None,
        limits: PoolLimits,
        *,
        name: str = "sandbox/0",
        slots: int = 8,
        waits: WaitTable | None = None,
        ends: Ends | None = None,
    ) -> None:
        self._waits, self._ends = waits, ends or Ends()
        self._host, self._clock, self._logs, self._limits = host, clock, logs, limits
        self._name = name
        self._slots = JailSlots(clock, slots)
        self._jobs: dict[str, LoadedJob] = {}  # in the order of their last use
        self._launchers: dict[Interpreter, JailLauncher] = {}
        self._loading = asyncio.Lock()
        self._outcomes: Counter[str] = Counter()
        self._found: dict[Interpreter | None, tiers.Found] = {}  # of a runner; None: of this host
        self._homes: cgroups.Homes | None = None
        self._sweeping: asyncio.Task[None] | None = None

    def stats(self) -> dict[str, Any]:
        jobs = self._jobs.values()
        return {
            "jobs": len(self._jobs),
            "workers": sum(pool.size for job in jobs for pool in job.pools),
            "replaced": sum(pool.replaced for job in jobs for pool in job.pools),
            "jails": sum(launcher.started for launcher in self._launchers.values()),
            "busy": self._slots.busy,
            "waiting": self._slots.waiting,
            "sessions": sum(job.jailed.sessions.size for job in jobs if job.jailed),
            **{f"outcomes_{status}": count for status, count in self._outcomes.items()},
        }

    async def start(self) -> None:
        self._sweeping = asyncio.create_task(self._sweep_forever(), name="idle sessions")

    async def stop(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        await asyncio.gather(*(job.stop() for job in self._jobs.values()))
        self._jobs.clear()
        await asyncio.gather(*(launcher.stop() for launcher in self._launchers.values()))
        self._launchers.clear()
        self._ends.stop()

    @call(Sandbox.load)
    async def load(self, m: LoadJob) -> Loaded:
        """Idempotent; other code under the same name replaces the job's workers and jails."""
        async with self._loading:
            job = self._jobs.get(m.job)
            if job is None or job.loaded != m:
                fresh = await self._loaded(m)
                self._jobs[m.job] = fresh
                if job is not None:
                    await job.stop()
                await self._make_room()
            workers = sum(pool.size for pool in self._jobs[m.job].pools)
            jailed = self._jobs[m.job].jailed
            tier = jailed.isolation if jailed is not None else ""
            return Loaded(job=m.job, workers=workers, tier=tier)

    async def _loaded(self, m: LoadJob) -> LoadedJob:
        jailed = await self._jailed(m)
        log = self._logs / f"sandbox-{m.job}.log" if self._logs else None
        pools: list[Pool] = []
        try:
            for functions, closed in zip(trusted(m), (True, False), strict=True):
                if functions:
                    place = (m.job, m.bundle_dir, functions, log, self._limits, m.mcp)
                    pools.append(
                        Pool(
                            self._host,
                            self._clock,
                            *place,
                            closed=closed,
                            waits=self._waits,
                            ends=self._ends,
                        )
                    )
                    await pools[-1].start()
        except BaseException:
            await asyncio.gather(*(pool.stop() for pool in pools))
            raise
        return LoadedJob(m, pools, jailed)

    async def _jailed(self, m: LoadJob) -> Jailed | None:
        """Jails for what runs the model's code; Refused below the tier that the job demands."""
        uses = builtin.jailed([*m.tools.values(), *(part.use for part in m.rewards)])
        if not uses:
            return None
        demanded = m.jail.tier
        log = self._logs / "jails.log" if self._logs else None
        interpreter = interpreter_of(m.jail)
        found = await self._find(interpreter, log)
        if not isolation.suffices(found.tier, demanded):
            raise Refused(
                f"{', '.join(uses)} of job {m.job} run code that the model wrote, which takes "
                f"{isolation.MEANING[demanded]}; this host has {found.meaning}",
                where=self._name,
                fix=found.fix,
            )
        if m.jail.root and found.tier == "landlock":
            raise Refused(
                f"sandbox.root of job {m.job} takes bubblewrap: Landlock shows the host's files",
                where=self._name,
                fix=found.fix,
            )
        tier = found.tier if found.tier in ("landlock", "runner") else "bwrap"
        launcher = self._launcher(interpreter, tier, log)
        await launcher.start()
        # One with pytest begins when the first row asks for it.
        suites = self._launcher(with_pytest(interpreter), tier, log)
        return Jailed(launcher, suites, self._clock, self._slots, m, found.meaning)

    async def _find(self, interpreter: Interpreter, log: Path | None) -> tiers.Found:
        """The tier of this host, or of a job's runner on it; each is tried once."""
        runner = interpreter if interpreter.runner else None
        if runner not in self._found:
            if not self._found:
                self._homes = cgroups.find()
                if self._homes is not None:
                    cgroups.sweep(self._homes)
            if runner is None:
                self._found[None] = await tiers.find(self._host, self._clock, log)
            else:
                found = await tiers.of_runner(runner, self._host, self._clock, log)
                if found.tier == "none":  # what is missing may be installed, and the job come again
                    return found
                self._found[runner] = found
        return self._found[runner]

    def _launcher(self, interpreter: Interpreter, tier: str, log: Path | None) -> JailLauncher:
        """The one of this interpreter, for all jobs."""
        if interpreter not in self._launchers:
            self._launchers[interpreter] = JailLauncher(
                self._host,
                self._clock,
                tier,
                interpreter,
                self._homes if tier != "landlock" else None,
                log,
                self._waits,
                self._ends,
            )
        return self._launchers[interpreter]

    @call(Sandbox.run)
    async def run(self, m: RunTools) -> Outcomes:
        by_job = _by_job(m.calls)
        parts = await asyncio.gather(*(self._job(job).run(calls) for job, calls in by_job.items()))
        return self._outcomes_of(m.calls, by_job, parts)

    @call(Sandbox.score)
    async def score(self, m: RewardBatch) -> Outcomes:
        by_job = _by_job(m.calls)
        parts = await asyncio.gather(
            *(self._job(job).score(calls) for job, calls in by_job.items())
        )
        return self._outcomes_of(m.calls, by_job, parts)

    @cast(Sandbox.end_sessions)
    async def end_sessions(self, m: EndSessions) -> None:
        job = self._jobs.get(m.job)
        if job is not None and job.jailed is not None:
            for session in m.sessions:
                job.jailed.sessions.end(session)

    def _job(self, name: str) -> LoadedJob:
        job = self._jobs.pop(name, None)
        if job is None:
            raise NotFound(
                f"job {name} is not loaded", where=self._name, fix="call Sandbox.load, then again"
            )
        self._jobs[name] = job
        self._slots.jobs = len(self._jobs)
        return job

    async def _make_room(self) -> None:
        while len(self._jobs) > JOBS_MOST:
            await self._jobs.pop(next(iter(self._jobs))).stop()

    async def _sweep_forever(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_S)
            for job in self._jobs.values():
                if job.jailed is not None:
                    job.jailed.sessions.sweep()

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
