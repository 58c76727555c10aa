"""A mesh that a token reaches through its gateway: files travel as bytes, both ways."""

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
from meshrl.common.base.digest import digest_of_file
from meshrl.common.base.errors import Damaged, NotAllowed, Refused
from meshrl.common.mesh.access import ticket
from meshrl.common.mesh.access.line import Line
from meshrl.common.state.events import Event
from meshrl.job import bundle
from meshrl.job.loaded import JobFile
from meshrl.view.mesh.snapshot import MeshSnapshot

REACH_S = 8.0  # for the first answer: a gateway that ends is back in less
GATEWAY_ENV = "MESHRL_GATEWAY"  # NAME:PORT of the mesh from here, instead of the token's
AT_ONCE = 4  # pieces on their way: enough to fill a link over some distance


class RemoteTransport:
    """The mesh that a token reaches, asked as `Client` describes."""

    def __init__(self, line: Line) -> None:
        self._line = line

    @classmethod
    async def open(cls, token: str | Path) -> RemoteTransport:
        """The mesh of a token, at `$MESHRL_GATEWAY` where that is set; NotAllowed when the token is
        not good any more, PeerLost without a mesh.
        """
        found = ticket.read(token)
        # One token serves inside of a cluster and through a tunnel to it, by another name each.
        if there := os.environ.get(GATEWAY_ENV):
            address = ticket.named(there, ticket.GATEWAY_PORT, f"${GATEWAY_ENV}")
            found = replace(found, address=address)
        line = Line(found)
        line.open()
        try:
            await line.call(Gateway.jobs, None, REACH_S)
        except BaseException:
            await line.close()
            raise
        return cls(line)

    async def close(self) -> None:
        await self._line.close()

    async def submit(self, found: JobFile, force: bool, job_file: Path | None) -> SubmittedJob:
        if force:
            raise Refused("runs of another user's mesh are not replaced", fix="Leave --force out")
        with tempfile.TemporaryDirectory(prefix="meshrl-submit-") as made:
            config, base, room = found.config, found.base, Path(made)
            directory, document = await asyncio.to_thread(bundle.pack, config, base, room)
            about = document.pop("bundle")
            begin = BeginUpload(document, about["digest"], about["files"], about["parameters"])
            async with aclosing(self._line.stream(Gateway.upload, begin)) as held:
                opened = await anext(held)
                await self._send(directory, about["files"], opened.upload, opened.piece_bytes)
                return await self._line.call(Gateway.finish, opened.upload)

    async def _send(self, directory: Path, files: Any, upload: str, size: int) -> None:
        """All pieces of all files, a few at a time; the first error ends it."""
        pieces = iter(_pieces(directory, files, size))

        async def sender() -> None:
            for name, offset, content in pieces:
                await self._line.call(Gateway.put, UploadPiece(upload, name, offset, content))

        async with asyncio.TaskGroup() as group:
            senders = [group.create_task(sender()) for _ in range(AT_ONCE)]
        for one in senders:
            one.result()

    async def jobs(self) -> list[JobState]:
        return (await self._line.call(Gateway.jobs, None)).jobs

    async def job(self, name: str) -> JobState:
        return await self._line.call(Gateway.job, JobRequest(name))

    async def happened(self, name: str, since: str, wait_s: float) -> tuple[list[Event], str]:
        found = await self._line.call(Gateway.events, EventsSince(name, since, wait_s))
        return [Event(**asdict(event)) for event in found.events], found.cursor

    async def stop(self, name: str, op: str) -> bool:
        return await self._line.call(Gateway.stop, JobRequest(name, op))

    async def delete(self, name: str, op: str) -> None:
        await self._line.call(Gateway.delete, JobRequest(name, op))

    async def workers(self) -> MeshSnapshot:
        raise NotAllowed("a token shows no workers", fix="Ask the mesh's own user")

    async def move(self, worker: str, role: str, job: str) -> str:
        raise NotAllowed("a token moves no workers", fix="Ask the mesh's own user")

    async def weights(self, name: str, step: int | None, best: bool, out: Path) -> Path:
        want = ModelRequest(name, -1 if step is None else step, best)
        with _appearing(out) as scratch:
            model = await self._line.call(Gateway.model, want)
            for file, (size, digest) in model.files.items():
                path = PurePosixPath(file)
                if path.is_absolute() or ".." in path.parts or not path.parts:
                    raise Damaged(f"{file!r:.300} is no name of a file of a model")
                place = scratch / path
                place.parent.mkdir(parents=True, exist_ok=True)
                await self._fetch(ReadModelFile(name, model.name, file, 0), place, size)
                if await asyncio.to_thread(digest_of_file, place) != digest:
                    raise Damaged(f"{file} is not what the mesh has", fix="Fetch it again")
        return out

    async def on_versions(self, name: str, act: str, version: str, note: str) -> dict[str, Any]:
        asked = VersionsRequest(name, act, version, note)
        answer: dict[str, Any] = (await self._line.call(Gateway.versions, asked)).answer
        return answer

    async def _fetch(self, first: ReadModelFile, place: Path, size: int) -> None:
        with place.open("xb") as file:
            while file.tell() < size:
                asked = ReadModelFile(first.job, first.model, first.name, file.tell())
                content = await self._line.call(Gateway.read, asked)
                if not content:
                    raise Damaged(f"{first.name} ends early", fix="Fetch it again")
                file.write(content)


def _pieces(directory: Path, files: Iterable[str], size: int) -> Iterator[tuple[str, int, bytes]]:
    """(name, offset, bytes) of all files, in pieces of at most `size`."""
    for name in files:
        with (directory / name).open("rb") as file:
            offset = 0
            while content := file.read(size):
                yield name, offset, content
                offset += len(content)


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A directory that becomes `out` when all has gone well, and else leaves nothing. Refused when
    there is something already.
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
