"""Actor of a sandbox: loads its job, and answers batches of calls in their order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshrl.common.api.sandbox import (
    CallOutcome,
    EndSessions,
    LoadJob,
    LoadResult,
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
from meshrl.common.job.bundle import sandbox_request
from meshrl.common.job.isolation import tiers
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.runtime.calls.actor import Actor, call, cast
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.services.sandbox.isolation import tier_detection
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.outer_jail.interpreters import (
    Interpreter,
    add_pytest,
    select_interpreter,
)
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from meshrl.services.sandbox.loaded_job import JailedFunctions, LoadedJob, list_worker_functions
from meshrl.services.sandbox.outcomes import CallResult, ExitReporter
from meshrl.services.sandbox.workers.calls import PoolFunctions, PoolLimits
from meshrl.services.sandbox.workers.pool import WorkerPool

FindModules = Callable[[str, str], Awaitable[str]]  # of a directory and a bundle's digest
SWEEP_INTERVAL_S = 5.0  # between two checks for idle sessions


@dataclass(frozen=True)
class SandboxIdentity:
    """Name of a sandbox, and the job that it serves."""

    name: str
    job: str = ""  # empty: any job, which replaces the loaded one
    load_digest: str = ""  # digest of the permitted code; empty: whatever its starter sends
    slots: int = 8  # concurrent jails


@dataclass(frozen=True)
class MeshServices:
    """Services that a mesh provides to a sandbox; a standalone sandbox has none of them."""

    waits: WaitTable | None = None
    exit_reporter: ExitReporter = field(default_factory=ExitReporter)
    job_clock: Clock | None = None  # stands still while the job is paused
    find_modules: FindModules | None = None  # finds the author's code; None: at its given path


class SandboxActor(Actor):
    interface = Sandbox

    def __init__(
        self,
        host: Host,
        clock: Clock,
        logs: Path | None,
        limits: PoolLimits,
        identity: SandboxIdentity,
        mesh: MeshServices | None = None,
    ) -> None:
        self._mesh, self._identity = mesh or MeshServices(), identity
        self._host, self._clock, self._logs, self._limits = host, clock, logs, limits
        self._slots = JailSlots(clock, identity.slots)
        self._job: LoadedJob | None = None
        self._launchers: dict[Interpreter, JailLauncher] = {}
        self._load_lock = asyncio.Lock()
        self._outcome_counts: Counter[str] = Counter()
        self._detected_tiers: dict[
            Interpreter | None, tier_detection.DetectedTier
        ] = {}  # None: of this host
        self._cgroup_parents: cgroups.CgroupParents | None = None
        self._sweep_task: asyncio.Task[None] | None = None
        self._no_retry_batches = (
            0  # running batches of calls that are not repeated if this process ends
        )

    def stats(self) -> SandboxStats:
        job = self._job
        pools = job.pools if job is not None else ()
        sessions = job.jailed.sessions.size if job is not None and job.jailed else 0
        return SandboxStats(
            job=self._identity.job or (job.loaded.job if job is not None else ""),
            workers=sum(pool.size for pool in pools),
            replaced=sum(pool.replaced_count for pool in pools),
            jails=sum(launcher.started_count for launcher in self._launchers.values()),
            busy=self._slots.busy,
            waiting=self._slots.waiting,
            sessions=sessions,
            safe_to_evict=not sessions and not self._no_retry_batches,
            outcomes=dict(self._outcome_counts),
        )

    async def start(self) -> None:
        self._sweep_task = asyncio.create_task(self._sweep_forever(), name="idle sessions")

    async def stop(self) -> None:
        if self._sweep_task is not None:
            self._sweep_task.cancel()
        job, self._job = self._job, None
        if job is not None:
            await job.stop()
        await asyncio.gather(*(launcher.stop() for launcher in self._launchers.values()))
        self._launchers.clear()
        self._mesh.exit_reporter.stop()

    @call(Sandbox.load_job)
    async def load_job(self, m: LoadJob) -> LoadResult:
        """Load a job. Idempotent; other code of the job replaces its workers and jails.

        Refused for a job that the sandbox does not serve, and for code other than its document's.
        """
        served = self._identity
        if served.job and m.job != served.job:
            raise Refused(f"the sandbox serves job {served.job}, not {m.job}", where=served.name)
        if served.load_digest and sandbox_request.compute_request_digest(m) != served.load_digest:
            raise Refused(
                f"the request to load job {m.job} does not match the job's document",
                where=served.name,
                fix=(
                    "Check the host of the requesting shard (`meshrl hosts`): a shard of this "
                    "mesh sends the submitted document"
                ),
            )
        async with self._load_lock:
            job = self._job
            if job is None or job.loaded != m:
                before, job = job, await self._build_job(m)
                self._job = job
                if before is not None:
                    await before.stop()
            workers = sum(pool.size for pool in job.pools)
            tier = job.jailed.isolation if job.jailed is not None else ""
            return LoadResult(job=m.job, workers=workers, isolation_tier=tier)

    async def _build_job(self, m: LoadJob) -> LoadedJob:
        jailed = await self._create_jailed_functions(m)
        log = self._log_path("workers")
        modules = m.bundle_dir
        if self._mesh.find_modules is not None:
            modules = await self._mesh.find_modules(m.bundle_dir, m.bundle)
        pools: list[WorkerPool] = []
        try:
            for references, closed in zip(list_worker_functions(m), (True, False), strict=True):
                if references:
                    functions = PoolFunctions(m.job, modules, references, m.mcp, closed)
                    where = self._host, self._clock, functions, self._limits
                    pools.append(
                        WorkerPool(*where, log, self._mesh.waits, self._mesh.exit_reporter)
                    )
                    await pools[-1].start()
        except BaseException:
            await asyncio.gather(*(pool.stop() for pool in pools))
            raise
        return LoadedJob(m, pools, jailed)

    async def _create_jailed_functions(self, m: LoadJob) -> JailedFunctions | None:
        """Create jails for the model's code; Refused below the tier that the job demands."""
        uses = builtin.select_jailed([*m.tools.values(), *(part.use for part in m.rewards)])
        if not uses:
            return None
        demanded = m.jail.min_tier
        log = self._log_path("jails")
        interpreter = select_interpreter(m.jail)
        found = await self._detect_tier(interpreter, log)
        if not tiers.is_sufficient(found.tier, demanded):
            raise Refused(
                f"{', '.join(uses)} of job {m.job} run code that the model wrote, which needs "
                f"{tiers.TIER_DESCRIPTIONS[demanded]}; this host has {found.description}",
                where=self._identity.name,
                fix=found.fix,
            )
        if m.jail.root and found.tier == "landlock":
            raise Refused(
                f"sandbox.root of job {m.job} needs bubblewrap: Landlock exposes the host's files",
                where=self._identity.name,
                fix=found.fix,
            )
        tier = found.tier if found.tier in ("landlock", "runner") else "bwrap"
        launcher = self._get_launcher(interpreter, tier, log)
        await launcher.start()
        # One with pytest starts at the first row that needs it.
        suites = self._get_launcher(add_pytest(interpreter), tier, log)
        jail_arguments = launcher, suites, self._clock, self._slots
        return JailedFunctions(*jail_arguments, m, found.description, self._mesh.job_clock)

    async def _detect_tier(
        self, interpreter: Interpreter, log: Path | None
    ) -> tier_detection.DetectedTier:
        """Return the tier of this host, or of a job's runner on it; each is probed once."""
        runner = interpreter if interpreter.runner else None
        if runner not in self._detected_tiers:
            if not self._detected_tiers:
                self._cgroup_parents = cgroups.find_parents()
                if self._cgroup_parents is not None:
                    cgroups.remove_stale(self._cgroup_parents)
            if runner is None:
                found = await tier_detection.detect_tier(self._host, self._clock, log)
            else:
                found = await tier_detection.detect_runner_tier(
                    runner, self._host, self._clock, log
                )
                if found.tier == "none":  # a fix may be installed, and the job resubmitted
                    return found
            self._detected_tiers[runner] = found
        return self._detected_tiers[runner]

    def _log_path(self, suffix: str) -> Path | None:
        name = f"{self._identity.name.replace('/', '-')}-{suffix}.log"
        return self._logs / name if self._logs else None

    def _get_launcher(self, interpreter: Interpreter, tier: str, log: Path | None) -> JailLauncher:
        if interpreter not in self._launchers:
            homes = self._cgroup_parents if tier != "landlock" else None
            launcher_arguments = self._host, self._clock, tier, interpreter, homes, log
            self._launchers[interpreter] = JailLauncher(
                *launcher_arguments, self._mesh.waits, self._mesh.exit_reporter
            )
        return self._launchers[interpreter]

    @call(Sandbox.run_tools)
    async def run_tools(self, m: RunTools) -> Outcomes:
        once = any(request.no_retry for request in m.calls)
        self._no_retry_batches += once
        try:
            return self._build_outcomes(m.calls, await self._get_job(m.calls).run(m.calls))
        finally:
            self._no_retry_batches -= once

    @call(Sandbox.score_trajectories)
    async def score_trajectories(self, m: RewardBatch) -> Outcomes:
        return self._build_outcomes(m.calls, await self._get_job(m.calls).score(m.calls))

    @cast(Sandbox.end_sessions)
    async def end_sessions(self, m: EndSessions) -> None:
        job = self._job
        if job is not None and job.loaded.job == m.job and job.jailed is not None:
            for session in m.sessions:
                job.jailed.sessions.end(session)

    def _get_job(self, calls: Sequence[ToolCall | RewardCall]) -> LoadedJob:
        job, where = self._job, self._identity.name
        for name in {request.job for request in calls}:
            if job is None or job.loaded.job != name:
                fix = "Call Sandbox.load_job, then retry"
                raise NotFound(f"job {name} is not loaded", where=where, fix=fix)
        if job is None:
            raise NotFound("no job is loaded", where=where)
        return job

    async def _sweep_forever(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_INTERVAL_S)
            if self._job is not None and self._job.jailed is not None:
                self._job.jailed.sessions.evict_idle()

    def _build_outcomes(
        self, calls: Sequence[ToolCall | RewardCall], answers: Sequence[CallResult]
    ) -> Outcomes:
        self._outcome_counts.update(answer.status for answer in answers)
        return Outcomes(
            [
                CallOutcome(id=request.id, status=a.status, value=a.value, error=a.error)
                for request, a in zip(calls, answers, strict=True)
            ]
        )
