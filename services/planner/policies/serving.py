"""Which shards and sandboxes run on which host: as many as each job needs that has begun.

A host says which it takes, and which isolation sandboxes have there; a job whose services no host
takes waits, or is paused. They stay where they are while their host lives: their ledgers and
sessions lie there. Those of a host that drains begin no new work, and go to another once they have
none under way, or when the host has waited for `move_s`. Those of a host that is gone begin anew on
the one that has most room, and where there is none they are left to it: they may live without its
agent, which finds them when it is back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import Serve, Why
from meshrl.common.state.pool.placing.snapshot import LEFT
from meshrl.common.state.pool.workers.names import sandbox, service, shard
from meshrl.services.planner.admission.sharing import PoolDivision, started
from meshrl.services.planner.admission.takers import Takers
from meshrl.services.planner.pool.draft import Draft
from meshrl.services.planner.pool.presence import Presence, gone_for


def serve(
    draft: Draft,
    jobs: Sequence[PlannedJob],
    division: PoolDivision,
    presence: Presence,
    takers: Takers,
) -> None:
    """Says what each host is to run, where that has changed."""
    snapshot = draft.snapshot
    dead = {
        host.name
        for host in snapshot.hosts
        if not host.alive
        and (
            host.draining == LEFT
            or gone_for(presence.away, host.name, snapshot.now_ms) > snapshot.settings.lost_s
        )
    }
    workers = Counter(worker.host for worker in presence.usable)
    wanted: list[str] = []
    for job in jobs:
        if started(job) or job.id in division.workers:
            wanted += [shard(job.id, number) for number in range(job.need.shards)]
            wanted += [sandbox(job.id, number) for number in range(job.need.sandboxes)]
    known = set(wanted)
    there: dict[str, list[str]] = {}
    placed: set[str] = set()
    for host in snapshot.hosts:
        kept = [n for n in host.services if n in known and n not in placed]
        kept = [name for name in kept if takers.keeps(host, name)]
        if host.name in presence.draining:
            away_s = gone_for(presence.away, host.name, snapshot.now_ms)
            late = away_s > snapshot.settings.move_s
            leaves = {name for name in kept if late or name in snapshot.rests}
            kept = [name for name in kept if name not in leaves or not takers.of(name)]
        if host.name in dead:
            kept = [name for name in kept if not takers.of(name)]
        there[host.name] = kept
        placed.update(there[host.name])
    for name in wanted:
        takes = takers.of(name) if name not in placed else ()
        if takes:
            core = draft.team(service(name)[1]).core
            home = draft.workers[core.workers[0]].host if core is not None else ""
            # The least full: services for each of its workers, as a small host has few cores; of
            # equals the one with the job's core, to which most of its bytes go.
            room = {
                host: (len(there[host]) / max(1, workers[host]), host != home) for host in takes
            }
            there[min(room, key=room.__getitem__)].append(name)
    for host in snapshot.hosts:
        if tuple(there[host.name]) != host.services:
            draft.decide(Serve(host.name, tuple(there[host.name]), Why("serve")))
