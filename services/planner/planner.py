"""The planner: leads if it is elected, and then writes what every gang should do."""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict
from typing import Any

from common.actor import Actor, cast
from common.api.hint import Look
from common.api.node import Worker
from common.api.planner import Planner as PlannerInterface
from common.config import PlannerConfig
from common.errors import Fenced, MeshError
from common.host import Stoppable
from common.mesh import Mesh
from common.state import events, gangs, jobs, leader, registry
from services.planner.allocation import Split, growing_role
from services.planner.placement import SCORING, Decision, gang_to_move, next_decision, shortage
from services.planner.stages import StageWindow, read

ELECTION = "planner"
LEASE_MS = 6000
KEEP_S = 1.5
LOOK_S = 0.5
GATHER_S = 5.0  # workers of a new mesh may take this long to join before the split is made
LOST_S = 10.0  # a worker whose lease has been gone this long is not waited for
GONE_S = 300.0  # and after this long it does not count as one of the mesh: hosts boot in less
SHORT_S = (
    15.0  # a mesh too small for its job for so long is not one whose workers are still joining
)
ROLES = ("rollout", "training", "idle")


class Term:
    """What a leader remembers from look to look; each time that it is elected it begins anew."""

    def __init__(self) -> None:
        self.job = ""
        self.window = StageWindow(1)
        self.last_move_step = -(10**6)
        self.observed = -math.inf  # when the stage times were looked at last
        self.missed: dict[str, float] = {}  # gang -> since when a worker of it is not there
        self.short_since: float | None = None  # when the mesh became too small for the job
        self.times: dict[str, float] = {}


