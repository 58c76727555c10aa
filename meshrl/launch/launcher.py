"""The root process of a mesh: it starts Redis and the services, keeps them running, and stops them.

`meshrl run` holds a Launcher in its own process; `meshrl up` starts this file as a program. Every
process of the mesh dies with it, or (workers, which may outlive an agent) within 75 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from common.clock import SystemClock
from common.errors import ConfigError, Damaged, DeadlineExceeded, MeshError, Refused
from common.process.child import PRIVATE
from common.process.failure import end_of
from common.process.handle import Child
from common.process.host import SystemHost, own_start_time
from common.process.lease_watch import LeaseWatch
from common.process.streams import outlive_a_full_disk
from common.process.supervisor import ChildSpec, End, Hooks, Supervisor
from common.records import damage
from common.secret import SECRET_BYTES
from common.settings import MESH_ENV, SETTINGS_ENV, MeshSettings, mark_of
from common.state import embedded, events, registry
from common.state.client import State
from common.state.ended import Report, Reports, ended, forget_all
from common.state.rollback import JobMark
from meshrl.launch import absolving, leftovers, plan, trimming
from meshrl.launch.kept import KeptDocument, keep
from meshrl.launch.nursery import MeshNursery
from meshrl.launch.ownership import made_private
from meshrl.launch.places import MeshPlace, read_json, write_json
from meshrl.launch.redis.server import MeshRedis
from meshrl.launch.restoring import put_all_back
from meshrl.observe import storage

T = TypeVar("T")

SHAPE = "shape.json"
BUDGET = (20, 120.0)  # restarts of a service in seconds: faults come every few seconds at worst
READY_S = 60.0  # until every service has registered; imports on a busy machine are slow
START_TRIES = 3  # times that an error may end a process while the mesh starts
BACK_TRIES = 3  # times that Redis may go back again before the mesh has
GRACE_S = 10.0  # from SIGTERM to SIGKILL, for each stage of the stop
ECHO_S = 1.0  # one Ctrl-C may arrive twice, from the terminal and from a parent


@dataclass(frozen=True)
class Shape:
    """What a mesh is made of, when nothing has started yet."""

    workers: int = 3
    shards: int = 1
    device: str = "cpu"
    bind: str = "tcp://127.0.0.1:*"
    advertise: str = ""
    metrics: str = "127.0.0.1:*"
    ranks: int = 1  # workers of the first gang
    sandboxes: int = 1


class Launcher(Hooks):
    """One mesh from start to stop. `failed` is set, with the reason in `why`, when it gives up."""

    def __init__(self, place: MeshPlace, shape: Shape) -> None:
        self.place, self.shape = place, shape
        self.clock, self.host = SystemClock(), SystemHost()
        self.failed = asyncio.Event()
        self.why = ""
        self.state: State
        self.settings: MeshSettings
        self._lock: IO[str] | None = None
        self._starts = False  # it may have processes
        self._supervisor: Supervisor | None = None
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._redis = MeshRedis(
            self.host, self.clock, place, self._secret, BUDGET, self, self._redis_went_back
        )
        environment = self._environment
        self._nursery = MeshNursery(self.host, self.clock, place, environment, BUDGET, self.ended)
        self._watch: LeaseWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        self._reports: Reports | None = None
        self._explained: set[str] = set()  # those whose ends have an error that says why
        self._tasks: list[asyncio.Task[Any]] = []
        self._going_back: asyncio.Task[None] | None = None
        self._failed_back = 0  # times in a row that the mesh could not
        self._back_again = ""  # why, if Redis went back while the mesh was not up

    async def start(self, begin: Callable[[], Awaitable[None]] | None = None) -> None:
        """Returns when every service has registered; on any error nothing is left running.

        `begin` is awaited when Redis answers and no service runs yet.
        """
        self._take_lock()
        self._starts = True
        try:
            await leftovers.end_all(self.place.settings.resolve(), GRACE_S)
            await self._nursery.start()
            await self._refuse_a_second_mesh(await self._redis.connect())
            await self._redis.admit()
            self._write_settings(self._redis.url)
            self.state = await State.open(self._redis.url)
            self._reports = Reports(self.state, self.clock)
            await forget_all(self.state)
            if self._redis.returning:
                await put_all_back(self.state, self._redis.known, needed=False)
            if begin is not None:
                await begin()
            if self._redis.returning:
                await self._redis.returned()
            await self._nursery.listens()
            await self._start_services()
            await self._all_registered()
            trimmed = trimming.trim_forever(self.state, self.clock)
            self._tasks.append(asyncio.create_task(trimmed, name="trim events"))
            self._write_marker(ready=True)
            if self._going_back is None:
                self._go_back_again()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ends every process of the mesh, Redis last. Safe after a failed start, and twice."""
        await self.stop_services()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GRACE_S)
        self._tasks.clear()
        if self._reports is not None:
            self._reports.stop()
        if hasattr(self, "state"):
            await self.state.close()
        await self._redis.stop()
        self.place.launcher.unlink(missing_ok=True)
        if self._lock is not None:
            self._starts = False  # what there is from now on may be another mesh's
            self._lock.close()
            self._lock = None

    async def ask_redis(self, question: Callable[[State], Awaitable[T]]) -> T:
        """The answer of the mesh's Redis, which runs for as long as that takes and no longer."""
        self._take_lock()
        try:
            return await question(await self._redis.connect())
        finally:
            await self.stop()

    async def stop_services(self) -> None:
        """Ends everything but Redis, in reverse order of the start: the books are final then."""
        going_back, self._going_back = self._going_back, None
        if going_back is not None:
            going_back.cancel()
            await asyncio.wait([going_back], timeout=GRACE_S)
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            await supervisor.stop(GRACE_S)
        await self._nursery.stop(GRACE_S)
        if self._starts:
            await self._end_leftovers()

    def kill(self) -> None:
        """Ends everything at once, for the second Ctrl-C."""
        for supervisor in (self._supervisor, self._nursery.supervisor, self._redis.supervisor):
            for child in supervisor.children.values() if supervisor else ():
                child.kill()
        for pid in leftovers.belonging_to(self.place.settings.resolve()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def pids(self) -> dict[int, str]:
        """The launcher, Redis and the services that run now, by pid."""
        found = {os.getpid(): "meshrl"}
        for supervisor in (self._redis.supervisor, self._nursery.supervisor, self._supervisor):
            if supervisor is not None:
                found |= {child.pid: name for name, child in supervisor.children.items()}
        return found

    def lineage_seen(self, job: str) -> int:
        """The highest lineage of a job that anything tells of; 0 when nothing does."""
        return max(0, self._redis.known.jobs.get(job, JobMark()).lineage)

    # Hooks of both supervisors

    async def ended(self, child: Child, end: End) -> None:
        if self._supervisor is None:  # the mesh stops
            return
        log = str(self.place.log(child.name))
        if end.failure is not None:
            self._explained.add(child.name)
        report = Report(child.name, end.code, end.why, end.failure, final=end.final, log=log)
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

    async def absolved(self, spec: ChildSpec, end: End) -> bool:
        """Whether a service whose budget is spent may be tried again; see `absolving`."""
        if self._reports is None:
            return False
        full = storage.full([self.place.root])
        return await absolving.absolved(self.state, self._reports, spec, end, full)

    async def gave_up(self, spec: ChildSpec, why: str) -> None:
        said = "" if spec.name in self._explained else f" ends: {end_of(spec.log)}"
        self.why = f"{spec.name} does not stay up: {why}; its log {spec.log}{said}"

    async def escalate(self, name: str) -> None:
        self.failed.set()

    # When the state goes back

    def _redis_went_back(self, why: str) -> None:
        """Redis is not what it was: nobody is let in, and what has acted on it starts anew."""
        self._back_again = why
        if self._going_back is None and self._supervisor is not None:
            self._go_back_again()

    def _go_back_again(self) -> None:
        """If Redis went back, perhaps while the mesh could not."""
        why, self._back_again = self._back_again, ""
        if why:
            self._going_back = asyncio.create_task(self._go_back(why), name="go back")
            self._going_back.add_done_callback(partial(self._gone_back, why))

    async def _go_back(self, why: str) -> None:
        await self._kill_services()
        await self._redis.begin_anew(why)
        await self._redis.readmit()
        await put_all_back(self.state, self._redis.known, needed=True)
        await self._redis.returned()
        await self._nursery.start()
        await self._nursery.listens()
        await self._start_services()

    def _gone_back(self, why: str, task: asyncio.Task[None]) -> None:
        if self._going_back is not task:  # the mesh stops
            return
        self._going_back = None
        if task.cancelled():
            return
        error = task.exception()
        self._failed_back = self._failed_back + 1 if error is not None else 0
        if error is not None and (not self._back_again or self._failed_back > BACK_TRIES):
            self.why = f"redis is not as it was ({why}), and the mesh cannot go on: {error}"
            self.failed.set()
        else:
            self._go_back_again()

    async def _kill_services(self) -> None:
        """At once: Redis, which they would say goodbye to, lets nobody in."""
        supervisor, self._supervisor = self._supervisor, None
        if self._watching is not None:
            self._watching.cancel()
        if supervisor is not None:
            for child in supervisor.children.values():
                child.kill()
            await supervisor.stop(GRACE_S)
        await self._nursery.stop(GRACE_S)
        await leftovers.end_all(self.place.settings.resolve(), GRACE_S)

    # Parts of the start

    def _take_lock(self) -> None:
        made_private(self.place.directory)
        self._lock = self.place.lock.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise Refused(
                f"a mesh runs in {self.place.root} already",
                fix=f"`meshrl down --mesh {self.place.root}` stops it",
            ) from error
        self._write_marker(ready=False)

    def _write_marker(self, ready: bool) -> None:
        marker = {"pid": os.getpid(), "start_time": own_start_time(), "ready": ready}
        write_json(self.place.launcher, marker)

    async def _refuse_a_second_mesh(self, state: State) -> None:
        """A Redis belongs to one mesh: with a shared one, another mesh may be there already."""
        alive = [e for e in await registry.entries(state) if e.alive]
        if embedded.configured_url() and alive and alive[0].run_root != str(self.place.root):
            raise Refused(
                f"another mesh ({alive[0].run_root}) lives in "
                f"{embedded.without_password(embedded.configured_url())}",
                fix="Stop it with `meshrl down`, or use another Redis",
            )
        for entry in alive:  # left by an earlier launcher, whose processes have just been ended
            await registry.evict(state, entry.name, entry.incarnation)

    def _write_settings(self, url: str) -> None:
        shape = self.shape
        self.settings = MeshSettings(
            redis_url=url,
            run_root=str(self.place.root),
            bind=shape.bind,
            advertise=shape.advertise,
            metrics=shape.metrics,
            secret=self._secret,
        )
        self.settings.to_file(self.place.settings)
        write_json(self.place.directory / SHAPE, asdict(shape))
        self._tasks.append(asyncio.create_task(self._keep_files(), name="keep files"))

    async def _keep_files(self) -> None:
        """Puts the mesh's own files back when they are damaged: what starts again reads them."""
        place, root = self.place, self.place.root

        def write(path: Path, content: dict[str, Any]) -> None:
            self.settings.to_file(path)

        async def tell(told: dict[str, Any]) -> None:
            await events.append(self.state, damage.EVENT, told)

        documents = [
            KeptDocument("mesh", place.settings, root, write=write),
            KeptDocument("mesh", place.directory / SHAPE, root),
            KeptDocument("mesh", place.launcher, root),
        ]
        await keep(documents, self.clock, tell)

    @property
    def _environment(self) -> dict[str, str]:
        """Of every process; those that a mesh left behind are found by its mark."""
        settings = self.place.settings.resolve()
        marks = {SETTINGS_ENV: str(settings), MESH_ENV: mark_of(settings)}
        return {**marks, "OMP_NUM_THREADS": "1"}

    async def _start_services(self) -> None:
        specs = [
            ChildSpec(
                service.name,
                list(service.argv),
                env=self._environment | self._nursery.environment,
                log=self.place.log(service.name),
                budget=BUDGET,
                critical=True,
                stage=stage,
                own_session=True,  # Ctrl-C is ours: they stop when we say so, in order
            )
            for stage, service in enumerate(self._services())
        ]
        supervisor = self._supervisor = Supervisor(self.host, self.clock, specs, hooks=self)
        watch = self._watch = LeaseWatch(
            self.state, self.clock, self.settings.host, lambda: supervisor.children.values()
        )
        await supervisor.start()
        if self._supervisor is not supervisor:  # Redis went back meanwhile, and others run
            return
        self._watching = asyncio.create_task(watch.run(), name="watch leases")
        self._tasks.append(self._watching)

    async def _all_registered(self) -> None:
        """Waits for the services and for the workers that the agent starts."""
        names = {s.name for s in self._services()}
        until = self.clock.monotonic() + READY_S
        while True:
            entries = [e for e in await registry.entries(self.state) if e.alive]
            missing = sorted(names - {e.name for e in entries})
            workers = sum(e.kind == "worker" for e in entries)
            if not missing and workers >= self.shape.workers:
                return
            if self.failed.is_set():
                raise MeshError(self.why)
            await self._none_is_hopeless({e.name for e in entries})
            if self.clock.monotonic() > until:
                absent = ", ".join(missing) or f"{self.shape.workers - workers} workers"
                raise DeadlineExceeded(
                    f"{absent} did not come up within {READY_S:g} s",
                    fix=f"See the logs in {self.place.logs}",
                )
            await self.clock.sleep(0.1)

    async def _none_is_hopeless(self, alive: set[str]) -> None:
        """MeshError with what ends a process that would not come up, however long one waited."""
        for end in await ended(self.state):
            tried = bool(end.error.get("type")) and end.times >= START_TRIES
            if end.name not in alive and (end.final or tried):
                raise MeshError(f"{end.name} does not start: {end.told}; its log: {end.log}")

    def _services(self) -> list[plan.Service]:
        shape = self.shape
        return plan.services(
            shape.workers,
            shape.shards,
            shape.device,
            self.settings.host,
            shape.ranks,
            shape.sandboxes,
        )

    async def _end_leftovers(self) -> None:
        pids = await leftovers.end_all(self.place.settings.resolve(), GRACE_S)
        if pids:
            print(f"ended {len(pids)} processes that had not stopped: {pids}", file=sys.stderr)


def shape_of(place: MeshPlace) -> Shape:
    """The shape of a mesh that was started before."""
    path = place.directory / SHAPE
    try:
        return Shape(**read_json(path))
    except (Damaged, FileNotFoundError, TypeError) as error:
        raise ConfigError(
            f"{path}, which says what the mesh is made of, is gone or damaged: {error}",
            fix=f"meshrl up --root {place.root}, with the options that it had, writes it anew",
        ) from error


def interruptible(stop: asyncio.Event, launcher: Launcher) -> None:
    """SIGINT and SIGTERM set `stop`; a second one that is no echo ends everything at once."""
    loop = asyncio.get_running_loop()
    first_at = 0.0

    def on_signal() -> None:
        nonlocal first_at
        if not stop.is_set():
            first_at = loop.time()
            stop.set()
        elif loop.time() - first_at > ECHO_S:
            launcher.kill()
            os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


async def serve(root: Path, shape: Shape) -> int:
    """`meshrl up`: a mesh that runs until SIGTERM, recording each job that is submitted to it."""
    from meshrl.observe.records import record_all

    outlive_a_full_disk()
    stop = asyncio.Event()
    launcher = Launcher(MeshPlace(root), shape)
    interruptible(stop, launcher)
    await launcher.start()
    recording = asyncio.create_task(record_all(launcher, stop))
    ends = [asyncio.create_task(event.wait()) for event in (stop, launcher.failed)]
    try:
        await asyncio.wait([*ends, recording], return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        await recording
    finally:
        await launcher.stop()
    if launcher.failed.is_set():
        print(launcher.why, file=sys.stderr)
    return int(launcher.failed.is_set())


def main() -> None:
    import argparse

    os.umask(PRIVATE)
    parser = argparse.ArgumentParser(prog="meshrl.launch.launcher")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--device", default=Shape.device)
    parser.add_argument("--bind", default=Shape.bind)
    parser.add_argument("--advertise", default="")
    parser.add_argument("--metrics", default=Shape.metrics)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sandboxes", type=int, default=1)
    a = parser.parse_args()
    shape = Shape(
        a.workers, a.shards, a.device, a.bind, a.advertise, a.metrics, a.ranks, a.sandboxes
    )
    try:
        code = asyncio.run(serve(a.root, shape))
    except MeshError as error:
        sys.exit(f"error: {error}")
    sys.exit(code)


if __name__ == "__main__":
    main()
