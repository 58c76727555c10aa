"""Records a run while it runs: events.jsonl, metrics.jsonl, and what its processes used.

It only ever appends what is not there yet, so a run that was cut off and resumed has one record.
What it finds damaged it sets aside and makes again, and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from meshrl.common.base.errors import (
    Damaged,
    DeadlineExceeded,
    HistoryLost,
    NotFound,
    StateUnavailable,
    StorageFull,
)
from meshrl.common.base.files import damage
from meshrl.common.base.files.at_url import is_url
from meshrl.common.mesh.process.ends.failure import NO_ROOM
from meshrl.common.records.checkpoints import all_checkpoints, is_first
from meshrl.common.state import events, groups, jobs, readers, steps
from meshrl.directory import job_file
from meshrl.directory.kept import KeptDocument
from meshrl.directory.places import read_if_whole, read_json, write_json
from meshrl.view import storage
from meshrl.view.history.run_snapshot import (
    RunHistory,
    RunReading,
    RunSnapshot,
    evaluations_of,
    snapshot,
)
from meshrl.view.mesh import prefixes
from meshrl.view.mesh.snapshot import MeshSnapshot
from meshrl.view.recording.looking import RunningMesh, SharedSnapshot
from meshrl.view.recording.outlet import Outlet
from meshrl.view.recording.recorded import (
    EVENTS,
    MARK,
    METRICS,
    Recorded,
    RecordMark,
    evaluated,
    last_standing_step,
    last_step,
)
from meshrl.view.recording.room import RoomForWrites
from meshrl.view.recording.usage import Tally
from meshrl.view.trackers.trackers import TRACKING, Trackers

T = TypeVar("T")

LOOK_S = 0.5
ANSWER_S = 4.0  # for one look; Redis is restarted after 8 s of silence
NOTE_S = 5.0  # between notes of how far it has read: what it has not noted is not trimmed


class Recorder:
    """One job of a `mesh`, recorded into its run directory. Recorders of one
    mesh share their `looks` at it.

    OSError when the directory is away or full, Damaged when `job.json` cannot be read.
    """

    def __init__(
        self, mesh: RunningMesh, job: str, run_dir: Path, looks: SharedSnapshot | None = None
    ) -> None:
        self.mesh, self.job, self.run_dir = mesh, job, run_dir
        self._looks = looks or SharedSnapshot(mesh)
        self.shot: RunSnapshot | None = None
        self._untold: list[dict[str, Any]] = []  # damage that Redis does not have as an event yet
        self._job_file = KeptDocument("job", run_dir / job_file.NAME, run_dir, job, job_file.read)
        # What is recorded already; nothing is written.
        self.recorded = Recorded(run_dir, job)
        self.tally = self._unless_damaged("usage", "usage.json", Tally.read) or Tally()
        self.recorded.see(
            self._unless_damaged("mark", MARK, lambda path: RecordMark.of(path.parent))
        )
        self._evaluated = evaluated(self.recorded.known, job)
        self._seen = self.recorded.last  # the last event of the stream
        self._unshown = True  # what is recorded, until this session's trackers have it
        shown = self._unless_damaged("tracking", TRACKING, read_json)
        host, clock = mesh.host, mesh.clock
        self.trackers = Trackers.of(run_dir, self.held, shown or {}, host, clock)
        out = str(self.held["document"].get("out", ""))
        self._outlet = Outlet(out, run_dir, host, clock) if is_url(out) else None
        self._committed = ""  # the last checkpoint
        self._in_the_way = ""  # of the outlet, as it was told last
        self._history = RunHistory()
        self._clock = mesh.clock
        self._started, self._began_ms = self._clock.monotonic(), int(1000 * self._clock.wall())
        self._tallied = float("-inf")  # of which reading of the processes it is
        self._reader = readers.recorder_of(job)
        self._noted: float | None = None  # when it said how far it is; None: it is not on record
        self._silent_since: float | None = None
        self._full = ""  # which disk is full
        self._full_since: float | None = None
        self._refused = ""  # what the last look could not write

    def _unless_damaged(self, kind: str, name: str, read: Callable[[Path], T]) -> T | None:
        """What a file holds; None when there is none, or when it is damaged, and set aside."""
        path = self.run_dir / name
        if not path.exists():
            return None
        try:
            return read(path)
        except (Damaged, KeyError, TypeError, ValueError, AttributeError) as error:
            why = error.message if isinstance(error, Damaged) else f"it is no {kind}: {error!r}"
            aside = damage.set_aside(path, self.run_dir)
            then = damage.FATES[kind]
            self._untold.append(damage.fields(kind, path, why, then, job=self.job, aside=aside))
            return None

    @property
    def held(self) -> dict[str, Any]:
        """What `job.json` says."""
        return self._job_file.content

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the last steps, a thousand at least where there are as many."""
        return self.recorded.rows

    @property
    def wall_s(self) -> float:
        """Seconds of wall time of this session and those before it."""
        return self.tally.wall_s + self._clock.monotonic() - self._started

    async def look(self) -> RunSnapshot | None:
        """The run now; the last snapshot, marked, while Redis does not answer; None before any."""
        now, refused = self._clock.monotonic(), ""
        try:
            await self._mend()
            async with self._clock.timeout(ANSWER_S, "a look at the run"):
                self.shot = await self._read()
            self._silent_since = None
        except (StateUnavailable, DeadlineExceeded):
            self._silent_since = self._silent_since or now
            silent = f"redis does not answer for {now - self._silent_since:.0f} s"
            if self.shot is not None:
                self.shot = replace(self.shot, trouble=silent, elapsed_s=self.wall_s)
        except NotFound:  # Redis went back, and has not been given its jobs again
            if not self.mesh.going_back:
                raise
        except StorageFull as error:
            refused = storage.needed(error, self.run_dir)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            refused = storage.told(self.run_dir)
        self._refused = refused
        await self._watch_room(refused)
        return self.shot

    async def _watch_room(self, refused: str) -> None:
        """Shows a disk that is full while it is, and puts on record that it was."""
        now = self._clock.monotonic()
        text = refused or storage.full([self.run_dir, self.mesh.place.root])
        if text:
            self._full, self._full_since = text, self._full_since or now
        elif self._full_since is not None:
            fields = {"job": self.job, "why": self._full, "seconds": now - self._full_since}
            self._full, self._full_since = "", None
            with contextlib.suppress(StateUnavailable, DeadlineExceeded):
                async with self._clock.timeout(ANSWER_S, "a note in the event stream"):
                    await events.append(self.mesh.state, "storage_full", fields)
        if self.shot is not None:
            self.shot = replace(self.shot, full=self._full or self.shot.full)

    async def close(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """A last look, when the services have ended: what is in flight now stays so. Waits for room
        on a full disk, until it is `given_up`: the next session records what is left.
        """
        room = RoomForWrites(self._clock, given_up)
        await room.write(lambda: self._count_cpu(force=True))
        await self.look()
        while self._refused and not room.over(self._refused):
            await room.wait()
            await self.look()
        with contextlib.suppress(StateUnavailable, DeadlineExceeded):
            async with self._clock.timeout(ANSWER_S, "a count of what is in flight"):
                counted = asdict(await groups.in_flight(self.mesh.state, self.job))
            mark = {"event": self.recorded.last, "events": self.recorded.lines} | counted
            if await room.write(lambda: write_json(self.run_dir / MARK, mark)):
                async with self._clock.timeout(ANSWER_S, "a note of where the record ends"):
                    await self._note(left=self.shot is not None and self.shot.over)
        await self.trackers.close()

    @property
    def out(self) -> str:
        """The URL that the job names in `out`, as it may be shown; empty: it names none."""
        return self._outlet.shown if self._outlet is not None else ""

    async def delivered(self, stop: asyncio.Event) -> str:
        """Copies the rest of the run to the URL that its job names in `out`, if it does; why not
        all of it is there. Once `stop` is set there is little time left.
        """
        return await self._outlet.close(self._committed, stop) if self._outlet is not None else ""

    async def _let_out(self) -> None:
        if self._outlet is None:
            return
        self._outlet.look(self._committed)
        before, self._in_the_way = self._in_the_way, self._outlet.trouble
        if self._in_the_way not in ("", before):
            told = {"job": self.job, "error": self._in_the_way}
            await events.append(self.mesh.state, "out_failed", told)

    async def abandon(self) -> None:
        """Leaves the record as it is: nothing can be written there."""
        if self._outlet is not None:
            self._outlet.abandon()
        with contextlib.suppress(OSError):
            await self.trackers.close()

    async def _read(self) -> RunSnapshot:
        if self._unshown:
            self._unshown = False
            if self.trackers.trackers:
                self.trackers.offer(list(self.recorded.every_row()), self._evaluated)
        state = self.mesh.state
        row = await jobs.job(state, self.job)
        new_events = await self._new_events()
        self._abandon(row.steps_done, new_events)
        new_rows = await steps.step_rows(state, self.job, since=last_step(self.rows))
        look = await self._looks.look()
        self._keep(new_rows, new_events)
        if self._clock.monotonic() - (self._noted or 0.0) >= NOTE_S:
            await self._note()
        self._count(look)
        # Only the first checkpoint says whether the warm start came from the cache.
        first = next(iter(all_checkpoints(self.run_dir)), None)
        if not self.tally.warm_start_cached and first is not None and is_first(first):
            account = read_if_whole(first).get("account", {})
            self.tally.warm_start_cached = bool(account.get("warm_start_cached", False))
        self._committed = row.checkpoint
        await self._let_out()
        reading = RunReading(
            at=self.wall_s,
            job=row,
            rows=self.rows,
            mesh=look,
            evaluations=evaluations_of(self._evaluated),
            events=new_events,
        )
        return snapshot(reading, self._history)

    async def _mend(self) -> None:
        """Makes again what is damaged or was changed by others, and puts that on record.

        How long that takes depends on the files, so no look's deadline is over it; each command to
        Redis has its own.
        """
        state, host = self.mesh.state, self.mesh.host
        self.recorded.look()
        if EVENTS in self.recorded.wrong:
            self._untold.append(await self.recorded.mend_events(state, host))
            self._evaluated = evaluated(self.recorded.known, self.job)
            self._seen = max(self._seen, self.recorded.last, key=events.order)
        if METRICS in self.recorded.wrong:
            self._untold.append(await self.recorded.mend_metrics(state, host))
        if (told := self._job_file.look()) is not None:
            self._untold.append(told)
        while self._untold:
            await events.append(state, damage.EVENT, self._untold[0])
            del self._untold[0]

    async def _new_events(self) -> list[events.Event]:
        """What has happened since the last look. Where events are gone it says so, on record."""
        state, missed = self.mesh.state, list[events.Event]()
        if self._noted is None:
            missed = await self._join()
        try:
            return missed + await events.read_all(state, self._seen)
        except HistoryLost as lost:
            where = str(self.run_dir)
            self._seen = await readers.history_lost(state, self.job, where, lost)
            return missed + await events.read_all(state, self._seen)

    async def _join(self) -> list[events.Event]:
        """Put the recorder on record as a reader; return the damage found between two sessions.

        Such damage, as to Redis' own file, precedes the event by which the job goes on, from which
        recorders read.
        """
        state, recorded = self.mesh.state, self._seen
        self._seen = await readers.join(state, self._reader, recorded, str(self.run_dir))
        self._noted = self._clock.monotonic()
        if events.order(recorded) == (0, 0):  # the run has no earlier session
            return []
        between = await events.left_between(state, recorded, self._seen)
        return [event for event in between if event.kind == damage.EVENT]

    async def _note(self, *, left: bool = False) -> None:
        """Says up to where events are recorded, so that no more of them need be kept in Redis."""
        state, where, step = self.mesh.state, str(self.run_dir), last_step(self.rows)
        await readers.note(state, self._reader, self._seen, where, step=step, left=left)
        self._noted = self._clock.monotonic()

    def _abandon(self, steps_done: int, new: list[events.Event]) -> None:
        """Cuts off the rows of steps that a new lineage has left behind."""
        last = last_standing_step(steps_done, new, self.job)
        if last < last_step(self.rows):
            self.recorded.keep_rows(last)
            self.trackers.rewind(last)

    def _keep(self, rows: list[dict[str, Any]], new: list[events.Event]) -> None:
        if rows:
            self.recorded.add_rows(rows)
            self.trackers.offer(rows, [])
        if mine := self.recorded.mine(new):
            self.recorded.add_events(mine)
            self._seen = mine[-1].id
            self._evaluated = evaluated([*self._evaluated, *mine], self.job)
            self.trackers.offer([], evaluated(mine, self.job))
        if new:
            self._seen = new[-1].id

    def _count(self, look: MeshSnapshot) -> None:
        """Counts tokens, accelerators and CPU time of the job."""
        for entry in look.entries:
            tokens = entry.stats.get("tokens")
            if tokens and self._looks.owners.get(entry.name, self.job) == self.job:
                self.tally.see_tokens(entry.name, entry.incarnation, float(tokens))
                if found := prefixes.figures(entry.stats):
                    self.tally.prefixes[entry.incarnation] = found
        self.tally.see_workers(look, self.job, self._looks.at)
        self._count_cpu()

    def _count_cpu(self, force: bool = False) -> None:
        """What the mesh was started for is charged from its start; else from here on."""
        at = self._looks.measure(force)
        if at == self._tallied:
            return
        self._tallied = at
        among = sum(row.id != self.job for row in self._looks.last.live_jobs) + 1
        whole = self.mesh.place.root == self.run_dir
        owners, used = self._looks.owners, self._looks.used
        self.tally.see_processes(used, owners, self.job, among, whole)
        self.tally.see_session(self._began_ms, int(1000 * self._clock.wall()))
        self.tally.write(self.run_dir / "usage.json", self._clock.monotonic() - self._started)
