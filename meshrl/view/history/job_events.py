"""Filter of a mesh's events for one job's record, which has none of another job's.

An event that names a job is that job's. One that names a worker, a gang or a process is a job's
while that serves it, according to the job's own `desired` events. The rest is the mesh's (its
leader, Redis, the store, the planners) and is in every job's record.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshrl.common.state.events import Event
from meshrl.common.state.pool.workers.process_names import parse_service_name
from meshrl.common.state.pool.workers.rows import Role
from meshrl.view.mesh.process_usage import KINDS_BY_INSTANCE, parse_job

# Events of one write of the planner may be in any order: a worker that is lost, and the
# instance that leaves it.
SAME_WRITE_MS = 1_000


class JobEventFilter:
    """Filter of a job's events, applied to all events in their order."""

    def __init__(self, job: str, past_events: Iterable[Event] = ()) -> None:
        self.job = job
        self._instances: set[str] = set()  # all instances that the job ever had
        self._gangs: set[str] = set()
        self._workers_by_instance: dict[str, frozenset[str]] = {}  # by instance of the job
        self._released_workers_ms: dict[
            str, int
        ] = {}  # workers, by when the last instance left them
        self._hosts: set[str] = set()  # hosts that run shards or sandboxes of the job
        for event in past_events:
            self.accept(event)

    def accept(self, event: Event) -> bool:
        """Return True if the event is in the job's record."""
        fields = event.fields
        if of := fields.get("job"):
            if of == self.job and event.kind == "desired":
                self._record_instance(event)
            return bool(of == self.job)
        if event.kind == "services":  # a host runs something for the job, or did until now
            before = fields["host"] in self._hosts
            if any(parse_service_name(name)[1] == self.job for name in fields["services"]):
                self._hosts.add(fields["host"])
                return True
            self._hosts.discard(fields["host"])
            return before
        if event.kind == "gang":
            return fields["gang"] in self._gangs
        if "worker" in fields:
            return self._is_job_worker(str(fields["worker"]), event.ms)
        if "name" in fields:
            return self._is_job_process(str(fields["name"]), event.ms)
        return True

    def _record_instance(self, event: Event) -> None:
        fields = event.fields
        resident = str(fields["resident"])
        if fields["role"] == Role.IDLE:
            released_workers = self._workers_by_instance.pop(resident, frozenset[str]())
            self._released_workers_ms |= dict.fromkeys(released_workers, event.ms)
            return
        self._instances.add(resident)
        self._gangs.add(str(fields["gang"]))
        self._workers_by_instance[resident] = frozenset(fields["workers"])

    def _is_job_worker(self, worker: str, ms: int) -> bool:
        if any(worker in workers for workers in self._workers_by_instance.values()):
            return True
        return (
            worker in self._released_workers_ms
            and ms - self._released_workers_ms[worker] <= SAME_WRITE_MS
        )

    def _is_job_process(self, name: str, ms: int) -> bool:
        kind, _, rest = name.partition("/")
        if kind in KINDS_BY_INSTANCE:
            return rest in self._instances
        if kind == "worker":
            return self._is_job_worker(rest, ms)
        return parse_job(name) in ("", self.job)
