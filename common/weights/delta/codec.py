"""Delta of one chunk: the elements whose bytes differ from another chunk, as gaps and new values.

Applying a delta overwrites elements, so no rounding errors accumulate. Gaps take two bytes each if
all fit (slime's `deltas` encoding). Gaps and values are split into planes: all first bytes, all
second bytes, and so on. Each plane is a zstd frame of its own, because exponents repeat where the
last bits of a mantissa do not, and a gap of a dense change has an empty upper byte.
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
ZSTD_LEVEL = 1  # planes have no repeats to search for, only bytes of unequal frequency
# Of the elements; beyond that a delta is hardly smaller than the chunk.
MAX_CHANGED_FRACTION = 0.25
MAX_GAPS_PER_BLOCK = 64 << 10  # converted to eight-byte gaps at a time
BLOCK_BYTES = 512 << 10  # of a chunk assembled at a time: it stays in the cache
NARROW_GAP_BYTES, WIDE_GAP_BYTES = 2, 4  # bytes of a gap
_HEADER = struct.Struct("<4sBBxxII")  # magic, bytes of an element, of a gap; elements, changed
_FRAME_LENGTH = struct.Struct("<I")  # of a plane's frame

BytesOrArray = bytes | memoryview | NDArray[np.uint8]


def compute_element_bytes(pieces: Iterable[TensorPiece]) -> int:
    """Return how many bytes of a chunk change together.

    It is the largest width that divides the size and offset of all its elements.
    """
    found = 0
    for piece in pieces:
        found = gcd(found, get_element_bytes(piece), piece.offset, piece.size_bytes)
    return max(width for width in ELEMENT_WIDTHS if found % width == 0)


def compute_max_changed(size_bytes: int, element_bytes: int) -> int:
    """Return the maximum number of elements that a delta of a chunk may change.

    One-byte elements count as two bytes each, because their positions take several times their own
    memory.
    """
    return int(size_bytes // max(element_bytes, 2) * MAX_CHANGED_FRACTION)


def encode_delta(old: BytesOrArray, new: BytesOrArray, element_bytes: int) -> bytes | None:
    """Return the delta from `old` to `new` in elements of `element_bytes`.

    None if a delta is not worthwhile: sizes differ, or too many elements do.
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
    """Decoded and verified delta."""

    element_bytes: int
    positions: NDArray[np.uint32]  # [changed], rising
    values: NDArray[np.unsignedinteger]  # [changed]

    def apply_in_blocks(self, old: BytesOrArray) -> Iterator[NDArray[np.uint8]]:
        """Yield the new chunk in blocks; each block is valid until the next one is requested."""
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
    """Decode the delta of a chunk of `chunk_bytes` bytes.

    Raises:
        BadMessage: The bytes are no such delta. At most the memory of several chunks is used.
    """
    view = memoryview(blob)
    try:
        magic, width, gap_bytes, elements, changed = _HEADER.unpack_from(view, 0)
        if (
            magic != MAGIC
            or width not in ELEMENT_WIDTHS
            or gap_bytes not in (NARROW_GAP_BYTES, WIDE_GAP_BYTES)
        ):
            raise BadMessage(
                "the delta has another format", fix="Install the same MeshRL version on all hosts"
            )
        if elements * width != chunk_bytes:
            raise BadMessage(
                f"a delta is for {elements * width} bytes, but the chunk has {chunk_bytes}"
            )
        if changed > compute_max_changed(chunk_bytes, width):
            raise BadMessage(f"a delta changes {changed} of {elements} elements")
        lengths = [
            _FRAME_LENGTH.unpack_from(view, _HEADER.size + _FRAME_LENGTH.size * plane)[0]
            for plane in range(gap_bytes + width)
        ]
    except struct.error as error:
        raise BadMessage(f"a delta is truncated: {error}") from error
    at = _HEADER.size + _FRAME_LENGTH.size * len(lengths)
    if at + sum(lengths) != len(view):
        raise BadMessage(f"a delta has {len(view)} bytes, but its header gives another size")
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
    """Write the chunk that a delta makes from an old one, in order.

    Raises:
        BadMessage: The blob is no delta of a chunk of this size.
        CorruptData: The result does not have the digest: the old chunk was another one. It is
            raised after everything was written.
    """
    hashed, was = Hasher(), _as_array(old)
    for block in decode_delta(blob, len(was)).apply_in_blocks(was):
        hashed.update(block.data)
        write(block.data)
    if hashed.hexdigest() != digest:
        raise CorruptData(
            f"a delta produced {hashed.hexdigest()} instead of chunk {digest}",
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
    """Decompress a plane without ever using more memory than `size_bytes`. BadMessage: other
    size.
    """
    try:
        declared_bytes = zstandard.frame_content_size(frame)
        if declared_bytes != size_bytes:
            raise BadMessage(
                f"a plane of a delta has {declared_bytes} bytes instead of {size_bytes}"
            )
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size_bytes or 1)
    except zstandard.ZstdError as error:
        raise BadMessage(f"a plane of a delta cannot be decoded: {error}") from error
    return np.frombuffer(content, np.uint8)


def _join_planes(planes: list[NDArray[np.uint8]]) -> NDArray[np.unsignedinteger]:
    interleaved = np.stack(planes, axis=1)
    joined: NDArray[np.unsignedinteger] = interleaved.view(f"<u{len(planes)}").reshape(-1)
    return joined


@dataclass(frozen=True)
class ChunkPair:
    """Two chunks that contain the same pieces at the same offsets."""

    old_digest: str
    new_digest: str
    element_bytes: int  # bytes that change together
    size_bytes: int  # of the new chunk


def pair_chunks(base: Iterable[TensorPiece], target: Iterable[TensorPiece]) -> list[ChunkPair]:
    """Return the changed chunks of a target paired with those of the base, in manifest order.

    Paired chunks contain the same pieces at the same offsets. Chunks with other boundaries have no
    pair.
    """
    there = {_make_piece_key(piece): piece.chunk for piece in base}
    found = []
    for digest, pieces in group_by_chunk(target).items():
        old = {there.get(_make_piece_key(piece)) for piece in pieces} - {digest}
        if len(old) == 1 and (one := old.pop()) is not None:
            size = max(piece.offset + piece.size_bytes for piece in pieces)
            found.append(ChunkPair(one, digest, compute_element_bytes(pieces), size))
    return found


def _make_piece_key(piece: TensorPiece) -> tuple[object, ...]:
    """Return the key that matches a piece of one version with that of another.

    It has no chunk: pieces with equal bytes share a chunk in one version, and may not in the other.
    """
    return (piece.name, piece.dtype, piece.begin, piece.end, piece.offset, piece.size_bytes)


def group_by_size(pairs: Iterable[ChunkPair], max_group_bytes: int) -> Iterator[list[ChunkPair]]:
    """Yield the pairs in order, in groups of at most `max_group_bytes` but at least one pair."""
    group: list[ChunkPair] = []
    for pair in pairs:
        if group and sum(one.size_bytes for one in group) + pair.size_bytes > max_group_bytes:
            yield group
            group = []
        group.append(pair)
    if group:
        yield group
