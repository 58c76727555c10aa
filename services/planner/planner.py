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


class Planner(Actor):
    """One of several; the others stand by and take over when the leader's lease expires."""

    interface = PlannerInterface

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.token = 0  # of the leadership; 0: standing by
        self._changed = asyncio.Event()
        self._window: StageWindow | None = None
        self._job = ""
        self._last_move_step = -(10**6)
        self._observed = -math.inf  # when the stage times were looked at last
        self._pending: dict[tuple[str, int], dict[str, Any]] = {}  # moves that are under way
        self._asked: list[gangs.Move] = []  # by people, and not yet decided
        self._missed: dict[str, float] = {}  # gang -> since when a worker of it is not there
        self._short_since: float | None = None  # when the mesh became too small for the job
        self._stale = False
        self._keeper: Stoppable | None = None
        self._times: dict[str, float] = {}
        self._started = mesh.clock.monotonic()

    @cast(PlannerInterface.look)
    def look(self, hint: Look) -> None:
        self._changed.set()

    def stats(self) -> dict[str, Any]:
        return {"leader": bool(self.token), **self._times}

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
                self._missed.clear()
                self._stale = True  # what was written may have been done, its answer lost
            await self._pause()

    async def _campaign(self) -> None:
        owner = f"{self.mesh.name}#{self.mesh.incarnation}"
        token = await leader.campaign(self.mesh.state, ELECTION, owner, LEASE_MS)
        if token and (token != self.token or self._stale):
            await self._take_over(token)
            self._stale = False
        self.token = token

    async def _take_over(self, token: int) -> None:
        """Learns which moves the predecessor left under way, and keeps the lease from a thread."""
        self._pending = {}
        self._window = None
        self._missed.clear()
        for event in await events.read_all(self.mesh.state):
            if event.kind == "desired" and event.fields.get("policy"):
                key = (event.fields["gang"], int(event.fields["epoch"]))
                self._pending[key] = dict(event.fields) | {"started_ms": event.ms}
            elif event.kind == "move":
                self._pending.pop((event.fields["gang"], int(event.fields["epoch"])), None)

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
        there = [g for g in known if now - self._missed.get(g.id, now) <= GONE_S]
        ranks = int(row.document["training"].get("ranks", 1))
        samples = row.document["algorithm"]["name"] != "sft"
        why = shortage(there, ranks, samples, bool(self._frozen(row)))
        if not why:
            self._short_since = None
            return False
        if self._short_since is None:
            self._short_since = now
        if now - self._short_since > SHORT_S:
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
        if job != self._job or self._window is None:
            size = row.document["algorithm"]["groups_per_step"] if row else 1
            self._job, self._window = job, StageWindow(size)
            self._short_since = None
            self._last_move_step = -(10**6)

    async def _lose_gangs(self, entries: list[registry.Entry]) -> None:
        """Marks gangs lost whose worker this leader has missed in every look for LOST_S.

        An outage of Redis begins the count anew: after it all leases look expired for a moment.
        """
        now = self.mesh.clock.monotonic()
        alive = {e.name for e in entries if e.alive}
        for gang in await gangs.gangs(self.mesh.state):
            leases = {w if "/" in w else f"worker/{w}" for w in gang.workers}
            if leases <= alive and gang.whole:
                self._missed.pop(gang.id, None)
                continue
            missed_s = now - self._missed.setdefault(gang.id, now)
            away = not leases <= alive  # else it has not been whole yet
            if away and missed_s > LOST_S and gang.actual_state != "lost":
                why = "its worker is gone"
                await gangs.lose_gang(self.mesh.state, self.token, gang.id, why)

    async def _decide(
        self, decision: Decision, row: jobs.JobRow | None, details: dict[str, Any]
    ) -> None:
        """Writes a decision and hints at it."""
        operation = self.mesh.random.token(8)
        epoch = await gangs.set_desired(
            self.mesh.state,
            self.token,
            decision.gang,
            decision.role,
            row.id if row and decision.role != "idle" else "",
            decision.core,
            decision.policy,
            operation,
            pinned=decision.policy == "user",
            details=details,
        )
        if details.get("policy"):
            started = {"started_ms": int(self.mesh.clock.wall() * 1000)}
            self._pending[decision.gang, epoch] = dict(details) | started
        try:
            await self.mesh.ref(f"worker/{decision.gang}").cast(Worker.look, Look("desired"))
        except MeshError as error:
            self.mesh.telemetry.log.info("hint", error=str(error))

    # -- moves -----------------------------------------------------------------------------------

    async def _moves_asked_for(self, known: list[gangs.Gang], row: jobs.JobRow) -> None:
        by_id = {g.id: g for g in known}
        self._asked += await gangs.take_moves(self.mesh.state, self.token)
        while self._asked:
            move = self._asked[0]
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
                await self._decide(Decision(gang.id, move.role, False, "user"), row, details)
            self._asked.pop(0)

    async def _balance(
        self,
        known: list[gangs.Gang],
        entries: list[registry.Entry],
        row: jobs.JobRow,
        config: PlannerConfig,
    ) -> None:
        """Moves one gang when the stage times say so."""
        if self._window is None or row.phase != "training" or row.steps_done <= config.warmup_steps:
            return
        usable = [g for g in known if g.actual_state != "lost"]
        if not all(g.settled for g in usable):
            self._window.reset()
            return
        now = self.mesh.clock.monotonic()
        if now - self._observed < config.interval_s:
            return
        self._observed = now
        self._window.observe(read(row.id, (e for e in entries if e.alive)))
        times = self._window.times()
        if times is None or row.steps_done < self._last_move_step + config.cooldown_steps:
            return
        self._times = asdict(times)
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
        self._last_move_step = row.steps_done
        self._window.reset()
        await self._decide(Decision(gang.id, grows, False, "stage_time"), row, details)

    async def _finish_moves(self, known: list[gangs.Gang], entries: list[registry.Entry]) -> None:
        """Says of each move when it is complete, and what the other gangs did meanwhile."""
        for gang in known:
            for key in [k for k in self._pending if k[0] == gang.id]:
                if key[1] < gang.epoch:
                    del self._pending[key]  # decided anew before it was done
                elif gang.settled:
                    details = self._pending.pop(key)
                    before = details.pop("before", {})
                    after = progress(known, entries, gang.id)
                    others = {
                        other: {"before": n, "after": after[other]}
                        for other, n in before.items()
                        if other in after
                    }
                    fields = details | {
                        "gang": gang.id,
                        "epoch": gang.epoch,
                        "finished_ms": int(self.mesh.clock.wall() * 1000),
                        "others": others,
                    }
                    await events.append(self.mesh.state, "move", fields)
                    self._last_move_step = int(fields.get("step", self._last_move_step))


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
