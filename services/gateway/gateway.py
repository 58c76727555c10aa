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
from meshrl.common.base.errors import Damaged, DeadlineExceeded, NotFound, Refused, StateUnavailable
from meshrl.common.base.files import documents
from meshrl.common.base.files.lines import signature
from meshrl.common.job.isolation import containment
from meshrl.common.job.run_names import free_name
from meshrl.common.mesh.access.tokens import TokenTable
from meshrl.common.mesh.runtime.calls.actor import call, stream
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.lifecycle import deleting
from meshrl.common.state.lifecycle.following import happened, standing
from meshrl.common.state.pool.demand.needs import need_of
from meshrl.common.state.pool.store.fitting import refuse_what_never_fits
from meshrl.services.gateway.front import holder
from meshrl.services.gateway.hosts import HostCalls
from meshrl.services.gateway.models import Models, on_versions
from meshrl.services.gateway.uploads import Upload, Uploads, config_of

IDLE_S = 60.0  # an upload of which nothing arrives for so long is given up
LOOK_S = 1.0  # between two looks whether it is
WAIT_S = 20.0  # longest wait of one question for events
CONTAINED_S = containment.PROBE_S + 5.0
ANSWERED = 256  # uploads that were submitted, whose question may come again


class GatewayActor(HostCalls):
    """Serves the runs below `<root>/runs`, and makes new ones there."""

    interface = Gateway

    def __init__(self, mesh: Mesh, tokens: TokenTable) -> None:
        super().__init__(mesh, tokens)
        self._root = Path(mesh.settings.run_root)
        self._runs = self._root / "runs"
        self._uploads = Uploads(mesh.host, self._runs)
        self._models = Models(mesh, self._root)
        self._submitted: OrderedDict[str, tuple[str, SubmittedJob]] = OrderedDict()
        # Of each run, by its directory, with the signature of the record that says so: another job
        # may come to have the name and the directory of one that was deleted.
        self._holders: dict[str, tuple[Any, str]] = {}

    async def start(self) -> None:
        await self._uploads.start()

    # ------------------------------------------------------------ a new job

    @stream(Gateway.upload)
    async def upload(self, request: BeginUpload) -> AsyncIterator[UploadOpened]:
        """Opens an upload, and holds it open while the other end is there."""
        token, clock = holder.get(), self.mesh.clock
        config = config_of(request.document)
        priority, most = config.pool.priority, self._tokens.priority(token)
        if priority > most:
            raise Refused(
                f"pool.priority = {priority}: jobs of this token have {most} at most",
                fix="Ask the mesh's own user for a token that was created with --priority",
            )
        need = need_of(config.document(), request.parameters)
        await refuse_what_never_fits(self.mesh.state, need)
        opened = self._uploads.opened(token, request, clock.monotonic())
        async with opened as upload:
            yield UploadOpened(upload.id, PIECE_BYTES)
            while upload.settling or (
                clock.monotonic() - upload.touched < IDLE_S and self._tokens.good(token)
            ):
                await clock.sleep(LOOK_S)
            raise DeadlineExceeded(f"nothing of the job arrived for {IDLE_S:g} s")

    @call(Gateway.put)
    async def put(self, request: UploadPiece) -> None:
        upload = self._uploads.of(request.upload, holder.get())
        if len(request.content) > PIECE_BYTES:
            raise Refused(f"a piece has at most {PIECE_BYTES} bytes")
        upload.touched = self.mesh.clock.monotonic()
        await self._uploads.put(upload, request.name, request.offset, request.content)

    @call(Gateway.finish)
    async def finish(self, id: str) -> SubmittedJob:
        token, known = holder.get(), self._submitted.get(id)
        if known is not None and known[0] == token:
            return known[1]
        upload = self._uploads.of(id, token)
        if upload.submission is None:
            await self._uploads.check(upload)
            # It goes on if who asked has gone: Redis may have the job by then.
            upload.submission = asyncio.create_task(self._answered(upload), name="submit a job")
        return await asyncio.shield(upload.submission)

    async def _answered(self, upload: Upload) -> SubmittedJob:
        """Submits; the answer is remembered for who asks again."""
        try:
            found = await self._submit(upload)
        finally:
            upload.settling, upload.touched = False, self.mesh.clock.monotonic()
        self._submitted[upload.id] = upload.holder, found
        if len(self._submitted) > ANSWERED:
            self._submitted.popitem(last=False)
        return found

    async def _submit(self, upload: Upload) -> SubmittedJob:
        """Makes the run's directory and puts the job on record, under the first free name."""
        state = self.mesh.state
        if not self.mesh.settings.joinable:  # there is one host: this one
            tried, config = containment.require, upload.config
            await self.mesh.host.run_blocking(tried, config, deadline_s=CONTAINED_S)
        taken = {row.id for row in await jobs.jobs(state)}
        taken |= {path.name for path in self._runs.iterdir()}
        # What is told of a deleted job, such as its events, is told by its name.
        taken |= set(await deleting.names(state))
        about = {"mesh": str(self._root), "token": upload.holder}
        while True:
            job = free_name(upload.config.name, taken)
            run_dir = self._uploads.settle(upload, job, about, self._root / "store")
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
        self.mesh.log.info("a job was handed in", job=job, token=upload.holder)
        return SubmittedJob(job, str(run_dir))

    # ------------------------------------------------------------ a job of the token's

    @call(Gateway.jobs)
    async def jobs(self, request: None) -> JobList:
        token = holder.get()
        rows = await jobs.jobs(self.mesh.state)
        return JobList([standing(row) for row in rows if self._holder_of(row) == token])

    @call(Gateway.job)
    async def job(self, request: JobRequest) -> JobState:
        return standing(await self._own(request.job))

    @call(Gateway.events)
    async def events(self, request: EventsSince) -> EventPage:
        await self._own(request.job)
        ms, _, number = request.since.partition("-")
        if not ms.isdecimal() or not (number.isdecimal() or request.since == ms):
            raise Refused(f"{request.since!r:.100} is no id of an event")
        mesh, wait_s = self.mesh, min(max(request.wait_s, 0.0), WAIT_S)
        found, cursor = await happened(mesh.state, mesh.clock, request.job, request.since, wait_s)
        return EventPage([JobEvent(**asdict(event)) for event in found], cursor)

    @call(Gateway.stop)
    async def cancel(self, request: JobRequest) -> bool:
        op = _operation(request)
        await self._own(request.job)
        return await jobs.cancel(self.mesh.state, request.job, op)

    @call(Gateway.delete)
    async def delete(self, request: JobRequest) -> bool:
        op = _operation(request)
        try:
            row = await self._own(request.job)
        except NotFound:
            with suppress(Refused):  # it is no name of a job
                if await deleting.was_deleted(self.mesh.state, request.job, op):
                    return True  # the answer was lost
            raise
        await deleting.delete(self.mesh.state, request.job, op)
        self._holders.pop(row.run_dir, None)
        return True

    async def _own(self, job: str) -> JobRow:
        """The row of a job that came with the token of this request; NotFound for any other, so
        that nobody learns which there are.
        """
        missing = NotFound(
            f"there is no job {job!r:.100} of yours", fix="`meshrl status` lists them"
        )
        try:
            row = await jobs.job(self.mesh.state, job)
        except (NotFound, Refused):
            raise missing from None
        if self._holder_of(row) != holder.get():
            raise missing
        return row

    def _holder_of(self, row: JobRow) -> str:
        """The token that a job came with; empty: it came from the mesh's own user."""
        run_dir = Path(row.run_dir)
        if run_dir.parent != self._runs:
            return ""
        path = run_dir / "job.json"
        now = signature(path)
        known = self._holders.get(row.run_dir)
        if now is not None and known is not None and known[0] == now:
            return known[1]
        self._holders.pop(row.run_dir, None)
        try:
            held = documents.decode(path.read_bytes(), str(path))
        except (Damaged, OSError):
            return ""  # it is being mended, or gone
        token = str(held.get("token", ""))
        self._holders[row.run_dir] = now, token
        return token

    # ------------------------------------------------------------ its weights

    @call(Gateway.model)
    async def model(self, request: ModelRequest) -> ModelFiles:
        """Writes the model where its files can be read; each version once."""
        return await self._models.written(await self._own(request.job), request)

    @call(Gateway.read)
    async def read(self, request: ReadModelFile) -> bytes:
        return await self._models.piece(await self._own(request.job), request)

    @call(Gateway.versions)
    async def versions(self, request: VersionsRequest) -> VersionsAnswer:
        """Refused for words that are none of a token's."""
        return VersionsAnswer(await on_versions(self.mesh, await self._own(request.job), request))

    def stats(self) -> dict[str, Any]:
        return {"uploads": len(self._uploads)}


def _operation(request: JobRequest) -> str:
    """What the state knows a request by: the token's own, so that none is told another's."""
    if not re.fullmatch(r"[0-9a-zA-Z]{8,64}", request.op):
        raise Refused(f"{request.op!r:.100} tells no request from another", fix="Make up a new one")
    return f"{holder.get()}.{request.op}"
