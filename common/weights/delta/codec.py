"""A delta of one chunk: the elements in which its bytes differ from those of another chunk, as gaps
between them and what they are now. Applied, it overwrites; so nothing is added up that could drift.

Gaps take two bytes each where all do (slime's `deltas` encoding), and gaps and values are cut into
planes, all first bytes, all second bytes, ..., each a zstd frame of its own: exponents repeat where
the last bits of a mantissa do not, and a gap of a dense change has an empty upper byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np
import zstandard
from numpy.typing import NDArray

from meshrl.common.api.weights import Tensor
from meshrl.common.base.digest import Hasher
from meshrl.common.base.errors import BadMessage, Damaged
from meshrl.common.weights.layout.manifest import by_chunk, itemsize
from meshrl.kernels import delta
from meshrl.kernels.delta import WIDTHS

MAGIC = b"MRD1"
LEVEL = 1  # of zstd: planes have no repeats for a search to find, only bytes of unlike frequency
# Of the elements; where more of them change, a delta is hardly smaller than the chunk.
MOST_SHARE = 0.25
GAPS_AT_ONCE = 64 << 10  # that are added up at a time, in eight bytes each
BLOCK_BYTES = 512 << 10  # of a chunk that are put together at a time: they stay in the cache
NARROW, WIDE = 2, 4  # bytes of a gap
_HEAD = struct.Struct("<4sBBxxII")  # magic, bytes of an element, of a gap; elements, changed
_LENGTH = struct.Struct("<I")  # of a plane's frame

Content = bytes | memoryview | NDArray[np.uint8]


def width_of(pieces: Iterable[Tensor]) -> int:
    """How many bytes of a chunk change together: the largest width that all of its elements have,
    or are whole multiples of.
    """
    found = 0
    for piece in pieces:
        found = gcd(found, itemsize(piece), piece.offset, piece.size)
    return max(width for width in WIDTHS if found % width == 0)


def most_changed(size: int, width: int) -> int:
    """How many elements of a chunk of `size` bytes a delta changes at most. Elements of one byte
    count as if they had two: what says where they are takes several times their own room in memory.
    """
    return int(size // max(width, 2) * MOST_SHARE)


def encoded(old: Content, new: Content, width: int) -> bytes | None:
    """The delta that makes `new` of `old`, in elements of `width` bytes; None where none is worth
    it: they have other sizes, or too many elements differ.
    """
    was, now = _array(old), _array(new)
    if len(was) != len(now) or len(now) % width:
        return None
    elements = len(now) // width
    found = delta.differences(was, now, width, most_changed(len(now), width))
    if found is None:
        return None
    gap_bytes = NARROW if not len(found.gaps) or found.gaps.max() < 1 << 16 else WIDE
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    planes = [*_planes(found.gaps.astype(f"<u{gap_bytes}")), *_planes(found.values)]
    frames = [compressor.compress(plane) for plane in planes]
    head = _HEAD.pack(MAGIC, width, gap_bytes, elements, len(found.gaps))
    lengths = b"".join(_LENGTH.pack(len(frame)) for frame in frames)
    blob = b"".join((head, lengths, *frames))
    return blob if len(blob) < len(now) else None


@dataclass(frozen=True)
class Changes:
    """What a delta says, read and checked."""

    width: int
    positions: NDArray[np.uint32]  # [changed], rising
    values: NDArray[np.unsignedinteger]  # [changed]

    def blocks(self, old: Content) -> Iterator[NDArray[np.uint8]]:
        """The new chunk of an old one, block by block; one is good until the next is asked for."""
        was = _array(old)
        room, done = np.empty(min(BLOCK_BYTES, len(was)), np.uint8), 0
        for first in range(0, len(was), BLOCK_BYTES):
            block = room[: min(BLOCK_BYTES, len(was) - first)]
            block[:] = was[first : first + len(block)]
            done = delta.overwrite(block, first // self.width, self.positions, self.values, done)
            yield block


def decoded(blob: bytes | memoryview, size: int) -> Changes:
    """What a delta says of a chunk of `size` bytes; BadMessage for bytes that are none of one, of
    which it takes no more memory than several such chunks.
    """
    view = memoryview(blob)
    try:
        magic, width, gap_bytes, elements, changed = _HEAD.unpack_from(view, 0)
        if magic != MAGIC or width not in WIDTHS or gap_bytes not in (NARROW, WIDE):
            raise BadMessage("no delta of this format", fix="Use the same MeshRL everywhere")
        if elements * width != size:
            raise BadMessage(f"a delta for {elements * width} bytes, and a chunk of {size}")
        if changed > most_changed(size, width):
            raise BadMessage(f"a delta changes {changed} of {elements} elements")
        lengths = [
            _LENGTH.unpack_from(view, _HEAD.size + _LENGTH.size * plane)[0]
            for plane in range(gap_bytes + width)
        ]
    except struct.error as error:
        raise BadMessage(f"a delta is cut short: {error}") from error
    at = _HEAD.size + _LENGTH.size * len(lengths)
    if at + sum(lengths) != len(view):
        raise BadMessage(f"a delta has {len(view)} bytes, its head says otherwise")
    planes = []
    for length in lengths:
        planes.append(_plane(view[at : at + length], changed))
        at += length
    positions = _positions(planes[:gap_bytes], elements)
    return Changes(width, positions, _joined(planes[gap_bytes:]))


def _positions(gaps: list[NDArray[np.uint8]], elements: int) -> NDArray[np.uint32]:
    found, last = np.empty(len(gaps[0]), np.uint32), -1
    for first in range(0, len(found), GAPS_AT_ONCE):
        some = slice(first, first + GAPS_AT_ONCE)
        block = _joined([plane[some] for plane in gaps]).astype(np.int64)
        block += 1
        np.cumsum(block, out=block)
        block += last
        last = int(block[-1])
        if last >= elements:
            raise BadMessage(f"a delta changes element {last} of {elements}")
        found[some] = block
    return found


def applied(
    old: Content, blob: bytes | memoryview, digest: str, write: Callable[[memoryview], None]
) -> None:
    """Writes the chunk that a delta makes of an old one, in order. BadMessage for what is no delta
    of such a chunk, and Damaged, once all is written, when the result is not that of the digest:
    the old chunk was another one.
    """
    hashed, was = Hasher(), _array(old)
    for block in decoded(blob, len(was)).blocks(was):
        hashed.update(block.data)
        write(block.data)
    if hashed.hexdigest() != digest:
        raise Damaged(
            f"a delta made {hashed.hexdigest()} instead of chunk {digest}",
            fix="the chunk is pulled in full",
        )


def _array(content: Content) -> NDArray[np.uint8]:
    if isinstance(content, np.ndarray):
        return content
    return np.frombuffer(content, np.uint8)


def _planes(values: NDArray[np.unsignedinteger]) -> list[bytes]:
    by_byte = values.view(np.uint8).reshape(-1, values.itemsize)
    return [by_byte[:, place].tobytes() for place in range(values.itemsize)]


def _plane(frame: memoryview, size: int) -> NDArray[np.uint8]:
    """BadMessage for a frame of another number of bytes; no more of them are ever in memory."""
    try:
        told = zstandard.frame_content_size(frame)
        if told != size:
            raise BadMessage(f"a plane of a delta has {told} bytes instead of {size}")
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size or 1)
    except zstandard.ZstdError as error:
        raise BadMessage(f"a plane of a delta cannot be read: {error}") from error
    return np.frombuffer(content, np.uint8)


def _joined(planes: list[NDArray[np.uint8]]) -> NDArray[np.unsignedinteger]:
    whole = np.stack(planes, axis=1)
    joined: NDArray[np.unsignedinteger] = whole.view(f"<u{len(planes)}").reshape(-1)
    return joined


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
