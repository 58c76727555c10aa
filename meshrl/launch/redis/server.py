"""The Redis of a mesh: started, looked at before anybody is let in, and again whenever it has been
away.

What it holds is compared with the launcher's note and with the records of the runs. One that is
older than these, or that cannot load its file, is treated as lost: its file is set aside and it
begins empty, above all fencing tokens and event ids that there have been. A server of the user's
has no gate and no file of ours: what is older there is renamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.clock import Clock
from common.errors import Damaged, DeadlineExceeded, MeshError, StateUnavailable
from common.process.handle import Child
from common.process.host import Host
from common.process.supervisor import ChildSpec, End, Hooks, Supervisor
from common.records import damage
from common.state import embedded, events, rollback
from common.state.client import State
from common.state.events import order
from common.state.keys import EVENTS, MESH, job_prefix
from common.state.rollback import Mark
from meshrl.launch.places import MeshPlace
from meshrl.launch.redis import aof, guard
from meshrl.launch.redis import note as notes
from meshrl.launch.redis.note import Note
from meshrl.launch.redis.recorded import RunRecord

GRACE_S = 10.0  # from SIGTERM to SIGKILL
NOTE_S = 4.0  # for one look at how far it has come
# A line in which a server says that its file is no good, and one that blames the host for it.
UNLOADABLE = re.compile(r"append.?only|\bAOF\b|\bRDB\b|loading DB|manifest", re.IGNORECASE)
OF_THE_HOST = re.compile(
    r"permission denied|no space left|too many open|cannot allocate|address|chdir", re.IGNORECASE
)


class MeshRedis(Hooks):
    """`owner` is told what happens to the server's process, and `went_back` why, in mid-run, the
    state is not what it was: then it is to end whoever uses it, and call `begin_anew`.
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
    ) -> None:
        self._host, self._clock, self._place = host, clock, place
        self._secret, self._budget = secret, budget
        self._owner, self._went_back = owner, went_back
        self.supervisor: Supervisor | None = None
        self.url = embedded.configured_url()
        self.known = Mark()  # as far as it has come by all that is known
        self.why = ""  # why it was not as it had been, when it was let in last
        self._own = not self.url
        self._owner_url = self.url
        self._state: State | None = None  # as its owner
        self._children: list[Child] = []
        self._records: dict[str, RunRecord] = {}  # of the mesh's runs
        self._aof = aof.Follower(place.redis)
        self._files: dict[str, aof.Extent] = {}
        self._log = place.log("redis")
        self._said = 0  # length of its log when it ended last
        self._port = 0  # 0: it is on a socket
        self._floor = 0  # the highest below which no fencing token has been issued since
        self._aside: Path | None = None  # where what it had lies
        self._starting = False  # by `_serve`, which looks at it itself
        self._admitted = False  # the mesh may use it
        self._tasks: list[asyncio.Task[None]] = []

    # -- its life --------------------------------------------------------------------------------

    async def connect(self) -> State:
        """The server answers its owner, whose connection this is; nobody else is let in. A file
        that differs from what was noted, or does not load, has been set aside.
        """
        note = self._noted()
        self._floor = note.floor
        self.known = rollback.joined([note.mark, *self._recorded(note.mark)])
        self._files = dict(note.files)
        if not self._own:
            await guard.wait_until_ready(self.url, self._clock, None, None)
        else:
            if why := self._differs():
                self._set_aside(why)
            await self._serve()
        self._state = await State.open(self._owner_url)
        return self._state

    async def admit(self) -> None:
        """Lets the mesh in, to a state that is no older than what is known of it: an older one has
        been set aside, and `why` says so.
        """
        if not self.why:
            found = await self._held()
            why = rollback.older(found, self.known)
            ours = self._own or bool(found.jobs.keys() & self.known.jobs.keys())
            if why and not found.empty and ours:
                await self.begin_anew(why)
            elif why:
                self._say(why)
        await self._let_in()
        self._tasks = [
            asyncio.create_task(self._note_forever(), name="note how far redis has come")
        ]
        if self._own:
            watching = guard.watch(self._owner_url, self._clock, self._children)
            self._tasks.append(asyncio.create_task(watching, name="watch redis"))

    async def begin_anew(self, why: str) -> None:
        """Sets aside what there is, and begins without it; `readmit` lets the mesh in."""
        self._admitted = False
        if not self._own:
            await self._rename()
            self._say(why)
            return
        await self._stop_server()
        self._set_aside(why)
        await self._serve()

    async def readmit(self) -> None:
        """Lets the mesh in after `begin_anew`."""
        await self._let_in()

    async def stop(self) -> None:
        """Ends the server, if it is our own, and notes how far it has come."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S)
        if self._admitted:
            with contextlib.suppress(MeshError, OSError):
                await self._note(durable=True)
        if self._state is not None:
            await self._state.close()
        await self._stop_server()

    # -- the server ------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Starts our own; one that cannot load its file does so without it."""
        self._starting = True
        try:
            since = self._log_length()
            try:
                await self._start()
            except StateUnavailable:
                await self._stop_server()
                complaint = self._complaint(since)
                if not complaint:
                    raise
                self._set_aside(f"it cannot be loaded: {complaint}")
                await self._start()
        finally:
            self._starting = False

    async def _start(self) -> None:
        server, self._port = guard.server_in(self._place, self._secret, self._port)
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
            looking = asyncio.create_task(self._look_again(child), name="look at redis")
            self._tasks = [task for task in self._tasks if not task.done()] + [looking]

    async def ended(self, child: Child, end: End) -> None:
        since, self._said = self._said, self._log_length()
        if end.asked or self._starting:
            return
        had_been_in, self._admitted = self._admitted, False
        complaint = ""
        if had_been_in:
            with contextlib.suppress(OSError):  # gone: that is seen when it is started again
                self._files = self._aof.look()
        elif end.code > 0:
            complaint = self._complaint(since)
        self._place.redis.mkdir(parents=True, exist_ok=True, mode=0o700)
        await self._owner.ended(child, end)
        if complaint:
            self._went_back(f"it cannot be loaded: {complaint}")

    async def gave_up(self, spec: ChildSpec, why: str) -> None:
        await self._owner.gave_up(spec, why)

    async def escalate(self, name: str) -> None:
        await self._owner.escalate(name)

    async def _look_again(self, child: Child) -> None:
        """Compares a server that was started again with what it was, and lets the mesh in."""
        while child.poll() is None:
            try:
                await guard.wait_until_ready(self._owner_url, self._clock, child, self._log)
                why = self._differs() or rollback.older(await self._held(), self.known)
                if why:
                    self._went_back(why)
                else:
                    await self._let_in()
                return
            except (StateUnavailable, OSError):
                # It loads for long, or does not answer: the watch kills it for that; or the disk is
                # full, so that there is no room for the note.
                await self._clock.sleep(guard.INTERVAL_S)

    def _log_length(self) -> int:
        return self._log.stat().st_size if self._log.is_file() else 0

    def _complaint(self, since: int) -> str:
        """The warning in which the server blames its file; empty when it does not."""
        with self._log.open("rb") as file:
            file.seek(since)
            lines = file.read().decode(errors="replace").splitlines()
        warnings = [line.partition(" # ")[2] for line in lines if " # " in line]
        if any(OF_THE_HOST.search(warning) for warning in warnings):
            return ""
        return next((one for one in reversed(warnings) if UNLOADABLE.search(one)), "").strip()

    # -- how far it has come ---------------------------------------------------------------------

    def _noted(self) -> Note:
        try:
            return notes.read(self._place.redis_note)
        except Damaged as error:
            aside = damage.set_aside(self._place.redis_note, self._place.root)
            print(
                f"the note of how far redis had come is damaged: {error}; it lies in {aside}, and "
                "the records of the runs tell the rest",
                file=sys.stderr,
                flush=True,
            )
            return Note()

    def _recorded(self, mark: Mark) -> list[Mark]:
        """By the records of the runs that the mesh has had."""
        runs = {job: Path(one.run_dir) for job, one in mark.jobs.items() if one.run_dir}
        about = self._place.root / "job.json"
        if about.is_file():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # told when it is read
                runs[str(json.loads(about.read_bytes())["job"])] = self._place.root
        for job, directory in runs.items():
            self._records.setdefault(job, RunRecord(directory, job))
        return [record.look() for record in self._records.values()]

    def _differs(self) -> str:
        try:
            return aof.differs(self._place.redis, self._files)
        except OSError as error:
            return f"its file cannot be read: {error}"

    async def _held(self) -> Mark:
        """What it holds now, to be compared with `known`, which is brought up to date."""
        told = await asyncio.to_thread(self._recorded, self.known)
        self.known = rollback.joined([self.known, *told])
        return await rollback.held(self._owned, self.known)

    @property
    def _owned(self) -> State:
        assert self._state is not None
        return self._state

    async def _let_in(self) -> None:
        """Opens the gate, when nobody can be issued a token that somebody has had already."""
        found = await rollback.held(self._owned, self.known)
        self._floor = rollback.floor_above(found, self.known, Mark(token=self._floor))
        note = Note(self.known, self._files, self._floor)
        notes.write(self._place.redis_note, note, durable=True)
        await rollback.raise_tokens(self._owned, self._floor)
        if self.why:
            await self._tell(self.why)
        if self._own:
            await self._owned.command("ACL", "SETUSER", embedded.USER, "on")
        self._aof = aof.Follower(self._place.redis)  # the server may have cut off half a command
        self._admitted = True

    async def _tell(self, why: str) -> None:
        """An event whose id is above all that were seen, whatever the clock says."""
        then = damage.FATES["redis"].then
        told = damage.fields("redis", self._place.redis, why, then, aside=self._aside)
        ms = max(int(self._clock.wall() * 1000), order(self.known.event)[0] + 1)
        fields = ("kind", damage.EVENT, "fields", json.dumps(told), "extra", "{}")
        await self._owned.command("XADD", EVENTS, f"{ms}-0", *fields)

    async def _note_forever(self) -> None:
        while True:
            await self._clock.sleep(guard.INTERVAL_S)
            if not self._admitted:
                continue
            with contextlib.suppress(StateUnavailable, DeadlineExceeded, OSError):
                why = await self._note()
                if why and self._admitted:
                    self._admitted = False
                    self._went_back(why)

    async def _note(self, durable: bool = False) -> str:
        """Notes how far it has come; why it is older than it was, if it is."""
        async with self._clock.timeout(NOTE_S, "a look at how far Redis has come"):
            found = await rollback.held(self._owned, self.known)
            if why := rollback.older(found, self.known):
                return why
            newest = await events.last_id(self._owned)
            if not self._admitted:
                return ""
            if self._own:
                self._files = await asyncio.to_thread(self._aof.look)
            self.known = rollback.joined([self.known, found, Mark(newest)])
            note = Note(self.known, self._files, self._floor)
            notes.write(self._place.redis_note, note, durable)
        return ""

    # -- what is not used ------------------------------------------------------------------------

    def _set_aside(self, why: str) -> None:
        place = self._place
        self._files, self._aside = {}, None
        if place.redis.is_dir() and any(place.redis.iterdir()):
            self._aside = damage.set_aside(place.redis, place.root)
        self._say(why)

    def _say(self, why: str) -> None:
        self.why = why
        where = f"; its file lies in {self._aside}" if self._aside else ""
        print(f"redis is not as it was: {why}{where}", file=sys.stderr, flush=True)
        print(f"what follows: {damage.FATES['redis'].then}", file=sys.stderr, flush=True)

    async def _rename(self) -> None:
        """The keys of the mesh in a server that is the user's."""
        state, stamp = self._owned, int(self._clock.wall() * 1000)
        for prefix in [MESH, *map(job_prefix, self.known.jobs)]:
            cursor: Any = "0"
            while True:
                cursor, keys = await state.command("SCAN", cursor, "MATCH", f"{prefix}*")
                for key in keys:
                    await state.command("RENAME", key, f"aside:{stamp}:{key}")
                if str(cursor) == "0":
                    break
        print(f"the names of its keys begin with aside:{stamp}: now", file=sys.stderr, flush=True)
