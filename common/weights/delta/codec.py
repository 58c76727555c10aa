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

from meshrl.common.api.weights import TensorPiece
from meshrl.common.base.digest import Hasher
from meshrl.common.base.errors import BadMessage, CorruptData
from meshrl.common.weights.layout.manifest import get_element_bytes, group_by_chunk
from meshrl.kernels import delta
from meshrl.kernels.delta import ELEMENT_WIDTHS

MAGIC = b"MRD1"
ZSTD_LEVEL = (
    1  # of zstd: planes have no repeats for a search to find, only bytes of unlike frequency
)
# Of the elements; where more of them change, a delta is hardly smaller than the chunk.
MAX_CHANGED_FRACTION = 0.25
MAX_GAPS_PER_BLOCK = 64 << 10  # that are added up at a time, in eight bytes each
BLOCK_BYTES = 512 << 10  # of a chunk that are put together at a time: they stay in the cache
NARROW_GAP_BYTES, WIDE_GAP_BYTES = 2, 4  # bytes of a gap
_HEADER = struct.Struct("<4sBBxxII")  # magic, bytes of an element, of a gap; elements, changed
_FRAME_LENGTH = struct.Struct("<I")  # of a plane's frame

BytesOrArray = bytes | memoryview | NDArray[np.uint8]


def compute_element_bytes(pieces: Iterable[TensorPiece]) -> int:
    """How many bytes of a chunk change together: the largest width that all of its elements have,
    or are whole multiples of.
    """
    found = 0
    for piece in pieces:
        found = gcd(found, get_element_bytes(piece), piece.offset, piece.size)
    return max(width for width in ELEMENT_WIDTHS if found % width == 0)


def compute_max_changed(size_bytes: int, element_bytes: int) -> int:
    """How many elements of a chunk of `size_bytes` bytes a delta changes at most. Elements of one
    byte count as if they had two: what says where they are takes several times their own room in
    memory.
    """
    return int(size_bytes // max(element_bytes, 2) * MAX_CHANGED_FRACTION)


def encode_delta(old: BytesOrArray, new: BytesOrArray, element_bytes: int) -> bytes | None:
    """The delta that makes `new` of `old`, in elements of `element_bytes` bytes; None where none is
    worth it: they have other sizes, or too many elements differ.
    """
    was, now = _as_array(old), _as_array(new)
    if len(was) != len(now) or len(now) % element_bytes:
        return None
    elements = len(now) // element_bytes
    found = delta.find_differences(
        was, now, element_bytes, compute_max_changed(len(now), element_bytes)
    )
    if found is None:
        return None
    gap_bytes = (
        NARROW_GAP_BYTES if not len(found.gaps) or found.gaps.max() < 1 << 16 else WIDE_GAP_BYTES
    )
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    planes = [*_split_planes(found.gaps.astype(f"<u{gap_bytes}")), *_split_planes(found.values)]
    frames = [compressor.compress(plane) for plane in planes]
    head = _HEADER.pack(MAGIC, element_bytes, gap_bytes, elements, len(found.gaps))
    lengths = b"".join(_FRAME_LENGTH.pack(len(frame)) for frame in frames)
    blob = b"".join((head, lengths, *frames))
    return blob if len(blob) < len(now) else None


@dataclass(frozen=True)
class DecodedDelta:
    """What a delta says, read and checked."""

    element_bytes: int
    positions: NDArray[np.uint32]  # [changed], rising
    values: NDArray[np.unsignedinteger]  # [changed]

    def apply_in_blocks(self, old: BytesOrArray) -> Iterator[NDArray[np.uint8]]:
        """The new chunk of an old one, block by block; one is good until the next is asked for."""
        was = _as_array(old)
        room, done = np.empty(min(BLOCK_BYTES, len(was)), np.uint8), 0
        for first in range(0, len(was), BLOCK_BYTES):
            block = room[: min(BLOCK_BYTES, len(was) - first)]
            block[:] = was[first : first + len(block)]
            done = delta.overwrite_elements(
                block, first // self.element_bytes, self.positions, self.values, done
            )
            yield block


def decode_delta(blob: bytes | memoryview, chunk_bytes: int) -> DecodedDelta:
    """What a delta says of a chunk of `chunk_bytes` bytes; BadMessage for bytes that are none of
    one, of which it takes no more memory than several such chunks.
    """
    view = memoryview(blob)
    try:
        magic, width, gap_bytes, elements, changed = _HEADER.unpack_from(view, 0)
        if (
            magic != MAGIC
            or width not in ELEMENT_WIDTHS
            or gap_bytes not in (NARROW_GAP_BYTES, WIDE_GAP_BYTES)
        ):
            raise BadMessage("no delta of this format", fix="Use the same MeshRL everywhere")
        if elements * width != chunk_bytes:
            raise BadMessage(f"a delta for {elements * width} bytes, and a chunk of {chunk_bytes}")
        if changed > compute_max_changed(chunk_bytes, width):
            raise BadMessage(f"a delta changes {changed} of {elements} elements")
        lengths = [
            _FRAME_LENGTH.unpack_from(view, _HEADER.size + _FRAME_LENGTH.size * plane)[0]
            for plane in range(gap_bytes + width)
        ]
    except struct.error as error:
        raise BadMessage(f"a delta is cut short: {error}") from error
    at = _HEADER.size + _FRAME_LENGTH.size * len(lengths)
    if at + sum(lengths) != len(view):
        raise BadMessage(f"a delta has {len(view)} bytes, its head says otherwise")
    planes = []
    for length in lengths:
        planes.append(_decode_plane(view[at : at + length], changed))
        at += length
    positions = _decode_positions(planes[:gap_bytes], elements)
    return DecodedDelta(width, positions, _join_planes(planes[gap_bytes:]))


def _decode_positions(gaps: list[NDArray[np.uint8]], elements: int) -> NDArray[np.uint32]:
    found, last = np.empty(len(gaps[0]), np.uint32), -1
    for first in range(0, len(found), MAX_GAPS_PER_BLOCK):
        some = slice(first, first + MAX_GAPS_PER_BLOCK)
        block = _join_planes([plane[some] for plane in gaps]).astype(np.int64)
        block += 1
        np.cumsum(block, out=block)
        block += last
        last = int(block[-1])
        if last >= elements:
            raise BadMessage(f"a delta changes element {last} of {elements}")
        found[some] = block
    return found


def apply_delta(
    old: BytesOrArray, blob: bytes | memoryview, digest: str, write: Callable[[memoryview], None]
) -> None:
    """Writes the chunk that a delta makes of an old one, in order. BadMessage for what is no delta
    of such a chunk, and Damaged, once all is written, when the result is not that of the digest:
    the old chunk was another one.
    """
    hashed, was = Hasher(), _as_array(old)
    for block in decode_delta(blob, len(was)).apply_in_blocks(was):
        hashed.update(block.data)
        write(block.data)
    if hashed.hexdigest() != digest:
        raise CorruptData(
            f"a delta made {hashed.hexdigest()} instead of chunk {digest}",
            fix="the chunk is pulled in full",
        )


def _as_array(content: BytesOrArray) -> NDArray[np.uint8]:
    if isinstance(content, np.ndarray):
        return content
    return np.frombuffer(content, np.uint8)


def _split_planes(values: NDArray[np.unsignedinteger]) -> list[bytes]:
    by_byte = values.view(np.uint8).reshape(-1, values.itemsize)
    return [by_byte[:, place].tobytes() for place in range(values.itemsize)]


def _decode_plane(frame: memoryview, size_bytes: int) -> NDArray[np.uint8]:
    """BadMessage for a frame of another number of bytes; no more of them are ever in memory."""
    try:
        told = zstandard.frame_content_size(frame)
        if told != size_bytes:
            raise BadMessage(f"a plane of a delta has {told} bytes instead of {size_bytes}")
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size_bytes or 1)
    except zstandard.ZstdError as error:
        raise BadMessage(f"a plane of a delta cannot be read: {error}") from error
    return np.frombuffer(content, np.uint8)


