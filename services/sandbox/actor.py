"""The actor of a sandbox: loads its job, takes batches of calls, and answers in the same order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshrl.common.api.sandbox import (
    CallOutcome,
    EndSessions,
    Loaded,
    LoadJob,
    Outcomes,
    RewardBatch,
    RewardCall,
    RunTools,
    Sandbox,
    SandboxStats,
    ToolCall,
)
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import NotFound, Refused
from meshrl.common.job import builtin
from meshrl.common.job.bundle import loading
from meshrl.common.job.isolation import isolation
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.runtime.calls.actor import Actor, call, cast
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.services.sandbox.isolation import tiers
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.outer_jail.interpreters import (
    Interpreter,
    interpreter_of,
    with_pytest,
)
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from meshrl.services.sandbox.jobs import Jailed, LoadedJob, trusted
from meshrl.services.sandbox.outcomes import Answer, Ends
from meshrl.services.sandbox.workers.calls import PoolFunctions, PoolLimits
from meshrl.services.sandbox.workers.pool import WorkerPool

Modules = Callable[[str, str], Awaitable[str]]  # of a directory at home and a bundle's digest
SWEEP_S = 5.0  # between two looks for sessions that are idle


@dataclass(frozen=True)
class ServedSandbox:
    """A sandbox's name, and what it serves."""

    name: str
    job: str = ""  # empty: whichever is loaded, in place of the one before
    load: str = ""  # digest of what may be loaded; empty: whatever its starter sends
    slots: int = 8  # jails at a time


@dataclass(frozen=True)
class MeshParts:
    """What a mesh gives a sandbox; one without a mesh has none of it."""

    waits: WaitTable | None = None
    ends: Ends = field(default_factory=Ends)
    job_clock: Clock | None = None  # stands still while the job is paused
    modules: Modules | None = None  # finds the author's code; None: it lies where it is said to


