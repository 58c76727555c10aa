"""The shards and sandboxes of jobs on one host: those that the planner has written down for it run,
and no others.

Each serves one job: what ends one is charged to its job, and touches no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.mesh.process.ends.failure import Failure
from meshrl.common.mesh.process.forking.birth import NURSERY_ENV, OFF
from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.process.supervision.ended import EndReport, Reports
from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.mesh.process.supervision.supervisor import (
    NO_START,
    ChildEnd,
    ChildSpec,
    Hooks,
    Supervisor,
)
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.workers import names
from meshrl.services.node.adopting import Notes
from meshrl.services.node.sandbox_code import SandboxCode

LOOK_S = 1.0  # between two looks at the record; a hint comes earlier
# As of a role process: restarts in seconds, whose delays add up to what an error of its own must
# last until it is the job's end.
BUDGET = (8, 60.0)
TRY_AGAIN_S = 30.0  # after the budget was spent, or while this host can start nothing
WELL_S = 3.0  # after one has ended well whose record still wants it: its job goes on again
# From SIGTERM to SIGKILL: a shard ends its environments' processes in an orderly way, which may
# take five seconds.
GRACE_S = 8.0
KINDS = ("rollout", "sandbox")
# A sandbox runs code of the job's author and of its model: it shares no memory with the nursery.
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {"rollout": {}, "sandbox": {NURSERY_ENV: OFF}}


def command(name: str, options: Sequence[str]) -> list[str]:
    kind, job, number = names.service(name)
    module = [sys.executable, "-m", f"meshrl.services.{kind}"]
    about = ["--name", name] if kind == "sandbox" else ["--job", job, "--shard", str(number)]
    return [*module, *about, *options]


def program(name: str) -> list[str]:
    """What tells the command line of the service with this name in the registry."""
    return command(name, [])[2:]


class JobServices(Hooks):
    def __init__(self, mesh: Mesh, root: Path, leases: LeaseWatch, options: Sequence[str]) -> None:
        self._mesh, self._root, self._leases, self._options = mesh, root, leases, options
        self._notes = Notes(mesh, root / f"{mesh.name.replace('/', '-')}-services.json", program)
        self._supervisor = Supervisor(mesh.host, mesh.clock, hooks=self)
        self._reports = Reports(mesh.state, mesh.clock)
        self._known: set[str] = set()  # those that are supervised
        self._not_before: dict[str, float] = {}  # when one that failed is started again
        self._well: set[str] = set()  # those that have ended by themselves without an error
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._code = SandboxCode(mesh, self._news.set)
        self.adopted = 0

    @property
    def children(self) -> list[Child]:
        return list(self._supervisor.children.values())

    def look(self) -> None:
        """The record has changed."""
        self._news.set()

    async def adopt(self) -> None:
        """Takes up what an earlier incarnation started; what is no longer wanted ends with the next
        look.
        """
        for name, child in (await self._notes.running(KINDS)).items():
            self._known.add(name)
            self.adopted += 1
            await self._code.adopted(name)
            spec = self._spec(name)
            await self._supervisor.add(spec, adopted=child)
            if not self._loads_it(child, spec.argv):  # its job has another document by now
                self._end(name)

    async def follow(self) -> None:
        """Looks at the record for ever. A look that Redis does not answer changes nothing."""
        mesh = self._mesh
        while True:
            with contextlib.suppress(StateUnavailable, DeadlineExceeded):
                await self._want(await pool.services_of(mesh.state, mesh.settings.host))
            with contextlib.suppress(DeadlineExceeded):
                async with mesh.clock.timeout(LOOK_S, "a hint"):
                    await self._news.wait()
            self._news.clear()

    async def stop(self, kind: str = "") -> None:
        """Ends all, or those of one kind, together."""
        if not kind:
            self._reports.stop()
        for name in sorted(self._known):
            if names.service(name)[0] == kind or not kind:
                self._end(name)
        if tasks := list(self._ending.values()):
            await asyncio.wait(tasks)
        if not kind:
            self._code.stop()
            self._notes.forget()

    async def _want(self, wanted: tuple[str, ...]) -> None:
        for name in self._known - set(wanted):
            self._end(name)
        for name in self._not_before.keys() - set(wanted):
            del self._not_before[name]
        self._well &= set(wanted)
        self._code.keep(wanted)
        for name in await self._code.changed(self._known):
            self._end(name)
        for name in wanted:
            free = name not in self._known and name not in self._ending
            due = free and self._mesh.clock.monotonic() >= self._not_before.get(name, 0.0)
            if not due or not self._code.there(name):
                continue
            try:
                await self._supervisor.add(self._spec(name))
                self._known.add(name)
            except OSError as error:  # no process, memory or log to be had now
                self._not_before[name] = self._mesh.clock.monotonic() + TRY_AGAIN_S
                end = ChildEnd(NO_START, "it cannot be started", Failure.of(error))
                await self._report(name, end)

    def _end(self, name: str) -> None:
        """Begins the end of one; one that is slow to end holds up nobody."""
        self._known.discard(name)

        def ended(task: asyncio.Task[None]) -> None:
            self._ending.pop(name, None)
            if not task.cancelled():
                task.result()
            self._news.set()

        task = asyncio.create_task(self._supervisor.remove(name, GRACE_S), name=f"end {name}")
        self._ending[name] = task
        task.add_done_callback(ended)

    def _spec(self, name: str) -> ChildSpec:
        return ChildSpec(
            name,
            command(name, [*self._code.options(name), *self._options]),
            env=ENVIRONMENT[names.service(name)[0]],
            log=self._log(name),
            restart="on_failure",  # a shard ends when its job has
            budget=BUDGET,
            own_session=True,
            die_with_parent=False,
        )

    def _loads_it(self, child: Child, argv: list[str]) -> bool:
        """Whether a process, if it is a sandbox's, was told to load what this command line says."""
        said = argv[2 : len(argv) - len(self._options)]
        process = child.pid, child.start_time
        sandbox = names.service(child.name)[0] == "sandbox"
        return not sandbox or bool(self._mesh.host.adopt(*process, name=child.name, program=said))

    def _log(self, name: str) -> Path:
        return self._root / "logs" / (name.replace("/", "-") + ".log")

    # What the supervisor tells

    async def started(self, child: Child) -> None:
        self._notes.write(self._supervisor.children.values())

    async def ended(self, child: Child, end: ChildEnd) -> None:
        await self._notes.evict(child, self._leases)
        if not end.asked and end.code:
            self._well.discard(child.name)
            await self._report(child.name, end)
        elif not end.asked:  # a shard whose job has ended
            self._well.add(child.name)

    async def _report(self, name: str, end: ChildEnd) -> None:
        """An error that no restart mends ends the job, and so does any that comes for ever."""
        job, log = names.service(name)[1], str(self._log(name))
        report = EndReport(name, end.code, end.why, end.failure, job, end.final, log=log)
        await self._reports.tell(replace(report, ran_s=end.ran_s))

    def lease_expired(self, child: Child) -> bool:
        return self._leases.expired(child)

    async def gave_up(self, spec: ChildSpec, why: str) -> None:
        """Its job is charged with each end, and fails by them; until then it is started again."""
        again_s = WELL_S if spec.name in self._well else TRY_AGAIN_S
        self._mesh.telemetry.log.info("a service is not up", name=spec.name, why=why, for_s=again_s)
        self._not_before[spec.name] = self._mesh.clock.monotonic() + again_s
        self._end(spec.name)
