"""The gateway's actor: what holders of tokens ask, each about jobs that came with its token, and
what hosts ask that join.
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

UPLOAD_IDLE_S = 60.0  # an upload of which nothing arrives for so long is given up
POLL_S = 1.0  # between two looks whether it is
MAX_EVENT_WAIT_S = 20.0  # longest wait of one question for events
CONTAINMENT_TIMEOUT_S = isolation_probe.PROBE_TIMEOUT_S + 5.0
MAX_REMEMBERED_JOBS = 256  # uploads that were submitted, whose question may come again


class GatewayActor(HostCalls):
    """Serves the runs below `<root>/runs`, and makes new ones there."""

    interface = Gateway

    def __init__(self, mesh: Mesh, tokens: TokenRegistry) -> None:
        super().__init__(mesh, tokens)
        self._run_root = Path(mesh.settings.run_root)
        self._runs_directory = self._run_root / "runs"
        self._uploads = Uploads(mesh.host, self._runs_directory)
        self._models = ModelExports(mesh, self._run_root)
        self._submitted_jobs: OrderedDict[str, tuple[str, SubmittedJob]] = OrderedDict()
        # Of each run, by its directory, with the signature of the record that says so: another job
        # may come to have the name and the directory of one that was deleted.
        self._tokens_by_run: dict[str, tuple[Any, str]] = {}

    async def start(self) -> None:
        await self._uploads.start()

    # ------------------------------------------------------------ a new job

    @stream(Gateway.upload)
    async def upload(self, request: BeginUpload) -> AsyncIterator[UploadOpened]:
        """Opens an upload, and holds it open while the other end is there."""
        token, clock = caller_id.get(), self.mesh.clock
        config = parse_config(request.document)
        priority, most = config.pool.priority, self._tokens.find_priority(token)
        if priority > most:
            raise Refused(
                f"pool.priority = {priority}: jobs of this token have {most} at most",
                fix="Ask the mesh's own user for a token that was created with --priority",
            )
        need = derive_requirements(config.to_document(), request.parameters)
        await check_job_is_feasible(self.mesh.state, need)
        opened = self._uploads.open_upload(token, request, clock.monotonic())
        async with opened as upload:
            yield UploadOpened(upload.id, PIECE_BYTES)
            while upload.is_sealed or (
                clock.monotonic() - upload.last_arrival_s < UPLOAD_IDLE_S
                and self._tokens.is_valid(token)
            ):
                await clock.sleep(POLL_S)
            raise DeadlineExceeded(f"nothing of the job arrived for {UPLOAD_IDLE_S:g} s")

    @call(Gateway.put)
    async def put(self, request: UploadPiece) -> None:
        upload = self._uploads.find(request.upload, caller_id.get())
        if len(request.content) > PIECE_BYTES:
            raise Refused(f"a piece has at most {PIECE_BYTES} bytes")
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
            # It goes on if who asked has gone: Redis may have the job by then.
            upload.submission_task = asyncio.create_task(
                self._submit_and_remember(upload), name="submit a job"
            )
        return await asyncio.shield(upload.submission_task)

    async def _submit_and_remember(self, upload: Upload) -> SubmittedJob:
        """Submits; the answer is remembered for who asks again."""
        try:
            found = await self._submit(upload)
        finally:
            upload.is_sealed, upload.last_arrival_s = False, self.mesh.clock.monotonic()
        self._submitted_jobs[upload.id] = upload.token_id, found
        if len(self._submitted_jobs) > MAX_REMEMBERED_JOBS:
            self._submitted_jobs.popitem(last=False)
        return found

    async def _submit(self, upload: Upload) -> SubmittedJob:
        """Makes the run's directory and puts the job on record, under the first free name."""
        state = self.mesh.state
        if not self.mesh.settings.joinable:  # there is one host: this one
            tried, config = isolation_probe.require_isolation, upload.config
            await self.mesh.host.run_blocking(tried, config, deadline_s=CONTAINMENT_TIMEOUT_S)
        taken = {row.id for row in await jobs.read_jobs(state)}
        taken |= {path.name for path in self._runs_directory.iterdir()}
        # What is told of a deleted job, such as its events, is told by its name.
        taken |= set(await deletion.read_deleted_jobs(state))
        about = {"mesh": str(self._run_root), "token": upload.token_id}
        while True:
            job = choose_free_name(upload.config.name, taken)
            run_dir = self._uploads.create_run(upload, job, about, self._run_root / "store")
            if run_dir is not None:
                break
            taken.add(job)
        document = documents.decode((run_dir / "job.json").read_bytes(), str(run_dir))["document"]
        try:
            await jobs.submit(state, job, document, str(run_dir), uuid.uuid4().hex)
        except (StateUnavailable, DeadlineExceeded):
            raise  # perhaps the mesh has the job all the same: its directory stays
        except BaseException:
            shutil.rmtree(run_dir, ignore_errors=True)
            raise
        self.mesh.log.info("a job was handed in", job=job, token=upload.token_id)
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
            raise Refused(f"{request.since!r:.100} is no id of an event")
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
            with suppress(Refused):  # it is no name of a job
                if await deletion.was_deleted(self.mesh.state, request.job, op):
                    return True  # the answer was lost
            raise
        await deletion.delete_job(self.mesh.state, request.job, op)
        self._tokens_by_run.pop(row.run_dir, None)
        return True

    async def _find_own_job(self, job: str) -> JobRow:
        """The row of a job that came with the token of this request; NotFound for any other, so
        that nobody learns which there are.
        """
        missing = NotFound(
            f"there is no job {job!r:.100} of yours", fix="`meshrl status` lists them"
        )
        try:
            row = await jobs.read_job(self.mesh.state, job)
        except (NotFound, Refused):
            raise missing from None
        if self._find_token(row) != caller_id.get():
            raise missing
        return row

    def _find_token(self, row: JobRow) -> str:
        """The token that a job came with; empty: it came from the mesh's own user."""
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
            held = documents.decode(path.read_bytes(), str(path))
        except (CorruptData, OSError):
            return ""  # it is being mended, or gone
        token = str(held.get("token", ""))
        self._tokens_by_run[row.run_dir] = now, token
        return token

    # ------------------------------------------------------------ its weights

    @call(Gateway.model)
    async def model(self, request: ModelRequest) -> ModelFiles:
        """Writes the model where its files can be read; each version once."""
        return await self._models.export_model(await self._find_own_job(request.job), request)

    @call(Gateway.read)
    async def read(self, request: ReadModelFile) -> bytes:
        return await self._models.read_piece(await self._find_own_job(request.job), request)

    @call(Gateway.versions)
    async def versions(self, request: VersionsRequest) -> VersionsAnswer:
        """Refused for words that are none of a token's."""
        return VersionsAnswer(
            await run_versions_command(self.mesh, await self._find_own_job(request.job), request)
        )

    def stats(self) -> dict[str, Any]:
        return {"uploads": len(self._uploads)}


def _build_operation_id(request: JobRequest) -> str:
    """What the state knows a request by: the token's own, so that none is told another's."""
    if not re.fullmatch(r"[0-9a-zA-Z]{8,64}", request.op_id):
        raise Refused(
            f"{request.op_id!r:.100} tells no request from another", fix="Make up a new one"
        )
    return f"{caller_id.get()}.{request.op_id}"
