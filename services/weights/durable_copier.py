"""Copier of jobs to the mesh's durable URL, in the background.

It copies what another head would resume from: each job's bundle, and each committed checkpoint. It
polls Redis for changes, and accesses the URL only when there are some.
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

from meshrl.common.base.errors import CorruptData, MeshError, NotFound, StateUnavailable
from meshrl.common.base.files.remote_directory import redact_url
from meshrl.common.job.bundle import bundle_files
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.records.checkpoints import read_manifest
from meshrl.common.records.durable_copy import (
    CopyTakenOver,
    DurableCopy,
    DurableCopyRecord,
    job_folder,
)
from meshrl.common.state import events, jobs
from meshrl.common.state.job_lifecycle import deletion
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.pool.store import pool_rows as pool

T = TypeVar("T")
POLL_S = 2.0  # between checks for commits
RETRY_S = 5.0  # after an error, doubled after each further one
MAX_RETRY_S = 60.0
OLD_JOBS_POLL_S = 600.0  # between checks for jobs that ended long ago
DAY_S = 86_400.0
COPY_TIMEOUT_S = DAY_S  # of one job's files; files copied by then are not copied again
STALL_WARNING_S = 900.0  # without a copied file before a warning: one file may have many GB
MAX_MISSED_CHECKPOINTS = 3  # missed in a row before an error is reported


@dataclass(frozen=True)
class _CopiedState:
    """Copied state of a job, as in `standing.json`."""

    phase: str = ""
    lineage: int = -1
    checkpoint: str = ""
    document: str = ""  # digest

    @classmethod
    def from_row(cls, row: JobRow) -> _CopiedState:
        document = hashlib.sha256(json.dumps(row.document).encode()).hexdigest()
        return cls(row.phase.value, row.lineage, row.checkpoint, document)


class DurableCopier:
    """Copier of a mesh's durable copy; idle if the mesh has none."""

    def __init__(self, mesh: Mesh) -> None:
        """Read the mesh's copy record. CorruptData: its file is corrupt."""
        self._mesh = mesh
        self._copy_record = DurableCopyRecord.read_from(Path(mesh.settings.run_root) / "mesh")
        self._copied_states: dict[str, _CopiedState] = {}
        self._missed_checkpoints: dict[
            str, int
        ] = {}  # checkpoints in a row that were deleted before they were copied, by job
        # jobs of the copy that Redis did not have at the last check
        self._unknown_jobs: set[str] = set()
        self._old_jobs_polled_at = float("-inf")
        self.checkpoints = 0  # by this process
        self.bytes = 0
        self.errors = 0
        self.trouble = ""  # why nothing is copied at the moment

    def stats(self) -> dict[str, Any]:
        if self._copy_record is None:
            return {}
        names = "checkpoints", "bytes", "errors", "trouble"
        return {f"durable_{name}": getattr(self, name) for name in names}

    async def run(self) -> None:
        """Copy until there is no copy to maintain, or another mesh has taken it over."""
        clock, again_s = self._mesh.clock, RETRY_S
        if self._copy_record is None:
            return
        copy: DurableCopy | None = None
        while True:
            pause_s = POLL_S
            try:
                copy = copy or await self._open_copy(self._copy_record)
                await self._copy_new(copy)
                self.trouble, again_s = "", RETRY_S
            except CopyTakenOver as error:
                url = redact_url(self._copy_record.url)
                await self._report_error(error, "durable_taken_over", {"url": url})
                return
            except StateUnavailable:
                pass  # no step is committed without Redis
            except MeshError as error:
                self.errors += 1
                copy, pause_s = None, again_s
                again_s = min(2 * again_s, MAX_RETRY_S)
                if str(error) != self.trouble:  # each error once
                    await self._report_error(error, "durable_failed", {"error": str(error)})
            await clock.sleep(pause_s)

    async def _report_error(self, error: MeshError, kind: str, fields: dict[str, Any]) -> None:
        self.trouble = str(error)
        self._mesh.telemetry.log.error("durable copy failed", error=str(error))
        await append_event_with_retry(self._mesh, kind, fields)

    async def _open_copy(self, durable: DurableCopyRecord) -> DurableCopy:
        copy = await self._run_blocking(DurableCopy, durable.url, durable.owner)
        if await self._run_blocking(copy.claim):
            self._copied_states.clear()  # the copy may have any content
        for job in await self._run_blocking(copy.list_jobs):
            if job not in self._copied_states:
                self._copied_states[job] = (
                    await self._run_blocking(_read_copied_state, copy, job)
                )[0]
        return copy

    async def _copy_new(self, copy: DurableCopy) -> None:
        rows, first = await jobs.read_jobs(self._mesh.state), None
        for row in rows:
            try:
                await self._copy_job(copy, row)
            except CopyTakenOver:
                raise
            except MeshError as error:  # a failure of one job does not stop the others
                missed = self._missed_checkpoints[row.id] = (
                    self._missed_checkpoints.get(row.id, 0) + 1
                )
                moved_on = True  # to another checkpoint: this one's files may have been removed
                with suppress(NotFound):
                    now = await jobs.read_job(self._mesh.state, row.id)
                    moved_on = now.checkpoint != row.checkpoint
                if missed >= MAX_MISSED_CHECKPOINTS or not moved_on:
                    first = first or error
        await self._remove_old_jobs(copy, self._copied_states.keys() - {row.id for row in rows})
        if first is not None:
            raise first

    async def _copy_job(self, copy: DurableCopy, row: JobRow) -> None:
        desired_state, copied_state = (
            _CopiedState.from_row(row),
            self._copied_states.get(row.id, _CopiedState()),
        )
        if copied_state == desired_state:
            return
        self._copied_states[row.id] = copied_state  # also after an interrupted copy
        if copied_state.document != desired_state.document:
            await self._run_blocking(self._copy_bundle, copy, row)
        if row.checkpoint and copied_state.checkpoint != row.checkpoint:
            began = self._mesh.clock.monotonic()
            moved = await self._run_blocking(self._copy_checkpoint, copy, row)
            self.checkpoints += 1
            took = {"bytes": moved, "took_s": round(self._mesh.clock.monotonic() - began, 3)}
            about = {"job": row.id, "checkpoint": row.checkpoint, "url": copy.public_url}
            await events.append(self._mesh.state, "durable_copied", about | took)
        document = asdict(desired_state) | {"at": self._mesh.clock.wall()}
        await self._run_blocking(
            copy.write_document, f"{job_folder(row.id)}/standing.json", document
        )
        self._copied_states[row.id] = desired_state
        self._missed_checkpoints.pop(row.id, None)

    def _copy_bundle(self, copy: DurableCopy, row: JobRow) -> None:
        if not row.checkpoint:  # existing files are of an earlier job of that name
            self._remove_unneeded(copy, row, 0)
        there, directory = copy.list_file_digests(row.id), Path(row.document["bundle"]["dir"])
        for name, (_, digest) in bundle_files.read_file_list(row.document).items():
            if digest not in there:
                self._upload(copy, row.id, str(digest), directory / name)
        copy.write_document(
            f"{job_folder(row.id)}/job.json", {"job": row.id, "document": row.document}
        )

    def _copy_checkpoint(self, copy: DurableCopy, row: JobRow) -> int:
        before, home = self.bytes, Path(row.run_dir) / "checkpoints"
        manifest = read_manifest(home / f"{row.checkpoint}.json")
        there = copy.list_file_digests(row.id)
        for name, digest in manifest["files"].items():
            if digest not in there:
                self._upload(copy, row.id, digest, home / row.checkpoint / name)
        copy.write_document(f"{job_folder(row.id)}/checkpoints/{row.checkpoint}.json", manifest)
        self._remove_unneeded(copy, row, max(1, int(row.document["training"]["keep_checkpoints"])))
        return self.bytes - before

    def _remove_unneeded(self, copy: DurableCopy, row: JobRow, max_checkpoints: int) -> None:
        """Remove all but the `max_checkpoints` last checkpoints of the job, and unneeded files.

        The last committed checkpoint stays, even if a listing does not have it yet.
        """
        place, names = f"{job_folder(row.id)}/checkpoints", copy.list_checkpoints(row.id)
        # A newer one can only belong to an abandoned lineage.
        retained = [row.checkpoint, *(name for name in names if name < row.checkpoint)][
            :max_checkpoints
        ]
        removed = [name for name in names if name not in retained]
        if not removed:
            return
        needed = {str(digest) for _, digest in bundle_files.read_file_list(row.document).values()}
        for name in retained:
            needed |= set(copy.read_document(f"{place}/{name}.json")["files"].values())
        copy.remove_files(f"{place}/{name}.json" for name in removed)
        unneeded = sorted(copy.list_file_digests(row.id) - needed)
        copy.remove_files(f"{job_folder(row.id)}/files/{digest}" for digest in unneeded)

    def _upload(self, copy: DurableCopy, job: str, digest: str, path: Path) -> None:
        try:
            size = path.stat().st_size
        except FileNotFoundError:  # also if the checkpoint is being removed
            raise NotFound(f"{path} is missing") from None
        copy.upload(job, digest, path)
        self.bytes += size

    # -- removal ---------------------------------------------------------------------------------

    async def _remove_old_jobs(self, copy: DurableCopy, unknown_jobs: set[str]) -> None:
        """Remove deleted jobs and expired ones.

        A job expires if it ended before the takeover, and is as old as those that the mesh deletes
        itself.
        """
        now, state = self._mesh.clock.monotonic(), self._mesh.state
        if unknown_jobs == self._unknown_jobs and now - self._old_jobs_polled_at < OLD_JOBS_POLL_S:
            return
        if unknown_jobs:
            deleted = set(await deletion.read_deleted_jobs(state))
            keep_s = (await pool.read_settings(state)).keep_days * DAY_S
            for job in sorted(unknown_jobs):
                standing, at = await self._run_blocking(_read_copied_state, copy, job)
                old = (
                    standing.phase in jobs.TERMINAL_PHASES and self._mesh.clock.wall() - at > keep_s
                )
                if job in deleted or old:
                    await self._run_blocking(copy.remove_job, job)
                    del self._copied_states[job]
                    unknown_jobs = unknown_jobs - {job}
        self._unknown_jobs, self._old_jobs_polled_at = unknown_jobs, now

    async def _run_blocking(self, work: Callable[..., T], *args: Any) -> T:
        silence = asyncio.create_task(self._warn_when_stalled(), name="watch for a stalled copy")
        try:
            return await self._mesh.host.run_blocking(work, *args, deadline_s=COPY_TIMEOUT_S)
        finally:
            silence.cancel()

    async def _warn_when_stalled(self) -> None:
        """Report an error if no file was copied for long: a hanging URL raises none."""
        last_bytes = -1
        while last_bytes != self.bytes:
            last_bytes = self.bytes
            await self._mesh.clock.sleep(STALL_WARNING_S)
        error = MeshError(
            f"no byte has been copied for {STALL_WARNING_S / 60:g} minutes, and no error was "
            "raised",
            where=redact_url(self._copy_record.url if self._copy_record else ""),
            fix="Check that this host reaches the URL, and measure how long a large file takes",
        )
        if str(error) != self.trouble:
            await self._report_error(error, "durable_failed", {"error": str(error)})


async def append_event_with_retry(mesh: Mesh, kind: str, fields: dict[str, Any]) -> None:
    """Append an event exactly once, when Redis accepts it."""
    op = uuid.uuid4().hex
    await retry(mesh.clock, partial(events.append, mesh.state, kind, fields, op))


def _read_copied_state(copy: DurableCopy, job: str) -> tuple[_CopiedState, float]:
    try:
        fields = copy.read_document(f"{job_folder(job)}/standing.json")
        at = float(fields.pop("at"))
        return replace(_CopiedState(), **fields), at
    except (CorruptData, NotFound, KeyError, TypeError):
        return _CopiedState(), 0.0
