"""Layout of a version's chunk files in memory. Pure.

Chunks are adjacent where a tensor continues from one to the next, so that the tensor is one view of
several files.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshrl.common.api.weights import TensorPiece
from meshrl.common.weights.layout.manifest import group_by_tensor

PAGE_BYTES = mmap.PAGESIZE  # chunk files start in memory at multiples of it


@dataclass(frozen=True)
class MemoryLayout:
    """Size and start of each chunk in memory; `total_bytes` is a multiple of `PAGE_BYTES`."""

    chunk_sizes: Mapping[str, int]
    chunk_offsets: Mapping[str, int]
    total_bytes: int

    def piece_offset(self, piece: TensorPiece) -> int:
        """Return the start of a piece in bytes."""
        return self.chunk_offsets[piece.chunk] + piece.offset

    def is_contiguous(self, pieces: Sequence[TensorPiece]) -> bool:
        """Return True if the pieces are adjacent in memory, in this order, and aligned to their
        elements.
        """
        if not pieces:
            return True
        at = begin = self.piece_offset(pieces[0])
        for piece in pieces:
            if self.piece_offset(piece) != at:
                return False
            at += piece.size_bytes
        elements = pieces[-1].end - pieces[0].begin
        return elements > 0 and begin % ((at - begin) // elements) == 0


def make_memory_layout(
    tensors: Iterable[TensorPiece], selected: Iterable[TensorPiece]
) -> MemoryLayout:
    """Return the layout of the chunks of the `selected` pieces; `tensors` has all pieces of a
    manifest.

    Each chunk has one position. A chunk that several tensors continue in, because its bytes occur
    more than once, follows one of them; the other tensors are not contiguous.
    """
    sizes: dict[str, int] = {}
    for piece in tensors:
        sizes[piece.chunk] = max(sizes.get(piece.chunk, 0), piece.offset + piece.size_bytes)
    filled = [piece for piece in selected if piece.size_bytes]
    sizes = {chunk: sizes[chunk] for chunk in dict.fromkeys(piece.chunk for piece in filled)}
    after = _find_continuations(filled, sizes)
    begins: dict[str, int] = {}
    total, heads = 0, sizes.keys() - set(after.values())
    for first in [*(chunk for chunk in sizes if chunk in heads), *sizes]:
        chunk: str | None = first
        while chunk is not None and chunk not in begins:
            begins[chunk] = total
            total += -(-sizes[chunk] // PAGE_BYTES) * PAGE_BYTES
            chunk = after.get(chunk)
    return MemoryLayout(sizes, begins, total)


def _find_continuations(pieces: Iterable[TensorPiece], sizes: Mapping[str, int]) -> dict[str, str]:
    after: dict[str, str] = {}
    continuations: set[str] = set()
    for parts in group_by_tensor(pieces).values():
        for one, other in itertools.pairwise(parts):
            full = (
                one.offset + one.size_bytes == sizes[one.chunk]
                and sizes[one.chunk] % PAGE_BYTES == 0
            )
            if not full or other.offset or one.end != other.begin or one.chunk == other.chunk:
                continue
            if one.chunk not in after and other.chunk not in continuations:
                after[one.chunk] = other.chunk
                continuations.add(other.chunk)
    return after
