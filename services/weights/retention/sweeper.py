"""Sweeper of the store: deletes dead chunks after a grace period, and old orphans.

An orphan was never named by a manifest or group, and is too old for a writer to be about to name.
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

from meshrl.common.api.transfer.bulk_permissions import GROUPS, PUBLISHED, WEIGHTS
from meshrl.common.api.weights import Manifest
from meshrl.common.base.errors import BadMessage, CorruptData, MeshError, NotFound, Refused
from meshrl.common.base.files import corruption
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.records.checkpoints import (
    find_newest_due_version,
    quarantine_checkpoint,
    read_manifest,
)
from meshrl.common.state import events, groups, jobs, steps
from meshrl.common.state.job_lifecycle import deletion
from meshrl.common.weights.bulk.port import ChunkStore
from meshrl.common.weights.chunks.chunk_store import CorruptionEvent
from meshrl.services.weights.deltas import DeltaRegistry
from meshrl.services.weights.retention.job_records import IO_TIMEOUT_S, JobRecords
from meshrl.services.weights.retention.pins import read_all_pins
from meshrl.services.weights.retention.policy import (
    VersionNumber,
    find_awaited,
    find_expired,
    find_permanent,
    find_requested,
    read_checkpoint_schedule,
)
from meshrl.services.weights.retention.quotas import VersionQuotas

T = TypeVar("T")
SWEEP_INTERVAL_S = 5.0
DELETION_GRACE_S = (
    60.0  # after its successor's commit until a version is deleted: engines may be fetching it
)
# Bytes are written before what names them: a version's chunks before its manifest, a group before
# its row. In between the writer may wait for the store or Redis, an hour each time (`retry`).
ORPHAN_MIN_AGE_S = 4 * 3600.0
ORPHAN_SCAN_INTERVAL_S = 60.0  # between scans of all files
REMOVAL_TIMEOUT_S = 3600.0  # to remove directories of checkpoints of any size
EXPIRED_PREFIX = "expired-"  # prefix of a directory being removed


class PendingEvents:
    """Corruption events in order of discovery, kept until they are published."""

    def __init__(self, mesh: Mesh, events: deque[CorruptionEvent]) -> None:
        """Create the collection.

        Args:
            events: Shared with other code that finds corruption.
        """
        self._mesh, self._events = mesh, events
        self._publish_lock = asyncio.Lock()

    def add(self, event_fields: dict[str, Any], op: str = "") -> None:
        """Add an event, which the next `publish_all` publishes; callable from any thread.

        A caller that moves a corrupt file adds the event at once, so that a cancellation loses
        none. `op` is the operation id that makes the publication idempotent; empty: a random one.
        """
        self._events.append((event_fields, op or uuid.uuid4().hex))

    async def publish(self, event_fields: dict[str, Any]) -> None:
        """Add an event, and try to publish all pending ones now."""
        self.add(event_fields)
        await self.publish_all()

    async def publish_all(self) -> None:
        """Publish the pending events in order; on an error keep the rest for the next call."""
        async with self._publish_lock:
            while self._events:
                try:
                    await events.append(
                        self._mesh.state, corruption.CORRUPTION_EVENT, *self._events[0]
                    )
                except MeshError as error:
                    self._mesh.telemetry.log.warning(
                        "corruption could not be reported", error=str(error)
                    )
                    return
                self._events.popleft()


@dataclass(frozen=True)
class SweepSettings:
    """Interval of sweeps, and grace period before deletion, in seconds."""

    interval_s: float = SWEEP_INTERVAL_S
    grace_s: float = DELETION_GRACE_S


@dataclass
class _Needed:
    """Digests that must stay, and directories of expired checkpoints to delete."""

    manifests: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    leftovers: list[Path] = field(default_factory=list)  # files of expired checkpoints


class ChunkSweeper:
    """Sweeper of one store, which deletes the chunks of versions and groups that nothing needs.

    It also removes deleted manifests from `manifest_cache`.
    """

    def __init__(
        self,
        mesh: Mesh,
        chunks: ChunkStore,
        records: JobRecords,
        pending_events: PendingEvents,
        deltas: DeltaRegistry,
        read_manifest: Callable[[str], Awaitable[Manifest]],
        manifest_cache: dict[str, Manifest],
        checkpoint_lock: asyncio.Lock,
        settings: SweepSettings,
    ) -> None:
        self._checkpoint_lock = checkpoint_lock  # held while a checkpoint is written or moved
        self._mesh, self._chunks, self._records = mesh, chunks, records
        self._settings = settings
        self._pending_events, self._read_manifest, self._manifest_cache = (
            pending_events,
            read_manifest,
            manifest_cache,
        )
        self._deltas = deltas
        self._referenced: set[str] = set()  # by a version or a group, at the last sweep
        # When a chunk was found dead, and its write time, by space.
        self._dead_chunks: dict[str, dict[str, tuple[float, int]]] = {WEIGHTS: {}, GROUPS: {}}
        self._known_jobs: set[str] = set()  # jobs that Redis has listed
        self._unreadable_since: dict[str, float] = {}  # names of unreadable files, since when
        self._next_orphan_scan_at = 0.0
        self._removal_task: asyncio.Task[None] | None = None
        self._sweep_lock = asyncio.Lock()  # one sweep at a time: quota checks request sweeps too
        self.sweep_count = 0  # since the start
        self.quotas = VersionQuotas(mesh, records, read_manifest, self.sweep)

    async def run(self) -> None:
        """Sweep every `interval_s` seconds until cancelled; log errors."""
        try:
            while True:
                await self._mesh.clock.sleep(self._settings.interval_s)
                try:
                    await self.sweep()
                except (MeshError, OSError) as error:
                    self._mesh.telemetry.log.warning("sweep", error=str(error))
        finally:
            if self._removal_task is not None:
                self._removal_task.cancel()

    async def sweep(self) -> None:
        """Delete what is no longer needed, and update the quotas; concurrent calls wait for each
        other.
        """
        async with self._sweep_lock:
            self.sweep_count += 1
            rows = await self._sweep_once()
            await self.quotas.update(rows)

    async def _sweep_once(self) -> list[jobs.JobRow]:
        """Sweep once, and return the jobs' rows.

        Delete nothing but expired checkpoints while an unknown job may resume from any chunk.
        """
        await self._pending_events.publish_all()
        rows = await jobs.read_jobs(self._mesh.state)
        for row in rows:
            if row.id in self._known_jobs:
                continue
            # Versions in Redis that a commit or checkpoint is about to name, once per start.
            since = max(0, find_newest_due_version(row.version, *read_checkpoint_schedule(row)) - 1)
            step_rows = await steps.read_step_rows(self._mesh.state, row.id, since)
            versions = {
                step["manifest"]: VersionNumber(step["lineage"], step["step"]) for step in step_rows
            }
            await self._records.merge_from_redis(row.id, row.run_dir, versions)
            self._known_jobs.add(row.id)
        pinned_by_job = await self._run_blocking(read_all_pins, self._chunks.directory)
        for row in rows:
            await self._records.add_pinned(row.id, row.run_dir, pinned_by_job.get(row.id, {}))
        versions_by_job = {record.job: dict(record.versions) for record in self._records}
        deleted = set(await deletion.read_pending_store_deletions(self._mesh.state)) - {
            row.id for row in rows
        }
        needed = await self._find_needed(rows, versions_by_job, deleted)
        needed.manifests |= {manifest for pins in pinned_by_job.values() for manifest in pins}
        # Hosts may report anchors that were deleted since: only versions on record can be kept.
        on_record = {manifest for versions in versions_by_job.values() for manifest in versions}
        needed.manifests |= (anchors := self._deltas.list_anchors()) & on_record
        for digest in list(needed.manifests):  # the bases of adapters
            # `_list_contents` reports the error
            with suppress(NotFound, CorruptData, BadMessage, Refused):
                if (base := (await self._read_manifest(digest)).base) is not None:
                    needed.manifests.add(base.manifest)
        live = needed.groups | await self._list_contents(needed.manifests, are_needed=True)
        live |= self._deltas.retain_live(needed.manifests)
        unneeded = {m for versions in versions_by_job.values() for m in versions} - needed.manifests
        referenced = self._referenced | await self._list_contents(unneeded)
        self._referenced = live
        self._start_removal(needed.leftovers)
        if self._records.has_unknown_jobs:  # any chunk may belong to what that job resumes from
            return rows
        await self._delete_dead(referenced - live, live)
        for job, versions in versions_by_job.items():
            await self._update_record(job, versions, needed.manifests, anchors)
        for job in deleted:
            self._known_jobs.discard(job)
            self._deltas.forget_job(job)
            await self._records.forget(job)
            await deletion.confirm_store_deletion(self._mesh.state, job)
        return rows

    # -- needed versions and groups --------------------------------------------------------------

    async def _find_needed(
        self,
        rows: list[jobs.JobRow],
        versions_by_job: dict[str, dict[str, VersionNumber]],
        deleted: set[str],
    ) -> _Needed:
        """Find the manifests and groups that jobs still need, and rename expired checkpoints.

        A job that Redis has lost needs all its versions. A deleted job needs none.
        """
        needed = _Needed()
        for row in rows:
            needed.groups |= await groups.read_live_digests(self._mesh.state, row.id)
            versions = versions_by_job.get(row.id, {})
            current, requested = (
                VersionNumber(row.lineage, row.version),
                row.document.get("weights", {}),
            )
            needed.manifests |= find_permanent(row) | find_awaited(row, versions)
            needed.manifests |= find_requested(versions, current, requested).keys()
            directory = Path(row.run_dir) / "checkpoints"
            # Before any expires: a corrupt checkpoint does not count towards those to keep.
            weights = await self._read_checkpoint_manifests(
                directory, await self._run_blocking(_list_checkpoint_names, directory)
            )
            names = await self._run_blocking(_remove_expired, row)
            if row.checkpoint and row.checkpoint not in names:  # is its disk missing?
                needed.manifests |= versions.keys()
            needed.manifests |= {weights[name] for name in names if name in weights}
            needed.leftovers += await self._run_blocking(
                _list_paths, directory, f"{EXPIRED_PREFIX}*"
            )
        known = {row.id for row in rows} | deleted  # nothing is needed of deleted jobs
        for record in self._records:
            # by Redis, which has lost the job: a resume needs its versions
            if record.job not in known:
                needed.manifests |= versions_by_job.get(record.job, {}).keys()
                if record.run_dir:
                    directory = Path(record.run_dir) / "checkpoints"
                    names = await self._run_blocking(_list_checkpoint_names, directory)
                    needed.manifests |= set(
                        (await self._read_checkpoint_manifests(directory, names)).values()
                    )
        return needed

    async def _read_checkpoint_manifests(
        self, directory: Path, names: Iterable[str]
    ) -> dict[str, str]:
        """Return the weight manifest of each readable checkpoint, by checkpoint name.

        Missing ones are logged; corrupt ones are quarantined.
        """
        weight_manifests: dict[str, str] = {}
        for name in names:
            path = directory / f"{name}.json"
            try:
                weight_manifests[name] = (await self._run_blocking(read_manifest, path))["weights"]
            except NotFound as error:
                self._report_unreadable(str(path), error)
            except CorruptData as error:
                await self._quarantine_checkpoint(path, error)
        return weight_manifests

    async def _quarantine_checkpoint(self, path: Path, error: CorruptData) -> None:
        """Rename a corrupt checkpoint and publish an event; the previous checkpoint takes its
        place. One that was written again since it was read stays.
        """

        def quarantine() -> None:
            with suppress(CorruptData, NotFound):
                read_manifest(path)
                return
            if (quarantined_path := quarantine_checkpoint(path)) is None:
                return
            recovery = (
                "an older checkpoint is used if a trainer starts before the next one is written"
            )
            self._pending_events.add(
                corruption.make_event_fields(
                    "checkpoint",
                    path,
                    error.message,
                    f"{recovery} written",
                    quarantined_path=quarantined_path,
                )
            )

        async with self._checkpoint_lock:
            await self._run_blocking(quarantine)
        await self._pending_events.publish_all()

    async def _list_contents(self, manifests: Iterable[str], are_needed: bool = False) -> set[str]:
        """Return the digests of these manifests and of their chunks.

        An unreadable manifest is logged once and counts without its chunks. A missing one of
        `are_needed` manifests is also published as corruption.
        """
        digests = set()
        for digest in manifests:
            digests.add(digest)
            try:
                digests |= {tensor.chunk for tensor in (await self._read_manifest(digest)).tensors}
            except (NotFound, CorruptData, BadMessage, Refused) as error:  # of an earlier version
                if (
                    self._report_unreadable(digest, error)
                    and are_needed
                    and isinstance(error, NotFound)
                ):
                    path, recovery = (
                        self._chunks.chunk_path(digest),
                        corruption.RECOVERY_BY_KIND["weights"],
                    )
                    await self._pending_events.publish(
                        corruption.make_event_fields(
                            "weights", path, "the file is missing", recovery
                        )
                    )
            else:
                self._unreadable_since.pop(digest, None)
        return digests

    def _report_unreadable(self, name: str, error: MeshError) -> bool:
        """Log an unreadable file once; return True the first time."""
        if name in self._unreadable_since:
            return False
        self._unreadable_since[name] = self._mesh.clock.monotonic()
        self._mesh.telemetry.log.error("cannot be retained", what=name, error=str(error))
        return True

    # -- deletion --------------------------------------------------------------------------------

    async def _delete_dead(self, unreferenced: set[str], live: set[str]) -> None:
        """Delete chunks that are dead for the grace period; now and then also old orphans.

        Args:
            unreferenced: Digests that were needed at the last sweep, or of unneeded versions.
            live: Digests that are needed; they stay.
        """
        now = self._mesh.clock.monotonic()
        # While an unreadable manifest may be written again, its chunks are named by none.
        has_recent_unreadable = any(
            now - since < ORPHAN_MIN_AGE_S for since in self._unreadable_since.values()
        )
        includes_orphans = now >= self._next_orphan_scan_at and not has_recent_unreadable
        if includes_orphans:
            self._next_orphan_scan_at = now + ORPHAN_SCAN_INTERVAL_S
            published = self._chunks.open_space(PUBLISHED)  # files are published again on request
            old_files = await self._run_blocking(
                published.find_older_than, ORPHAN_MIN_AGE_S, self._mesh.clock.wall()
            )
            await self._run_blocking(published.delete_unchanged, old_files)
        for space, dead in self._dead_chunks.items():
            chunks = self._chunks.open_space(space)
            for digest in await self._delete_in_space(
                chunks, dead, unreferenced, live, includes_orphans
            ):
                if digest not in live:
                    self._manifest_cache.pop(digest, None)

    async def _delete_in_space(
        self,
        chunks: ChunkStore,
        dead: dict[str, tuple[float, int]],
        unreferenced: set[str],
        live: set[str],
        include_orphans: bool,
    ) -> Iterable[str]:
        """Delete dead chunks of one space unless they were written again; return their digests.

        Args:
            dead: Time of death and write time by digest; updated by this call.
        """
        now, grace_s = self._mesh.clock.monotonic(), self._settings.grace_s
        write_times = await self._run_blocking(chunks.read_write_times, unreferenced - dead.keys())
        dead |= {digest: (now, written) for digest, written in write_times.items()}
        for digest in live & dead.keys():
            del dead[digest]
        due = {d: written for d, (since, written) in dead.items() if now - since >= grace_s}
        if include_orphans:
            old_chunks = await self._run_blocking(
                chunks.find_older_than, ORPHAN_MIN_AGE_S, self._mesh.clock.wall()
            )
            known = live | dead.keys()
            due |= {d: written for d, written in old_chunks.items() if d not in known}
        await self._run_blocking(chunks.delete_unchanged, due)
        for digest in due:
            dead.pop(digest, None)
        return due.keys()

    async def _update_record(
        self, job: str, versions: dict[str, VersionNumber], needed: set[str], anchors: set[str]
    ) -> None:
        """Remove unneeded versions from a job's record, and set its anchors; save it if it changed.

        Versions staged since the sweep began stay. Commands that list versions read the anchors
        there.
        """
        unneeded, record = versions.keys() - needed, self._records.get_or_create(job)
        for digest in unneeded:
            record.versions.pop(digest, None)
        earlier_anchors, record.anchors = (
            record.anchors,
            frozenset(anchors & record.versions.keys()),
        )
        if unneeded or record.anchors != earlier_anchors:
            await self._records.save(job)

    def _start_removal(self, directories: list[Path]) -> None:
        """Delete directories in a background task, unless one runs; the next sweep retries
        failures.
        """

        async def remove_all() -> None:
            for directory in directories:
                try:
                    run = self._mesh.host.run_blocking
                    await run(shutil.rmtree, directory, deadline_s=REMOVAL_TIMEOUT_S)
                except (MeshError, OSError) as error:
                    self._mesh.telemetry.log.warning("removal", error=str(error))

        if directories and (self._removal_task is None or self._removal_task.done()):
            self._removal_task = asyncio.create_task(remove_all(), name="remove")

    async def _run_blocking(self, work: Callable[..., T], *args: object) -> T:
        return await self._mesh.host.run_blocking(work, *args, deadline_s=IO_TIMEOUT_S)


# -- files of checkpoints --------------------------------------------------------------------------


def _list_checkpoint_names(directory: Path) -> list[str]:
    return [path.stem for path in _list_paths(directory, "step-*.json")]


def _list_paths(directory: Path, pattern: str) -> list[Path]:
    return sorted(directory.glob(pattern))


def _remove_expired(row: jobs.JobRow) -> list[str]:
    """Rename expired checkpoints for removal; return the names of the others.

    The committed checkpoint, the `keep_checkpoints` - 1 before it, and all later ones stay.
    """
    directory = Path(row.run_dir) / "checkpoints"
    names = _list_checkpoint_names(directory)
    for name in find_expired(
        names, row.checkpoint, int(row.document["training"]["keep_checkpoints"])
    ):
        renamed_path = directory / f"{EXPIRED_PREFIX}{name}"
        if not renamed_path.exists():
            with suppress(FileNotFoundError):
                (directory / name).rename(renamed_path)
            # Last: after an interruption the checkpoint is found expired again.
            (directory / f"{name}.json").unlink(missing_ok=True)
            names.remove(name)
    return names
