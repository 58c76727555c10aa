"""Transport to a mesh through its gateway, with a token: files travel as bytes, both ways."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import Any

from meshrl.common.api.gateway import (
    BeginUpload,
    EventsSince,
    Gateway,
    JobRequest,
    JobState,
    ModelRequest,
    ReadModelFile,
    SubmittedJob,
    UploadPiece,
    VersionsRequest,
)
from meshrl.common.base.digest import compute_file_digest
from meshrl.common.base.errors import CorruptData, NotAllowed, Refused
from meshrl.common.mesh.access import access_token
from meshrl.common.mesh.access.gateway_connection import GatewayConnection
from meshrl.common.state.events import Event
from meshrl.job import bundle
from meshrl.job.job_file import JobFile
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot

CONNECT_TIMEOUT_S = 8.0  # for the first answer: a gateway that ends is back in less
GATEWAY_ENV = "MESHRL_GATEWAY"  # NAME:PORT of the mesh from here, instead of the token's
CONCURRENT_PIECES = 4  # pieces on their way: enough to fill a link over some distance


class RemoteTransport:
    """Transport to the mesh that a token reaches, with the methods of `Client`."""

    def __init__(self, connection: GatewayConnection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, token: str | Path) -> RemoteTransport:
        """Connect to the mesh of a token, at `$MESHRL_GATEWAY` where that is set.

        Raises NotAllowed when the token is no longer valid, PeerLost without a mesh.
        """
        found = access_token.read_token(token)
        # One token serves inside of a cluster and through a tunnel to it, by another name each.
        if there := os.environ.get(GATEWAY_ENV):
            address = access_token.parse_gateway_address(
                there, access_token.GATEWAY_PORT, f"${GATEWAY_ENV}"
            )
            found = replace(found, address=address)
        line = GatewayConnection(found)
        line.open()
        try:
            await line.call(Gateway.jobs, None, CONNECT_TIMEOUT_S)
        except BaseException:
            await line.close()
            raise
        return cls(line)

    async def close(self) -> None:
        await self._connection.close()

    async def submit(self, job: JobFile, force: bool, job_file: Path | None) -> SubmittedJob:
        if force:
            raise Refused("runs of another user's mesh cannot be replaced", fix="Remove --force")
        with tempfile.TemporaryDirectory(prefix="meshrl-submit-") as scratch:
            config, base, room = job.config, job.base, Path(scratch)
            directory, document = await asyncio.to_thread(bundle.pack_bundle, config, base, room)
            about = document.pop("bundle")
            begin = BeginUpload(
                document, about["digest"], about["files"], about["parameters"], about["models"]
            )
            async with aclosing(self._connection.stream(Gateway.upload, begin)) as replies:
                opened = await anext(replies)
                await self._send_files(directory, about["files"], opened.upload, opened.piece_bytes)
                return await self._connection.call(Gateway.finish, opened.upload)

    async def _send_files(
        self, directory: Path, files: Any, upload_id: str, piece_bytes: int
    ) -> None:
        """Send all pieces of all files, a few at a time; the first error ends it."""
        pieces = iter(_read_pieces(directory, files, piece_bytes))

        async def sender() -> None:
            for name, offset, content in pieces:
                await self._connection.call(
                    Gateway.put, UploadPiece(upload_id, name, offset, content)
                )

        async with asyncio.TaskGroup() as group:
            senders = [group.create_task(sender()) for _ in range(CONCURRENT_PIECES)]
        for one in senders:
            one.result()

    async def jobs(self) -> list[JobState]:
        return (await self._connection.call(Gateway.jobs, None)).jobs

    async def job(self, name: str) -> JobState:
        return await self._connection.call(Gateway.job, JobRequest(name))

    async def read_events(self, name: str, since: str, wait_s: float) -> tuple[list[Event], str]:
        found = await self._connection.call(Gateway.events, EventsSince(name, since, wait_s))
        return [Event(**asdict(event)) for event in found.events], found.cursor

    async def stop(self, name: str, op_id: str) -> bool:
        return await self._connection.call(Gateway.stop, JobRequest(name, op_id))

    async def delete(self, name: str, op_id: str) -> None:
        await self._connection.call(Gateway.delete, JobRequest(name, op_id))

    async def workers(self) -> MeshSnapshot:
        raise NotAllowed("a token does not allow listing workers", fix="Ask the owner of the mesh")

    async def move(self, worker: str, role: str, job: str) -> str:
        raise NotAllowed("a token does not allow moving workers", fix="Ask the owner of the mesh")

    async def place(self, job: str, partner: str) -> str:
        raise NotAllowed("a token does not allow placing jobs", fix="Ask the owner of the mesh")

    async def weights(self, name: str, step: int | None, best: bool, out: Path) -> Path:
        request = ModelRequest(name, -1 if step is None else step, best)
        with _atomic_directory(out) as scratch:
            model = await self._connection.call(Gateway.model, request)
            for file, (size, digest) in model.files.items():
                path = PurePosixPath(file)
                if path.is_absolute() or ".." in path.parts or not path.parts:
                    raise CorruptData(f"{file!r:.300} is not a file name of a model")
                place = scratch / path
                place.parent.mkdir(parents=True, exist_ok=True)
                await self._fetch_file(ReadModelFile(name, model.name, file, 0), place, size)
                if await asyncio.to_thread(compute_file_digest, place) != digest:
                    raise CorruptData(f"{file} differs from the mesh's copy", fix="Fetch it again")
        return out

    async def run_versions_command(
        self, name: str, action: str, version: str, note: str
    ) -> dict[str, Any]:
        request = VersionsRequest(name, action, version, note)
        answer: dict[str, Any] = (await self._connection.call(Gateway.versions, request)).answer
        return answer

    async def _fetch_file(self, request: ReadModelFile, path: Path, size_bytes: int) -> None:
        with path.open("xb") as file:
            while file.tell() < size_bytes:
                read_request = ReadModelFile(request.job, request.model, request.name, file.tell())
                content = await self._connection.call(Gateway.read, read_request)
                if not content:
                    raise CorruptData(f"{request.name} is truncated", fix="Fetch it again")
                file.write(content)


def _read_pieces(
    directory: Path, files: Iterable[str], piece_bytes: int
) -> Iterator[tuple[str, int, bytes]]:
    """Yield (name, offset, bytes) of all files, in pieces of at most `piece_bytes`."""
    for name in files:
        with (directory / name).open("rb") as file:
            offset = 0
            while content := file.read(piece_bytes):
                yield name, offset, content
                offset += len(content)


@contextmanager
def _atomic_directory(out: Path) -> Iterator[Path]:
    """Yield a scratch directory that becomes `out` on success, and is removed on an error.

    Raises Refused when `out` is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(f"{out} is not empty", fix="Name another directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield scratch
        if out.exists():
            out.rmdir()
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
