"""Uploads of jobs: each has its own directory, which becomes the run's directory when its files are
complete. An upload whose client is disconnected or silent is removed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.common.api.gateway import BeginUpload, SubmittedJob
from meshrl.common.base.errors import ConfigError, NotFound, Overloaded, Refused, StorageFull
from meshrl.common.base.files import documents
from meshrl.common.base.files.disk_sync import fsync_tree
from meshrl.common.job.bundle import bundle_upload
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.process.host import Host

INCOMING_PREFIX = ".incoming-"  # prefix of upload directories
IO_TIMEOUT_S = 60.0  # for one piece, or to create all files
CHECK_TIMEOUT_S = 280.0  # to read a whole bundle again: 64 GiB at a quarter of a GB per second
MAX_UPLOADS_PER_TOKEN = 2  # concurrent uploads of one token
MAX_UPLOADS = 8  # concurrent uploads of all tokens
MIN_FREE_BYTES = 1 << 30  # disk space that uploads must leave free


@dataclass
class Upload:
    """Upload of one job."""

    id: str
    token_id: str  # the token of its request
    config: JobConfig
    digest: str
    files: Mapping[str, tuple[int, str]]
    parameters: int  # of its model
    models: dict[str, Any]  # descriptions of its models by role
    directory: Path  # becomes the run directory
    last_arrival_s: float  # time of the last data
    is_sealed: bool = False  # all data has arrived: no more writes
    submission_task: asyncio.Task[SubmittedJob] | None = (
        None  # submits it as a run, even if the client disconnects
    )
    pieces_in_progress: int = field(default=0)  # pieces being written

    @property
    def bundle(self) -> Path:
        """Directory of the uploaded files."""
        return self.directory / "bundle" / self.digest


class Uploads:
    """Uploads in progress, below `runs`."""

    def __init__(self, host: Host, runs: Path) -> None:
        self._host, self._runs = host, runs
        self._open_uploads: dict[str, Upload] = {}

    async def start(self) -> None:
        """Remove incomplete uploads of an earlier process."""

        def tidy() -> None:
            self._runs.mkdir(parents=True, exist_ok=True)
            for leftover in self._runs.glob(f"{INCOMING_PREFIX}*"):
                shutil.rmtree(leftover, ignore_errors=True)

        await self._host.run_blocking(tidy, deadline_s=IO_TIMEOUT_S)

    def __len__(self) -> int:
        return len(self._open_uploads)

    def find(self, upload_id: str, token_id: str) -> Upload:
        """Return an upload of this token. Raise NotFound if it has ended, or belongs to another
        token.
        """
        found = self._open_uploads.get(upload_id)
        if found is None or found.token_id != token_id:
            raise NotFound("there is no such upload: it has expired", fix="Submit the job again")
        return found

    @asynccontextmanager
    async def open_upload(
        self, token_id: str, begin: BeginUpload, now_s: float
    ) -> AsyncIterator[Upload]:
        """Open an upload, which is removed at the end of the context unless it has become a run.
        Raise Refused or ConfigError for an invalid job, Overloaded, or StorageFull.
        """
        mine = sum(upload.token_id == token_id for upload in self._open_uploads.values())
        if mine >= MAX_UPLOADS_PER_TOKEN or len(self._open_uploads) >= MAX_UPLOADS:
            raise Overloaded(
                f"{max(mine, len(self._open_uploads))} jobs are already being uploaded"
            )
        checked = bundle_upload.validate_files(begin.files, begin.digest)
        if begin.parameters < 0:
            raise Refused(f"a model cannot have {begin.parameters} parameters")
        config = parse_config(begin.document)
        bundle_upload.check_config_paths(config, checked)
        needed = sum(size for size, _ in checked.values())
        arrives = sum(size for u in self._open_uploads.values() for size, _ in u.files.values())
        free = self._host.measure_free_space(self._runs).disk_bytes
        if needed + arrives + MIN_FREE_BYTES > free:
            raise StorageFull(
                f"the bundle needs {needed} bytes, and the mesh's disk has {free} free",
                fix="Free disk space on the head",
            )
        name = uuid.uuid4().hex
        directory = self._runs / f"{INCOMING_PREFIX}{name}"
        about = config, begin.digest, checked, begin.parameters, begin.models or {}
        upload = self._open_uploads[name] = Upload(name, token_id, *about, directory, now_s)
        try:
            make = bundle_upload.create_empty_files
            await self._host.run_blocking(make, upload.bundle, checked, deadline_s=IO_TIMEOUT_S)
            yield upload
        finally:
            if upload.submission_task is not None:  # before that the directory is the upload's own
                await asyncio.wait([upload.submission_task])
            del self._open_uploads[name]
            remove = partial(shutil.rmtree, directory, ignore_errors=True)
            await self._host.run_blocking(remove, deadline_s=IO_TIMEOUT_S)

    async def write_piece(self, upload: Upload, name: str, offset: int, content: bytes) -> None:
        """Write a piece. Raise Refused outside of the file's size, or for an unlisted file."""
        if name not in upload.files:
            raise Refused(f"{name!r:.300} is not listed in the bundle")
        if upload.is_sealed:
            raise Refused("the upload is complete and accepts no more pieces")
        size, _ = upload.files[name]
        path = upload.bundle / name
        upload.pieces_in_progress += 1
        try:
            write = bundle_upload.write_piece
            await self._host.run_blocking(
                write, path, size, offset, content, deadline_s=IO_TIMEOUT_S
            )
        except OSError as error:
            raise StorageFull(
                f"{name}: {error.strerror}", fix="Free disk space on the head"
            ) from error
        finally:
            upload.pieces_in_progress -= 1

    async def check_complete(self, upload: Upload) -> None:
        """Check that all bytes have arrived as packed; raise Refused otherwise."""
        if upload.pieces_in_progress or upload.is_sealed:
            raise Refused("pieces of the upload are still being written")
        upload.is_sealed = True
        try:
            check = bundle_upload.check_complete
            await self._host.run_blocking(
                check, upload.bundle, upload.files, deadline_s=CHECK_TIMEOUT_S
            )
            await self._host.run_blocking(fsync_tree, upload.directory, deadline_s=CHECK_TIMEOUT_S)
        except BaseException:
            upload.is_sealed = False
            raise

    def create_run(
        self, upload: Upload, job: str, about: dict[str, Any], store: Path
    ) -> Path | None:
        """Turn an upload into the run directory of `job` atomically. Return None if it exists
        already.
        """
        target = self._runs / job
        if os.path.lexists(target):
            return None
        bundle = {
            "dir": str(target / "bundle" / upload.digest),
            "digest": upload.digest,
            "files": {name: list(about) for name, about in upload.files.items()},
            "parameters": upload.parameters,
            "models": upload.models,
        }
        document = upload.config.to_document() | {"bundle": bundle}
        documents.write(upload.directory / "job.json", about | {"job": job, "document": document})
        link = upload.directory / "store"  # the mesh's weight store
        if not link.is_symlink():
            link.symlink_to(store)
        try:
            upload.directory.rename(target)
        except OSError:
            if os.path.lexists(target):
                return None
            raise
        return target


def parse_config(document: Any) -> JobConfig:
    """Parse a job document; the ConfigError names the invalid key."""
    # pydantic is imported with the first job, as no other service needs it.
    from meshrl.common.job.schema import JOB_SCHEMA

    def fail(key: str, message: str, fix: str) -> ConfigError:
        return ConfigError(message, where=key, fix=fix)

    if not isinstance(document, dict):
        raise Refused("a job must be a table")
    config = JOB_SCHEMA.validate({k: v for k, v in document.items() if k != "bundle"}, fail)
    if config.out_url:
        raise Refused(
            "`out` is a URL, to which the mesh would write with its owner's credentials",
            fix=(
                "Remove it, and fetch the model with `meshrl export`. Only the mesh's owner "
                "may set a URL"
            ),
        )
    # Paths of the client's host are meaningless here.
    cache = str(Path("~/.cache/meshrl").expanduser()) if config.cache else ""
    return replace(config, out="", cache=cache)
