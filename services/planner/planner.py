"""Planner actor: it campaigns for leadership. The leader reads snapshots, decides and writes.

All decisions come from `decide`. The memory is stored with the decisions, so the next leader
continues from it. Messages to workers are only hints, as workers read their own records anyway.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

from meshrl.common.api.calls.interface import ChangeHint
from meshrl.common.api.node import Node, Worker
from meshrl.common.api.stats import PlannerStats
from meshrl.common.base.errors import DeadlineExceeded, Fenced, MeshError
from meshrl.common.mesh.process.host import Stoppable
from meshrl.common.mesh.runtime.calls.actor import Actor
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import leader
from meshrl.common.state.job_lifecycle import deletion
from meshrl.common.state.pool.scheduling.decisions import (
    AssignServices,
    Decision,
    DissolveGang,
    FormGang,
    PlaceInstance,
    RemoveInstance,
    ReportHostPresence,
)
from meshrl.common.state.pool.scheduling.snapshot import PoolSnapshot
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.process_names import agent_name, worker_name
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.decision import decide
from meshrl.services.planner.memory import PlannerMemory

ELECTION = "planner"
LEASE_MS = 6000
LEASE_RENEWAL_S = 1.5
POLL_S = 0.5
HINTS_TIMEOUT_S = (
    1.0  # for all hints of a pass: a worker without one reads its record within about a second
)
CLEANUP_INTERVAL_S = 5.0  # between two cleanups of expired records


class Planner(Actor):
    """Planner actor, one of several; the others stand by until the leader's lease expires."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.fencing_token = 0  # of the leadership; 0: standing by
        self._is_first_poll = (
            False  # no planner has led for a while: missing workers may only be late
        )
        self._had_outage = False
        self._last_stats = PlannerStats(True, 0.0, 0.0, 0.0, 0, 0)  # of the last pass
        self._last_cleanup_s = mesh.clock.monotonic()
        self._lease_renewal: Stoppable | None = None

    def stats(self) -> PlannerStats:
        return self._last_stats if self.fencing_token else PlannerStats()

    # -- leadership ------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Campaign and lead until cancelled."""
        while True:
            try:
                owner = f"{self.mesh.name}#{self.mesh.incarnation}"
                token = await leader.campaign(self.mesh.state, ELECTION, owner, LEASE_MS)
                if token and (token != self.fencing_token or self._had_outage):
                    self._take_over(token)
                    self._had_outage = False
                self.fencing_token = token
                if self.fencing_token:
                    settings = await self._reconcile()
                    await self._clean_up(settings)
            except Fenced as error:
                self.mesh.telemetry.log.warning("no longer leader", error=str(error))
                self.fencing_token = 0
            except MeshError as error:
                if not error.retryable:
                    raise
                self.mesh.telemetry.log.warning("retrying", error=str(error))
                self._had_outage = True  # after an outage all leases look expired for a moment
            await self.mesh.clock.sleep(POLL_S)

    def _take_over(self, token: int) -> None:
        """Begin a term, with a thread that renews the lease. The memory and the open moves of the
        predecessors are stored.
        """
        self._is_first_poll = True

        def keep() -> bool:
            is_renewed = leader.renew_leadership(self.mesh.state, ELECTION, token, LEASE_MS)
            if not is_renewed and self.fencing_token == token:
                self.fencing_token = 0
            return is_renewed

        if self._lease_renewal is not None:
            self._lease_renewal.stop()
        self._lease_renewal = self.mesh.host.run_periodically(LEASE_RENEWAL_S, keep, "leadership")

    # -- one pass ----------------------------------------------------------------------------------

    async def _reconcile(self) -> PoolSettings:
        """Read a snapshot, decide, write, and send hints about changed records; return the
        settings.
        """
        state, token, clock = self.mesh.state, self.fencing_token, self.mesh.clock
        started_at_s = clock.monotonic()
        stored = await pool.read_snapshot(state, token)
        read_at_s = clock.monotonic()
        memory = PlannerMemory.decode(stored.memory or {})
        if self._is_first_poll:
            memory = memory.reset_after_outage()
        decisions, memory = decide(stored.snapshot, memory)
        decided_at_s = clock.monotonic()
        document = json.loads(json.dumps(memory.encode()))  # as it is read again: no tuples
        refused = await pool.write_decisions(
            state,
            token,
            self.mesh.random.hex_token(8),
            decisions,
            document if document != stored.memory else None,
            stored.revision,
        )
        self._is_first_poll = False
        self._last_stats = PlannerStats(
            True,
            round(1000 * (read_at_s - started_at_s), 2),
            round(1000 * (decided_at_s - read_at_s), 2),
            round(1000 * (clock.monotonic() - decided_at_s), 2),
            len(stored.snapshot.workers),
            len(stored.snapshot.jobs),
        )
        for one in refused:
            self.mesh.telemetry.log.info(
                "a decision was made on outdated state",
                decision=str(one.decision),
                reason=one.reason,
            )
        left_out = {id(one.decision) for one in refused}
        for decision in decisions:
            lost = isinstance(decision, ReportHostPresence) and not decision.is_back
            if lost and id(decision) not in left_out:
                self.mesh.telemetry.count("hosts_lost")
        await self._send_hints(stored.snapshot, [d for d in decisions if id(d) not in left_out])
        return stored.snapshot.settings

    async def _send_hints(self, snapshot: PoolSnapshot, decisions: Iterable[Decision]) -> None:
        """Send one hint to each worker and agent whose record has changed; ignore failures."""
        workers, hosts = find_changed_records(snapshot, decisions)
        refs = [self.mesh.ref(worker_name(worker)).cast for worker in workers]
        casts = [cast(Worker.notify_change, ChangeHint("desired")) for cast in refs]
        casts += [
            self.mesh.ref(agent_name(host)).cast(Node.notify_change, ChangeHint("services"))
            for host in hosts
        ]
        if not casts:
            return
        try:
            async with self.mesh.clock.timeout(HINTS_TIMEOUT_S, "sending hints of changes"):
                answers = await asyncio.gather(*casts, return_exceptions=True)
        except DeadlineExceeded as error:
            self.mesh.telemetry.log.info("hint", error=str(error))
            return
        for answer in answers:
            if isinstance(answer, MeshError):
                self.mesh.telemetry.log.info("hint", error=str(answer))
            elif answer is not None:
                raise answer

    async def _clean_up(self, settings: PoolSettings) -> None:
        """Remove expired records: jobs that ended long ago, and hosts that left for good."""
        now_s = self.mesh.clock.monotonic()
        if now_s - self._last_cleanup_s < CLEANUP_INTERVAL_S:
            return
        self._last_cleanup_s = now_s
        await pool.remove_gone(self.mesh.state, self.fencing_token, settings.forget_after_s)
        await deletion.delete_old_jobs(self.mesh.state, self.fencing_token, settings.keep_days)


def find_changed_records(
    snapshot: PoolSnapshot, decisions: Iterable[Decision]
) -> tuple[list[str], list[str]]:
    """Return the workers whose records these decisions change, and the hosts whose services
    change.
    """
    members = {gang.id: gang.workers for gang in snapshot.gangs}
    workers: dict[str, None] = {}
    hosts: dict[str, None] = {}
    for decision in decisions:
        match decision:
            case FormGang(gang, ids):
                members[gang] = ids
                workers.update(dict.fromkeys(ids))
            case DissolveGang(gang) | PlaceInstance(gang) | RemoveInstance(gang):
                workers.update(dict.fromkeys(members.get(gang, ())))
            case AssignServices(host):
                hosts[host] = None
    return list(workers), list(hosts)
