"""Jobs on their way in: the files of each arrive below a directory of its own, which becomes the
run's when they are whole. An upload whose sender has gone, or is silent, leaves nothing.
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

INCOMING_PREFIX = ".incoming-"  # how the directories of uploads begin
IO_TIMEOUT_S = 60.0  # for one piece, or to make all files
CHECK_TIMEOUT_S = 280.0  # to read all of a bundle again: 64 GiB at a quarter of a GB a second
MAX_UPLOADS_PER_TOKEN = 2  # uploads of one token at a time
MAX_UPLOADS = 8  # of all tokens
MIN_FREE_BYTES = 1 << 30  # of the disk that uploads leave


@dataclass
class Upload:
    """One job on its way in."""

    id: str
    token_id: str  # the token that it came with
    config: JobConfig
    digest: str
    files: Mapping[str, tuple[int, str]]
    parameters: int  # of its model
    directory: Path  # which becomes the run's
    last_arrival_s: float  # when something of it arrived last
    is_sealed: bool = False  # all of it has arrived: nothing is written to it any more
    submission_task: asyncio.Task[SubmittedJob] | None = (
        None  # it becomes a run, whoever is there still
    )
    pieces_in_progress: int = field(default=0)  # that are being written

    @property
    def bundle(self) -> Path:
        """Where the files arrive."""
        return self.directory / "bundle" / self.digest


class Uploads:
    """All jobs on their way in, below `runs`."""

    def __init__(self, host: Host, runs: Path) -> None:
        self._host, self._runs = host, runs
        self._open_uploads: dict[str, Upload] = {}

    async def start(self) -> None:
        """Removes what an earlier process of ours left half way."""

        def tidy() -> None:
            self._runs.mkdir(parents=True, exist_ok=True)
            for left in self._runs.glob(f"{INCOMING_PREFIX}*"):
                shutil.rmtree(left, ignore_errors=True)

        await self._host.run_blocking(tidy, deadline_s=IO_TIMEOUT_S)

    def __len__(self) -> int:
        return len(self._open_uploads)

    def find(self, upload_id: str, token_id: str) -> Upload:
        """An upload of this token; NotFound when it has ended, or is another's."""
        found = self._open_uploads.get(upload_id)
        if found is None or found.token_id != token_id:
            raise NotFound("there is no such upload: it was given up", fix="Submit the job again")
        return found

    @asynccontextmanager
    async def open_upload(
        self, token_id: str, begin: BeginUpload, now_s: float
    ) -> AsyncIterator[Upload]:
        """A new upload, which is given up at the end of the context unless it has become a run.
        Refused or ConfigError for what is no job; Overloaded; StorageFull.
        """
        mine = sum(upload.token_id == token_id for upload in self._open_uploads.values())
        if mine >= MAX_UPLOADS_PER_TOKEN or len(self._open_uploads) >= MAX_UPLOADS:
            raise Overloaded(
                f"{max(mine, len(self._open_uploads))} jobs are being handed over already"
            )
        checked = bundle_upload.validate_files(begin.files, begin.digest)
        if begin.parameters < 0:
            raise Refused(f"a model does not have {begin.parameters} parameters")
        config = parse_config(begin.document)
        bundle_upload.check_config_paths(config, checked)
        needed = sum(size for size, _ in checked.values())
        arrives = sum(size for u in self._open_uploads.values() for size, _ in u.files.values())
        free = self._host.measure_free_space(self._runs).disk_bytes
        if needed + arrives + MIN_FREE_BYTES > free:
            raise StorageFull(
                f"the bundle has {needed} bytes, and the mesh's disk {free} left",
                fix="Free some space there",
            )
        name = uuid.uuid4().hex
        directory = self._runs / f"{INCOMING_PREFIX}{name}"
        upload = self._open_uploads[name] = Upload(
            name, token_id, config, begin.digest, checked, begin.parameters, directory, now_s
        )
        try:
            make = bundle_upload.create_empty_files
            await self._host.run_blocking(make, upload.bundle, checked, deadline_s=IO_TIMEOUT_S)
            yield upload
        finally:
            if upload.submission_task is not None:  # until then the directory is its own
                await asyncio.wait([upload.submission_task])
            del self._open_uploads[name]
            remove = partial(shutil.rmtree, directory, ignore_errors=True)
            await self._host.run_blocking(remove, deadline_s=IO_TIMEOUT_S)

    async def write_piece(self, upload: Upload, name: str, offset: int, content: bytes) -> None:
        """Writes a piece. Refused outside of the file's size, or for a file that was not listed."""
        if name not in upload.files:
            raise Refused(f"{name!r:.300} is not in the bundle's list")
        if upload.is_sealed:
            raise Refused("all pieces were said to have arrived")
        size, _ = upload.files[name]
        path = upload.bundle / name
        upload.pieces_in_progress += 1
        try:
            write = bundle_upload.write_piece
            await self._host.run_blocking(
                write, path, size, offset, content, deadline_s=IO_TIMEOUT_S
            )
        except OSError as error:
            raise StorageFull(f"{name}: {error.strerror}", fix="Free some space there") from error
        finally:
            upload.pieces_in_progress -= 1

    async def check_complete(self, upload: Upload) -> None:
        """Refused unless all of its bytes have arrived as they were packed."""
        if upload.pieces_in_progress or upload.is_sealed:
            raise Refused("pieces of it are being written")
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
        """Makes an upload the run directory of `job`, at once; None when there is one already."""
        target = self._runs / job
        if os.path.lexists(target):
            return None
        bundle = {
            "dir": str(target / "bundle" / upload.digest),
            "digest": upload.digest,
            "files": {name: list(about) for name, about in upload.files.items()},
            "parameters": upload.parameters,
        }
        document = upload.config.to_document() | {"bundle": bundle}
        documents.write(upload.directory / "job.json", about | {"job": job, "document": document})
        link = upload.directory / "store"  # where the mesh keeps its weights
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
    """The job that a document is; ConfigError names the key that is wrong."""
    # pydantic, which no other service needs: it is imported when the first job comes.
    from meshrl.common.job.schema import JOB_SCHEMA

    def fail(key: str, message: str, fix: str) -> ConfigError:
        return ConfigError(message, where=key, fix=fix)

    if not isinstance(document, dict):
        raise Refused("a job is a table")
    config = JOB_SCHEMA.validate({k: v for k, v in document.items() if k != "bundle"}, fail)
    if config.out_url:
        raise Refused(
            "`out` names a URL, which the mesh would write to with its owner's credentials",
            fix="Leave it out; `meshrl export` brings the model. The mesh's owner may name one",
        )
    # Where its files lie is the mesh's matter: paths of the sender's host mean nothing here.
    cache = str(Path("~/.cache/meshrl").expanduser()) if config.cache else ""
    return replace(config, out="", cache=cache)
