"""The Redis of a mesh: started, looked at before anybody is let in, and again whenever it has been
away.

What it holds is compared with the launcher's note and with the records of the runs. One that is
older than these, or that cannot load its file, is treated as lost: its file is set aside and it
begins empty, above all fencing tokens and event ids that there have been. A server of the user's
has no gate and no file of ours: what is older there is renamed.

With a `Network` other hosts may join the mesh: each role of each host is a user, behind the same
gate, also in a server of the user's.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import (
    DeadlineExceeded,
    MeshError,
    Refused,
    StateUnavailable,
    StorageFull,
)
from meshrl.common.base.files import damage
from meshrl.common.mesh.access.hosts import AdmittedHost
from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.process.supervision.supervisor import ChildEnd, ChildSpec, Hooks, Supervisor
from meshrl.common.state import events
from meshrl.common.state.redis import embedded
from meshrl.common.state.redis.client import State
from meshrl.common.state.server import rollback
from meshrl.common.state.server.rollback import RollbackMark
from meshrl.directory.places import MeshPlace
from meshrl.launch.redis import guard
from meshrl.launch.redis.access.network import Network, far_url
from meshrl.launch.redis.access.users import HostUsers
from meshrl.launch.redis.aside import complaint, rename
from meshrl.launch.redis.progress import RedisProgress
from meshrl.launch.redis.serving import RedisAddresses, RedisListening

GRACE_S = 10.0  # from SIGTERM to SIGKILL
NOTE_S = 4.0  # for one look at how far it has come
ROOM_S = 60.0  # that a start waits for room on the disk


class MeshRedis(Hooks):
    """`owner` is told what happens to the server's process, and `went_back` why, in mid-run, the
    state is not what it was: then it is to end whoever uses it, and call `begin_anew`.

    While it is `returning`, the jobs of a Redis that was lost are to be put back, and nothing is
    noted: `returned` says that they are. A start that was cut off in between does it again.
    """

    def __init__(
        self,
        host: Host,
        clock: Clock,
        place: MeshPlace,
        secret: str,
        budget: tuple[int, float],
        owner: Hooks,
        went_back: Callable[[str], None],
        network: Network | None = None,
    ) -> None:
        self._host, self._clock, self._place = host, clock, place
        self._budget = budget
        self._owner, self._went_back = owner, went_back
        self._network = network
        self._users = HostUsers(place.directory, network.head) if network else None
        self._serving = RedisListening(place, secret, network, self._users, clock.wall)
        self.supervisor: Supervisor | None = None
        self.url = embedded.configured_url()  # for the launcher
        self.told = RedisAddresses(self.url)  # for all others
        self.why = ""  # why it was not as it had been, when it was let in last
        self._progress = RedisProgress(place)
        self._untold = False  # the mesh has no event yet that tells `why`
        self._own = not self.url
        self._owner_url = self.url
        self._state: State | None = None  # as its owner
        self._children: list[Child] = []
        self._log = place.log("redis")
        self._said = 0  # length of its log when it ended last
        self._aside: Path | None = None  # where what it had lies
        self._starting = False  # by `_serve`, which looks at it itself
        self._admitted = False  # the mesh may use it
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def known(self) -> RollbackMark:
        return self._progress.known

    @property
    def returning(self) -> bool:
        """Whether the jobs of a Redis that was lost are to be put back."""
        return self._progress.returning

    # -- its life --------------------------------------------------------------------------------

    async def connect(self) -> State:
        """The server answers its owner, whose connection this is; nobody else is let in. A file
        that differs from what was noted, or does not load, has been set aside.
        """
        await asyncio.to_thread(self._progress.recall)
        if not self._own:
            await guard.wait_until_ready(self.url, self._clock, None, None)
            if self._network is not None:
                far, authority = far_url(self.url, self._network.listen)
                self.told = RedisAddresses(far, authority, far, authority)
        else:
            if why := await asyncio.to_thread(self._progress.differs):
                await self._set_aside(why, ROOM_S)
            await self._serve(first=True)
        self._state = await State.open(self._owner_url)
        if self._users is not None and not self._own:
            await self._users.shut(self._state)
        return self._state

    async def admit(self) -> None:
        """Lets the mesh in, to a state that is no older than what is known of it: an older one has
        been set aside, and `why` says so.
        """
        if not self.why:
            found, why = await self._progress.look_back(self._owned)
            ours = self._own or bool(found.jobs.keys() & self.known.jobs.keys())
            if why and (not self._own if found.empty else ours):  # a rename may have been cut off
                await self.begin_anew(why, ROOM_S)
            elif why:
                self._say(why)
        await self._let_in(ROOM_S)
        self._tasks = [self._task("note how far redis has come", self._note_forever())]
        if self._own:
            watching = guard.watch(self._owner_url, self._clock, self._children)
            self._tasks.append(self._task("watch redis", watching))
            if self._users is not None:  # others than this user reach it
                cutting = guard.cut_off(self._owned, self._clock)
                self._tasks.append(self._task("cut strangers off from redis", cutting))

    async def begin_anew(self, why: str, room_s: float | None = None) -> None:
        """Sets aside what there is, and begins without it; `readmit` lets the mesh in. Waits for
        room on the disk, for `room_s` at most: StorageFull. StateUnavailable: it does not start,
        perhaps as another process has taken its port meanwhile.
        """
        self._admitted = False
        if not self._own:
            await rename(self._owned, self.known.jobs, int(self._clock.wall() * 1000))
            self._say(why)
            return
        await self._stop_server()
        await self._set_aside(why, room_s)
        await self._serve()

    async def readmit(self) -> None:
        await self._let_in()

    async def admit_host(self, host: AdmittedHost) -> None:
        """Lets a host's processes in, now and whenever the mesh runs. Safe twice. Refused: its name
        is another's, or it cannot be let in; StateUnavailable: it may be by now, or with the next
        try.
        """
        self._users_of_hosts.remember(host)
        if self._own:
            self._serving.write()
        if self._admitted:
            await self._users_of_hosts.let_in(self._owned, host)

    async def expel_host(self, host: str) -> bool:
        """Lets them in no more, and cuts off those that are; whether it was let in. Safe twice.
        Refused for the head; StateUnavailable as above.
        """
        self._users_of_hosts.refuse_head(host)
        await self._users_of_hosts.let_out(self._owned, host)  # first: a full disk keeps nobody in
        was = self._users_of_hosts.forget(host)
        if self._own:
            self._serving.write()
        return was

    @property
    def _users_of_hosts(self) -> HostUsers:
        if self._users is None:
            raise Refused(
                "this mesh is one host's alone",
                fix="`meshrl up --listen HOST` starts one that others may join",
            )
        return self._users

    async def returned(self) -> None:
        """The jobs are back that go on: those that are not there now are not missed any more."""
        self._progress.have_returned(await self._progress.held(self._owned))
        await self._with_room(self._progress.write, None)

    async def stop(self) -> None:
        """Ends the server, if it is our own, and notes how far it has come."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S)
        if self._admitted and not self.returning:
            with contextlib.suppress(MeshError, OSError):
                await self._note()
        if self._state is not None:
            await self._state.close()
        await self._stop_server()

    # -- the server ------------------------------------------------------------------------------

    async def _serve(self, first: bool = False) -> None:
        """Starts our own; one that cannot load its file does so without it. `first`: nobody has
        been told yet where it is, and one whose port another process has taken does so at another.
        """
        self._starting = True
        try:
            since = self._log_length()
            try:
                await self._start()
            except StateUnavailable:
                await self._stop_server()
                said = complaint(self._log, since)
                if said:
                    await self._set_aside(f"it cannot be loaded: {said}", ROOM_S)
                elif not (first and await asyncio.to_thread(self._serving.lost_port)):
                    raise
                await self._start()
        finally:
            self._starting = False

    async def _start(self) -> None:
        server, self.told = await self._serving.configured()
        self.url, self._owner_url = server.url, server.owner_url
        spec = ChildSpec(
            "redis",
            server.argv,
            log=self._log,
            budget=self._budget,
            critical=True,
            own_session=True,
        )
        self.supervisor = Supervisor(self._host, self._clock, [spec], hooks=self)
        await self.supervisor.start()
        child = self._children[-1]
        await guard.wait_until_ready(self._owner_url, self._clock, child, self._log)

    async def _stop_server(self) -> None:
        supervisor, self.supervisor = self.supervisor, None
        if supervisor is not None:
            await supervisor.stop(GRACE_S)

    async def started(self, child: Child) -> None:
        self._children[:] = [child]
        if not self._starting:
            looking = self._task("look at redis", self._look_again(child))
            self._tasks = [task for task in self._tasks if not task.done()] + [looking]

    async def ended(self, child: Child, end: ChildEnd) -> None:
        since, self._said = self._said, self._log_length()
        if end.asked or self._starting:
            return
        had_been_in, self._admitted = self._admitted, False
        said = complaint(self._log, since) if not had_been_in and end.code > 0 else ""
        self._place.redis.mkdir(parents=True, exist_ok=True, mode=0o700)
        await self._owner.ended(child, end)
        if said:
            self._went_back(f"it cannot be loaded: {said}")

    async def gave_up(self, spec: ChildSpec, why: str) -> None:
        await self._owner.gave_up(spec, why)

    async def escalate(self, name: str) -> None:
        await self._owner.escalate(name)

    async def _look_again(self, child: Child) -> None:
        """Compares a server that was started again with what it was, and lets the mesh in."""
        while child.poll() is None:
            try:
                await guard.wait_until_ready(self._owner_url, self._clock, child, self._log)
                progress = self._progress
                why = await asyncio.to_thread(progress.differs)
                if not why:
                    _, why = await progress.look_back(self._owned)
                if why:
                    self._went_back(why)
                else:
                    await self._let_in(0.0)
                return
            except (StateUnavailable, StorageFull, OSError):
                # It loads for long, or does not answer: the watch kills it for that; or the disk is
                # full, so that there is no room for the note.
                await self._clock.sleep(guard.INTERVAL_S)

    def _task(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """What has failed is not watched or let in any more: the owner is told, by name."""

        async def told() -> None:
            try:
                await work
            except Exception as error:
                why = f"the task to {name} failed: {type(error).__name__}: {error}"
                spec = ChildSpec("redis", [], log=self._log, critical=True)
                await self._owner.gave_up(spec, why)
                await self._owner.escalate("redis")
                raise

        return asyncio.create_task(told(), name=name)

    def _log_length(self) -> int:
        return self._log.stat().st_size if self._log.is_file() else 0

    # -- who is let in, and how far it has come --------------------------------------------------

    @property
    def _owned(self) -> State:
        assert self._state is not None
        return self._state

    async def _let_in(self, room_s: float | None = None) -> None:
        """Opens the gate, when nobody can be issued a token that somebody has had already."""
        floor = self._progress.raised(await rollback.held(self._owned, self.known))
        await self._with_room(self._progress.write, room_s)
        await rollback.raise_tokens(self._owned, floor)
        if self._untold:
            then = damage.FATES["redis"]
            fields = damage.fields("redis", self._place.redis, self.why, then, aside=self._aside)
            self._progress.damaged.insert(0, fields)
            self._untold = False
        while self._progress.damaged:  # with ids above all that were seen, whatever the clock says
            found = self._progress.damaged[0]
            await events.append(self._owned, damage.EVENT, found, above=self.known.event)
            del self._progress.damaged[0]
        if self._own:
            await self._owned.command("ACL", "SETUSER", embedded.USER, "on")
        if self._users is not None:
            await self._users.open(self._owned)
        self._progress.follow_anew()  # the server may have cut off half a command
        self._admitted = True

    async def _note_forever(self) -> None:
        while True:
            await self._clock.sleep(guard.INTERVAL_S)
            if not self._admitted or self.returning:
                continue
            with contextlib.suppress(StateUnavailable, DeadlineExceeded, StorageFull, OSError):
                why = await self._note()
                if why and self._admitted:
                    self._admitted = False
                    self._went_back(why)
                elif self._users is not None and await self._users.missing(self._owned):
                    await self._users.open(self._owned)

    async def _note(self) -> str:
        """Notes how far it has come; why it is older than it was, if it is."""
        async with self._clock.timeout(NOTE_S, "a look at how far Redis has come"):
            found, why = await self._progress.look_back(self._owned, records=False)
            if why:
                return why
            files = await asyncio.to_thread(self._progress.look) if self._own else {}
            # It answers when what it was writing while it was looked at is there as a whole, or was
            # taken back: half a command, which is cut off when it is loaded, is not noted.
            newest = await events.last_id(self._owned)
            if not self._admitted:
                return ""
            self._progress.come_to(found, newest, files)
            await asyncio.to_thread(self._progress.write)
        return ""

    async def _with_room(self, write: Callable[[], None], room_s: float | None) -> None:
        """Again until the disk has room, for `room_s` at most, or for as long as the mesh runs:
        StorageFull.
        """
        until, said = self._clock.monotonic() + (room_s or 0.0), False
        while True:
            try:
                return write()
            except StorageFull as error:
                if room_s is not None and self._clock.monotonic() >= until:
                    raise
                if not said:
                    print(f"the mesh waits: {error}", file=sys.stderr, flush=True)
                said = True
                await self._clock.sleep(guard.INTERVAL_S)

    # -- what is not used ------------------------------------------------------------------------

    async def _set_aside(self, why: str, room_s: float | None) -> None:
        """Waits for room on the disk, for `room_s` at most: StorageFull."""
        self._progress.files, self._aside = {}, None
        await self._with_room(self._move, room_s)
        self._say(why)

    def _move(self) -> None:
        place = self._place
        try:
            if place.redis.is_dir() and any(place.redis.iterdir()):
                self._aside = damage.set_aside(place.redis, place.root)
        except OSError as error:
            raise StorageFull(
                f"the file of Redis cannot be set aside: {error}",
                where=str(place.redis),
                fix="Make room on its disk",
            ) from error

    def _say(self, why: str) -> None:
        self.why, self._progress.returning, self._untold = why, True, True
        where = f"; its file lies in {self._aside}" if self._aside else ""
        print(f"redis is not as it was: {why}{where}", file=sys.stderr, flush=True)
        print(f"what follows: {damage.FATES['redis']}", file=sys.stderr, flush=True)
