"""Planner decisions that are overdue: instances, shards and sandboxes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshrl.common.mesh.process.supervision.exit_reports import LastExit
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.pool.demand.requirements import JobRequirements, derive_requirements
from meshrl.common.state.pool.scheduling.host_services import (
    explain_rejected_service,
    explain_unplaced_service,
)
from meshrl.common.state.pool.scheduling.snapshot import PoolHost
from meshrl.common.state.pool.store.pool_rows import decode_host
from meshrl.common.state.pool.workers.process_names import (
    agent_name,
    parse_service_name,
    role_process_name,
    sandbox_name,
    shard_name,
    worker_name,
)
from meshrl.common.state.pool.workers.rows import Gang, Instance, InstancePhase, Role
from meshrl.common.state.registry import RegistryEntry
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot

START_LIMIT_MS = 30_000  # to start a process takes seconds
TIER_CHANGE_LIMIT_MS = 60_000  # from tier to tier at some GB a second
LOAD_LIMIT_MS = 300_000  # a process that is there and renews its lease may load a large model
SERVICE_START_LIMIT_MS = (
    30_000  # from the decision to a shard that is up: its start is some seconds
)


@dataclass(frozen=True)
class OverdueDecision:
    """Overdue decision: the process that is late, since when, and its progress."""

    culprit: str
    action: str
    since_s: float
    reason: str  # reason if its own process is healthy
    job: str
    extra_reason: str = ""  # a reason that is reported in any case

    def describe(self, process_problem: str) -> str:
        """Return why it is late; `process_problem` describes the problem of its process, if any."""
        return "; ".join(
            filter(None, dict.fromkeys((process_problem or self.reason, self.extra_reason)))
        )


def find_overdue(mesh: MeshSnapshot) -> Iterator[OverdueDecision]:
    """Yield instances that do not reach their desired state, and missing shards and sandboxes.

    An instance is late, or its process fails.
    """
    entries = {entry.name: entry for entry in mesh.entries}
    exits_by_name = {end.name: end for end in mesh.last_exits}
    for gang, resident in mesh.instances:
        if not resident.is_reconciled:
            yield from _check_instance(gang, resident, entries, exits_by_name, mesh.now_ms)
    at_work = {job.id: job for job in mesh.live_jobs if not job.block_reason}
    hosts = [decode_host(entry) for entry in entries.values() if entry.kind == "node"]
    for host, name in mesh.services:
        job = at_work.get(parse_service_name(name)[1])
        if job is not None and not (name in entries and entries[name].alive):
            yield from _check_service(host, name, job, entries, exits_by_name, hosts, mesh.now_ms)
    placed = {name for _, name in mesh.services}
    for job in at_work.values():
        yield from _check_unplaced_services(job, placed, hosts, mesh.now_ms)


def _check_instance(
    gang: Gang,
    instance: Instance,
    entries: Mapping[str, RegistryEntry],
    last_exits: Mapping[str, LastExit],
    now_ms: float,
) -> Iterator[OverdueDecision]:
    since_ms = now_ms - instance.desired_since_ms
    named = instance.detail.split(" ")[0].rstrip(":")
    if named in last_exits:
        yield OverdueDecision(
            named,
            _describe_desired_role(gang, instance),
            since_ms / 1000,
            instance.detail,
            instance.job,
        )
        return
    process = entries.get(role_process_name(instance))
    limit_ms = START_LIMIT_MS
    if process is not None and process.alive:
        limit_ms = TIER_CHANGE_LIMIT_MS if instance.phase == InstancePhase.MOVING else LOAD_LIMIT_MS
    if since_ms > limit_ms:
        rank = next(r for r in instance.ranks if not replace(instance, ranks=(r,)).is_reconciled)
        report = instance.reports.get(rank)
        if report is None or report.generation != instance.generation:
            actual_state = f"it has not reported {instance.id} yet"
        else:
            detail = f": {report.detail}" if report.detail else ""
            actual_state = f"{instance.id} is {report.phase} at {report.tier}{detail}"
        culprit = worker_name(gang.workers[rank])
        yield OverdueDecision(
            culprit,
            _describe_desired_role(gang, instance),
            since_ms / 1000,
            actual_state,
            instance.job,
        )


def _describe_desired_role(gang: Gang, instance: Instance) -> str:
    role = "core" if instance.core and instance.role == Role.TRAINING else instance.role
    return (
        f"to bring the {role} instance of {instance.job} to {instance.tier} on "
        f"{', '.join(gang.workers)}"
    )


def _check_service(
    host: str,
    name: str,
    job: JobRow,
    entries: Mapping[str, RegistryEntry],
    last_exits: Mapping[str, LastExit],
    hosts: Sequence[PoolHost],
    now_ms: float,
) -> Iterator[OverdueDecision]:
    last = entries.get(name)
    # It was there until then, or was decided with the job's admission; where that was at once, a
    # job that comes further is given the time from then on.
    known_ms = max(last.expires_ms if last else 0, job.blocked_since_ms) or job.progress_ms
    since_ms = now_ms - known_ms
    if since_ms <= SERVICE_START_LIMIT_MS:
        return
    what, end = f"to start {name}", last_exits.get(name)
    if end is not None:
        reason = f"{name} has exited: {end.description}"
        yield OverdueDecision(name, "to run", since_ms / 1000, reason, job.id)
    else:
        reason = f"{name} is assigned to {host}, but does not run there"
        no_host_reason = _explain_no_host(
            hosts, parse_service_name(name)[0], derive_requirements(job.document)
        )
        yield OverdueDecision(
            agent_name(host), what, since_ms / 1000, reason, job.id, no_host_reason
        )


def _explain_no_host(hosts: Sequence[PoolHost], kind: str, requirements: JobRequirements) -> str:
    """Return why no present host accepts a service; empty when one does."""
    up = [host for host in hosts if host.alive and not host.drain_reason]
    fits = any(not explain_rejected_service(host, kind, requirements) for host in up)
    return "" if fits else explain_unplaced_service(hosts, kind, requirements)


def _check_unplaced_services(
    job: JobRow, placed: Collection[str], hosts: Sequence[PoolHost], now_ms: float
) -> Iterator[OverdueDecision]:
    """Yield services on no host, because no host that accepts them is present."""
    since_ms = now_ms - (job.blocked_since_ms or job.progress_ms)
    if since_ms <= SERVICE_START_LIMIT_MS:
        return
    need = derive_requirements(job.document)
    required = [shard_name(job.id, 0)] if need.shards else []
    required += [sandbox_name(job.id, 0)] if need.sandboxes else []
    for name in required:
        kind = parse_service_name(name)[0]
        takers = [host for host in hosts if not explain_rejected_service(host, kind, need)]
        if name not in placed and takers and (why := _explain_no_host(hosts, kind, need)):
            culprit, what = agent_name(takers[0].name), f"to start {name}"
            yield OverdueDecision(culprit, what, since_ms / 1000, why, job.id, why)
