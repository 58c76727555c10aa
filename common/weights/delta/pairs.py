"""Which chunk of a version stands where which chunk of an earlier one does: deltas are from one to
the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from common.api.weights import Tensor
from common.weights.delta.codec import width_of
from common.weights.layout.manifest import by_chunk


@dataclass(frozen=True)
class Pair:
    """Two chunks in which the same pieces lie, at the same places."""

    old: str  # digests
    new: str
    width: int  # bytes of what changes together
    size: int  # bytes of the new one


def paired(base: Iterable[Tensor], target: Iterable[Tensor]) -> list[Pair]:
    """The chunks of a target whose bytes differ from those of the base's in which the same pieces
    lie at the same places, in the order of the target's manifest. What was cut otherwise has no
    pair.
    """
    there = {_place(piece): piece.chunk for piece in base}
    found = []
    for digest, pieces in by_chunk(target).items():
        old = {there.get(_place(piece)) for piece in pieces} - {digest}
        if len(old) == 1 and (one := old.pop()) is not None:
            size = max(piece.offset + piece.size for piece in pieces)
            found.append(Pair(one, digest, width_of(pieces), size))
    return found


def _place(piece: Tensor) -> tuple[object, ...]:
    """What makes a piece of one version that of another; several of the same bytes share a chunk
    in one, and may not in the other.
    """
    return (piece.name, piece.dtype, piece.begin, piece.end, piece.offset, piece.size)


def grouped(pairs: Iterable[Pair], group_bytes: int) -> Iterator[list[Pair]]:
    """The pairs in their order, as many together as have so many bytes, but at least one."""
    group: list[Pair] = []
    for pair in pairs:
        if group and sum(one.size for one in group) + pair.size > group_bytes:
            yield group
            group = []
        group.append(pair)
    if group:
        yield group
