"""The root process of a mesh: it starts Redis and the services, keeps them running, and stops them.

`meshrl run` holds a Launcher in its own process; `meshrl up` starts this file as a program. Every
process of the mesh dies with it, or (workers, which may outlive an agent) within 75 s.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from meshrl.common.base.errors import Refused
from meshrl.common.base.files import damage
from meshrl.common.base.files.home import BYTES as PROBE_BYTES
from meshrl.common.base.files.home import make as make_home
from meshrl.common.base.host.settings import OFF, SECRET_BYTES, MeshSettings
from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.process.output.streams import outlive_a_full_disk
from meshrl.common.mesh.process.supervision.ended import forget_all
from meshrl.common.state import events, registry
from meshrl.common.state.hosts import doors
from meshrl.common.state.pool.store.store import write_settings
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.common.state.redis import embedded
from meshrl.common.state.redis.client import State
from meshrl.common.state.server import home
from meshrl.common.state.server.rollback import JobMark
from meshrl.directory.joined import joined_hosts
from meshrl.directory.kept import KeptDocument, keep
from meshrl.directory.places import MeshPlace, write_json
from meshrl.launch.background import run_program
from meshrl.launch.foreground import AGAIN, ENDED, begun
from meshrl.launch.head import from_copy, trimming
from meshrl.launch.head.admitting import Admitting
from meshrl.launch.head.head import HeadNetwork, told_to_hosts
from meshrl.launch.head.restoring import put_all_back
from meshrl.launch.head.shape import POOL, MeshShape, pool_of
from meshrl.launch.holding import interruptible
from meshrl.launch.outward.outward import outward
from meshrl.launch.redis.server import MeshRedis
from meshrl.launch.redis.serving import RedisAddresses
from meshrl.launch.root import RootProcess
from meshrl.launch.services import plan
from meshrl.launch.services.services import BUDGET, GRACE_S

T = TypeVar("T")

BACK_TRIES = 3  # times that Redis may go back again before the mesh has


class Launcher(RootProcess):
    def __init__(
        self, place: MeshPlace, shape: MeshShape, pool: PoolSettings | None = None
    ) -> None:
        """`pool`: its settings; None: as they were when the mesh was started last."""
        super().__init__(place)
        self.shape, self._pool = shape, pool
        self._starts = False  # it may have processes
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._head = HeadNetwork.new(place, shape.listen) if shape.listen else None
        self._redis = MeshRedis(
            *(self.host, self.clock, place, self._secret, BUDGET, self._services),
            self._redis_went_back,
            self._head.network(self._secret, shape.advertise) if self._head else None,
        )
        self._tasks: list[asyncio.Task[Any]] = []
        self._going_back: asyncio.Task[None] | None = None
        self._failed_back = 0  # times in a row that the mesh could not
        self._back_again = ""  # why, if Redis went back while the mesh was not up

    async def start(self, begin: Callable[[], Awaitable[None]] | None = None) -> None:
        """Returns when every service has registered; on any error nothing is left running.

        `begin` is awaited when Redis answers and no service runs yet.
        """
        self._hold.take()
        self._starts = True
        try:
            await self._services.prepare()
            await self._refuse_a_second_mesh(await self._redis.connect())
            await self._redis.admit()
            self._write_settings(self._redis.told)
            self.state = await State.open(self._redis.url)
            await self._tell_home()
            self._services.tell(self.state, self.settings.host)
            await forget_all(self.state)
            if self._redis.returning:
                await put_all_back(self.state, self._redis.known, needed=False)
            if begin is not None:
                await begin()
            if self._redis.returning:
                await self._redis.returned()
            await write_settings(self.state, self.pool)
            if self._head is not None:
                about = partial(told_to_hosts, self._redis.told, self.settings)
                who = self._redis, about, self.pool.gone_s, self.settings.host
                hosts = Admitting(self.place, self.state, self.clock, *who)
                admitting = asyncio.create_task(hosts.run(), name="admit hosts")
                self._services.watch(admitting, "admit hosts")
                self._tasks.append(admitting)
            await self._services.start(self._planned())
            names = {service.name for service in self._planned()}
            await self._services.registered(names, self.shape.workers)
            trimmed = trimming.trim_forever(self.state, self.clock)
            self._tasks.append(asyncio.create_task(trimmed, name="trim events"))
            self._hold.tell(ready=True)
            if self._going_back is None:
                self._go_back_again()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ends every process of the mesh, Redis last. Safe after a failed start, and twice."""
        await self.stop_services()
        await self._services.stop()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GRACE_S)
        self._tasks.clear()
        self._services.close()
        if hasattr(self, "state"):
            await self.state.close()
        await self._redis.stop()
        if self._hold.held:
            self._starts = False  # what there is from now on may be another mesh's
            self._hold.give_back()

    async def ask_redis(self, question: Callable[[State], Awaitable[T]]) -> T:
        """The answer of the mesh's Redis, which runs for as long as that takes and no longer."""
        self._hold.take()
        try:
            return await question(await self._redis.connect())
        finally:
            await self.stop()

    async def stop_services(self) -> None:
        """Ends everything but Redis and the nursery, in reverse order of the start: the books are
        final then.
        """
        going_back, self._going_back = self._going_back, None
        if going_back is not None:
            going_back.cancel()
            await asyncio.wait([going_back], timeout=GRACE_S)
        await self._services.stop(nursery=False)
        if self._starts:
            await self._services.end_leftovers()

    def start_program(self, argv: list[str], name: str) -> Child:
        """Start a program of MeshRL's that is no service: a fork of the nursery while it runs."""
        environment = self._services.nursery_environment
        return self.host.spawn(argv, name=name, env=environment, log=self.place.log(name))

    def kill(self) -> None:
        if self._redis.supervisor is not None:
            for child in self._redis.supervisor.children.values():
                child.kill()
        self._services.kill_now()

    @property
    def hindered(self) -> str:
        """Why it does not do its work now; empty: it does."""
        if self._going_back is not None:
            return "Redis is not as it was, and all that acted on it starts anew"
        if (supervisor := self._redis.supervisor) is not None and not supervisor.children:
            return "redis is down"
        return super().hindered

    @property
    def pids(self) -> dict[int, str]:
        """The launcher, Redis and the services that run now, by pid."""
        found = {os.getpid(): "meshrl"}
        if self._redis.supervisor is not None:
            found |= {child.pid: name for name, child in self._redis.supervisor.children.items()}
        return found | {child.pid: name for name, child in self._services.children}

    def seen(self, job: str) -> JobMark:
        """How far a job has come by all that tells of it; the mark of nothing when nothing does."""
        return self._redis.known.jobs.get(job, JobMark())

    # When the state goes back

    @property
    def going_back(self) -> bool:
        """Whether Redis has lost what it had, and the jobs are being put back."""
        return self._going_back is not None or bool(self._back_again)

    def _redis_went_back(self, why: str) -> None:
        """Redis is not what it was: nobody is let in, and what has acted on it starts anew."""
        self._back_again = why
        if self._going_back is None and self._services.running:
            self._go_back_again()

    def _go_back_again(self) -> None:
        """If Redis went back, perhaps while the mesh could not."""
        why, self._back_again = self._back_again, ""
        if why:
            self._going_back = asyncio.create_task(self._go_back(why), name="go back")
            self._going_back.add_done_callback(partial(self._gone_back, why))

    async def _go_back(self, why: str) -> None:
        await self._services.kill()
        await self._redis.begin_anew(why)
        await self._redis.readmit()
        await self._tell_home()
        await put_all_back(self.state, self._redis.known, needed=True)
        await write_settings(self.state, self.pool)
        await self._redis.returned()
        await self._services.prepare()
        await self._services.start(self._planned())

    def _gone_back(self, why: str, task: asyncio.Task[None]) -> None:
        if self._going_back is not task:  # the mesh stops
            return
        self._going_back = None
        if task.cancelled():
            return
        error = task.exception()
        self._failed_back = self._failed_back + 1 if error is not None else 0
        if error is not None and (not self._back_again or self._failed_back > BACK_TRIES):
            self._services.fail(
                f"redis is not as it was ({why}), and the mesh cannot go on: {error}"
            )
        else:
            self._go_back_again()

    # Parts of the start

    async def _refuse_a_second_mesh(self, state: State) -> None:
        """A Redis belongs to one mesh: with a shared one, another mesh may be there already."""
        joined = joined_hosts(self.place)
        alive = [e for e in await registry.entries(state) if e.alive and e.host not in joined]
        if embedded.configured_url() and alive and alive[0].run_root != str(self.place.root):
            raise Refused(
                f"another mesh ({alive[0].run_root}) lives in "
                f"{embedded.without_password(embedded.configured_url())}",
                fix="Stop it with `meshrl down`, or use another Redis",
            )
        for entry in alive:  # left by an earlier launcher, whose processes have just been ended
            await registry.evict(state, entry.name, entry.incarnation)

    async def _tell_home(self) -> None:
        """Says where the runs are at home, and how another host finds out whether it sees them."""
        content = secrets.token_bytes(PROBE_BYTES)
        made = make_home(self.settings.host, self.place.root, content)
        await home.tell(self.state, made)
        if self._head is None:
            await doors.admit_alone(self.state, self.settings.host)

    def _write_settings(self, told: RedisAddresses) -> None:
        shape = self.shape
        self.settings = MeshSettings(
            redis_url=told.url,
            run_root=str(self.place.root),
            bind=shape.bind,
            advertise=shape.advertise,
            metrics=shape.metrics,
            secret=self._secret,
            encrypt=shape.encrypt,
            rate_up=shape.rate_up,
            rate_down=shape.rate_down,
        )
        if self._head is not None:
            self._head.keep(self.place, self._secret)
            self.settings = self._head.settings(told, self.settings)
        self.settings.to_file(self.place.settings)
        write_json(self.place.shape, asdict(shape))
        self.pool = self._pool or pool_of(self.place)
        write_json(self.place.directory / POOL, asdict(self.pool))
        self._tasks.append(asyncio.create_task(self._keep_files(), name="keep files"))

    async def _keep_files(self) -> None:
        """Puts the mesh's own files back when they are damaged: what starts again reads them."""
        place = self.place

        def write(path: Path, content: dict[str, Any]) -> None:
            self.settings.to_file(path)

        async def tell(told: dict[str, Any]) -> None:
            await events.append(self.state, damage.EVENT, told)

        own = (place.shape, place.directory / POOL, place.launcher)
        documents = [KeptDocument("mesh", path, place.root) for path in own]
        documents.append(KeptDocument("mesh", place.settings, place.root, write=write))
        await keep(documents, self.clock, tell)

    def _planned(self) -> list[plan.Service]:
        shape = self.shape
        found = plan.services(shape.workers, shape.device, self.settings.host, shape.takes)
        if shape.gateway != OFF:
            found.append(plan.gateway(shape.gateway, shape.advertise))
        return found


