"""Transfer of a hybrid's gradient to the core and its ranks.

The hybrid serves the gradient in pieces on its own bulk port, beside the control traffic. Ranks on
the core's host read it from a file. Ranks on other hosts fetch the pieces of their rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import BadMessage, PeerLost
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import registry
from meshrl.common.weights.bulk.port import BulkClient, serve_chunks
from meshrl.common.weights.chunks.chunk_store import ChunkStore, make_write_error

PIECE_BYTES = 64 << 20
PIECE_TIMEOUT_S = 30.0  # to transfer one piece
FILE_TIMEOUT_S = 600.0  # to write or read a full gradient


def make_hybrid_name(instance: str) -> str:
    return f"hybrid/{instance}"


class GradientOutbox:
    """Outbox of one gradient: that of a hybrid, or what a core's ranks on other hosts fetch.

    The gradient is not needed after its round has been answered. Its files are not durable: a
    gradient that is lost with its process is computed again.
    """

    def __init__(self, mesh: Mesh, name: str) -> None:
        directory = Path(mesh.settings.run_root) / "mesh" / "lent" / name
        shutil.rmtree(directory, ignore_errors=True)  # left by an earlier process of the same name
        self._run_blocking = mesh.host.run_blocking
        self._chunks = ChunkStore(directory, mesh.clock.wall)
        self._server = serve_chunks(mesh, self._chunks, accepts_uploads=False)
        self._digests: list[str] = []

    @property
    def address(self) -> str:
        return self._server.address

    async def put(self, gradient: Tensor) -> list[str]:
        """Replace the last gradient by a flat one; return its pieces' digests, or StorageFull."""
        array = await self._run_blocking(lambda: gradient.cpu().numpy(), deadline_s=FILE_TIMEOUT_S)
        return (await self.put_parts([array]))[0]

    async def put_parts(self, parts: Sequence[NDArray[np.float32]]) -> list[list[str]]:
        """Replace the last gradient by parts; return each part's piece digests, or StorageFull."""
        await self.clear()
        return [
            await self._run_blocking(self._write_pieces, part, deadline_s=FILE_TIMEOUT_S)
            for part in parts
        ]

    async def clear(self) -> None:
        pieces, self._digests = self._digests, []

        def remove() -> None:
            for digest in pieces:
                self._chunks.chunk_path(digest).unlink(missing_ok=True)

        await self._run_blocking(remove, deadline_s=FILE_TIMEOUT_S)

    def close(self) -> None:
        self._server.close()
        shutil.rmtree(self._chunks.directory, ignore_errors=True)

    def _write_pieces(self, numbers: NDArray[np.float32]) -> list[str]:
        content = numbers.view(np.uint8).data
        pieces = []
        for start in range(0, len(content), PIECE_BYTES):
            piece = content[start : start + PIECE_BYTES]
            pieces.append(compute_digest(piece))
            self._digests.append(pieces[-1])
            write_gradient_file(piece, self._chunks.chunk_path(pieces[-1]))
        return pieces


async def fetch_gradient(
    mesh: Mesh,
    bulk: BulkClient,
    name: str,
    digests: Sequence[str],
    element_count: int,
    address: str = "",
) -> NDArray[np.float32]:
    """Return the gradient of `element_count` numbers that the process `name` has put.

    Its own bulk port serves the gradient, or another `address`. Raise PeerLost, or BadMessage if it
    has another length.
    """
    entry = await registry.lookup(mesh.state, name)
    if entry is None or not entry.alive:
        raise PeerLost(f"{name} has exited with its gradient", where=name)
    if address:
        entry = replace(entry, bulk=address)
    gradient = np.empty(element_count, np.float32)
    room, start = gradient.view(np.uint8).data, 0
    if len(digests) != -(-len(room) // PIECE_BYTES):
        raise BadMessage(
            f"{len(digests)} pieces for a gradient of {element_count} numbers", where=name
        )
    for digest in digests:
        piece = await bulk.fetch_chunk(entry, digest, deadline_s=PIECE_TIMEOUT_S)
        part = room[start : start + PIECE_BYTES]
        if len(piece) != len(part):
            what = f"a piece of {len(piece)} bytes for a gradient of {element_count} numbers"
            raise BadMessage(what, where=name)
        await mesh.host.run_blocking(
            part.__setitem__, slice(None), piece, deadline_s=PIECE_TIMEOUT_S
        )
        start += len(part)
    return gradient


def map_gradient_file(path: str, element_count: int) -> NDArray[np.float32]:
    """Map a gradient file, so that only the parts in use are read."""
    return np.memmap(path, np.float32, "r", shape=(element_count,))


def write_gradient_file(content: memoryview, path: Path) -> None:
    """Write a file without making it durable; raise StorageFull without disk space."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise make_write_error(error, path) from error
