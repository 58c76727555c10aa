"""The weight store: versions and checkpoints as manifests over content-addressed chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from meshrl.common.api.transfer.bulk_permissions import SPACES
from meshrl.common.api.weights import (
    Checkpoint,
    CheckpointAssembly,
    CheckpointName,
    CheckpointNames,
    CheckpointQuarantine,
    ChunkVerification,
    FilePublication,
    LineBatch,
    Manifest,
    ManifestRequest,
    PublishedFiles,
    SourceAssignments,
    SourceRequest,
    UnfinishedCheckpoints,
    Weights,
)
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import (
    AlreadyCommitted,
    BadMessage,
    CorruptData,
    DeadlineExceeded,
    NotFound,
    Refused,
)
from meshrl.common.base.files import corruption
from meshrl.common.base.files.corruption import RECOVERY_BY_KIND
from meshrl.common.base.files.sealed_documents import encode_sealed
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.records.checkpoints import (
    NAME_PATTERN,
    check_paths,
    format_checkpoint_name,
    list_older_names,
    quarantine_checkpoint,
    read_manifest,
)
from meshrl.common.state import jobs
from meshrl.common.weights.bulk.port import ChunkStore
from meshrl.common.weights.chunks.chunk_store import CORRUPTION_REASON, make_write_error
from meshrl.common.weights.layout.manifest import decode_manifest, encode_manifest, merge_base
from meshrl.services.weights import run_host_files
from meshrl.services.weights.deltas import DeltaActor, DeltaRegistry
from meshrl.services.weights.retention.job_records import IO_TIMEOUT_S, JOBS_FOLDER, JobRecords
from meshrl.services.weights.retention.policy import VersionNumber
from meshrl.services.weights.retention.sweeper import ChunkSweeper, PendingEvents, SweepSettings
from meshrl.services.weights.run_host_files import SharedTasks, TaskProgress
from meshrl.services.weights.tracker import ChunkTracker

T = TypeVar("T")
RUN_HOST_TIMEOUT_S = (
    900.0  # to rename and remove files on the run host; see the deadlines of the calls
)
MAX_REMEMBERED_FILES = (
    1024  # whose last operations are remembered: more files than are written at a time
)


class WeightStore(DeltaActor):
    """Weight store: manifests in `chunks` beside the chunks that they name.

    Checkpoint manifests are JSON files under `<run>/checkpoints`; records of jobs are in the folder
    `jobs` of the chunks' directory.
    """

    interface = Weights

    def __init__(
        self,
        mesh: Mesh,
        chunks: ChunkStore,
        shared_tasks: SharedTasks | None = None,
        sweep_settings: SweepSettings = SweepSettings(),  # noqa: B008 (it does not change)
    ) -> None:
        self.mesh, self.chunks = mesh, chunks
        self._manifest_cache: dict[str, Manifest] = {}
        # The last operation of a shard with samples, for the most recent shards.
        self._last_line_operations: dict[tuple[str, int, str], str] = {}
        self.job_records = JobRecords(mesh.host, chunks.directory / JOBS_FOLDER)
        self._pending_events = PendingEvents(mesh, chunks.pending_events)
        self._shared_tasks = shared_tasks or SharedTasks(mesh)
        self._tracker = ChunkTracker(mesh.clock, mesh.name, mesh.settings.network)
        self.delta_registry = DeltaRegistry(mesh)
        self.checkpoint_lock = asyncio.Lock()
        self.sweeper = ChunkSweeper(
            mesh,
            chunks,
            self.job_records,
            self._pending_events,
            self.delta_registry,
            self._read_manifest,
            self._manifest_cache,
            self.checkpoint_lock,
            sweep_settings,
        )

    def stats(self) -> dict[str, Any]:
        fields = {"manifests": len(self._manifest_cache), "sweeps": self.sweeper.sweep_count}
        fields |= self._tracker.stats()
        return fields | self.sweeper.quotas.stats() | self.delta_registry.stats()

    async def start(self) -> None:
        for lost in await self.job_records.load():
            then = "rebuilt from Redis and the checkpoints; until then no chunk is removed"
            fields = corruption.make_event_fields(
                "versions",
                lost.path,
                lost.reason,
                then,
                job=lost.job,
                quarantined_path=lost.quarantined_path,
            )
            await self._pending_events.publish(fields)

    async def stop(self) -> None:
        await self._shared_tasks.stop()

    async def run_sweeper(self) -> None:
        await self.sweeper.run()

    @call(Weights.stage_version)
    async def stage_version(self, manifest: Manifest) -> str:
        """Store a version's manifest durably, until the job's commits have passed the version.

        Raises:
            Refused: A chunk that it names is missing.
            AlreadyCommitted: The lineage has other weights of that version.
            QuotaExceeded: The job's versions would have too many bytes.
        """
        content = encode_manifest(manifest)
        digest = compute_digest(content)
        await self._check_version(manifest, digest)
        versions = self.job_records.get_or_create(manifest.job).versions
        # A concurrent sweep knows the version from here on.
        self._manifest_cache[digest] = manifest
        versions[digest] = VersionNumber(manifest.lineage, manifest.version)
        try:
            await self._mark_base_written(manifest)
            await self.mesh.host.run_blocking(
                self._mark_chunks_written, manifest, deadline_s=IO_TIMEOUT_S
            )
        except (Refused, NotFound, CorruptData):
            del versions[digest]
            self._manifest_cache.pop(digest, None)
            raise
        await self.mesh.host.run_blocking(self.chunks.write, content, deadline_s=IO_TIMEOUT_S)
        await self.job_records.save(manifest.job)
        return digest

    async def _check_version(self, manifest: Manifest, digest: str) -> None:
        """Check that a version is new in its lineage and within the quota.

        A version is committed once in its lineage, also if Redis has lost that commit.
        """
        record, row = self.job_records.get_or_create(manifest.job), None
        with suppress(NotFound):  # a job that Redis has lost is not checked
            row = await jobs.read_job(self.mesh.state, manifest.job)
            record.record_commit(VersionNumber(row.lineage, row.version), row.manifest)
        number = VersionNumber(manifest.lineage, manifest.version)
        if other := record.find_conflict(number, digest):  # free space would not resolve a conflict
            raise AlreadyCommitted(
                f"version {number.version} of lineage {number.lineage} of {manifest.job} is "
                f"already committed as {other}, and was offered again as {digest}",
                where=self.mesh.name,
                fix="Run `meshrl resume RUN`, which opens a new lineage: Redis may have lost state",
            )
        # a version on record is counted already
        if row is not None and digest not in record.versions:
            await self.sweeper.quotas.check_quota(row, manifest)

    def _mark_chunks_written(self, manifest: Manifest) -> None:
        """Mark the version's chunks as written now. Refused: a chunk is missing."""
        chunks = {tensor.chunk for tensor in manifest.tensors}
        missing = [chunk for chunk in sorted(chunks) if not self.chunks.mark_written(chunk)]
        if missing:
            raise Refused(
                f"version {manifest.version}: chunk {missing[0]} is not stored",
                where=self.mesh.name,
                fix="Put the chunks before the manifest",
            )

    @call(Weights.fetch_manifest)
    async def fetch_manifest(self, request: ManifestRequest) -> Manifest:
        found = await self._read_manifest(request.digest)
        if request.without_base or found.base is None:
            return found
        return merge_base(found, await self._read_manifest(found.base.manifest))

    async def _read_manifest(self, digest: str) -> Manifest:
        if digest not in self._manifest_cache:
            read = self.chunks.read
            try:
                content = await self.mesh.host.run_blocking(read, digest, deadline_s=IO_TIMEOUT_S)
            except CorruptData:
                await self._verify_chunk(self.chunks, digest, "weights", "")
                raise
            self._manifest_cache[digest] = decode_manifest(
                content, str(self.chunks.chunk_path(digest))
            )
        return self._manifest_cache[digest]

    @call(Weights.assign_sources)
    def assign_sources(self, request: SourceRequest) -> SourceAssignments:
        return self._tracker.assign_sources(request)

    @call(Weights.verify_chunk)
    async def verify_chunk(self, request: ChunkVerification) -> bool:
        """Verify a chunk; a corrupt one is quarantined, so that its writer writes it again."""
        if request.space not in SPACES or request.kind not in RECOVERY_BY_KIND:
            raise BadMessage(
                f"unknown kind {request.kind!r:.40} or space {request.space!r:.40} of chunks"
            )
        chunks = self.chunks.open_space(request.space)
        return await self._verify_chunk(chunks, request.digest, request.kind, request.job)

    async def _verify_chunk(self, chunks: ChunkStore, digest: str, kind: str, job: str) -> bool:
        def verify_and_report() -> bool:
            is_valid, quarantined_path = chunks.verify_or_quarantine(digest)
            if quarantined_path is not None:
                path, then = chunks.chunk_path(digest), RECOVERY_BY_KIND[kind]
                self._pending_events.add(
                    corruption.make_event_fields(
                        kind,
                        path,
                        CORRUPTION_REASON,
                        then,
                        job=job,
                        quarantined_path=quarantined_path,
                    )
                )
            return is_valid

        is_valid = await self.mesh.host.run_blocking(verify_and_report, deadline_s=IO_TIMEOUT_S)
        await self._pending_events.publish_all()
        return is_valid

    # -- checkpoints -----------------------------------------------------------------------------

    @call(Weights.save_checkpoint)
    async def save_checkpoint(self, request: Checkpoint) -> str:
        """Write a checkpoint's manifest; it counts once a step commit names it.

        Raises:
            NotFound: The checkpoint has no directory; a sweep may have quarantined it.
        """
        # A replaced trainer that wakes must not overwrite the checkpoint that its successor has
        # committed, so the name includes the weights.
        name = format_checkpoint_name(request.lineage, request.step, request.weights)
        check_paths(request.files)
        manifest, run = await self._read_manifest(request.weights), self.mesh.host.run_blocking
        await self._mark_manifest_written(request.weights)
        await self._mark_base_written(manifest)
        await run(self._mark_chunks_written, manifest, deadline_s=IO_TIMEOUT_S)
        row = await jobs.read_job(self.mesh.state, request.job)
        record = self.job_records.get_or_create(request.job)
        if record.run_dir != row.run_dir:
            record.run_dir = row.run_dir
            await self.job_records.save(request.job)
        path, content = _checkpoint_path(row, name), encode_sealed(asdict(request))

        def write_manifest() -> None:
            if not (directory := path.with_suffix("")).is_dir():
                raise NotFound(f"checkpoint {directory} is missing", where=self.mesh.name)
            self._write_file(path, content)

        async with self.checkpoint_lock:
            await run(write_manifest, deadline_s=IO_TIMEOUT_S)
        return name

    async def _mark_base_written(self, manifest: Manifest) -> None:
        """Mark the base of adapters as written, except the tensors that they replace."""
        if manifest.base is None:
            return
        merged = merge_base(manifest, await self._read_manifest(manifest.base.manifest))
        await self._mark_manifest_written(manifest.base.manifest)
        shared = merged.tensors[: len(merged.tensors) - len(manifest.tensors)]
        others = replace(manifest, tensors=shared)
        await self.mesh.host.run_blocking(
            self._mark_chunks_written, others, deadline_s=IO_TIMEOUT_S
        )

    async def _mark_manifest_written(self, digest: str) -> None:
        if not await self.mesh.host.run_blocking(
            self.chunks.mark_written, digest, deadline_s=IO_TIMEOUT_S
        ):
            raise Refused(f"manifest {digest} is not stored any more", where=self.mesh.name)

    def _write_file(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.mesh.host.replace_file(path, content)
        except OSError as error:
            raise make_write_error(error, path) from error

    @call(Weights.assemble_checkpoint)
    async def assemble_checkpoint(self, request: CheckpointAssembly) -> bool:
        """Assemble a checkpoint from chunks; False while that runs.

        Refused: a file is no longer a chunk, and must be put again.
        """
        row = await jobs.read_job(self.mesh.state, request.job)
        path = _checkpoint_path(row, request.name)

        def lay_out(moved: TaskProgress) -> bool:
            run_host_files.assemble_checkpoint(self.chunks, path, request.files, moved)
            return True

        key = "lay out", str(path), *sorted(request.files.items())
        what = f"checkpoint {request.name} of {row.id}"
        return await self._shared_tasks.join(key, lay_out, what) or False

    @call(Weights.list_older_checkpoints)
    async def list_older_checkpoints(self, request: CheckpointName) -> CheckpointNames:
        row = await jobs.read_job(self.mesh.state, request.job)
        return CheckpointNames(
            await self._run_on_run_host(list_older_names, Path(row.run_dir), request.name)
        )

    @call(Weights.quarantine_checkpoint)
    async def quarantine_checkpoint(self, request: CheckpointQuarantine) -> str:
        path = _checkpoint_path(await jobs.read_job(self.mesh.state, request.job), request.name)

        def put_aside() -> Path | None:
            quarantined_path = quarantine_checkpoint(path)
            if quarantined_path is not None:
                self._pending_events.add(
                    {**request.event_fields, "aside": str(quarantined_path)}, request.op_id
                )
            return quarantined_path

        quarantined_path = await self._run_on_run_host(put_aside)
        await self._pending_events.publish_all()
        return str(quarantined_path or "")

    @call(Weights.remove_unfinished_checkpoints)
    async def remove_unfinished_checkpoints(self, request: UnfinishedCheckpoints) -> None:
        """Remove unfinished checkpoints; quarantine older ones without a manifest, which are
        corrupt.
        """
        row = await jobs.read_job(self.mesh.state, request.job)

        def report_missing(path: Path, aside: Path) -> None:
            then = "its remaining files are quarantined; other checkpoints are available"
            why = "its manifest is missing"
            self._pending_events.add(
                corruption.make_event_fields(
                    "checkpoint", path, why, then, job=request.job, quarantined_path=aside
                )
            )

        directory = Path(row.run_dir) / "checkpoints"
        await self._run_on_run_host(
            run_host_files.remove_unfinished_checkpoints,
            directory,
            request.committed,
            report_missing,
        )
        await self._pending_events.publish_all()

    @call(Weights.publish_files)
    async def publish_files(self, request: FilePublication) -> PublishedFiles:
        """Import files of a checkpoint or bundle as chunks. NotFound; CorruptData: a corrupt
        manifest.
        """
        row = await jobs.read_job(self.mesh.state, request.job)
        if request.checkpoint:
            _checkpoint_path(row, request.checkpoint)
        chunks, checkpoint, below = self.chunks, request.checkpoint, request.folders

        def publish(moved: TaskProgress) -> PublishedFiles:
            return PublishedFiles(
                run_host_files.publish_files(chunks, row, checkpoint, below, moved)
            )

        key = "publish", row.run_dir, row.created_ms, checkpoint, *below
        what = f"the files of {checkpoint or 'the bundle of'} {row.id}"
        return await self._shared_tasks.join(key, publish, what) or PublishedFiles(
            {}, is_complete=False
        )

    @call(Weights.append_lines)
    async def append_lines(self, request: LineBatch) -> None:
        """Append lines to a file. StorageFull: they are dropped. BadMessage: invalid name."""
        row, lines = await jobs.read_job(self.mesh.state, request.job), request.lines.encode()
        key = request.job, row.created_ms, request.file

        def keep(_: TaskProgress) -> bool:
            if self._last_line_operations.get(key) != request.op_id:
                run_host_files.append_lines(self.mesh.host, row, request.file, lines)
                self._last_line_operations.pop(key, None)
                self._last_line_operations[key] = request.op_id
                while len(self._last_line_operations) > MAX_REMEMBERED_FILES:
                    del self._last_line_operations[next(iter(self._last_line_operations))]
            return True

        # A retry waits for the first write.
        if not await self._shared_tasks.join(
            (*key, request.op_id), keep, f"{request.file} of {row.id}"
        ):
            raise DeadlineExceeded("the disk does not accept lines in time", where=row.run_dir)

    async def _run_on_run_host(self, work: Callable[..., T], *args: Any) -> T:
        return await self.mesh.host.run_blocking(work, *args, deadline_s=RUN_HOST_TIMEOUT_S)

    @call(Weights.load_checkpoint)
    async def load_checkpoint(self, request: CheckpointName) -> Checkpoint:
        path = _checkpoint_path(await jobs.read_job(self.mesh.state, request.job), request.name)
        document = await self.mesh.host.run_blocking(read_manifest, path, deadline_s=IO_TIMEOUT_S)
        return Checkpoint(**document)


def _checkpoint_path(row: jobs.JobRow, name: str) -> Path:
    """Return the path of a checkpoint's manifest. BadMessage: invalid name."""
    if not NAME_PATTERN.fullmatch(name):
        raise BadMessage(f"{name!r:.80} is not a valid checkpoint name")
    return Path(row.run_dir) / "checkpoints" / f"{name}.json"
