"""The root process of a host that has joined a mesh: it starts a nursery and the host's agent, and
a planner that stands by where the host was given one, keeps them running, and stops them.

Redis, the weight store and the gateway are the head's. While the head cannot be reached everything
here goes on as well as it can, for as long as that takes; when the mesh lets the host in no more it
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshrl.common.api.gateway import Gateway
from meshrl.common.base.errors import (
    ConfigError,
    Damaged,
    DeadlineExceeded,
    MeshError,
    NotAllowed,
    NotFound,
    Refused,
    StateUnavailable,
)
from meshrl.common.base.host.settings import MeshSettings, advertised_host
from meshrl.common.mesh.process.output.streams import outlive_a_full_disk
from meshrl.common.state import events
from meshrl.common.state.pool.placing import taking
from meshrl.common.state.pool.workers import names
from meshrl.common.state.redis.client import State, refusal_behind
from meshrl.common.state.redis.keys import MESH
from meshrl.directory.places import MeshPlace, read_json, write_json
from meshrl.launch.background import run_program
from meshrl.launch.ending import STOP_S
from meshrl.launch.foreground import AGAIN, ENDED, ERRORS, NEVER, begun, ended_with
from meshrl.launch.holding import interruptible
from meshrl.launch.hosts import membership, notice
from meshrl.launch.outward.outward import outward
from meshrl.launch.root import RootProcess
from meshrl.launch.services import plan

ROLE = "node"  # as whom the root process itself asks Redis
ADMITTED = f"{MESH}:admitted"  # hosts that may belong to the mesh
LOOK_S = 2.0  # between two looks whether the host still belongs to it
ANSWER_S = 5.0
REACH_S = 30.0  # a start waits for the head so long
EVENT_S = 2.0


@dataclass(frozen=True)
class HostShape:
    workers: int = 1
    device: str = "cpu"
    prefix: str = "w"  # of its workers' names, which are unique in the mesh
    market: str = "reserved"
    memory_bytes: int = 0  # that residents may take; 0: all there is
    disk_bytes: int = 0
    planner: str = ""  # the name of the planner that stands by here; empty: none
    takes: Sequence[str] = taking.ALL  # the services that may be placed here
    listen: str = ""  # as it was named; empty: as it reaches the head
    ephemeral: bool = False  # it leaves the mesh when it is told to end
    asked_s: float = 0.0  # wall clock, when the join was asked for; 0: it has been in before

    def services(self, host: str) -> list[plan.Service]:
        """What runs here, in the order of the start."""
        options = ["--worker-prefix", self.prefix, "--market", self.market]
        options += ["--memory-bytes", str(self.memory_bytes), "--disk-bytes", str(self.disk_bytes)]
        agent = plan.agent(host, self.workers, self.device, self.takes, *options)
        return [plan.planner(self.planner, True), agent] if self.planner else [agent]

    def write(self, place: MeshPlace) -> None:
        write_json(place.shape, asdict(self))

    @classmethod
    def of(cls, place: MeshPlace) -> HostShape:
        """That of the host with this directory; ConfigError."""
        try:
            return cls(**read_json(place.shape))
        except (Damaged, FileNotFoundError, TypeError) as error:
            raise ConfigError(
                f"what this host gives its mesh is gone or damaged: {error}",
                where=str(place.shape),
                fix="`meshrl leave`, then join with a new token",
            ) from error


class Hosting(RootProcess):
    """A host's part of a mesh from start to stop. `failed` is set, with the reason in `why`, when
    it gives up, or belongs to the mesh no more.
    """

    def __init__(self, place: MeshPlace, drain_s: float = 0.0) -> None:
        """`drain_s`: that its end waits at most for all to move away. ConfigError: the host has
        never joined, or its files are damaged.
        """
        super().__init__(place, patient=True, end_s=drain_s + STOP_S)
        self.settings = MeshSettings.from_file(place.settings)
        self.shape = HostShape.of(place)
        self.expelled = False  # it belongs to the mesh no more
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when the agent and its workers have registered; on any error nothing is left
        running.
        """
        self._hold.take()
        place, host = self.place, self.settings.host
        place.logs.mkdir(parents=True, exist_ok=True)
        try:
            await self._services.prepare()
            self.state = await self._reached()
            self._services.tell(self.state, host)
            planned = self.shape.services(host)
            await self._services.start(planned)
            await self._services.registered({s.name for s in planned}, self.shape.workers)
            back = await self._tell_joined()
            self._goes_on(self._watch(), "watch the membership")
            if back and (member := membership.known(place)) is not None:
                told = advertised_host(self.settings.advertise or self.settings.bind)
                telling = notice.tell_back(member, self.clock, told)
                self._goes_on(telling, "tell the mesh that this host is back")
            self._hold.tell(ready=True)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ends every process of this host, the agent with its workers first. Safe twice."""
        self._end_tasks()
        await self._services.stop()
        if self._hold.held:
            await self._services.end_leftovers()
        self._services.close()
        if hasattr(self, "state"):
            await self.state.close()
        self._hold.give_back()

    async def drain(self, for_s: float) -> None:
        """Has the mesh move everything away from this host, which waits for that so long."""
        self._end_tasks()
        agent = names.agent(self.settings.host)  # who sees to it that things move away in order

        def hindered() -> str:
            return "" if agent in dict(self._services.children) else f"{agent} is down"

        if (member := membership.known(self.place)) is not None:
            await notice.empty(member, self.clock, for_s, hindered)

    @property
    def leaves(self) -> bool:
        return self.shape.ephemeral or self.place.leaving.exists()

    async def leave(self) -> None:
        """Leaves the mesh, once it has stopped. It stays a member while the head cannot be told."""
        if (member := membership.known(self.place)) and await notice.leave(member):
            membership.forget(self.place)

    def kill(self) -> None:
        self._services.kill_now()

    # -- membership --------------------------------------------------------------------------------

    async def _reached(self) -> State:
        """The mesh's Redis, which lets this host in. A mesh that is being started again is waited
        for.
        """
        until = self.clock.monotonic() + REACH_S
        while True:
            try:
                state = await State.open(self.settings.redis_as(ROLE), connect_s=ANSWER_S)
            except StateUnavailable as error:
                refused, why, where = refusal_behind(error) is not None, error.message, error.where
            else:
                if await self._admitted(state):
                    return state
                refused, why, where = True, "its Redis does not know this host", ""
                await state.close()
            if refused and await self._struck_off():
                raise expelled(self.settings.host)
            if self.clock.monotonic() > until:
                raise StateUnavailable(
                    f"the head of the mesh cannot be reached: {why}",
                    where=where,
                    fix="See whether it runs (`meshrl status` there), and whether this host's "
                    "way to it is open",
                )
            await self.clock.sleep(LOOK_S)

    async def _admitted(self, state: State) -> bool:
        if not self.settings.joinable:
            return True
        found = await state.command("SISMEMBER", ADMITTED, self.settings.host, deadline_s=ANSWER_S)
        return bool(found)

    async def _watch(self) -> None:
        """Ends this host's part when the mesh says that it lets it in no more. A Redis that begins
        again lets nobody in until the head's launcher has been there, however long that is away.
        """
        told = False
        while True:
            await self.clock.sleep(LOOK_S)
            try:
                refused = not await self._admitted(self.state)
            except StateUnavailable as error:
                refused = refusal_behind(error) is not None
            if refused and await self._struck_off():
                self.expelled = True
                self._services.fail(str(expelled(self.settings.host)))
                return
            if refused and not told:
                notice.say(f"Redis does not let {self.settings.host} in: it waits for the head")
            told = refused

    async def _struck_off(self) -> bool:
        """Whether the gateway says that this host is a member no more: by its own key, which
        that knows for as long as it is one.
        """
        member = membership.known(self.place)
        if member is None:
            return False
        async with membership.gateway_line(member.ticket) as line:
            try:
                await line.call(Gateway.membership, None, ANSWER_S)
            except (NotAllowed, NotFound):
                return True
            except MeshError:  # it is away too: that may be a mesh that starts again
                return False
        return False

    def _goes_on(self, work: Coroutine[Any, Any, None], what: str) -> None:
        task = asyncio.create_task(work, name=what)
        self._services.watch(task, what)
        self._tasks.append(task)

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    async def _tell_joined(self) -> bool:
        """Whether it was in before. The event has how long the command took until now."""
        took_s = max(0.0, time.time() - self.shape.asked_s) if self.shape.asked_s else 0.0
        fields = {
            "host": self.settings.host,
            "workers": self.shape.workers,
            "join_s": round(took_s, 3),
            "back": (back := not self.shape.asked_s),
        }
        with contextlib.suppress(StateUnavailable, DeadlineExceeded):
            async with self.clock.timeout(EVENT_S, "an event"):
                await events.append(self.state, "host_joined", fields)
        self.shape = replace(self.shape, asked_s=0.0)
        self.shape.write(self.place)
        return back


def expelled(host: str) -> Refused:
    return Refused(
        f"the mesh does not let {host} in: it was removed there, or its keys were revoked",
        fix="`meshrl leave` here, then join with a new token (`meshrl token create --host` at "
        "the head)",
    )


async def serve(root: Path, health: str = "", drain_s: float = 0.0) -> int:
    """A host's part of a mesh, until SIGTERM or until it cannot go on. `health`: HOST:PORT, where
    it answers for the host as a whole; empty: nowhere.
    """
    outlive_a_full_disk()
    stop = asyncio.Event()
    hosting = Hosting(MeshPlace(root), drain_s)
    interruptible(stop, hosting.kill)
    try:
        async with outward(hosting, stop, health, head=False):
            status = await _served(hosting, stop, drain_s)
        if status == ENDED and hosting.leaves:
            await hosting.leave()
    except ERRORS as error:
        return ended_with(error, stop)
    return status


async def _served(hosting: Hosting, stop: asyncio.Event, drain_s: float) -> int:
    if not await begun(hosting.start(), stop):
        return ENDED
    failing = asyncio.create_task(hosting.failed.wait())
    try:
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([stopping, failing], return_when=asyncio.FIRST_COMPLETED)
        told = not hosting.failed.is_set()
        if drain_s and told:
            draining = asyncio.create_task(hosting.drain(drain_s), name="drain")
            await asyncio.wait([draining, failing], return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await draining
    finally:
        await hosting.stop()
    if hosting.failed.is_set():
        print(f"error: {hosting.why}", file=sys.stderr, flush=True)
        if not told:
            return NEVER if hosting.expelled else AGAIN
    return ENDED


if __name__ == "__main__":
    run_program("meshrl.launch.hosts.hosting", lambda a: serve(a.root, a.health))
