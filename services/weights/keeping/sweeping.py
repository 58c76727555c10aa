"""Sweeps the store: deletes what it knows to be dead after a grace, and what nobody ever named once
no writer can be about to.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from meshrl.common.api.transfer.bulk import GROUPS, PUBLISHED, WEIGHTS
from meshrl.common.api.weights import Manifest
from meshrl.common.base.errors import BadMessage, Damaged, MeshError, NotFound, Refused
from meshrl.common.base.files import damage
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.records.checkpoints import manifest_of, newest_due, set_aside
from meshrl.common.state import events, groups, jobs, steps
from meshrl.common.state.lifecycle import deleting
from meshrl.common.weights.bulk.port import ChunkStore
from meshrl.common.weights.chunks.chunks import DamageEvent
from meshrl.services.weights.deltas import DeltaSets
from meshrl.services.weights.keeping.pins import all_pins
from meshrl.services.weights.keeping.quotas import Quotas
from meshrl.services.weights.keeping.records import IO_S, JobRecords
from meshrl.services.weights.keeping.retention import (
    Number,
    awaited,
    due_of,
    expired,
    lasting,
    pinned,
)

T = TypeVar("T")
SWEEP_S = 5.0
GRACE_S = 60.0  # between its successor's commit and a version's end: engines may be fetching it
# Bytes come before what names them: the chunks of a version before its manifest, a group before its
# row. In between their writer waits for the store or for Redis, an hour each time (`patiently`).
ORPHAN_S = 4 * 3600.0
ORPHANS_S = 60.0  # between looks at all files
REMOVAL_S = 3600.0  # deadline for directories of checkpoints, of any size
GONE = "expired-"  # begins the name of a directory that is being removed


class Untold:
    """Events in the order in which the damage was found. Nobody finds it a second time."""

    def __init__(self, mesh: Mesh, waiting: deque[DamageEvent]) -> None:
        """`waiting`: to which those who find damage add, too."""
        self._mesh, self._waiting = mesh, waiting
        self._telling = asyncio.Lock()

    def add(self, told: dict[str, Any], op: str = "") -> None:
        """Has it told with the next `tell_all`, which a sweep does every few seconds. From any
        thread: whoever moves a file adds it in the same breath, and no caller's end comes between.
        """
        self._waiting.append((told, op or uuid.uuid4().hex))

    async def tell(self, told: dict[str, Any]) -> None:
        """Tells it now, or with a later `tell_all`."""
        self.add(told)
        await self.tell_all()

    async def tell_all(self) -> None:
        """Tells what it can; while Redis takes none, the rest waits."""
        async with self._telling:
            while self._waiting:
                try:
                    await events.append(self._mesh.state, damage.EVENT, *self._waiting[0])
                except MeshError as error:
                    self._mesh.telemetry.log.warning("damage is untold", error=str(error))
                    return
                self._waiting.popleft()


@dataclass(frozen=True)
class SweepPace:
    """How often a store is swept, and how soon what it needs no more goes."""

    sweep_s: float = SWEEP_S
    grace_s: float = GRACE_S


@dataclass
class _Need:
    manifests: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    leftovers: list[Path] = field(default_factory=list)  # files of checkpoints that are not needed


class Sweeper:
    """`manifest` reads one; of those that are gone none stays in `manifests`."""

    def __init__(
        self,
        mesh: Mesh,
        chunks: ChunkStore,
        records: JobRecords,
        untold: Untold,
        deltas: DeltaSets,
        manifest: Callable[[str], Awaitable[Manifest]],
        manifests: dict[str, Manifest],
        pace: SweepPace,
    ) -> None:
        self._mesh, self._chunks, self._records = mesh, chunks, records
        self._pace = pace
        self._untold, self._manifest, self._manifests = untold, manifest, manifests
        self._deltas = deltas
        self._named: set[str] = set()  # by a version or a group, at the last sweep
        # Found so when, and last written when, by space.
        self._dead: dict[str, dict[str, tuple[float, int]]] = {WEIGHTS: {}, GROUPS: {}}
        self._known: set[str] = set()  # jobs of which Redis has told
        self._unreadable: dict[str, float] = {}  # what was complained of, and when
        self._orphans_at = 0.0
        self._removal: asyncio.Task[None] | None = None
        self._sweeping = asyncio.Lock()  # one at a time: what a quota is held to asks for one, too
        self.sweeps = 0  # since the start
        self.quotas = Quotas(mesh, records, manifest, self.sweep)

    async def forever(self) -> None:
        try:
            while True:
                await self._mesh.clock.sleep(self._pace.sweep_s)
                try:
                    await self.sweep()
                except (MeshError, OSError) as error:
                    self._mesh.telemetry.log.warning("sweep", error=str(error))
        finally:
            if self._removal is not None:
                self._removal.cancel()

    async def sweep(self) -> None:
        async with self._sweeping:
            self.sweeps += 1
            rows = await self._swept()
            await self.quotas.look(rows)

    async def _swept(self) -> list[jobs.JobRow]:
        await self._untold.tell_all()
        rows = await jobs.jobs(self._mesh.state)
        for row in rows:
            if row.id in self._known:
                continue
            # What Redis tells of the versions that somebody is about to name, once in this start.
            since = max(0, newest_due(row.version, *due_of(row)) - 1)
            told = await steps.step_rows(self._mesh.state, row.id, since)
            versions = {step["manifest"]: Number(step["lineage"], step["step"]) for step in told}
            await self._records.make_known(row.id, row.run_dir, versions)
            self._known.add(row.id)
        pinned_by_job = await self._run(all_pins, self._chunks.directory)
        for row in rows:
            await self._records.take_up(row.id, row.run_dir, pinned_by_job.get(row.id, {}))
        held = {record.job: dict(record.versions) for record in self._records}
        deleted = set(await deleting.in_store(self._mesh.state)) - {row.id for row in rows}
        need = await self._need(rows, held, deleted)
        need.manifests |= {manifest for pins in pinned_by_job.values() for manifest in pins}
        # What hosts tell of may have been collected since: only what is on record can be kept.
        on_record = {manifest for versions in held.values() for manifest in versions}
        need.manifests |= (anchored := self._deltas.anchored()) & on_record
        for digest in list(need.manifests):  # the versions that adapters are added to
            with suppress(NotFound, Damaged, BadMessage, Refused):  # `_contents` complains of it
                if (base := (await self._manifest(digest)).base) is not None:
                    need.manifests.add(base.digest)
        live = need.groups | await self._contents(need.manifests, needed=True)
        live |= self._deltas.beside(need.manifests)
        passed = {m for versions in held.values() for m in versions} - need.manifests
        named = self._named | await self._contents(passed)
        self._named = live
        self._remove(need.leftovers)
        if self._records.unknown:  # whatever is there may be what that job goes on from
            return rows
        await self._delete(named - live, live)
        for job, versions in held.items():
            await self._record(job, versions, need.manifests, anchored)
        for job in deleted:
            self._known.discard(job)
            self._deltas.forget(job)
            await self._records.forget(job)
            await deleting.let_go(self._mesh.state, job)
        return rows

    # -- what is needed --------------------------------------------------------------------------

    async def _need(
        self, rows: list[jobs.JobRow], held: dict[str, dict[str, Number]], deleted: set[str]
    ) -> _Need:
        need = _Need()
        for row in rows:
            need.groups |= await groups.digests(self._mesh.state, row.id)
            versions = held.get(row.id, {})
            current, asked = Number(row.lineage, row.version), row.document.get("weights", {})
            need.manifests |= pinned(row) | awaited(row, versions)
            need.manifests |= lasting(versions, current, asked).keys()
            directory = Path(row.run_dir) / "checkpoints"
            # Before any expires: one that is damaged takes nobody's place.
            weights = await self._of_checkpoints(directory, await self._run(_names, directory))
            names = await self._run(_unexpired, row)
            if row.checkpoint and row.checkpoint not in names:  # is its disk not there?
                need.manifests |= versions.keys()
            need.manifests |= {weights[name] for name in names if name in weights}
            need.leftovers += await self._run(_named, directory, f"{GONE}*")
        known = {row.id for row in rows} | deleted  # nothing is needed of those
        for record in self._records:
            if record.job not in known:  # to Redis, which has lost it: a resume will come for it
                need.manifests |= held.get(record.job, {}).keys()
                if record.run_dir:
                    directory = Path(record.run_dir) / "checkpoints"
                    names = await self._run(_names, directory)
                    need.manifests |= set((await self._of_checkpoints(directory, names)).values())
        return need

    async def _of_checkpoints(self, directory: Path, names: Iterable[str]) -> dict[str, str]:
        """The manifests of weights that checkpoints name; what is damaged is set aside."""
        found: dict[str, str] = {}
        for name in names:
            path = directory / f"{name}.json"
            try:
                found[name] = (await self._run(manifest_of, path))["weights"]
            except NotFound as error:
                self._complain(str(path), error)
            except Damaged as error:
                await self._set_aside(path, error)
        return found

    async def _set_aside(self, path: Path, error: Damaged) -> None:
        """A damaged checkpoint gives its place to the one before; nobody deletes it."""

        def put_aside() -> None:
            if (aside := set_aside(path)) is None:
                return
            then = "the older kept checkpoint is used if a trainer starts before the next one is"
            self._untold.add(
                damage.fields("checkpoint", path, error.message, f"{then} written", aside=aside)
            )

        await self._run(put_aside)
        await self._untold.tell_all()

    async def _contents(self, manifests: Iterable[str], needed: bool = False) -> set[str]:
        """These manifests with their chunks. One that is lost is nothing that others wait for."""
        found = set()
        for digest in manifests:
            found.add(digest)
            try:
                found |= {tensor.chunk for tensor in (await self._manifest(digest)).tensors}
            except (NotFound, Damaged, BadMessage, Refused) as error:  # of an earlier version
                if self._complain(digest, error) and needed and isinstance(error, NotFound):
                    path, then = self._chunks.path(digest), damage.FATES["weights"]
                    await self._untold.tell(damage.fields("weights", path, "it is missing", then))
            else:
                self._unreadable.pop(digest, None)
        return found

    def _complain(self, what: str, error: MeshError) -> bool:
        if what in self._unreadable:
            return False
        self._unreadable[what] = self._mesh.clock.monotonic()
        self._mesh.telemetry.log.error("cannot be kept", what=what, error=str(error))
        return True

    # -- what goes -------------------------------------------------------------------------------

    async def _delete(self, ended: set[str], live: set[str]) -> None:
        """`ended` are named no longer; what is written again in its grace becomes an orphan."""
        now = self._mesh.clock.monotonic()
        # While a version that cannot be read may be written again, nobody has named its chunks.
        unread = any(now - since < ORPHAN_S for since in self._unreadable.values())
        orphans = now >= self._orphans_at and not unread
        if orphans:
            self._orphans_at = now + ORPHANS_S
            published = self._chunks.space(PUBLISHED)  # it is published again on request
            old = await self._run(published.older_than, ORPHAN_S, self._mesh.clock.wall())
            await self._run(published.delete, old)
        for space, dead in self._dead.items():
            chunks = self._chunks.space(space)
            for digest in await self._delete_in(chunks, dead, ended, live, orphans):
                if digest not in live:
                    self._manifests.pop(digest, None)

    async def _delete_in(
        self,
        chunks: ChunkStore,
        dead: dict[str, tuple[float, int]],
        ended: set[str],
        live: set[str],
        orphans: bool,
    ) -> Iterable[str]:
        now, grace_s = self._mesh.clock.monotonic(), self._pace.grace_s
        new = await self._run(chunks.written, ended - dead.keys())
        dead |= {digest: (now, written) for digest, written in new.items()}
        for digest in live & dead.keys():
            del dead[digest]
        due = {d: written for d, (since, written) in dead.items() if now - since >= grace_s}
        if orphans:
            old = await self._run(chunks.older_than, ORPHAN_S, self._mesh.clock.wall())
            known = live | dead.keys()
            due |= {d: written for d, written in old.items() if d not in known}
        await self._run(chunks.delete, due)
        for digest in due:
            dead.pop(digest, None)
        return due.keys()

    async def _record(
        self, job: str, versions: dict[str, Number], needed: set[str], anchored: set[str]
    ) -> None:
        """Strikes off the versions that are needed no longer; what was staged meanwhile stays. Who
        lists the others reads there which are anchors.
        """
        passed, record = versions.keys() - needed, self._records.of(job)
        for digest in passed:
            record.versions.pop(digest, None)
        before, record.anchors = record.anchors, frozenset(anchored & record.versions.keys())
        if passed or record.anchors != before:
            await self._records.save(job)

    def _remove(self, directories: list[Path]) -> None:
        """Removes files in the background, one sweep's after the other's; what fails is tried
        again.
        """

        async def removed() -> None:
            for directory in directories:
                try:
                    run = self._mesh.host.run_blocking
                    await run(shutil.rmtree, directory, deadline_s=REMOVAL_S)
                except (MeshError, OSError) as error:
                    self._mesh.telemetry.log.warning("removal", error=str(error))

        if directories and (self._removal is None or self._removal.done()):
            self._removal = asyncio.create_task(removed(), name="remove")

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        return await self._mesh.host.run_blocking(work, *args, deadline_s=IO_S)


# -- files of checkpoints --------------------------------------------------------------------------


def _names(directory: Path) -> list[str]:
    return [path.stem for path in _named(directory, "step-*.json")]


def _named(directory: Path, pattern: str) -> list[Path]:
    return sorted(directory.glob(pattern))


def _unexpired(row: jobs.JobRow) -> list[str]:
    """Names of the checkpoints to keep; those that are not needed are out of everybody's way, to be
    removed.
    """
    directory = Path(row.run_dir) / "checkpoints"
    names = _names(directory)
    for name in expired(names, row.checkpoint, int(row.document["training"]["keep_checkpoints"])):
        aside = directory / f"{GONE}{name}"
        if not aside.exists():
            with suppress(FileNotFoundError):
                (directory / name).rename(aside)
            # Last: whoever is cut off before finds it expired again.
            (directory / f"{name}.json").unlink(missing_ok=True)
            names.remove(name)
    return names
