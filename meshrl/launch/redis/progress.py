"""How far the Redis of a mesh has come, by all that is known: the launcher's note, the records of
the runs, and what it has held since. By this it is told whether one is older than it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import Damaged
from meshrl.common.base.files import damage
from meshrl.common.state.redis.client import State
from meshrl.common.state.server import rollback
from meshrl.common.state.server.rollback import RollbackMark
from meshrl.directory.places import MeshPlace
from meshrl.launch.redis import aof, note
from meshrl.launch.redis.note import Note
from meshrl.launch.redis.recorded import RunRecord


class RedisProgress:
    """`known` is as far as it has come. While it is `returning`, the jobs of a Redis that was lost
    are to be put back. `files` are those of the mesh's own, as they were when they were noted last.
    """

    def __init__(self, place: MeshPlace) -> None:
        self._place = place
        self.known = RollbackMark()
        self.returning = False
        self.files: Mapping[str, aof.Extent] = {}
        self._gone: frozenset[str] = frozenset()  # jobs that were lost and are not missed
        self._forgotten: dict[str, int] = {}  # jobs that were deleted since the start, and when
        self._floor = 0  # the highest below which no fencing token has been issued since
        self._records: dict[str, RunRecord] = {}  # of the mesh's runs
        self._writing = threading.Lock()  # one that was given up goes on in its thread
        self._file = aof.Follower(place.redis)
        self.damaged: list[dict[str, Any]] = []  # fields of events that Redis does not have yet

    def recall(self) -> None:
        """What the note and the records of the runs tell. Blocks."""
        told = note.read(self._place.redis_note, self._damaged)
        self.known = rollback.joined([told.mark, *self._recorded(told.mark)])
        self.returning, self.files = told.returning, dict(told.files)
        self._floor, self._gone = told.floor, frozenset(told.gone)

    def _damaged(self, path: Path, error: Damaged) -> None:
        aside, then = damage.set_aside(path, self._place.root), damage.FATES["redis note"]
        found = damage.fields("redis note", path, error.message, then, aside=aside)
        print(damage.sentence(found), file=sys.stderr, flush=True)
        self.damaged.append(found)

    def _recorded(self, mark: RollbackMark) -> list[RollbackMark]:
        """By the records of the runs that the mesh has had."""
        runs = {job: Path(one.run_dir) for job, one in mark.jobs.items() if one.run_dir}
        about = self._place.root / "job.json"
        if about.is_file():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # told when it is read
                runs[str(json.loads(about.read_bytes())["job"])] = self._place.root
        for job, directory in runs.items():
            self._records.setdefault(job, RunRecord(directory, job))
        return [record.look() for record in self._records.values()]

    # -- whether it is what it was ---------------------------------------------------------------

    def differs(self) -> str:
        """Why its file is not what was noted; empty when it is. Blocks."""
        try:
            return aof.differs(self._place.redis, self.files)
        except OSError as error:
            return f"its file cannot be read: {error}"

    async def held(self, state: State) -> RollbackMark:
        """Return what it holds now; `known` is brought up to date with the records of the runs."""
        await self._read_records()
        return await rollback.held(state, self.known)

    async def look_back(self, state: State, records: bool = True) -> tuple[RollbackMark, str]:
        """Return what it holds, and why that is older than it was, if it is.

        It is compared with what was known when it was asked: meanwhile more may have become known,
        of events that it was not asked about. `records`: read the records of the runs before.
        """
        if records:
            await self._read_records()
        known = self.known
        found = await rollback.held(state, known)
        return found, self._older(found, known)

    async def _read_records(self) -> None:
        told = await asyncio.to_thread(self._recorded, self.known)
        self.known = rollback.joined([self.known, *told])

    def _older(self, found: RollbackMark, known: RollbackMark) -> str:
        """Why one that holds `found` is older than what was `known`; empty when it is not."""
        known = rollback.without(known, self._forget(found))
        if self.returning:
            return rollback.older(found, known, known.jobs)
        if again := self._gone & found.jobs.keys():  # as others, perhaps, of the same names
            anew = {job: found.jobs[job] for job in again}
            known = replace(known, jobs={**known.jobs, **anew})
            self.known = replace(self.known, jobs={**self.known.jobs, **anew})
            self._gone -= again
            self._records = {job: told for job, told in self._records.items() if job not in again}
        return rollback.older(found, known, self._gone)

    def _forget(self, found: RollbackMark) -> Collection[str]:
        """Jobs that were deleted, which are returned, are missed no more. Each deletion counts
        once: of another job that has the name since, all is known anew.
        """
        gone = {
            job: at_ms
            for job, at_ms in found.deleted.items()
            if job not in found.jobs or self._forgotten.get(job) != at_ms
        }
        if gone:
            self.known = rollback.without(self.known, gone)
            self._forgotten |= gone
            self._records = {job: told for job, told in self._records.items() if job not in gone}
        return gone.keys()

    # -- what is known from now on ---------------------------------------------------------------

    def raised(self, found: RollbackMark) -> int:
        """The floor that fencing tokens of one that holds `found` are to be raised to."""
        if not self.returning:
            self.known = rollback.joined([self.known, found])
        self._floor = rollback.floor_above(found, self.known, RollbackMark(token=self._floor))
        return self._floor

    def have_returned(self, found: RollbackMark) -> None:
        """The jobs are back that go on: those that are not there now are not missed any more."""
        self._gone = frozenset(self.known.jobs.keys() - found.jobs.keys())
        self.known = rollback.joined([self.known, found])
        self.returning = False

    def follow_anew(self) -> None:
        """Its file may have been cut or made again."""
        self._file = aof.Follower(self._place.redis)

    def look(self) -> Mapping[str, aof.Extent]:
        return self._file.look()

    def come_to(self, found: RollbackMark, newest: str, files: Mapping[str, aof.Extent]) -> None:
        """It holds `found`, its newest event is `newest`, and its files were as `look` said."""
        if aof.holds(self._place.redis, files):
            self.files = files
        self.known = rollback.joined([self.known, found, RollbackMark(newest)])

    def write(self) -> None:
        """Notes all of it. Blocks. StorageFull."""
        gone = tuple(sorted(self._gone))
        told = Note(self.known, self.files, self._floor, gone, self.returning)
        with self._writing:
            note.write(self._place.redis_note, told)
