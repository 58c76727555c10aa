"""What the planner has decided and nobody has brought about: residents, shards, sandboxes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshrl.common.mesh.process.supervision.ended import LastEnd
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.pool.demand.needs import Need, need_of
from meshrl.common.state.pool.placing.snapshot import PoolHost
from meshrl.common.state.pool.placing.taking import nowhere, refusal
from meshrl.common.state.pool.store.store import host_of
from meshrl.common.state.pool.workers.names import (
    agent,
    role_process,
    sandbox,
    service,
    shard,
    worker_process,
)
from meshrl.common.state.pool.workers.rows import Doing, Gang, Resident, Role
from meshrl.common.state.registry import Entry
from meshrl.view.mesh.snapshot import MeshSnapshot

SETTLE_MS = 30_000  # to start a process takes seconds
MOVE_MS = 60_000  # from tier to tier at some GB a second
LOAD_MS = 300_000  # a process that is there and renews its lease may load a large model
SERVE_MS = 30_000  # from the decision to a shard that is up: its start is some seconds


@dataclass(frozen=True)
class Late:
    """Who has not done what was decided, since when, and how far it is."""

    culprit: str
    what: str
    since_s: float
    reason: str  # where its own process is well
    job: str
    besides: str = ""  # what is to be said in any case

    def said(self, unwell: str) -> str:
        """Return why it is late; `unwell` tells what ails its process, if anything does."""
        return "; ".join(filter(None, dict.fromkeys((unwell or self.reason, self.besides))))


def late(mesh: MeshSnapshot) -> Iterator[Late]:
    """Residents that do not come to what was wished of them, because they are late or because their
    process fails; and shards and sandboxes that are not there.
    """
    entries = {entry.name: entry for entry in mesh.entries}
    ended = {end.name: end for end in mesh.ended}
    for gang, resident in mesh.residents:
        if not resident.settled:
            yield from _unsettled(gang, resident, entries, ended, mesh.now_ms)
    at_work = {job.id: job for job in mesh.live_jobs if not job.held}
    hosts = [host_of(entry) for entry in entries.values() if entry.kind == "node"]
    for host, name in mesh.services:
        job = at_work.get(service(name)[1])
        if job is not None and not (name in entries and entries[name].alive):
            yield from _missing(host, name, job, entries, ended, hosts, mesh.now_ms)
    placed = {name for _, name in mesh.services}
    for job in at_work.values():
        yield from _nowhere(job, placed, hosts, mesh.now_ms)


def _unsettled(
    gang: Gang,
    resident: Resident,
    entries: Mapping[str, Entry],
    ended: Mapping[str, LastEnd],
    now_ms: float,
) -> Iterator[Late]:
    since_ms = now_ms - resident.changed_ms
    named = resident.detail.split(" ")[0].rstrip(":")
    if named in ended:
        yield Late(named, _wish(gang, resident), since_ms / 1000, resident.detail, resident.job)
        return
    process = entries.get(role_process(resident))
    limit_ms = SETTLE_MS
    if process is not None and process.alive:
        limit_ms = MOVE_MS if resident.doing == Doing.MOVING else LOAD_MS
    if since_ms > limit_ms:
        rank = next(r for r in resident.ranks if not replace(resident, ranks=(r,)).settled)
        report = resident.reports.get(rank)
        if report is None or report.generation != resident.generation:
            said = f"it has said nothing of {resident.id} yet"
        else:
            detail = f": {report.detail}" if report.detail else ""
            said = f"{resident.id} is {report.doing} at {report.tier}{detail}"
        culprit = worker_process(gang.workers[rank])
        yield Late(culprit, _wish(gang, resident), since_ms / 1000, said, resident.job)


def _wish(gang: Gang, resident: Resident) -> str:
    role = "core" if resident.core and resident.role == Role.TRAINING else resident.role
    return f"{role} of {resident.job} to be at {resident.tier} on {', '.join(gang.workers)}"


def _missing(
    host: str,
    name: str,
    job: JobRow,
    entries: Mapping[str, Entry],
    ended: Mapping[str, LastEnd],
    hosts: Sequence[PoolHost],
    now_ms: float,
) -> Iterator[Late]:
    last = entries.get(name)
    # It was there until then, or was decided with the job's admission; where that was at once, a
    # job that comes further is given the time from then on.
    known_ms = max(last.expires_ms if last else 0, job.held_ms) or job.progress_ms
    since_ms = now_ms - known_ms
    if since_ms <= SERVE_MS:
        return
    what, end = f"to start {name}", ended.get(name)
    if end is not None:
        reason = f"{name} has ended: {end.told}"
        yield Late(name, "to be up", since_ms / 1000, reason, job.id)
    else:
        reason = f"{name} is planned on {host}, and is not there"
        alone = _untaken(hosts, service(name)[0], need_of(job.document))
        yield Late(agent(host), what, since_ms / 1000, reason, job.id, alone)


def _untaken(hosts: Sequence[PoolHost], kind: str, need: Need) -> str:
    """Why no host that is there takes a service; empty when one does."""
    up = [host for host in hosts if host.alive and not host.draining]
    fits = any(not refusal(host, kind, need) for host in up)
    return "" if fits else nowhere(hosts, kind, need)


def _nowhere(
    job: JobRow, placed: Collection[str], hosts: Sequence[PoolHost], now_ms: float
) -> Iterator[Late]:
    """What is on no host, as none that takes it is there."""
    since_ms = now_ms - (job.held_ms or job.progress_ms)
    if since_ms <= SERVE_MS:
        return
    need = need_of(job.document)
    wanted = [shard(job.id, 0)] if need.shards else []
    wanted += [sandbox(job.id, 0)] if need.sandboxes else []
    for name in wanted:
        kind = service(name)[0]
        takers = [host for host in hosts if not refusal(host, kind, need)]
        if name not in placed and takers and (why := _untaken(hosts, kind, need)):
            culprit, what = agent(takers[0].name), f"to start {name}"
            yield Late(culprit, what, since_ms / 1000, why, job.id, why)
