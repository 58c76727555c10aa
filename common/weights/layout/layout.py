"""Where the chunk files of a version lie in memory: side by side where a tensor goes on from one to
the next, so that it is one view of several files. Pure.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshrl.common.api.weights import Tensor
from meshrl.common.weights.layout.manifest import by_tensor

PAGE = mmap.PAGESIZE  # files begin in memory at multiples of it


@dataclass(frozen=True)
class Layout:
    """Bytes of each chunk, and where it begins; `total` is a multiple of PAGE."""

    sizes: Mapping[str, int]
    begins: Mapping[str, int]
    total: int

    def begin(self, piece: Tensor) -> int:
        """Where a piece begins."""
        return self.begins[piece.chunk] + piece.offset

    def follow(self, pieces: Sequence[Tensor]) -> bool:
        """Whether these follow each other in memory, in this order, and can be looked at as
        elements there.
        """
        if not pieces:
            return True
        at = begin = self.begin(pieces[0])
        for piece in pieces:
            if self.begin(piece) != at:
                return False
            at += piece.size
        elements = pieces[-1].end - pieces[0].begin
        return elements > 0 and begin % ((at - begin) // elements) == 0


def laid_out(tensors: Iterable[Tensor], wanted: Iterable[Tensor]) -> Layout:
    """The layout of the chunks of those pieces that are `wanted`, out of all of a manifest.

    A chunk is placed once. One that several tensors go on in, because its bytes are there more than
    once, follows one of them; the others are in pieces.
    """
    sizes: dict[str, int] = {}
    for piece in tensors:
        sizes[piece.chunk] = max(sizes.get(piece.chunk, 0), piece.offset + piece.size)
    filled = [piece for piece in wanted if piece.size]
    sizes = {chunk: sizes[chunk] for chunk in dict.fromkeys(piece.chunk for piece in filled)}
    after = _goes_on(filled, sizes)
    begins: dict[str, int] = {}
    total, heads = 0, sizes.keys() - set(after.values())
    for first in [*(chunk for chunk in sizes if chunk in heads), *sizes]:
        chunk: str | None = first
        while chunk is not None and chunk not in begins:
            begins[chunk] = total
            total += -(-sizes[chunk] // PAGE) * PAGE
            chunk = after.get(chunk)
    return Layout(sizes, begins, total)


def _goes_on(pieces: Iterable[Tensor], sizes: Mapping[str, int]) -> dict[str, str]:
    after: dict[str, str] = {}
    taken: set[str] = set()
    for parts in by_tensor(pieces).values():
        for one, other in itertools.pairwise(parts):
            full = one.offset + one.size == sizes[one.chunk] and sizes[one.chunk] % PAGE == 0
            if not full or other.offset or one.end != other.begin or one.chunk == other.chunk:
                continue
            if one.chunk not in after and other.chunk not in taken:
                after[one.chunk] = other.chunk
                taken.add(other.chunk)
    return after