def _join_planes(planes: list[NDArray[np.uint8]]) -> NDArray[np.unsignedinteger]:
    whole = np.stack(planes, axis=1)
    joined: NDArray[np.unsignedinteger] = whole.view(f"<u{len(planes)}").reshape(-1)
    return joined


@dataclass(frozen=True)
class ChunkPair:
    """Two chunks in which the same pieces lie, at the same places."""

    old_digest: str  # digests
    new_digest: str
    element_bytes: int  # bytes of what changes together
    size_bytes: int  # bytes of the new one


def pair_chunks(base: Iterable[TensorPiece], target: Iterable[TensorPiece]) -> list[ChunkPair]:
    """The chunks of a target whose bytes differ from those of the base's in which the same pieces
    lie at the same places, in the order of the target's manifest. What was cut otherwise has no
    pair.
    """
    there = {_make_piece_key(piece): piece.chunk for piece in base}
    found = []
    for digest, pieces in group_by_chunk(target).items():
        old = {there.get(_make_piece_key(piece)) for piece in pieces} - {digest}
        if len(old) == 1 and (one := old.pop()) is not None:
            size = max(piece.offset + piece.size for piece in pieces)
            found.append(ChunkPair(one, digest, compute_element_bytes(pieces), size))
    return found


def _make_piece_key(piece: TensorPiece) -> tuple[object, ...]:
    """What makes a piece of one version that of another; several of the same bytes share a chunk
    in one, and may not in the other.
    """
    return (piece.name, piece.dtype, piece.begin, piece.end, piece.offset, piece.size)


def group_by_size(pairs: Iterable[ChunkPair], max_group_bytes: int) -> Iterator[list[ChunkPair]]:
    """The pairs in their order, as many together as have so many bytes, but at least one."""
    group: list[ChunkPair] = []
    for pair in pairs:
        if group and sum(one.size_bytes for one in group) + pair.size_bytes > max_group_bytes:
            yield group
            group = []
        group.append(pair)
    if group:
        yield group
