"""The shards and sandboxes of jobs on one host: those that the planner has written down for it run,
and no others.

Each serves one job: what ends one is charged to its job, and touches no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshrl.common.api.weights import STORE
from meshrl.common.base.errors import DeadlineExceeded, MeshError, NotFound, StateUnavailable
from meshrl.common.job.bundle import loading
from meshrl.common.job.bundle.job_data import MODULES, JobData
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
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state import jobs
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.workers import names
from meshrl.common.weights.store.local_files import at_home, fetched, is_home, release
from meshrl.services.node.adopting import Notes

AGAIN_S = 5.0  # after an error
SOON_S = 0.5  # after Redis did not answer
CHANGED_S = 15.0  # between two looks for documents that have changed
NOTHING = "none"  # no digest: what a sandbox may load whose job there is no more


class SandboxCode:
    """The code that sandboxes may load, brought to a host that does not see where a job is at home.

    Sandboxes, which run what the model wrote, may ask the weight store for nothing, and see no row
    of a job. `news` is called when some code has come.
    """

    def __init__(self, mesh: Mesh, news: Callable[[], None]) -> None:
        self._mesh, self._news = mesh, news
        self._bringing: dict[str, asyncio.Task[None]] = {}
        self._there: dict[str, Path | None] = {}  # by sandbox; None: where the run is at home
        self._loads: dict[str, str] = {}  # by sandbox: digest of what it may be told to load
        self._looked = float("-inf")  # for documents that have changed

    def there(self, name: str) -> bool:
        """Whether a service has its code here; a shard looks for that itself."""
        if names.service(name)[0] != "sandbox" or name in self._there:
            return True
        if name not in self._bringing:
            self._bringing[name] = asyncio.create_task(self._bring(name), name=f"code of {name}")
        return False

    def options(self, name: str) -> list[str]:
        """What is told a service that begins: a joined host can have any shard's key, so a sandbox
        takes the word of none for what it is to import and run.
        """
        if names.service(name)[0] != "sandbox":
            return []
        return ["--load", self._loads.get(name, NOTHING)]

    async def adopted(self, name: str) -> None:
        """Finds out what a sandbox that runs already may load when it is started again."""
        if names.service(name)[0] == "sandbox":
            job = names.service(name)[1]
            with contextlib.suppress(NotFound):  # nor is it wanted any more
                row = await patiently(self._mesh.clock, lambda: jobs.job(self._mesh.state, job))
                self._loads[name] = _digest(row)

    async def changed(self, running: Collection[str]) -> list[str]:
        """The sandboxes that run of jobs which have another document by now, and load by that when
        they are started again. It is looked for now and then: a job has it from a resume.
        """
        now = self._mesh.clock.monotonic()
        if now < self._looked + CHANGED_S:
            return []
        found = {}
        for name in sorted(running):
            if names.service(name)[0] == "sandbox":
                with contextlib.suppress(NotFound):  # nor is it wanted any more
                    found[name] = _digest(await jobs.job(self._mesh.state, names.service(name)[1]))
        changed = [name for name, digest in found.items() if self._loads.get(name) != digest]
        self._looked = now
        self._loads.update(found)
        return changed

    def keep(self, wanted: Collection[str]) -> None:
        """Lets go of the code of sandboxes that are not wanted any more."""
        for name in self._bringing.keys() - set(wanted):
            self._bringing.pop(name).cancel()
        for name in self._loads.keys() - set(wanted):
            del self._loads[name]
        for name in self._there.keys() - set(wanted):
            if (directory := self._there.pop(name)) is not None:
                release(directory)

    def stop(self) -> None:
        self.keep(())

    async def _bring(self, name: str) -> None:
        mesh = self._mesh
        with mesh.wait(f"to bring the code of {name} to this host", on=STORE):
            while True:
                try:
                    await self._find(name)
                    break
                except StateUnavailable:
                    await mesh.clock.sleep(SOON_S)
                except (MeshError, OSError) as error:
                    mesh.telemetry.log.warning("code", name=name, error=str(error))
                    await mesh.clock.sleep(AGAIN_S)
        self._bringing.pop(name, None)
        self._news()

    async def _find(self, name: str) -> None:
        mesh, directory = self._mesh, None
        try:
            row = await jobs.job(mesh.state, names.service(name)[1])
        except NotFound:  # nor is it wanted for long
            self._there[name] = None
            return
        if not (await is_home(mesh) or await at_home(mesh, Path(row.run_dir))):
            directory = await fetched(mesh, row, [MODULES])
        self._loads[name], self._there[name] = _digest(row), directory


def _digest(row: jobs.JobRow) -> str:
    return loading.digest_of(loading.load_request(JobData.of(row.id, row.document, row.run_dir)))


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
