"""Hosts that may run the shards and sandboxes of jobs now."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from meshrl.common.state.pool.demand.requirements import JobRequirements, PlannedJob
from meshrl.common.state.pool.scheduling.host_services import (
    explain_rejected_service,
    explain_unplaced_service,
)
from meshrl.common.state.pool.scheduling.snapshot import HOST_LEFT, PoolHost, PoolSnapshot
from meshrl.common.state.pool.workers.process_names import SERVICE_NAMES, parse_service_name
from meshrl.services.planner.admission.fair_shares import has_started
from meshrl.services.planner.pool.presence import PoolPresence


class ServiceHosts:
    """Hosts of one snapshot, by the services that they accept."""

    def __init__(self, snapshot: PoolSnapshot, presence: PoolPresence) -> None:
        self._hosts = {host.name: host for host in snapshot.hosts}
        self._requirements = {job.id: job.requirements for job in snapshot.jobs}
        self._schedulable_hosts = [self._hosts[name] for name in presence.schedulable_hosts]
        self._hosts_by_need: dict[tuple[str, str], tuple[str, ...]] = {}

    def find_hosts(self, name: str) -> tuple[str, ...]:
        """Return the hosts that accept a shard or a sandbox, by the name of the service."""
        kind, job, _ = parse_service_name(name)
        return self._find_hosts_by_kind(kind, self._requirements[job])

    def can_keep_service(self, host: PoolHost, name: str) -> bool:
        """Return True if a service may remain on its host. A host that returned with other options
        or with less isolation no longer accepts it.
        """
        kind, job, _ = parse_service_name(name)
        tries = host.is_probing_isolation and SERVICE_NAMES[kind] in host.accepted_services
        return (
            not host.alive
            or tries
            or not explain_rejected_service(host, kind, self._requirements[job])
        )

    def explain_rejection(self, job: PlannedJob) -> str:
        """Explain why no host, present or absent, accepts the unplaced services of a job. Return an
        empty string if each service is placed or may be placed later.
        """
        for kind, word in SERVICE_NAMES.items():
            if not _count_desired(job.requirements, word) or self._find_hosts_by_kind(
                kind, job.requirements
            ):
                continue
            there = [host for host in self._hosts.values() if host.drain_reason != HOST_LEFT]
            if has_started(job) and any(
                host.is_probing_isolation and word in host.accepted_services for host in there
            ):
                continue  # the host may regain its isolation, so the job continues
            if there and all(
                explain_rejected_service(host, kind, job.requirements) for host in there
            ):
                return explain_unplaced_service(self._hosts.values(), kind, job.requirements)
        return ""

    def explain_unplaced(self, job: PlannedJob, placed: Collection[str]) -> Iterator[str]:
        """Yield a line for each kind of service of a job that is on no host, with the reason."""
        for kind, word in SERVICE_NAMES.items():
            names = [
                f"{kind}/{job.id}/{number}"
                for number in range(_count_desired(job.requirements, word))
            ]
            absent = [name for name in names if name not in placed]
            if absent and not self._find_hosts_by_kind(kind, job.requirements):
                yield (
                    f"{', '.join(absent)}: "
                    f"{explain_unplaced_service(self._hosts.values(), kind, job.requirements)}"
                )

    def _find_hosts_by_kind(self, kind: str, requirements: JobRequirements) -> tuple[str, ...]:
        about = kind, requirements.isolation_tier if kind == "sandbox" else ""
        if about not in self._hosts_by_need:
            takes = tuple(
                host.name
                for host in self._schedulable_hosts
                if not explain_rejected_service(host, kind, requirements)
            )
            self._hosts_by_need[about] = takes
        return self._hosts_by_need[about]


def _count_desired(requirements: JobRequirements, service_name: str) -> int:
    return requirements.shards if service_name == "shards" else requirements.sandboxes