async def serve(
    root: Path,
    shape: MeshShape,
    pool: PoolSettings,
    health: str = "",
    ready: Callable[[], None] = lambda: None,
) -> int:
    """`meshrl up`: a mesh that runs until SIGTERM, recording each job that is submitted to it; the
    exit status. `health`: HOST:PORT, where it answers for this host as a whole and for the mesh;
    empty: nowhere. `ready` is called when all services are there.
    """
    outlive_a_full_disk()
    stop = asyncio.Event()
    launcher = Launcher(MeshPlace(root), shape, pool)
    interruptible(stop, launcher.kill)
    async with outward(launcher, stop, health, head=True):
        return await _served(launcher, stop, ready)


async def _served(launcher: Launcher, stop: asyncio.Event, ready: Callable[[], None]) -> int:
    from meshrl.view.records import record_all

    brought = from_copy.to_put_back(launcher.place)
    begin = (lambda: brought(launcher.state)) if brought is not None else None
    if not await begun(launcher.start(begin), stop):
        return ENDED
    recording = asyncio.create_task(record_all(launcher, stop))
    ends = [asyncio.create_task(event.wait()) for event in (stop, launcher.failed)]
    try:
        ready()
        await asyncio.wait([*ends, recording], return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        await recording
    finally:
        await launcher.stop()
    if launcher.failed.is_set():
        print(f"error: {launcher.why}", file=sys.stderr, flush=True)
    return AGAIN if launcher.failed.is_set() else ENDED


if __name__ == "__main__":
    run_program(
        "meshrl.launch.head.launcher",
        lambda a: serve(a.root, MeshShape(**a.shape), PoolSettings(**a.pool), a.health),
        *("--shape", "--pool"),
    )
