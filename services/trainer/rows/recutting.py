"""Makes the chunks of a version as its manifest has them of others that hold the same elements, cut
otherwise: one at a time, so that nobody has a whole version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from common.api.weights import Tensor
from common.weights.layout.manifest import by_chunk, by_tensor, itemsize


class Recutting:
    """The contents of chunks of one manifest, of those of another one."""

    def __init__(
        self,
        wanted: Iterable[Tensor],
        there: Iterable[Tensor],
        read: Callable[[str], Awaitable[bytes]],
    ) -> None:
        """`there`: pieces of the same tensors, of the same types, which are cut along their first
        dimension as those that are `wanted`. `read`: the bytes of a chunk in which some lie.
        """
        self.chunks = by_chunk(wanted)
        self._there, self._read = by_tensor(there), read
        self._last: tuple[str, bytes] = "", b""  # neighbours mostly lie in the same one

    async def content(self, digest: str) -> memoryview:
        """What that chunk should hold; another digest: the elements are others. Errors as of
        `read`.
        """
        pieces = self.chunks[digest]
        found = np.empty(max(piece.offset + piece.size for piece in pieces), np.uint8)
        for piece in pieces:
            await self._fill(piece, found[piece.offset : piece.offset + piece.size])
        return found.data

    async def _fill(self, piece: Tensor, into: NDArray[np.uint8]) -> None:
        item = itemsize(piece)
        for one in self._there[piece.name]:
            begin, end = max(one.begin, piece.begin), min(one.end, piece.end)
            if begin >= end:
                continue
            low = one.offset + (begin - one.begin) * item
            content = np.frombuffer(await self._content(one.chunk), np.uint8)
            place = slice((begin - piece.begin) * item, (end - piece.begin) * item)
            into[place] = content[low : low + (end - begin) * item]

    async def _content(self, chunk: str) -> bytes:
        if self._last[0] != chunk:
            self._last = chunk, await self._read(chunk)
        return self._last[1]
