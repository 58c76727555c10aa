"""The planner's shell: it stands for election, and as the leader writes what every gang should do.

It reads, asks the modules beside it what to do, and writes that down.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from common.api.hint import Look
from common.api.node import Worker
from common.errors import Fenced, MeshError
from common.job.config import PlannerConfig
from common.process.host import Stoppable
from common.runtime.actor import Actor
from common.runtime.mesh import Mesh
from common.state import gangs, jobs, leader, registry
from common.state.gangs import Role
from services.planner.allocation import StageTimes
from services.planner.balancing import rebalance
from services.planner.feasibility import Shortfall, hopeless, shortfall
from services.planner.job import PlannedJob, planned
from services.planner.moves import finished
from services.planner.placement import RoleDecision, next_decision
from services.planner.presence import counted, gathering, missing_since, newly_lost
from services.planner.requests import granted, refusal
from services.planner.settling import StageWatch, following, look

ELECTION = "planner"
LEASE_MS = 6000
KEEP_S = 1.5
LOOK_S = 0.5


class Term:
    """What a leader remembers from look to look; each time that it is elected it begins anew."""

    def __init__(self) -> None:
        self.watch = StageWatch()
        self.times: StageTimes | None = None  # the times that the last decision was made by
        self.missing: dict[str, float] = {}  # gang -> since when
        self.short: Shortfall | None = None


class Planner(Actor):
    """One of several; the others stand by and take over when the leader's lease expires."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.token = 0  # fencing token of the leadership; 0: standing by
        self._term = Term()
        self._stale = False
        self._keeper: Stoppable | None = None
        self._started = mesh.clock.monotonic()

    def stats(self) -> dict[str, Any]:
        times = self._term.times if self.token else None
        return {"leader": bool(self.token), **(asdict(times) if times else {})}

    # -- leadership ------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Campaigns and leads, until cancelled."""
        while True:
            try:
                await self._campaign()
                if self.token:
                    await self._look()
            except Fenced as error:
                self.mesh.telemetry.log.warning("no longer leader", error=str(error))
                self.token = 0
            except MeshError as error:
                if not error.retryable:
                    raise
                self.mesh.telemetry.log.warning("looking again", error=str(error))
                self._stale = True  # after an outage all leases look expired for a moment
            await self.mesh.clock.sleep(LOOK_S)

    async def _campaign(self) -> None:
        owner = f"{self.mesh.name}#{self.mesh.incarnation}"
        token = await leader.campaign(self.mesh.state, ELECTION, owner, LEASE_MS)
        if token and (token != self.token or self._stale):
            self._take_over(token)
            self._stale = False
        self.token = token

    def _take_over(self, token: int) -> None:
        """Begins a term, and keeps the lease from a thread. What a predecessor left under way is on
        record.
        """
        self._term = Term()

        def keep() -> bool:
            held = leader.keep(self.mesh.state, ELECTION, token, LEASE_MS)
            if not held and self.token == token:
                self.token = 0
            return held

        if self._keeper is not None:
            self._keeper.stop()
        self._keeper = self.mesh.host.every(KEEP_S, keep, "leadership")

    # -- one look --------------------------------------------------------------------------------

    async def _look(self) -> None:
        state, term = self.mesh.state, self._term
        entries = [entry for entry in await registry.entries(state) if entry.alive]
        known = await self._present(entries)
        rows = await jobs.jobs(state)
        job = next((planned(row) for row in rows if not row.ended), None)
        term.watch = following(term.watch, job)
        await self._finish_moves(known, entries)
        if job is None:
            term.short = None
        elif not await self._feasible(known, job):
            return
        if not await self._place(known, job) and job is not None:
            await self._moves_asked_for(known, job)
            await self._balance(known, entries, job)

    async def _place(self, known: list[gangs.Gang], job: PlannedJob | None) -> bool:
        """Puts right what must be before anything is improved, a decision for each gang at most;
        whether there was any.
        """
        for made in range(len(known)):
            if job is None:
                decision = next_decision(known, "", PlannerConfig().training)
            else:
                training = job.config.training
                decision = next_decision(known, job.id, training, job.scoring, job.ranks)
            if decision is None:
                return made > 0
            await self._decide(decision, job)
            known = await gangs.gangs(self.mesh.state)
        return bool(known)

    async def _present(self, entries: list[registry.Entry]) -> list[gangs.Gang]:
        """All gangs, after those that were lost since the last look are marked."""
        state, term, now_s = self.mesh.state, self._term, self.mesh.clock.monotonic()
        alive = {entry.name for entry in entries}
        known = await gangs.gangs(state)
        term.missing = missing_since(known, alive, term.missing, now_s)
        lost = newly_lost(known, alive, term.missing, now_s)
        for gang in lost:
            await gangs.lose_gang(state, self.token, gang, "its worker is gone")
        return await gangs.gangs(state) if lost else known

    async def _feasible(self, known: list[gangs.Gang], job: PlannedJob) -> bool:
        """Whether the mesh has what the job needs. A job that has waited for it too long fails."""
        mesh, term, now_s = self.mesh, self._term, self.mesh.clock.monotonic()
        if gathering(known, job.workers, now_s - self._started):
            return False
        term.short = shortfall(counted(known, term.missing, now_s), job, term.short, now_s)
        if term.short is None:
            return True
        if hopeless(term.short, now_s):
            why = term.short.why
            await jobs.set_phase(
                mesh.state, job.id, jobs.Phase.FAILED, mesh.token, mesh.name, error=why
            )
        return False

    async def _moves_asked_for(self, known: list[gangs.Gang], job: PlannedJob) -> None:
        by_id = {gang.id: gang for gang in known}
        for move in await gangs.moves_asked_for(self.mesh.state):
            gang = by_id.get(move.gang)
            why = refusal(move, gang)
            if gang is None or why:
                await gangs.decline_move(self.mesh.state, self.token, move.op_id, why)
            else:
                await self._decide(granted(move, gang), job, move.op_id)

    async def _balance(
        self, known: list[gangs.Gang], entries: list[registry.Entry], job: PlannedJob
    ) -> None:
        """Moves one gang when the stage times say so."""
        term = self._term
        term.watch, times = look(term.watch, job, known, entries, self.mesh.clock.monotonic())
        if times is None:
            return
        term.times = times
        decision = rebalance(times, job, known, entries)
        if decision is not None:
            term.watch = term.watch.moved(job.steps_done)
            await self._decide(decision, job)

    async def _finish_moves(self, known: list[gangs.Gang], entries: list[registry.Entry]) -> None:
        """Says of each move when it is complete, and what the other gangs did meanwhile."""
        state, term = self.mesh.state, self._term
        for move, details in finished(await gangs.moves_under_way(state), known, entries):
            await gangs.finish_move(state, self.token, move, details)
            term.watch = term.watch.arrived(details)

    async def _decide(
        self, decision: RoleDecision, job: PlannedJob | None, operation: str = ""
    ) -> None:
        """Writes a decision, once for an operation, and hints at it."""
        await gangs.set_desired(
            self.mesh.state,
            self.token,
            decision.gang,
            decision.role,
            job.id if job and decision.role != Role.IDLE else "",
            decision.core,
            decision.policy,
            operation or self.mesh.random.token(8),
            pinned=decision.policy == "user",
            details=decision.details,
        )
        try:
            await self.mesh.ref(f"worker/{decision.gang}").cast(Worker.look, Look("desired"))
        except MeshError as error:
            self.mesh.telemetry.log.info("hint", error=str(error))
