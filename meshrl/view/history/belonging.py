"""Which events of a mesh concern a job: its record holds those, and none that is another's.

An event that names a job is that job's. One that names a worker, a gang or a process is a job's
while that serves it, which the job's own events `desired` tell. What is left is the mesh's (its
leader, Redis, the store, the planners) and is in every job's record.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshrl.common.state.events import Event
from meshrl.common.state.pool.workers.names import service
from meshrl.common.state.pool.workers.rows import Role
from meshrl.view.mesh.processes import BY_RESIDENT, job_in

# What a write of the planner tells together may be in any order: a worker that is lost, and the
# resident that leaves it.
TOGETHER_MS = 1_000


class Belonging:
    """Tells a job's events from those of others, one after the other, in their order."""

    def __init__(self, job: str, known: Iterable[Event] = ()) -> None:
        self.job = job
        self._residents: set[str] = set()  # all that it ever had
        self._gangs: set[str] = set()
        self._workers: dict[str, frozenset[str]] = {}  # by resident that it has
        self._left: dict[str, int] = {}  # workers, by when the last resident left them
        self._hosts: set[str] = set()  # that run shards or sandboxes of it
        for event in known:
            self.takes(event)

    def takes(self, event: Event) -> bool:
        """Whether the event is in the job's record."""
        fields = event.fields
        if of := fields.get("job"):
            if of == self.job and event.kind == "desired":
                self._learn(event)
            return bool(of == self.job)
        if event.kind == "services":  # a host runs something for the job, or did until now
            before = fields["host"] in self._hosts
            if any(service(name)[1] == self.job for name in fields["services"]):
                self._hosts.add(fields["host"])
                return True
            self._hosts.discard(fields["host"])
            return before
        if event.kind == "gang":
            return fields["gang"] in self._gangs
        if "worker" in fields:
            return self._works(str(fields["worker"]), event.ms)
        if "name" in fields:
            return self._is_of_it(str(fields["name"]), event.ms)
        return True

    def _learn(self, event: Event) -> None:
        fields = event.fields
        resident = str(fields["resident"])
        if fields["role"] == Role.IDLE:
            left = self._workers.pop(resident, frozenset[str]())
            self._left |= dict.fromkeys(left, event.ms)
            return
        self._residents.add(resident)
        self._gangs.add(str(fields["gang"]))
        self._workers[resident] = frozenset(fields["workers"])

    def _works(self, worker: str, ms: int) -> bool:
        if any(worker in workers for workers in self._workers.values()):
            return True
        return worker in self._left and ms - self._left[worker] <= TOGETHER_MS

    def _is_of_it(self, name: str, ms: int) -> bool:
        kind, _, rest = name.partition("/")
        if kind in BY_RESIDENT:
            return rest in self._residents
        if kind == "worker":
            return self._works(rest, ms)
        return job_in(name) in ("", self.job)
