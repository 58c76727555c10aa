"""The hosts that shards and sandboxes of jobs may be placed on now."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from meshrl.common.state.pool.demand.needs import Need, PlannedJob
from meshrl.common.state.pool.placing.snapshot import LEFT, PoolHost, Snapshot
from meshrl.common.state.pool.placing.taking import nowhere, refusal
from meshrl.common.state.pool.workers.names import TAKEN, service
from meshrl.services.planner.admission.sharing import started
from meshrl.services.planner.pool.presence import Presence


class Takers:
    """Those of one look."""

    def __init__(self, snapshot: Snapshot, presence: Presence) -> None:
        self._hosts = {host.name: host for host in snapshot.hosts}
        self._needs = {job.id: job.need for job in snapshot.jobs}
        self._open = [self._hosts[name] for name in presence.takes]
        self._found: dict[tuple[str, str], tuple[str, ...]] = {}

    def of(self, name: str) -> tuple[str, ...]:
        """The hosts that a shard or a sandbox may be placed on, by its name."""
        kind, job, _ = service(name)
        return self._of(kind, self._needs[job])

    def keeps(self, host: PoolHost, name: str) -> bool:
        """Whether a service may stay where it is: a host that is there again with other options, or
        with less isolation, has it no more.
        """
        kind, job, _ = service(name)
        tries = host.trying and TAKEN[kind] in host.takes
        return not host.alive or tries or not refusal(host, kind, self._needs[job])

    def refused(self, job: PlannedJob) -> str:
        """Why no host, away or not, would take services of this job that are on none; empty when
        each is on one, or may come to be.
        """
        for kind, word in TAKEN.items():
            if not _wanted(job.need, word) or self._of(kind, job.need):
                continue
            there = [host for host in self._hosts.values() if host.draining != LEFT]
            if started(job) and any(host.trying and word in host.takes for host in there):
                continue  # one may turn out as it was, and the job goes on
            if there and all(refusal(host, kind, job.need) for host in there):
                return nowhere(self._hosts.values(), kind, job.need)
        return ""

    def lacking(self, job: PlannedJob, placed: Collection[str]) -> Iterator[str]:
        """Which services of a job are on no host, as none of `placed`, and why."""
        for kind, word in TAKEN.items():
            names = [f"{kind}/{job.id}/{number}" for number in range(_wanted(job.need, word))]
            absent = [name for name in names if name not in placed]
            if absent and not self._of(kind, job.need):
                yield f"{', '.join(absent)}: {nowhere(self._hosts.values(), kind, job.need)}"

    def _of(self, kind: str, need: Need) -> tuple[str, ...]:
        about = kind, need.tier if kind == "sandbox" else ""
        if about not in self._found:
            takes = tuple(host.name for host in self._open if not refusal(host, kind, need))
            self._found[about] = takes
        return self._found[about]


def _wanted(need: Need, word: str) -> int:
    return need.shards if word == "shards" else need.sandboxes
