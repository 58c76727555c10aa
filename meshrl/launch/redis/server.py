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
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from redis.exceptions import ResponseError

from common.clock import Clock
from common.errors import Damaged, DeadlineExceeded, MeshError, StateUnavailable, StorageFull
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
ROOM_S = 60.0  # that a start waits for room on the disk
# A line in which a server says that its file is no good, and one that blames the host for it.
UNLOADABLE = re.compile(r"append.?only|\bAOF\b|\bRDB\b|loading DB|manifest", re.IGNORECASE)
OF_THE_HOST = re.compile(
    r"permission denied|no space left|too many open|cannot allocate|address|chdir", re.IGNORECASE
)


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
    ) -> None:
        self._host, self._clock, self._place = host, clock, place
        self._secret, self._budget = secret, budget
        self._owner, self._went_back = owner, went_back
        self.supervisor: Supervisor | None = None
        self.url = embedded.configured_url()
        self.known = Mark()  # as far as it has come by all that is known
        self.why = ""  # why it was not as it had been, when it was let in last
        self.returning = False
        self._gone: frozenset[str] = frozenset()  # jobs that were lost and are not missed
        self._untold = False  # the mesh has no event yet that tells `why`
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
        self._floor, self.returning = note.floor, note.returning
        self._gone = frozenset(note.gone)
        told = await asyncio.to_thread(self._recorded, note.mark)
        self.known = rollback.joined([note.mark, *told])
        self._files = dict(note.files)
        if not self._own:
            await guard.wait_until_ready(self.url, self._clock, None, None)
        else:
            if why := await asyncio.to_thread(self._differs):
                await self._set_aside(why, ROOM_S)
            await self._serve()
        self._state = await State.open(self._owner_url)
        return self._state

    async def admit(self) -> None:
        """Lets the mesh in, to a state that is no older than what is known of it: an older one has
        been set aside, and `why` says so.
        """
        if not self.why:
            found = await self._held()
            why = self._older(found)
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

    async def begin_anew(self, why: str, room_s: float | None = None) -> None:
        """Sets aside what there is, and begins without it; `readmit` lets the mesh in. Waits for
        room on the disk, for `room_s` at most: StorageFull.
        """
        self._admitted = False
        if not self._own:
            await self._rename()
            self._say(why)
            return
        await self._stop_server()
        await self._set_aside(why, room_s)
        await self._serve()

    async def readmit(self) -> None:
        """Lets the mesh in after `begin_anew`."""
        await self._let_in()

    async def returned(self) -> None:
        """The jobs are back that go on: those that are not there now are not missed any more."""
        found = await self._held()
        self._gone = frozenset(self.known.jobs.keys() - found.jobs.keys())
        self.returning = False
        await self._with_room(self._write_note, None)

    async def stop(self) -> None:
        """Ends the server, if it is our own, and notes how far it has come."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S)
        if self._admitted and not self.returning:
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
                await self._set_aside(f"it cannot be loaded: {complaint}", ROOM_S)
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
            looking = self._task("look at redis", self._look_again(child))
            self._tasks = [task for task in self._tasks if not task.done()] + [looking]

    async def ended(self, child: Child, end: End) -> None:
        since, self._said = self._said, self._log_length()
        if end.asked or self._starting:
            return
        had_been_in, self._admitted = self._admitted, False
        complaint = ""
        if not had_been_in and end.code > 0:
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
                why = await asyncio.to_thread(self._differs) or self._older(await self._held())
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

    def _older(self, found: Mark) -> str:
        if self.returning:
            return rollback.older(found, self.known, self.known.jobs)
        if again := self._gone & found.jobs.keys():  # as others, perhaps, of the same names
            jobs = {**self.known.jobs, **{job: found.jobs[job] for job in again}}
            self.known, self._gone = replace(self.known, jobs=jobs), self._gone - again
            self._records = {job: told for job, told in self._records.items() if job not in again}
        return rollback.older(found, self.known, self._gone)

    @property
    def _owned(self) -> State:
        assert self._state is not None
        return self._state

    async def _let_in(self, room_s: float | None = None) -> None:
        """Opens the gate, when nobody can be issued a token that somebody has had already."""
        found = await rollback.held(self._owned, self.known)
        self._floor = rollback.floor_above(found, self.known, Mark(token=self._floor))
        await self._with_room(self._write_note, room_s)
        await rollback.raise_tokens(self._owned, self._floor)
        if self._untold:
            await self._tell(self.why)
            self._untold = False
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
            if not self._admitted or self.returning:
                continue
            with contextlib.suppress(StateUnavailable, DeadlineExceeded, StorageFull, OSError):
                why = await self._note()
                if why and self._admitted:
                    self._admitted = False
                    self._went_back(why)

    async def _note(self, durable: bool = False) -> str:
        """Notes how far it has come; why it is older than it was, if it is."""
        async with self._clock.timeout(NOTE_S, "a look at how far Redis has come"):
            found = await rollback.held(self._owned, self.known)
            if why := self._older(found):
                return why
            files = await asyncio.to_thread(self._aof.look) if self._own else {}
            # It answers when what it was writing while it was looked at is there as a whole, or was
            # taken back: half a command, which is cut off when it is loaded, is not noted.
            newest = await events.last_id(self._owned)
            if not self._admitted:
                return ""
            if aof.holds(self._place.redis, files):
                self._files = files
            self.known = rollback.joined([self.known, found, Mark(newest)])
            self._write_note(durable)
        return ""

    def _write_note(self, durable: bool = True) -> None:
        gone = tuple(sorted(self._gone))
        note = Note(self.known, self._files, self._floor, gone, self.returning)
        notes.write(self._place.redis_note, note, durable)

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
        self._files, self._aside = {}, None
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
        self.why, self.returning, self._untold = why, True, True
        where = f"; its file lies in {self._aside}" if self._aside else ""
        print(f"redis is not as it was: {why}{where}", file=sys.stderr, flush=True)
        print(f"what follows: {damage.FATES['redis'].then}", file=sys.stderr, flush=True)

    async def _rename(self) -> None:
        """The keys of the mesh in a server that is the user's; those that say whose they are come
        last, so that it is done again when it is cut off.
        """
        state, stamp = self._owned, int(self._clock.wall() * 1000)
        for prefix in [*map(job_prefix, self.known.jobs), MESH]:
            cursor: Any = "0"
            while True:
                cursor, keys = await state.command("SCAN", cursor, "MATCH", f"{prefix}*")
                for key in keys:
                    try:
                        await state.command("RENAME", key, f"aside:{stamp}:{key}")
                    except ResponseError as error:
                        if "no such key" not in str(error):  # it has expired since
                            raise
                if str(cursor) == "0":
                    break
        print(f"the names of its keys begin with aside:{stamp}: now", file=sys.stderr, flush=True)
