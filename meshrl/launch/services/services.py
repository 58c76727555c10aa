"""The services of one host: started from a nursery, watched by their leases, started again, told of
when they end, and ended in order. The launcher has those of the head, `hosting` those of a host
that has joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded, MeshError
from meshrl.common.base.host.settings import MESH_ENV, SETTINGS_ENV, mark_of
from meshrl.common.mesh.process.ends.failure import end_of
from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.process.supervision.ended import EndReport, Reports, ended
from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.mesh.process.supervision.supervisor import ChildEnd, ChildSpec, Hooks, Supervisor
from meshrl.common.state import registry
from meshrl.common.state.redis.client import State
from meshrl.directory.places import MeshPlace
from meshrl.launch import leftovers
from meshrl.launch.services import absolving, plan
from meshrl.launch.services.nursery import MeshNursery
from meshrl.view import storage

BUDGET = (20, 120.0)  # restarts of a service in seconds: faults come every few seconds at worst
READY_S = 60.0  # until every service has registered; imports on a busy machine are slow
START_TRIES = 3  # times that an error may end a process while its host starts
GRACE_S = 10.0  # from SIGTERM to SIGKILL
STAGE_S = 20.0  # the same for each stage of the stop: an agent ends shards first, then all else
LOOK_S = 0.1


class Services(Hooks):
    """`failed` is set, with the reason in `why`, when one does not stay up. With `patient` that is
    only when none could: a host that cannot reach its head waits for it.
    """

    def __init__(
        self, host: Host, clock: Clock, place: MeshPlace, *, patient: bool = False
    ) -> None:
        self._patient = patient
        self._host, self._clock, self._place = host, clock, place
        self.failed = asyncio.Event()
        self.why = ""
        self.state: State
        self._name = ""  # of this host
        self._supervisor: Supervisor | None = None
        self._planned: tuple[str, ...] = ()
        self._nursery = MeshNursery(host, clock, place, self.environment, BUDGET, self.ended)
        self._watch: LeaseWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        self._reports: Reports | None = None
        self._explained: set[str] = set()  # those whose ends have an error that says why

    @property
    def environment(self) -> dict[str, str]:
        """Of every process; those that were left behind are found by its mark."""
        settings = self._place.settings.resolve()
        marks = {SETTINGS_ENV: str(settings), MESH_ENV: mark_of(settings)}
        return {**marks, "OMP_NUM_THREADS": "1"}

    @property
    def nursery_environment(self) -> Mapping[str, str]:
        """Variables by which a process is forked from the nursery."""
        return self._nursery.environment

    @property
    def running(self) -> bool:
        """Whether they were started, and are not to end."""
        return self._supervisor is not None

    @property
    def planned(self) -> tuple[str, ...]:
        return self._planned if self.running else ()

    @property
    def down(self) -> str:
        """Which of them do not run now, in words; empty: all do."""
        there = self._supervisor.children if self._supervisor is not None else {}
        missing = [name for name in self.planned if name not in there]
        return f"{', '.join(missing)} is down" if missing else ""

    @property
    def children(self) -> Iterator[tuple[str, Child]]:
        for supervisor in (self._nursery.supervisor, self._supervisor):
            if supervisor is not None:
                yield from supervisor.children.items()

    # -- start and stop ----------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Ends what an earlier start has left, and begins the nursery's."""
        await leftovers.end_all(self._place.settings.resolve(), GRACE_S)
        await self._nursery.start()

    def tell(self, state: State, host: str) -> None:
        """From now on ends are told there; `host` is this one's name."""
        self.state, self._name = state, host
        self._reports = Reports(state, self._clock)

    async def start(self, services: Sequence[plan.Service]) -> None:
        """Starts them in their order, once the nursery listens."""
        await self._nursery.listens()
        specs = [
            ChildSpec(
                service.name,
                list(service.argv),
                env=self.environment | self._nursery.environment,
                log=self._place.log(service.name),
                budget=BUDGET,
                critical=True,
                stage=stage,
                own_session=True,  # Ctrl-C is ours: they stop when we say so, in order
            )
            for stage, service in enumerate(services)
        ]
        self._planned = tuple(service.name for service in services)
        supervisor = self._supervisor = Supervisor(self._host, self._clock, specs, hooks=self)
        watch = self._watch = LeaseWatch(
            self.state, self._clock, self._name, lambda: supervisor.children.values()
        )
        await supervisor.start()
        if self._supervisor is supervisor:  # else they were ended meanwhile, and others run
            self._watching = asyncio.create_task(watch.run(), name="watch leases")

    async def registered(self, names: set[str], workers: int) -> None:
        """Waits for these, and for so many workers of this host. MeshError with what ends one again
        and again; DeadlineExceeded.
        """
        before = {end.name: end.times for end in await ended(self.state)}
        until = self._clock.monotonic() + READY_S
        while True:
            entries = [e for e in await registry.entries(self.state) if e.alive]
            missing = sorted(names - {e.name for e in entries})
            there = sum(e.kind == "worker" and e.host == self._name for e in entries)
            if not missing and there >= workers:
                return
            if self.failed.is_set():
                raise MeshError(self.why)
            await self._none_is_hopeless({e.name for e in entries}, before)
            if self._clock.monotonic() > until:
                absent = ", ".join(missing) or f"{workers - there} workers"
                raise DeadlineExceeded(
                    f"{absent} did not come up within {READY_S:g} s",
                    fix=f"See the logs in {self._place.logs}",
                )
            await self._clock.sleep(LOOK_S)

    async def _none_is_hopeless(self, alive: set[str], before: dict[str, int]) -> None:
        """MeshError with what ends a process that would not come up, however long one waited."""
        for end in await ended(self.state):
            times = end.times - before.get(end.name, 0)
            tried = bool(end.error.get("type")) and times >= START_TRIES
            ours = end.log == str(self._place.log(end.name))
            if ours and end.name not in alive and times and (end.final or tried):
                raise MeshError(f"{end.name} does not start: {end.told}; its log: {end.log}")

    async def stop(self, *, nursery: bool = True) -> None:
        """Ends them in reverse order of the start, and the nursery, unless it is needed still."""
        if (supervisor := self._forget()) is not None:
            await supervisor.stop(STAGE_S)
        if nursery:
            await self._nursery.stop(GRACE_S)

    async def kill(self) -> None:
        """Ends everything of this host at once, what others have started too."""
        if (supervisor := self._forget()) is not None:
            for child in supervisor.children.values():
                child.kill()
            await supervisor.stop(GRACE_S)
        await self._nursery.stop(GRACE_S)
        await leftovers.end_all(self._place.settings.resolve(), GRACE_S)

    def kill_now(self) -> None:
        """The same without waiting, for the second Ctrl-C."""
        for _, child in self.children:
            child.kill()
        for pid in leftovers.belonging_to(self._place.settings.resolve()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def end_leftovers(self) -> None:
        """Ends what has not stopped, but for a nursery that is needed still, and says so."""
        spared = [child.pid for child in self._nursery.supervisor.children.values()]
        if pids := await leftovers.end_all(self._place.settings.resolve(), GRACE_S, spared):
            print(f"ended {len(pids)} processes that had not stopped: {pids}", file=sys.stderr)

    def close(self) -> None:
        if self._reports is not None:
            self._reports.stop()

    def fail(self, why: str) -> None:
        """Says that this host's part of the mesh cannot go on."""
        self.why = why
        self.failed.set()

    def watch(self, task: asyncio.Task[Any], what: str) -> None:
        """An error that ends a task which is to run for ever is why it cannot go on."""

        def ended(task: asyncio.Task[Any]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self.fail(f"the task to {what} failed: {type(error).__name__}: {error}")

        task.add_done_callback(ended)

    def _forget(self) -> Supervisor | None:
        supervisor, self._supervisor = self._supervisor, None
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
        return supervisor

    # -- what supervisors tell, that of Redis too --------------------------------------------------

    async def ended(self, child: Child, end: ChildEnd) -> None:
        if self._supervisor is None:  # they are to end
            return
        log = str(self._place.log(child.name))
        if end.failure is not None:
            self._explained.add(child.name)
        report = EndReport(child.name, end.code, end.why, end.failure, final=end.final, log=log)
        if child.name == "redis":
            if self._reports is not None:
                self._reports.soon(report)
            return
        if self._watch is not None:
            await self._watch.evict(child)
        if self._reports is not None:
            await self._reports.tell(report)

    def lease_expired(self, child: Child) -> bool:
        return self._watch is not None and child.name != "redis" and self._watch.expired(child)

    async def absolved(self, spec: ChildSpec, end: ChildEnd) -> bool:
        """Whether a service whose budget is spent may be tried again; see `absolving`."""
        if self._patient or self._reports is None:
            return self._patient
        full = storage.full([self._place.root])
        return await absolving.absolved(self.state, self._reports, spec, end, full)

    async def gave_up(self, spec: ChildSpec, why: str) -> None:
        said = "" if spec.name in self._explained else f" ends: {end_of(spec.log)}"
        self.why = f"{spec.name} does not stay up: {why}; its log {spec.log}{said}"

    async def escalate(self, name: str) -> None:
        self.failed.set()
