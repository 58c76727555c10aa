"""The agent of a host: it starts one worker for each accelerator and the shards and sandboxes that
the planner wants here, watches them, and adopts them again.

They are in sessions of their own and survive the agent. Its next incarnation finds them by what it
wrote down (pid and start time) and goes on watching.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from meshrl.common.api import node as api
from meshrl.common.api.calls.interface import Look
from meshrl.common.api.node import LogFile, LogPart, Node, ReadLog
from meshrl.common.api.stats import DistanceStats, HostLoadStats, NodeStats
from meshrl.common.base.errors import DeadlineExceeded, NotFound, StateUnavailable
from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.process.host import Stoppable
from meshrl.common.mesh.process.output.log_bounds import bound_file
from meshrl.common.mesh.process.supervision.ended import EndReport, Reports
from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.mesh.process.supervision.supervisor import ChildEnd, ChildSpec, Hooks, Supervisor
from meshrl.common.mesh.runtime.calls.actor import Actor, call, cast
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import events
from meshrl.common.state.pool.placing.taking import ALL
from meshrl.common.state.pool.workers.names import worker_process
from meshrl.common.state.redis.client import server_ms
from meshrl.services.node import old_runs
from meshrl.services.node.adopting import Notes
from meshrl.services.node.gpus.accelerators import WorkerAccelerator
from meshrl.services.node.gpus.watch import GpuWatch
from meshrl.services.node.isolation import OwnIsolation
from meshrl.services.node.job_services import JobServices

MOST_BYTES = 1 << 20  # of a part, whatever is asked for
ENDING = ".log"


class HostLogFiles:
    """Those in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def listed(self) -> list[LogFile]:
        found = []
        for path in sorted(self._directory.glob(f"*{ENDING}")):
            about = path.stat()
            found.append(LogFile(path.stem, about.st_size, about.st_mtime))
        return found

    def read(self, name: str, offset: int, most: int) -> LogPart:
        """A part of a file from `offset` on, whole lines if there is one; or of so many bytes
        before its end if that is less than 0. NotFound.
        """
        if name not in (file.name for file in self.listed()):
            raise NotFound(f"there is no log {name!r:.200} here")
        with (self._directory / (name + ENDING)).open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size + offset) if offset < 0 else min(offset, size)
            file.seek(start)
            content = file.read(max(0, min(most, MOST_BYTES)))
        whole = content if offset < 0 else content[: content.rfind(b"\n") + 1] or content
        return LogPart(whole.decode(errors="replace"), start + len(whole), size)

    def bound(self) -> None:
        """Start those again that are too long, whatever process writes to them."""
        for path in self._directory.glob(f"*{ENDING}"):
            bound_file(path)


LOOK_S = 1.0
WINDOW_S = 5.0  # that `busy_cores` is the mean of
DISTANCE_LOOK_S = 10.0
ANSWER_S = 5.0
SAMPLES = 3  # the shortest trip of so many tells most


class HostLoad:
    """Statistics of the last look; none of the processors before the second."""

    def __init__(self, mesh: Mesh, directory: Path) -> None:
        """`directory` is on the disk whose room is told."""
        self._mesh, self._directory = mesh, directory
        self._looks: deque[tuple[float, float]] = deque()  # when, and busy seconds until then
        self.stats = HostLoadStats()

    async def run(self) -> None:
        while True:
            self.look()
            await self._mesh.clock.sleep(LOOK_S)

    def look(self) -> None:
        now, (number, busy_s) = self._mesh.clock.monotonic(), self._mesh.host.cores()
        self._looks.append((now, busy_s))
        while len(self._looks) > 2 and self._looks[1][0] <= now - WINDOW_S:
            self._looks.popleft()
        since, before_s = self._looks[0]
        room = self._mesh.host.room(self._directory)
        self.stats = HostLoadStats(room.memory, room.disk)
        if number and now > since:
            busy = (busy_s - before_s) / (now - since)
            self.stats = replace(self.stats, cores=number, busy_cores=round(min(busy, number), 2))


