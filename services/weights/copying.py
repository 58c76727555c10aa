"""Copies what another head would go on from to the mesh's durable URL: of each job its bundle, and
each checkpoint that a commit has named. In the background: nothing waits for it.

Redis is looked at for what is new; the URL is asked only when something is.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from meshrl.common.base.errors import Damaged, MeshError, NotFound, StateUnavailable
from meshrl.common.base.files.at_url import without_secrets
from meshrl.common.job.bundle import bundle_files
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.records.checkpoints import manifest_of
from meshrl.common.records.durable_copy import Durable, DurableCopy, TakenOver, of_job
from meshrl.common.state import events, jobs
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.lifecycle import deleting
from meshrl.common.state.pool.store import store as pool

T = TypeVar("T")
LOOK_S = 2.0  # between two looks for commits
AGAIN_S = 5.0  # after an error; twice as long after each further one
LATEST_AGAIN_S = 60.0
OLD_S = 600.0  # between looks for jobs that ended long ago
DAY_S = 86_400.0
COPY_S = DAY_S  # of one job's files; those that are there by then are not copied again
SILENT_S = 900.0  # without a file that was copied, until that is told: one may have many GB
TOO_SLOW = 3  # checkpoints in a row that were gone before they were copied, until that is told


@dataclass(frozen=True)
class _Standing:
    """What is there of a job, as `standing.json` tells it."""

    phase: str = ""
    lineage: int = -1
    checkpoint: str = ""
    document: str = ""  # digest

    @classmethod
    def of(cls, row: JobRow) -> _Standing:
        document = hashlib.sha256(json.dumps(row.document).encode()).hexdigest()
        return cls(row.phase.value, row.lineage, row.checkpoint, document)


class Copying:
    """Does nothing in a mesh that keeps no copy."""

    def __init__(self, mesh: Mesh) -> None:
        """Damaged when the file that names the URL is."""
        self._mesh = mesh
        self._durable = Durable.of(Path(mesh.settings.run_root) / "mesh")
        self._there: dict[str, _Standing] = {}
        self._missed: dict[str, int] = {}  # checkpoints in a row that came too late, by job
        self._unknown: set[str] = set()  # jobs of the copy that Redis did not know at the last look
        self._looked_for_old = float("-inf")
        self.checkpoints = 0  # copied by this process
        self.bytes = 0
        self.errors = 0
        self.trouble = ""  # why nothing is copied at the moment

    def stats(self) -> dict[str, Any]:
        if self._durable is None:
            return {}
        names = "checkpoints", "bytes", "errors", "trouble"
        return {f"durable_{name}": getattr(self, name) for name in names}

    async def forever(self) -> None:
        """Returns when there is no copy to keep, or another mesh has taken it over."""
        clock, again_s = self._mesh.clock, AGAIN_S
        if self._durable is None:
            return
        copy: DurableCopy | None = None
        while True:
            pause_s = LOOK_S
            try:
                copy = copy or await self._claimed(self._durable)
                await self._look(copy)
                self.trouble, again_s = "", AGAIN_S
            except TakenOver as error:
                url = without_secrets(self._durable.url)
                await self._tell(error, "durable_taken_over", {"url": url})
                return
            except StateUnavailable:
                pass  # nobody commits anything meanwhile
            except MeshError as error:
                self.errors += 1
                copy, pause_s = None, again_s
                again_s = min(2 * again_s, LATEST_AGAIN_S)
                if str(error) != self.trouble:  # once for each error
                    await self._tell(error, "durable_failed", {"error": str(error)})
            await clock.sleep(pause_s)

    async def _tell(self, error: MeshError, kind: str, fields: dict[str, Any]) -> None:
        self.trouble = str(error)
        self._mesh.telemetry.log.error("durable copy", error=str(error))
        await patiently_tell(self._mesh, kind, fields)

    async def _claimed(self, durable: Durable) -> DurableCopy:
        copy = await self._run(DurableCopy, durable.url, durable.owner)
        if await self._run(copy.claim):
            self._there.clear()  # whatever was there
        for job in await self._run(copy.jobs):
            if job not in self._there:
                self._there[job] = (await self._run(_standing, copy, job))[0]
        return copy

    async def _look(self, copy: DurableCopy) -> None:
        rows, first = await jobs.jobs(self._mesh.state), None
        for row in rows:
            try:
                await self._job(copy, row)
            except TakenOver:
                raise
            except MeshError as error:  # what is wrong with one job keeps no other from its copy
                missed = self._missed[row.id] = self._missed.get(row.id, 0) + 1
                moved_on = True  # to another checkpoint: the files of this one may be gone
                with suppress(NotFound):
                    now = await jobs.job(self._mesh.state, row.id)
                    moved_on = now.checkpoint != row.checkpoint
                if missed >= TOO_SLOW or not moved_on:
                    first = first or error
        await self._remove_old(copy, self._there.keys() - {row.id for row in rows})
        if first is not None:
            raise first

    async def _job(self, copy: DurableCopy, row: JobRow) -> None:
        wanted, there = _Standing.of(row), self._there.get(row.id, _Standing())
        if there == wanted:
            return
        self._there[row.id] = there  # of a copy that breaks off, too
        if there.document != wanted.document:
            await self._run(self._bundle, copy, row)
        if row.checkpoint and there.checkpoint != row.checkpoint:
            began = self._mesh.clock.monotonic()
            moved = await self._run(self._checkpoint, copy, row)
            self.checkpoints += 1
            took = {"bytes": moved, "took_s": round(self._mesh.clock.monotonic() - began, 3)}
            about = {"job": row.id, "checkpoint": row.checkpoint, "url": copy.shown}
            await events.append(self._mesh.state, "durable_copied", about | took)
        told = asdict(wanted) | {"at": self._mesh.clock.wall()}
        await self._run(copy.write, f"{of_job(row.id)}/standing.json", told)
        self._there[row.id] = wanted
        self._missed.pop(row.id, None)

    def _bundle(self, copy: DurableCopy, row: JobRow) -> None:
        if not row.checkpoint:  # what is there is of an earlier job of its name
            self._keep(copy, row, 0)
        there, directory = copy.files(row.id), Path(row.document["bundle"]["dir"])
        for name, (_, digest) in bundle_files.of(row.document).items():
            if digest not in there:
                self._put(copy, row.id, str(digest), directory / name)
        copy.write(f"{of_job(row.id)}/job.json", {"job": row.id, "document": row.document})

    def _checkpoint(self, copy: DurableCopy, row: JobRow) -> int:
        before, home = self.bytes, Path(row.run_dir) / "checkpoints"
        held = manifest_of(home / f"{row.checkpoint}.json")
        there = copy.files(row.id)
        for name, digest in held["files"].items():
            if digest not in there:
                self._put(copy, row.id, digest, home / row.checkpoint / name)
        copy.write(f"{of_job(row.id)}/checkpoints/{row.checkpoint}.json", held)
        self._keep(copy, row, max(1, int(row.document["training"]["keep_checkpoints"])))
        return self.bytes - before

    def _keep(self, copy: DurableCopy, row: JobRow, most: int) -> None:
        """Removes all but the `most` last checkpoints of the job, and files that are of none. The
        one that was committed last stays, though a listing may not tell of it yet.
        """
        place, names = f"{of_job(row.id)}/checkpoints", copy.checkpoints(row.id)
        # None is newer than that one, but one that no lineage goes on from.
        kept = [row.checkpoint, *(name for name in names if name < row.checkpoint)][:most]
        gone = [name for name in names if name not in kept]
        if not gone:
            return
        needed = {str(digest) for _, digest in bundle_files.of(row.document).values()}
        for name in kept:
            needed |= set(copy.read(f"{place}/{name}.json")["files"].values())
        copy.remove(f"{place}/{name}.json" for name in gone)
        unneeded = sorted(copy.files(row.id) - needed)
        copy.remove(f"{of_job(row.id)}/files/{digest}" for digest in unneeded)

    def _put(self, copy: DurableCopy, job: str, digest: str, path: Path) -> None:
        try:
            size = path.stat().st_size
        except FileNotFoundError:  # also of a checkpoint that goes at this moment
            raise NotFound(f"{path} is missing") from None
        copy.put(job, digest, path)
        self.bytes += size

    # -- what goes -------------------------------------------------------------------------------

    async def _remove_old(self, copy: DurableCopy, unknown: set[str]) -> None:
        """Removes jobs that the mesh has deleted, and those that ended before it took the copy
        over, once they are as old as those that it deletes by itself.
        """
        now, state = self._mesh.clock.monotonic(), self._mesh.state
        if unknown == self._unknown and now - self._looked_for_old < OLD_S:
            return
        if unknown:
            deleted = set(await deleting.names(state))
            keep_s = (await pool.settings(state)).keep_days * DAY_S
            for job in sorted(unknown):
                standing, at = await self._run(_standing, copy, job)
                old = standing.phase in jobs.ENDED and self._mesh.clock.wall() - at > keep_s
                if job in deleted or old:
                    await self._run(copy.remove_job, job)
                    del self._there[job]
                    unknown = unknown - {job}
        self._unknown, self._looked_for_old = unknown, now

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        silence = asyncio.create_task(self._tell_of_silence(), name="a silent copy")
        try:
            return await self._mesh.host.run_blocking(work, *args, deadline_s=COPY_S)
        finally:
            silence.cancel()

    async def _tell_of_silence(self) -> None:
        """Says so when no file has been copied for long: a URL that hangs is an error to nobody."""
        seen = -1
        while seen != self.bytes:
            seen = self.bytes
            await self._mesh.clock.sleep(SILENT_S)
        error = MeshError(
            f"nothing has been copied in {SILENT_S / 60:g} minutes, and no error has come",
            where=without_secrets(self._durable.url if self._durable else ""),
            fix="See that the URL answers from this host, and how long a large file takes to it",
        )
        if str(error) != self.trouble:
            await self._tell(error, "durable_failed", {"error": str(error)})


async def patiently_tell(mesh: Mesh, kind: str, fields: dict[str, Any]) -> None:
    """Adds an event, once, when Redis takes it."""
    op = uuid.uuid4().hex
    await patiently(mesh.clock, partial(events.append, mesh.state, kind, fields, op))


def _standing(copy: DurableCopy, job: str) -> tuple[_Standing, float]:
    try:
        told = copy.read(f"{of_job(job)}/standing.json")
        at = float(told.pop("at"))
        return replace(_Standing(), **told), at
    except (Damaged, NotFound, KeyError, TypeError):
        return _Standing(), 0.0
