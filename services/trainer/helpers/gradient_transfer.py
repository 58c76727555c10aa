"""Transfers a hybrid's gradient: to the core in pieces, over the hybrid's own bulk port and beside
the control traffic; from there to the ranks of a gang, which are on one host, as a file.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.errors import BadMessage, PeerLost
from common.runtime.mesh import Mesh
from common.state import registry
from common.wire.bulk import BulkClient, BulkServer, bulk_key
from common.wire.chunks import ChunkStore, digest_of, failure

PIECE_BYTES = 64 << 20
PIECE_S = 30.0  # deadline of moving one
FILE_S = 600.0  # to write or read a whole gradient


def hybrid_name(gang: str) -> str:
    """What the hybrid of a gang is called in the mesh."""
    return f"hybrid/{gang}"


class Outbox:
    """A hybrid's: holds one gradient, which nobody needs any more once its round was answered.

    Its files are not made durable: what is lost with its process is computed again.
    """

    def __init__(self, mesh: Mesh, gang: str) -> None:
        settings = mesh.settings
        directory = Path(settings.run_root) / "mesh" / "lent" / gang
        shutil.rmtree(directory, ignore_errors=True)  # left by an earlier process of the gang
        self._run = mesh.host.run_blocking
        self._chunks = ChunkStore(directory, mesh.clock.wall)
        self._server = BulkServer(
            self._chunks, mesh.host, settings.bind, settings.advertise, key=bulk_key(settings)
        )
        self._pieces: list[str] = []

    @property
    def address(self) -> str:
        return self._server.address

    async def put(self, gradient: Tensor) -> list[str]:
        """Digests of the pieces of a flat gradient, which takes the place of the one before;
        StorageFull.
        """
        await self.clear()
        self._pieces = await self._run(self._write, gradient, deadline_s=FILE_S)
        return self._pieces

    async def clear(self) -> None:
        pieces, self._pieces = self._pieces, []
        await self._run(self._remove, pieces, deadline_s=FILE_S)

    def close(self) -> None:
        self._server.close()
        shutil.rmtree(self._chunks.directory, ignore_errors=True)

    def _write(self, gradient: Tensor) -> list[str]:
        content = gradient.cpu().numpy().data.cast("B")
        pieces = []
        for start in range(0, len(content), PIECE_BYTES):
            piece = content[start : start + PIECE_BYTES]
            pieces.append(digest_of(piece))
            _write(piece, self._chunks.path(pieces[-1]))
        return pieces

    def _remove(self, pieces: Sequence[str]) -> None:
        for digest in pieces:
            self._chunks.path(digest).unlink(missing_ok=True)


async def collect(
    mesh: Mesh, bulk: BulkClient, gang: str, pieces: Sequence[str], size: int
) -> NDArray[np.float32]:
    """The gradient of `size` numbers that a hybrid has put; PeerLost, and BadMessage when it is not
    that long.
    """
    entry = await registry.lookup(mesh.state, hybrid_name(gang))
    if entry is None or not entry.alive:
        raise PeerLost("the hybrid has gone with its gradient", where=hybrid_name(gang))
    whole = np.empty(size, np.float32)
    room, start = whole.data.cast("B"), 0
    if len(pieces) != -(-len(room) // PIECE_BYTES):
        raise _strange(gang, f"{len(pieces)} pieces", size)
    for digest in pieces:
        piece = await bulk.get(entry, digest, deadline_s=PIECE_S)
        part = room[start : start + PIECE_BYTES]
        if len(piece) != len(part):
            raise _strange(gang, f"a piece of {len(piece)} bytes", size)
        await mesh.host.run_blocking(part.__setitem__, slice(None), piece, deadline_s=PIECE_S)
        start += len(part)
    return whole


class Shelf:
    """Where the core of a gang lays gradients for the other ranks."""

    def __init__(self, mesh: Mesh, directory: Path) -> None:
        self._run, self._directory = mesh.host.run_blocking, directory

    async def clear(self) -> None:
        """Removes what an earlier start of the core has left in the middle."""
        await self._run(shutil.rmtree, self._directory, True, deadline_s=FILE_S)

    async def put(self, name: str, gradient: NDArray[np.float32]) -> Path:
        """The file of a flat gradient, float32 numbers and nothing else; StorageFull."""
        path = self._directory / name
        await self._run(_write, gradient.data.cast("B"), path, deadline_s=FILE_S)
        return path

    async def remove(self, path: Path) -> None:
        await self._run(path.unlink, True, deadline_s=FILE_S)


def read(path: str, size: int) -> NDArray[np.float32]:
    """A gradient on a shelf, of which only what is looked at is read."""
    return np.memmap(path, np.float32, "r", shape=(size,))


def _write(content: memoryview, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise failure(error, path) from error


def _strange(gang: str, what: str, size: int) -> BadMessage:
    return BadMessage(f"{what} for a gradient of {size} numbers", where=hybrid_name(gang))