class Distance:
    """Statistics of the last look; none before the first."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.stats = DistanceStats()

    async def run(self) -> None:
        while True:
            try:
                async with self._mesh.clock.timeout(ANSWER_S, "a look at the distance"):
                    trip_ms, ahead_ms = min([await self._look() for _ in range(SAMPLES)])
                self.stats = DistanceStats(round(trip_ms, 2), round(ahead_ms, 1))
            except (StateUnavailable, DeadlineExceeded):
                self.stats = DistanceStats()
            await self._mesh.clock.sleep(DISTANCE_LOOK_S)

    async def _look(self) -> tuple[float, float]:
        """The round trip, and by how much this clock is ahead: Redis told its time about in the
        middle.
        """
        clock = self._mesh.clock
        before = clock.monotonic()
        theirs = await server_ms(self._mesh.state)
        trip_ms = 1000 * (clock.monotonic() - before)
        return trip_ms, 1000 * clock.wall() - trip_ms / 2 - theirs


T = TypeVar("T")
BUDGET = (20, 120.0)  # restarts of a worker in seconds: spot hosts see faults every few seconds
TRY_AGAIN_S = 60.0  # after the budget was spent
GRACE_S = 6.0  # for a worker to end its role processes and itself
LOG_S = 8.0  # to read a part of a log file
BOUND_S = 1.0  # between two looks at the length of the host's logs
EVENT_S = 2.0  # a report must not hold up a restart


def program(name: str) -> list[str]:
    """What tells the command line of the worker with this name in the registry."""
    return ["meshrl.services.node.worker", "--worker", name.partition("/")[2]]


class NodeAgent(Actor, Hooks):
    interface = Node

    def __init__(
        self,
        mesh: Mesh,
        accelerators: list[WorkerAccelerator],
        worker_options: list[str],
        prefix: str,
        service_options: Sequence[str] = (),
        takes: Sequence[str] = ALL,
    ) -> None:
        """Workers are called `prefix` and a number, which is unique to this host in the mesh.
        `takes`: the services that may be placed here.
        """
        self._takes = list(takes)
        self._mesh, self._accelerators, self._prefix = mesh, accelerators, prefix
        self._options = worker_options
        self._root = Path(mesh.settings.run_root) / "mesh"
        self._notes = Notes(mesh, self._root / f"{mesh.name.replace('/', '-')}.json", program)
        self._files = HostLogFiles(self._root / "logs")
        self._adopted: set[str] = set()
        self._supervisor = Supervisor(mesh.host, mesh.clock, hooks=self)
        self._reports = Reports(mesh.state, mesh.clock)
        self.leases = LeaseWatch(mesh.state, mesh.clock, mesh.settings.host, self._children)
        self.services = JobServices(mesh, self._root, self.leases, service_options)
        self._distance = Distance(mesh)
        self._load = HostLoad(mesh, self._root)
        self._isolation = OwnIsolation(mesh, takes)
        self.gpus = GpuWatch(
            mesh,
            {f"{prefix}{i}": a.device for i, a in enumerate(accelerators) if a.device is not None},
            self._note,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._bounding: Stoppable | None = None

    def stats(self) -> NodeStats:
        load, distance = self._load.stats, self._distance.stats
        return NodeStats(
            memory_left_bytes=load.memory_left_bytes,
            disk_left_bytes=load.disk_left_bytes,
            cores=load.cores,
            busy_cores=load.busy_cores,
            trip_ms=distance.trip_ms,
            ahead_ms=distance.ahead_ms,
            workers=len(self._supervisor.children),
            adopted=len(self._adopted),
            services=len(self.services.children),
            adopted_services=self.services.adopted,
            takes=self._takes,
            tiers=self._isolation.tiers,
        )

    @cast(Node.look)
    def look(self, m: Look) -> None:
        self.services.look()

    @call(Node.logs)
    async def logs(self, m: None) -> api.LogFiles:
        return api.LogFiles(await self._off_loop(self._files.listed))

    @call(Node.read_log)
    async def read_log(self, m: ReadLog) -> LogPart:
        return await self._off_loop(self._files.read, m.name, m.offset, m.most)

    async def _off_loop(self, work: Callable[..., T], *args: Any) -> T:
        return await self._mesh.host.run_blocking(work, *args, deadline_s=LOG_S)

    async def start(self) -> None:
        running = await self._notes.running(["worker"])
        for place, accelerator in enumerate(self._accelerators):
            spec = self._spec(f"{self._prefix}{place}", accelerator)
            if (adopted := running.get(spec.name)) is not None:
                self._adopted.add(spec.name)
            await self._supervisor.add(spec, adopted=adopted)
        await self.services.adopt()
        self._run(self.leases.run())
        self._run(self.services.follow())
        self._run(old_runs.sweep_forever(self._mesh))
        self._run(self._distance.run())
        self._run(self._load.run())
        self._run(self._isolation.run())
        self._run(self.gpus.run())
        self._bounding = self._mesh.host.every(BOUND_S, self._files.bound, "bound logs")

    async def leave(self) -> None:
        """The host leaves the mesh: what it started ends, shards first, as they still use the
        others. (An agent that is killed leaves them be.)
        """
        for task in self._tasks:
            task.cancel()
        if self._bounding is not None:
            self._bounding.stop()
        self._reports.stop()
        await self.services.stop("rollout")
        await asyncio.gather(self._supervisor.stop(GRACE_S), self.services.stop())
        self._notes.forget()

    def _children(self) -> list[Child]:
        return [*self._supervisor.children.values(), *self.services.children]

    def _spec(self, worker: str, accelerator: WorkerAccelerator) -> ChildSpec:
        name = worker_process(worker)
        module = [sys.executable, "-m", *program(name)]
        place = ["--accelerator", accelerator.name]
        if accelerator.device is not None:
            place += ["--gpu", accelerator.device.uuid]
        if accelerator.bytes:
            place += ["--accelerator-bytes", str(accelerator.bytes)]
        return ChildSpec(
            name,
            [*module, *place, *self._options],
            env=accelerator.env,
            log=self._log(name),
            budget=BUDGET,
            own_session=True,
            die_with_parent=False,
        )

    def _log(self, name: str) -> Path:
        return self._root / "logs" / (name.replace("/", "-") + ".log")

    def _run(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _note(self, kind: str, fields: dict[str, Any]) -> None:
        with contextlib.suppress(StateUnavailable, DeadlineExceeded):
            async with self._mesh.clock.timeout(EVENT_S, "an event"):
                await events.append(self._mesh.state, kind, fields)

    # What the supervisor tells

    async def started(self, child: Child) -> None:
        self._notes.write(self._supervisor.children.values())
        how = "adopted" if child.name in self._adopted else "started"
        await self._note("worker_up", {"name": child.name, "pid": child.pid, "how": how})

    async def ended(self, child: Child, end: ChildEnd) -> None:
        self._adopted.discard(child.name)
        await self._notes.evict(child, self.leases)
        if not end.asked:
            told = EndReport(child.name, end.code, end.why, end.failure, final=end.final)
            await self._reports.tell(replace(told, log=str(self._log(child.name))))

    def lease_expired(self, child: Child) -> bool:
        return self.leases.expired(child)

    async def gave_up(self, spec: ChildSpec, why: str) -> None:
        await self._note("worker_gave_up", {"name": spec.name, "why": why})
        self._mesh.telemetry.log.error("worker does not stay up", name=spec.name, why=why)
        self._run(self._try_again(spec))

    async def _try_again(self, spec: ChildSpec) -> None:
        """Starts it once more after a pause, and again for as long as this host cannot."""
        await self._supervisor.remove(spec.name, 0.0)
        while True:
            await self._mesh.clock.sleep(TRY_AGAIN_S)
            try:
                await self._supervisor.add(spec)
                return
            except OSError as error:
                why = f"it cannot be started: {error}"
                await self._note("worker_gave_up", {"name": spec.name, "why": why})
