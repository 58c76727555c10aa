"""Gateway actor: it serves requests of token holders about their own jobs, and requests of hosts
that join.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshrl.common.api.gateway import (
    PIECE_BYTES,
    BeginUpload,
    EventPage,
    EventsSince,
    Gateway,
    JobEvent,
    JobList,
    JobRequest,
    JobState,
    ModelFiles,
    ModelRequest,
    ReadModelFile,
    SubmittedJob,
    UploadOpened,
    UploadPiece,
    VersionsAnswer,
    VersionsRequest,
)
from meshrl.common.base.errors import (
    CorruptData,
    DeadlineExceeded,
    NotFound,
    Refused,
    StateUnavailable,
)
from meshrl.common.base.files import documents
from meshrl.common.base.files.json_lines import read_signature
from meshrl.common.job.isolation import isolation_probe
from meshrl.common.job.run_names import choose_free_name
from meshrl.common.mesh.access.token_registry import TokenRegistry
from meshrl.common.mesh.runtime.calls.actor import call, stream
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.common.state.job_lifecycle import deletion
from meshrl.common.state.job_lifecycle.job_status import to_job_state, wait_for_events
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.pool.demand.requirements import derive_requirements
from meshrl.common.state.pool.store.submission_check import check_job_is_feasible
from meshrl.services.gateway.hosts import HostCalls
from meshrl.services.gateway.listener import caller_id
from meshrl.services.gateway.model_exports import ModelExports, run_versions_command
from meshrl.services.gateway.uploads import Upload, Uploads, parse_config

UPLOAD_IDLE_S = 60.0  # an upload is aborted after this time without data
POLL_S = 1.0  # interval of the check for idle uploads
MAX_EVENT_WAIT_S = 20.0  # limit of one request's wait for events
CONTAINMENT_TIMEOUT_S = isolation_probe.PROBE_TIMEOUT_S + 5.0
MAX_REMEMBERED_JOBS = 256  # submitted uploads whose request may be repeated


class GatewayActor(HostCalls):
    """Gateway of the runs below `<root>/runs`; it also creates runs there."""

    interface = Gateway

    def __init__(self, mesh: Mesh, tokens: TokenRegistry) -> None:
        super().__init__(mesh, tokens)
        self._run_root = Path(mesh.settings.run_root)
        self._runs_directory = self._run_root / "runs"
        self._uploads = Uploads(mesh.host, self._runs_directory)
        self._models = ModelExports(mesh, self._run_root)
        self._submitted_jobs: OrderedDict[str, tuple[str, SubmittedJob]] = OrderedDict()
        # Token of each run directory, with the signature of its job record: another job
        # may reuse the name and the directory of a deleted job.
        self._tokens_by_run: dict[str, tuple[Any, str]] = {}

    async def start(self) -> None:
        await self._uploads.start()

    # ------------------------------------------------------------ a new job

    @stream(Gateway.upload)
    async def upload(self, request: BeginUpload) -> AsyncIterator[UploadOpened]:
        """Open an upload, and hold it open while the client is connected."""
        token, clock = caller_id.get(), self.mesh.clock
        config = parse_config(request.document)
        priority, most = config.pool.priority, self._tokens.find_priority(token)
        if priority > most:
            raise Refused(
                f"pool.priority = {priority} exceeds {most}, the maximum of this token's jobs",
                fix="Ask the mesh's owner for a token created with --priority",
            )
        document = config.to_document() | {"bundle": {"models": request.models or {}}}
        need = derive_requirements(document)
        await check_job_is_feasible(self.mesh.state, need, document)
        opened = self._uploads.open_upload(token, request, clock.monotonic())
        async with opened as upload:
            yield UploadOpened(upload.id, PIECE_BYTES)
            while upload.is_sealed or (
                clock.monotonic() - upload.last_arrival_s < UPLOAD_IDLE_S
                and self._tokens.is_valid(token)
            ):
                await clock.sleep(POLL_S)
            raise DeadlineExceeded(f"no data of the job arrived for {UPLOAD_IDLE_S:g} s")

    @call(Gateway.put)
    async def put(self, request: UploadPiece) -> None:
        upload = self._uploads.find(request.upload, caller_id.get())
        if len(request.content) > PIECE_BYTES:
            raise Refused(f"a piece exceeds the limit of {PIECE_BYTES} bytes")
        upload.last_arrival_s = self.mesh.clock.monotonic()
        await self._uploads.write_piece(upload, request.name, request.offset, request.content)

    @call(Gateway.finish)
    async def finish(self, upload_id: str) -> SubmittedJob:
        token, known = caller_id.get(), self._submitted_jobs.get(upload_id)
        if known is not None and known[0] == token:
            return known[1]
        upload = self._uploads.find(upload_id, token)
        if upload.submission_task is None:
            await self._uploads.check_complete(upload)
            # It continues if the client disconnects: Redis may have the job already.
            upload.submission_task = asyncio.create_task(
                self._submit_and_remember(upload), name="submit a job"
            )
        return await asyncio.shield(upload.submission_task)

    async def _submit_and_remember(self, upload: Upload) -> SubmittedJob:
        """Submit an upload; remember the answer for repeated requests."""
        try:
            found = await self._submit(upload)
        finally:
            upload.is_sealed, upload.last_arrival_s = False, self.mesh.clock.monotonic()
        self._submitted_jobs[upload.id] = upload.token_id, found
        if len(self._submitted_jobs) > MAX_REMEMBERED_JOBS:
            self._submitted_jobs.popitem(last=False)
        return found

    async def _submit(self, upload: Upload) -> SubmittedJob:
        """Create the run directory and submit the job under the first free name."""
        state = self.mesh.state
        if not self.mesh.settings.joinable:  # the only host is this one
            tried, config = isolation_probe.require_isolation, upload.config
            await self.mesh.host.run_blocking(tried, config, deadline_s=CONTAINMENT_TIMEOUT_S)
        used_names = {row.id for row in await jobs.read_jobs(state)}
        used_names |= {path.name for path in self._runs_directory.iterdir()}
        # Records of a deleted job, such as its events, are found by its name.
        used_names |= set(await deletion.read_deleted_jobs(state))
        about = {"mesh": str(self._run_root), "token": upload.token_id}
        while True:
            job = choose_free_name(upload.config.name, used_names)
            run_dir = self._uploads.create_run(upload, job, about, self._run_root / "store")
            if run_dir is not None:
                break
            used_names.add(job)
        document = documents.decode((run_dir / "job.json").read_bytes(), str(run_dir))["document"]
        try:
            await jobs.submit(state, job, document, str(run_dir), uuid.uuid4().hex)
        except (StateUnavailable, DeadlineExceeded):
            raise  # the mesh may have the job, so its directory stays
        except BaseException:
            shutil.rmtree(run_dir, ignore_errors=True)
            raise
        self.mesh.log.info("a job was submitted", job=job, token=upload.token_id)
        return SubmittedJob(job, str(run_dir))

    # ------------------------------------------------------------ a job of the token's

    @call(Gateway.jobs)
    async def jobs(self, request: None) -> JobList:
        token = caller_id.get()
        rows = await jobs.read_jobs(self.mesh.state)
        return JobList([to_job_state(row) for row in rows if self._find_token(row) == token])

    @call(Gateway.job)
    async def job(self, request: JobRequest) -> JobState:
        return to_job_state(await self._find_own_job(request.job))

    @call(Gateway.events)
    async def events(self, request: EventsSince) -> EventPage:
        await self._find_own_job(request.job)
        ms, _, number = request.since.partition("-")
        if not ms.isdecimal() or not (number.isdecimal() or request.since == ms):
            raise Refused(f"{request.since!r:.100} is not the ID of an event")
        mesh, wait_s = self.mesh, min(max(request.wait_s, 0.0), MAX_EVENT_WAIT_S)
        found, cursor = await wait_for_events(
            mesh.state, mesh.clock, request.job, request.since, wait_s
        )
        return EventPage([JobEvent(**asdict(event)) for event in found], cursor)

    @call(Gateway.stop)
    async def cancel(self, request: JobRequest) -> bool:
        op = _build_operation_id(request)
        await self._find_own_job(request.job)
        return await jobs.cancel(self.mesh.state, request.job, op)

    @call(Gateway.delete)
    async def delete(self, request: JobRequest) -> bool:
        op = _build_operation_id(request)
        try:
            row = await self._find_own_job(request.job)
        except NotFound:
            with suppress(Refused):  # not a job name
                if await deletion.was_deleted(self.mesh.state, request.job, op):
                    return True  # the answer was lost
            raise
        await deletion.delete_job(self.mesh.state, request.job, op)
        self._tokens_by_run.pop(row.run_dir, None)
        return True

    async def _find_own_job(self, job: str) -> JobRow:
        """Return the row of a job that was submitted with the token of this request. Raise NotFound
        for any other job, so that names of other users' jobs are not disclosed.
        """
        missing = NotFound(
            f"this token has no job {job!r:.100}", fix="Run `meshrl status` to list its jobs"
        )
        try:
            row = await jobs.read_job(self.mesh.state, job)
        except (NotFound, Refused):
            raise missing from None
        if self._find_token(row) != caller_id.get():
            raise missing
        return row

    def _find_token(self, row: JobRow) -> str:
        """Return the token id of a job's submission; empty: it was submitted by the mesh's own
        user.
        """
        run_dir = Path(row.run_dir)
        if run_dir.parent != self._runs_directory:
            return ""
        path = run_dir / "job.json"
        now = read_signature(path)
        known = self._tokens_by_run.get(row.run_dir)
        if now is not None and known is not None and known[0] == now:
            return known[1]
        self._tokens_by_run.pop(row.run_dir, None)
        try:
            document = documents.decode(path.read_bytes(), str(path))
        except (CorruptData, OSError):
            return ""  # being repaired, or deleted
        token = str(document.get("token", ""))
        self._tokens_by_run[row.run_dir] = now, token
        return token

    # ------------------------------------------------------------ its weights

    @call(Gateway.model)
    async def model(self, request: ModelRequest) -> ModelFiles:
        """Export the model for downloads; each version once."""
        return await self._models.export_model(await self._find_own_job(request.job), request)

    @call(Gateway.read)
    async def read(self, request: ReadModelFile) -> bytes:
        return await self._models.read_piece(await self._find_own_job(request.job), request)

    @call(Gateway.versions)
    async def versions(self, request: VersionsRequest) -> VersionsAnswer:
        """Run a versions command. Raise Refused for actions that a token does not permit."""
        return VersionsAnswer(
            await run_versions_command(self.mesh, await self._find_own_job(request.job), request)
        )

    def stats(self) -> dict[str, Any]:
        return {"uploads": len(self._uploads)}


def _build_operation_id(request: JobRequest) -> str:
    """Build the operation id of a request in the state. It contains the token id, so that requests
    of different tokens never collide.
    """
    if not re.fullmatch(r"[0-9a-zA-Z]{8,64}", request.op_id):
        raise Refused(
            f"{request.op_id!r:.100} is not a valid request ID",
            fix="Use 8 to 64 letters and digits",
        )
    return f"{caller_id.get()}.{request.op_id}"
