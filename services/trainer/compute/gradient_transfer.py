"""Transfer of a hybrid's gradient to the ranks of a core, each its rows.

The hybrid serves the gradient in pieces on its own bulk port, beside the control traffic. Ranks on
its host read a piece from the file. A piece whose numbers are all exact in bfloat16 is sent in
bfloat16, else in float32: no bit is lost.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import BadMessage, PeerLost
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import registry
from meshrl.common.weights.bulk.port import BulkClient, serve_chunks
from meshrl.common.weights.chunks.chunk_store import ChunkStore, make_write_error

PIECE_NUMBERS = 16 << 20  # 64 MiB of float32
PIECE_TIMEOUT_S = 30.0  # to transfer one piece
FILE_TIMEOUT_S = 600.0  # to write a full gradient


def make_hybrid_name(instance: str) -> str:
    return f"hybrid/{instance}"


class GradientOutbox:
    """Outbox of one gradient of a hybrid.

    The gradient is not needed after its ranks have answered. Its files are not durable: a gradient
    that is lost with its process is computed again.
    """

    def __init__(self, mesh: Mesh, name: str) -> None:
        directory = Path(mesh.settings.run_root) / "mesh" / "lent" / name
        shutil.rmtree(directory, ignore_errors=True)  # left by an earlier process of the same name
        self._run_blocking = mesh.host.run_blocking
        self._chunks = ChunkStore(directory, mesh.clock.wall)
        self._server = serve_chunks(mesh, self._chunks, accepts_uploads=False)
        self._digests: set[str] = set()
        self.staged_bytes = 0  # of all gradients so far

    @property
    def address(self) -> str:
        return self._server.address

    async def put(
        self, gradient: Tensor, owned_ranges: Sequence[NDArray[np.int64]]
    ) -> list[list[str]]:
        """Replace the last gradient by a flat one; return the pieces' digests of each rank's rows.

        Raise StorageFull without disk space.
        """
        await self.clear()
        return [
            await self._run_blocking(self._write_rows, gradient, ranges, deadline_s=FILE_TIMEOUT_S)
            for ranges in owned_ranges
        ]

    async def clear(self) -> None:
        digests, self._digests = self._digests, set()

        def remove() -> None:
            for digest in digests:
                self._chunks.chunk_path(digest).unlink(missing_ok=True)

        await self._run_blocking(remove, deadline_s=FILE_TIMEOUT_S)

    def close(self) -> None:
        self._server.close()
        shutil.rmtree(self._chunks.directory, ignore_errors=True)

    def _write_rows(self, gradient: Tensor, ranges: NDArray[np.int64]) -> list[str]:
        found = []
        for numbers in cut_pieces(gradient, ranges):
            content = encode_piece(numbers)
            found.append(compute_digest(content))
            self._digests.add(found[-1])
            self.staged_bytes += len(content)
            path = self._chunks.chunk_path(found[-1])
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            except OSError as error:
                raise make_write_error(error, path) from error
        return found


def cut_pieces(gradient: Tensor, ranges: NDArray[np.int64]) -> Iterator[NDArray[np.float32]]:
    """Yield ranges of a flat gradient as one sequence in pieces, which share their memory."""
    left = int((ranges[:, 1] - ranges[:, 0]).sum())
    room = torch.empty(min(left, PIECE_NUMBERS))
    filled = 0
    for start, end in ranges.tolist():
        while start < end:
            taken = min(end - start, len(room) - filled)
            room[filled : filled + taken].copy_(gradient[start : start + taken])
            start, filled, left = start + taken, filled + taken, left - taken
            if filled == len(room):
                yield room.numpy()
                room, filled = room[: min(left, len(room))], 0


def encode_piece(numbers: NDArray[np.float32]) -> memoryview:
    """Return the numbers as bfloat16 if that is exact, else as float32."""
    bits = numbers.view(np.uint32)
    for part in (bits[:1024], bits):  # most pieces in float32 show at once
        if (part & 0xFFFF).any():
            return bits.view(np.uint8).data
    return (bits >> 16).astype(np.uint16).view(np.uint8).data


def decode_piece(content: bytes, room: NDArray[np.float32]) -> None:
    """Fill `room` with the numbers of a piece; raise BadMessage if it has another length."""
    if len(content) == room.nbytes:
        room[:] = np.frombuffer(content, np.float32)
    elif 2 * len(content) == room.nbytes:
        bits = room.view(np.uint32)
        bits[:] = np.frombuffer(content, np.uint16)
        bits <<= 16
    else:
        raise BadMessage(f"a piece of {len(content)} bytes for {len(room)} numbers")


async def fetch_gradient(
    mesh: Mesh, bulk: BulkClient, name: str, digests: Sequence[str], element_count: int
) -> NDArray[np.float32]:
    """Return the rows of `element_count` numbers that the process `name` has put.

    Raise PeerLost, or BadMessage if they have another length.
    """
    entry = await registry.lookup(mesh.state, name)
    if entry is None or not entry.alive:
        raise PeerLost(f"{name} has exited with its gradient", where=name)
    if len(digests) != -(-element_count // PIECE_NUMBERS):
        what = f"{len(digests)} pieces for a gradient of {element_count} numbers"
        raise BadMessage(what, where=name)
    gradient = np.empty(element_count, np.float32)
    for number, digest in enumerate(digests):
        piece = await bulk.fetch_chunk(entry, digest, deadline_s=PIECE_TIMEOUT_S)
        room = gradient[number * PIECE_NUMBERS : (number + 1) * PIECE_NUMBERS]
        await mesh.host.run_blocking(decode_piece, piece, room, deadline_s=PIECE_TIMEOUT_S)
    return gradient
