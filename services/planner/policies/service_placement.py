"""Placement of shards and sandboxes on hosts: as many as each started job needs.

A host declares which services it accepts, and the isolation of its sandboxes. A job whose services
no host accepts waits, or is paused. Services stay while their host lives, as their ledgers and
sessions are stored there. Services of a draining host start no new work. They move to another host
once they are idle, or after `move_timeout_s`. Services of a lost host start again on the
host with most capacity. If there is none, they stay assigned to the lost host. They may run without
its agent, which finds them when it returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import AssignServices, Rationale
from meshrl.common.state.pool.scheduling.snapshot import HOST_LEFT
from meshrl.common.state.pool.workers.process_names import (
    parse_service_name,
    sandbox_name,
    shard_name,
)
from meshrl.services.planner.admission.fair_shares import PoolDivision, has_started
from meshrl.services.planner.admission.service_hosts import ServiceHosts
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.presence import PoolPresence, compute_absence_s


def place_services(
    draft: PoolDraft,
    jobs: Sequence[PlannedJob],
    division: PoolDivision,
    presence: PoolPresence,
    service_hosts: ServiceHosts,
) -> None:
    """Assign services to each host, where they have changed."""
    snapshot = draft.snapshot
    dead = {
        host.name
        for host in snapshot.hosts
        if not host.alive
        and (
            host.drain_reason == HOST_LEFT
            or compute_absence_s(presence.away_since, host.name, snapshot.now_ms)
            > snapshot.settings.worker_lost_s
        )
    }
    workers = Counter(worker.host for worker in presence.usable_workers)
    required_names: list[str] = []
    for job in jobs:
        if has_started(job) or job.id in division.workers:
            required_names += [
                shard_name(job.id, number) for number in range(job.requirements.shards)
            ]
            required_names += [
                sandbox_name(job.id, number) for number in range(job.requirements.sandboxes)
            ]
    known = set(required_names)
    there: dict[str, list[str]] = {}
    placed: set[str] = set()
    for host in snapshot.hosts:
        retained = [n for n in host.services if n in known and n not in placed]
        retained = [name for name in retained if service_hosts.can_keep_service(host, name)]
        if host.name in presence.draining_hosts:
            away_s = compute_absence_s(presence.away_since, host.name, snapshot.now_ms)
            late = away_s > snapshot.settings.move_timeout_s
            leaves = {name for name in retained if late or name in snapshot.evictable_services}
            retained = [
                name
                for name in retained
                if name not in leaves or not service_hosts.find_hosts(name)
            ]
        if host.name in dead:
            retained = [name for name in retained if not service_hosts.find_hosts(name)]
        there[host.name] = retained
        placed.update(there[host.name])
    for name in required_names:
        takes = service_hosts.find_hosts(name) if name not in placed else ()
        if takes:
            core = draft.get_instances(parse_service_name(name)[1]).core
            home = draft.workers[core.workers[0]].host if core is not None else ""
            # The least loaded host: services per worker, as a small host has few cores. Of
            # equals the one with the job's core, which receives most of its bytes.
            room = {
                host: (len(there[host]) / max(1, workers[host]), host != home) for host in takes
            }
            there[min(room, key=room.__getitem__)].append(name)
    for host in snapshot.hosts:
        if tuple(there[host.name]) != host.services:
            draft.add_decision(
                AssignServices(host.name, tuple(there[host.name]), Rationale("serve"))
            )