class SandboxActor(Actor):
    interface = Sandbox

    def __init__(
        self,
        host: Host,
        clock: Clock,
        logs: Path | None,
        limits: PoolLimits,
        served: ServedSandbox,
        mesh: MeshParts | None = None,
    ) -> None:
        self._mesh, self._served = mesh or MeshParts(), served
        self._host, self._clock, self._logs, self._limits = host, clock, logs, limits
        self._slots = JailSlots(clock, served.slots)
        self._job: LoadedJob | None = None
        self._launchers: dict[Interpreter, JailLauncher] = {}
        self._loading = asyncio.Lock()
        self._outcomes: Counter[str] = Counter()
        self._found: dict[Interpreter | None, tiers.FoundTier] = {}  # None: of this host
        self._homes: cgroups.Homes | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._once = 0  # batches under way of calls that are not run again when this ends

    def stats(self) -> SandboxStats:
        job = self._job
        pools = job.pools if job is not None else ()
        sessions = job.jailed.sessions.size if job is not None and job.jailed else 0
        return SandboxStats(
            job=self._served.job or (job.loaded.job if job is not None else ""),
            workers=sum(pool.size for pool in pools),
            replaced=sum(pool.replaced for pool in pools),
            jails=sum(launcher.started for launcher in self._launchers.values()),
            busy=self._slots.busy,
            waiting=self._slots.waiting,
            sessions=sessions,
            rests=not sessions and not self._once,
            outcomes=dict(self._outcomes),
        )

    async def start(self) -> None:
        self._sweeping = asyncio.create_task(self._sweep_forever(), name="idle sessions")

    async def stop(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        job, self._job = self._job, None
        if job is not None:
            await job.stop()
        await asyncio.gather(*(launcher.stop() for launcher in self._launchers.values()))
        self._launchers.clear()
        self._mesh.ends.stop()

    @call(Sandbox.load)
    async def load(self, m: LoadJob) -> Loaded:
        """Idempotent; other code of the job replaces its workers and jails. Refused for a job that
        it does not serve, and for other code than its document has.
        """
        served = self._served
        if served.job and m.job != served.job:
            raise Refused(f"it serves job {served.job}, and not {m.job}", where=served.name)
        if served.load and loading.digest_of(m) != served.load:
            raise Refused(
                f"it was told to load of job {m.job} what the job's document does not say",
                where=served.name,
                fix="Its document is what was submitted; a shard that says otherwise is none of "
                "this mesh's code: see whose host it is on (`meshrl hosts`)",
            )
        async with self._loading:
            job = self._job
            if job is None or job.loaded != m:
                before, job = job, await self._loaded(m)
                self._job = job
                if before is not None:
                    await before.stop()
            workers = sum(pool.size for pool in job.pools)
            tier = job.jailed.isolation if job.jailed is not None else ""
            return Loaded(job=m.job, workers=workers, tier=tier)

    async def _loaded(self, m: LoadJob) -> LoadedJob:
        jailed = await self._jailed(m)
        log = self._log("workers")
        modules = m.bundle_dir
        if self._mesh.modules is not None:
            modules = await self._mesh.modules(m.bundle_dir, m.bundle)
        pools: list[WorkerPool] = []
        try:
            for references, closed in zip(trusted(m), (True, False), strict=True):
                if references:
                    functions = PoolFunctions(m.job, modules, references, m.mcp, closed)
                    where = self._host, self._clock, functions, self._limits
                    pools.append(WorkerPool(*where, log, self._mesh.waits, self._mesh.ends))
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
        log = self._log("jails")
        interpreter = interpreter_of(m.jail)
        found = await self._find(interpreter, log)
        if not isolation.suffices(found.tier, demanded):
            raise Refused(
                f"{', '.join(uses)} of job {m.job} run code that the model wrote, which takes "
                f"{isolation.MEANING[demanded]}; this host has {found.meaning}",
                where=self._served.name,
                fix=found.fix,
            )
        if m.jail.root and found.tier == "landlock":
            raise Refused(
                f"sandbox.root of job {m.job} takes bubblewrap: Landlock shows the host's files",
                where=self._served.name,
                fix=found.fix,
            )
        tier = found.tier if found.tier in ("landlock", "runner") else "bwrap"
        launcher = self._launcher(interpreter, tier, log)
        await launcher.start()
        # One with pytest begins when the first row asks for it.
        suites = self._launcher(with_pytest(interpreter), tier, log)
        made = launcher, suites, self._clock, self._slots
        return Jailed(*made, m, found.meaning, self._mesh.job_clock)

    async def _find(self, interpreter: Interpreter, log: Path | None) -> tiers.FoundTier:
        """The tier of this host, or of a job's runner on it; each is tried once."""
        runner = interpreter if interpreter.runner else None
        if runner not in self._found:
            if not self._found:
                self._homes = cgroups.find()
                if self._homes is not None:
                    cgroups.sweep(self._homes)
            if runner is None:
                found = await tiers.find(self._host, self._clock, log)
            else:
                found = await tiers.of_runner(runner, self._host, self._clock, log)
                if found.tier == "none":  # what is missing may be installed, and the job come again
                    return found
            self._found[runner] = found
        return self._found[runner]

    def _log(self, of: str) -> Path | None:
        name = f"{self._served.name.replace('/', '-')}-{of}.log"
        return self._logs / name if self._logs else None

    def _launcher(self, interpreter: Interpreter, tier: str, log: Path | None) -> JailLauncher:
        if interpreter not in self._launchers:
            homes = self._homes if tier != "landlock" else None
            made = self._host, self._clock, tier, interpreter, homes, log
            self._launchers[interpreter] = JailLauncher(*made, self._mesh.waits, self._mesh.ends)
        return self._launchers[interpreter]

    @call(Sandbox.run)
    async def run(self, m: RunTools) -> Outcomes:
        once = any(asked.once for asked in m.calls)
        self._once += once
        try:
            return self._outcomes_of(m.calls, await self._job_of(m.calls).run(m.calls))
        finally:
            self._once -= once

    @call(Sandbox.score)
    async def score(self, m: RewardBatch) -> Outcomes:
        return self._outcomes_of(m.calls, await self._job_of(m.calls).score(m.calls))

    @cast(Sandbox.end_sessions)
    async def end_sessions(self, m: EndSessions) -> None:
        job = self._job
        if job is not None and job.loaded.job == m.job and job.jailed is not None:
            for session in m.sessions:
                job.jailed.sessions.end(session)

    def _job_of(self, calls: Sequence[ToolCall | RewardCall]) -> LoadedJob:
        job, where = self._job, self._served.name
        for name in {asked.job for asked in calls}:
            if job is None or job.loaded.job != name:
                fix = "call Sandbox.load, then again"
                raise NotFound(f"job {name} is not loaded", where=where, fix=fix)
        if job is None:
            raise NotFound("no job is loaded", where=where)
        return job

    async def _sweep_forever(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_S)
            if self._job is not None and self._job.jailed is not None:
                self._job.jailed.sessions.sweep()

    def _outcomes_of(
        self, calls: Sequence[ToolCall | RewardCall], answers: Sequence[Answer]
    ) -> Outcomes:
        self._outcomes.update(answer.status for answer in answers)
        return Outcomes(
            [
                CallOutcome(id=asked.id, status=a.status, value=a.value, error=a.error)
                for asked, a in zip(calls, answers, strict=True)
            ]
        )