class Planner(Actor):
    """One of several; the others stand by and take over when the leader's lease expires."""

    interface = PlannerInterface

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.token = 0  # of the leadership; 0: standing by
        self._changed = asyncio.Event()
        self._term = Term()
        self._stale = False
        self._keeper: Stoppable | None = None
        self._started = mesh.clock.monotonic()

    @cast(PlannerInterface.look)
    def look(self, hint: Look) -> None:
        self._changed.set()

    def stats(self) -> dict[str, Any]:
        return {"leader": bool(self.token), **(self._term.times if self.token else {})}

    # -- leadership ------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Campaigns and leads, until cancelled."""
        while True:
            try:
                await self._campaign()
                if self.token:
                    await self._lead()
            except Fenced as error:
                self.mesh.telemetry.log.warning("no longer leader", error=str(error))
                self.token = 0
            except MeshError as error:
                if not error.retryable:
                    raise
                self.mesh.telemetry.log.warning("looking again", error=str(error))
                self._stale = True  # after an outage all leases look expired for a moment
            await self._pause()

    async def _campaign(self) -> None:
        owner = f"{self.mesh.name}#{self.mesh.incarnation}"
        token = await leader.campaign(self.mesh.state, ELECTION, owner, LEASE_MS)
        if token and (token != self.token or self._stale):
            await self._take_over(token)
            self._stale = False
        self.token = token

    async def _take_over(self, token: int) -> None:
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
        await events.append(self.mesh.state, "leader", {"name": self.mesh.name, "token": token})

    async def _pause(self) -> None:
        self._changed.clear()
        try:
            async with self.mesh.clock.timeout(LOOK_S, "a hint"):
                await self._changed.wait()
        except MeshError:
            return

    # -- one look --------------------------------------------------------------------------------

    async def _lead(self) -> None:
        state = self.mesh.state
        entries = await registry.entries(state)
        await self._lose_gangs(entries)
        known = await gangs.gangs(state)
        row = next((r for r in await jobs.jobs(state) if r.phase not in jobs.ENDED), None)
        self._follow(row)
        await self._finish_moves(known, entries)
        joined = sum(len(g.workers) for g in known)
        if row is not None and joined < row.document["mesh"]["workers"] and self._gathering():
            return
        config = self._config(row)
        if row is not None and await self._impossible(row, known):
            return
        scoring = row is not None and bool(self._frozen(row))
        ranks = int(row.document["training"].get("ranks", 1)) if row else 1
        decision = next_decision(known, row.id if row else "", config.training, scoring, ranks)
        if decision is not None:
            await self._decide(decision, row, {})
            self._changed.set()
        elif row is not None:
            await self._moves_asked_for(known, row)
            await self._balance(known, entries, row, config)

    async def _impossible(self, row: jobs.JobRow, known: list[gangs.Gang]) -> bool:
        """Whether this mesh is too small for the job: such a one waits, but not for ever."""
        now = self.mesh.clock.monotonic()
        there = [g for g in known if now - self._term.missed.get(g.id, now) <= GONE_S]
        ranks = int(row.document["training"].get("ranks", 1))
        samples = row.document["algorithm"]["name"] != "sft"
        why = shortage(there, ranks, samples, bool(self._frozen(row)))
        if not why:
            self._term.short_since = None
            return False
        if self._term.short_since is None:
            self._term.short_since = now
        if now - self._term.short_since > SHORT_S:
            mesh = self.mesh
            await jobs.set_phase(mesh.state, row.id, "failed", mesh.token, mesh.name, error=why)
        return True

    def _gathering(self) -> bool:
        return self.mesh.clock.monotonic() - self._started < GATHER_S

    def _config(self, row: jobs.JobRow | None) -> PlannerConfig:
        return PlannerConfig(**row.document["planner"]) if row else PlannerConfig()

    def _frozen(self, row: jobs.JobRow) -> list[str]:
        """Roles of the job's frozen models, which one gang hosts."""
        models: dict[str, dict[str, Any]] = row.document.get("models", {})
        return [role for role, model in models.items() if model["path"]]

    def _follow(self, row: jobs.JobRow | None) -> None:
        job = row.id if row else ""
        if job != self._term.job:
            size = row.document["algorithm"]["groups_per_step"] if row else 1
            self._term.job, self._term.window = job, StageWindow(size)
            self._term.short_since = None
            self._term.last_move_step = -(10**6)

    async def _lose_gangs(self, entries: list[registry.Entry]) -> None:
        """Marks gangs lost whose worker this leader has missed in every look for LOST_S.

        An outage of Redis begins the count anew: after it all leases look expired for a moment.
        """
        now = self.mesh.clock.monotonic()
        alive = {e.name for e in entries if e.alive}
        for gang in await gangs.gangs(self.mesh.state):
            leases = {w if "/" in w else f"worker/{w}" for w in gang.workers}
            if leases <= alive and gang.whole:
                self._term.missed.pop(gang.id, None)
                continue
            missed_s = now - self._term.missed.setdefault(gang.id, now)
            away = not leases <= alive  # else it has not been whole yet
            if away and missed_s > LOST_S and gang.actual_state != "lost":
                why = "its worker is gone"
                await gangs.lose_gang(self.mesh.state, self.token, gang.id, why)

    async def _decide(
        self,
        decision: Decision,
        row: jobs.JobRow | None,
        details: dict[str, Any],
        operation: str = "",
    ) -> None:
        """Writes a decision, once for an operation, and hints at it."""
        await gangs.set_desired(
            self.mesh.state,
            self.token,
            decision.gang,
            decision.role,
            row.id if row and decision.role != "idle" else "",
            decision.core,
            decision.policy,
            operation or self.mesh.random.token(8),
            pinned=decision.policy == "user",
            details=details,
        )
        try:
            await self.mesh.ref(f"worker/{decision.gang}").cast(Worker.look, Look("desired"))
        except MeshError as error:
            self.mesh.telemetry.log.info("hint", error=str(error))

    # -- moves -----------------------------------------------------------------------------------

    async def _moves_asked_for(self, known: list[gangs.Gang], row: jobs.JobRow) -> None:
        by_id = {g.id: g for g in known}
        for move in await gangs.moves_asked_for(self.mesh.state):
            gang = by_id.get(move.gang)
            why = ""
            if gang is None:
                why = f"no gang is called {move.gang}"
            elif move.role not in ROLES:
                why = f"{move.role} is no role; choose from {', '.join(ROLES)}"
            elif gang.desired_core:
                why = f"{move.gang} is the core of training; move another one"
            elif gang.desired_role == SCORING:
                why = f"{move.gang} hosts the job's frozen models; move another one"
            elif gang.size > 1:
                why = f"{move.gang} is a gang of {gang.size} workers, for a core of so many ranks"
            if gang is None or why:
                await gangs.decline_move(self.mesh.state, self.token, move.op_id, why)
            else:
                details = {"policy": "user", "from": gang.desired_role, "to": move.role}
                decision = Decision(gang.id, move.role, False, "user")
                await self._decide(decision, row, details, move.op_id)

    async def _balance(
        self,
        known: list[gangs.Gang],
        entries: list[registry.Entry],
        row: jobs.JobRow,
        config: PlannerConfig,
    ) -> None:
        """Moves one gang when the stage times say so."""
        if row.phase != "training" or row.steps_done <= config.warmup_steps:
            return
        usable = [g for g in known if g.actual_state != "lost"]
        if not all(g.settled for g in usable):
            self._term.window.reset()
            return
        now = self.mesh.clock.monotonic()
        if now - self._term.observed < config.interval_s:
            return
        self._term.observed = now
        self._term.window.observe(read(row.id, (e for e in entries if e.alive)))
        times = self._term.window.times()
        if times is None or row.steps_done < self._term.last_move_step + config.cooldown_steps:
            return
        self._term.times = asdict(times)
        split = Split(
            rollout=sum(g.desired_role == "rollout" for g in usable),
            training=sum(g.desired_role == "training" for g in usable),
        )
        grows = growing_role(times, split, config)
        gang = gang_to_move(usable, grows) if grows else None
        if grows is None or gang is None:
            return
        details = {
            "policy": "stage_time",
            "from": gang.desired_role,
            "to": grows,
            "rollout_s": times.rollout_s,
            "train_s": times.train_s,
            "threshold": config.imbalance,
            "step": row.steps_done,
            "before": progress(known, entries, gang.id),
        }
        self._term.last_move_step = row.steps_done
        self._term.window.reset()
        await self._decide(Decision(gang.id, grows, False, "stage_time"), row, details)

    async def _finish_moves(self, known: list[gangs.Gang], entries: list[registry.Entry]) -> None:
        """Says of each move when it is complete, and what the other gangs did meanwhile."""
        under_way = {move.gang: move for move in await gangs.moving(self.mesh.state)}
        for gang in known:
            move = under_way.get(gang.id)
            if move is None or move.epoch != gang.epoch or not gang.settled:
                continue
            after = progress(known, entries, gang.id)
            details = dict(move.details)
            details["others"] = {
                other: {"before": before, "after": after[other]}
                for other, before in details.pop("before", {}).items()
                if other in after
            }
            await gangs.finish_move(self.mesh.state, self.token, move, details)
            self._term.last_move_step = int(details.get("step", self._term.last_move_step))


def progress(known: list[gangs.Gang], entries: list[registry.Entry], but: str) -> dict[str, int]:
    """What each other gang has done so far: tokens of an engine, steps of the core, bins of a
    hybrid.
    """
    done: dict[str, int] = {}
    for entry in entries:
        gang = str(entry.stats.get("gang", ""))
        if entry.alive and gang and gang != but and any(g.id == gang for g in known):
            count = {"engine": "tokens", "trainer": "step", "hybrid": "bins"}.get(entry.kind)
            if count:
                done[gang] = int(entry.stats.get(count, 0))
    return done
