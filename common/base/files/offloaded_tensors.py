"""Tensors of one kind in a memory segment or a file while they are not on the accelerator.

A header names the tensors. Their bytes follow as one run in chunks with a checksum each. The commit
mark, a checksum of the header, is written last. So a half-written copy never counts as complete,
and later changes are detected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.common.base.checksum import CHECKSUM_BYTES, Checksum, Checksummer, compute_checksum
from meshrl.common.base.errors import CorruptData, Refused

Octets = NDArray[np.uint8]
MAGIC = b"MeshKep2"
OLD_MAGIC = b"MeshKept"  # one file for all kinds, with a checksum of each tensor
FIXED_HEADER_BYTES = 32  # magic, length of the description, commit mark
ALIGN_BYTES = 64  # of a tensor: a cache line, and the widest vector
BLOCK_BYTES = 4096  # of a disk: direct access needs offsets and lengths that are multiples
COPIES_BYTES = "copies_bytes"  # key in the metadata of a record: bytes of the copies that it names
CHUNK_BYTES = 4 << 20  # copied between two checks for a cancellation; a multiple of BLOCK_BYTES
PIECE_BYTES = 1 << 19  # copied and summed at a time on a CPU, so that it stays in a cache


class CopyCancelled(Refused):
    """Error raised when a copy was cancelled between two chunks."""

    code = "copy_cancelled"


class Cancellation:
    """Request to end a copy between two chunks."""

    def __init__(self) -> None:
        self.is_requested = False

    def request(self) -> None:
        """Request the end. Idempotent."""
        self.is_requested = True

    def check(self) -> None:
        """Raise CopyCancelled if the end was requested."""
        if self.is_requested:
            raise CopyCancelled("the copy was cancelled")


class OffloadSource(Protocol):
    """Named byte ranges of a process."""

    @property
    def sizes_bytes(self) -> Mapping[str, int]:
        """Size of each in bytes."""

    @property
    def piece_bytes(self) -> int:
        """Most bytes that are copied at a time."""

    def read_into(self, name: str, start: int, out: Octets) -> Octets | None:
        """Copy the bytes from `start` of one to host memory. Several threads call this.

        Return other memory with these bytes if it is faster to read.
        """


class OffloadTarget(Protocol):
    """Named byte ranges that can be restored."""

    @property
    def sizes_bytes(self) -> Mapping[str, int]:
        """Size of each in bytes."""

    @property
    def piece_bytes(self) -> int:
        """Most bytes that are copied at a time."""

    def write(self, name: str, start: int, piece: Octets) -> None:
        """Write bytes to their place, and return when they are read. Several threads call this."""


class OffloadMedium(Protocol):
    """Storage of one copy. Several threads access different chunks."""

    @property
    def location(self) -> str:
        """Location for users to read."""

    @property
    def size_bytes(self) -> int:
        """Capacity or content in bytes."""

    @property
    def thread_count(self) -> int:
        """Number of threads that copy chunks at a time."""

    def open_chunk(self, offset: int, count: int) -> Octets:
        """Return memory for the new content of a range, valid until the thread's next call."""

    def write_chunk(self, offset: int, chunk: Octets) -> None:
        """Write memory that `open_chunk` has returned."""

    def read_chunk(self, offset: int, count: int) -> Octets:
        """Read a range, valid until the thread's next call; return fewer bytes at the end."""

    def flush(self) -> None:
        """Return once written bytes are as durable as the medium allows."""

    def close(self) -> None:
        """Close the medium; its content stays."""


@dataclass(frozen=True)
class Span:
    """Part of a tensor within a chunk."""

    name: str
    start: int  # in the tensor
    offset: int  # in the chunk
    count: int


@dataclass(frozen=True)
class OffloadHeader:
    """Content of a medium, according to its header."""

    metadata: dict[str, Any]  # metadata of the process
    sizes_bytes: Mapping[str, int]
    data_offset: int  # of the first chunk
    data_bytes: int
    checksums: tuple[Checksum, ...]  # of the chunks

    @property
    def size_bytes(self) -> int:
        """Bytes of the medium."""
        return self.data_offset + _round_up(self.data_bytes, BLOCK_BYTES)


def _round_up(size: int, unit: int) -> int:
    return size + -size % unit


def _encode_description(metadata: Mapping[str, Any], sizes: Mapping[str, int]) -> bytes:
    return json.dumps({"about": metadata, "sizes": list(sizes.items())}).encode()


def _compute_data_bytes(sizes: Mapping[str, int]) -> int:
    return sum(_round_up(size, ALIGN_BYTES) for size in sizes.values())


def _compute_data_offset(description_bytes: int, data_bytes: int) -> int:
    count = -(-data_bytes // CHUNK_BYTES)
    return _round_up(FIXED_HEADER_BYTES + description_bytes + CHECKSUM_BYTES * count, BLOCK_BYTES)


def compute_size_bytes(metadata: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """Return the required size of a medium in bytes."""
    data_bytes = _compute_data_bytes(sizes)
    description = _encode_description(metadata, sizes)
    return _compute_data_offset(len(description), data_bytes) + _round_up(data_bytes, BLOCK_BYTES)


def _list_chunks(sizes: Mapping[str, int], piece_bytes: int = PIECE_BYTES) -> list[list[Span]]:
    """Cut the run of all tensors into chunks, and their parts of tensors into pieces."""
    chunks: list[list[Span]] = [[] for _ in range(-(-_compute_data_bytes(sizes) // CHUNK_BYTES))]
    at = 0
    for name, size in sizes.items():
        start = 0
        while start < size:
            number, offset = divmod(at + start, CHUNK_BYTES)
            count = min(size - start, CHUNK_BYTES - offset, piece_bytes)
            chunks[number].append(Span(name, start, offset, count))
            start += count
        at += _round_up(size, ALIGN_BYTES)
    return chunks


def offload(
    medium: OffloadMedium,
    metadata: Mapping[str, Any],
    source: OffloadSource,
    cancel: Cancellation | None = None,
) -> OffloadHeader:
    """Write all of `source` to the medium, and the commit mark last. `metadata` is JSON.

    Raises StorageFull without space, or CopyCancelled, and then leaves nothing readable.
    """
    sizes = dict(source.sizes_bytes)
    description = _encode_description(metadata, sizes)
    chunks = _list_chunks(sizes, source.piece_bytes)
    data_bytes = _compute_data_bytes(sizes)
    data_offset = _compute_data_offset(len(description), data_bytes)
    checksums = [Checksum(b"")] * len(chunks)

    def copy(number: int) -> None:
        offset = data_offset + number * CHUNK_BYTES
        count = min(CHUNK_BYTES, data_bytes - number * CHUNK_BYTES)
        chunk, summed = medium.open_chunk(offset, count), Checksummer()
        for span in chunks[number]:
            piece = chunk[span.offset : span.offset + span.count]
            cached = source.read_into(span.name, span.start, piece)
            summed.update((piece if cached is None else cached).data)
        medium.write_chunk(offset, chunk)
        checksums[number] = summed.checksum

    _write_header(medium, b"", data_offset)
    _run_chunks(copy, len(chunks), medium.thread_count, cancel)
    table = b"".join(checksums)
    mark = compute_checksum(description + table)
    length = len(description).to_bytes(8, "little")
    _write_header(medium, MAGIC + length + mark + description + table, data_offset)
    medium.flush()
    return OffloadHeader(dict(metadata), sizes, data_offset, data_bytes, tuple(checksums))


def _write_header(medium: OffloadMedium, content: bytes, data_offset: int) -> None:
    """Write a header; an empty one removes the commit mark of earlier content."""
    header = medium.open_chunk(0, data_offset)
    header[:] = 0
    header[: len(content)] = np.frombuffer(content, np.uint8)
    medium.write_chunk(0, header)


def read_header(medium: OffloadMedium) -> OffloadHeader:
    """Read the header of a medium; raise CorruptData if the content is incomplete."""
    first = medium.read_chunk(0, FIXED_HEADER_BYTES).tobytes()
    length = int.from_bytes(first[8:16], "little")
    if first[:8] == OLD_MAGIC:
        raise CorruptData("an earlier version of MeshRL has written it", where=medium.location)
    if first[:8] != MAGIC or len(first) < FIXED_HEADER_BYTES or length > medium.size_bytes:
        raise CorruptData("no complete offloaded state is there", where=medium.location)
    description = medium.read_chunk(FIXED_HEADER_BYTES, length).tobytes()
    try:
        found = json.loads(description)
        sizes = {str(name): int(size) for name, size in found["sizes"]}
        data_bytes = _compute_data_bytes(sizes)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData("its header is invalid", where=medium.location) from error
    count = -(-data_bytes // CHUNK_BYTES)
    if min(sizes.values(), default=0) < 0 or CHECKSUM_BYTES * count > medium.size_bytes:
        raise CorruptData("its header is invalid", where=medium.location)
    table = medium.read_chunk(FIXED_HEADER_BYTES + length, CHECKSUM_BYTES * count).tobytes()
    if compute_checksum(description + table) != first[16:FIXED_HEADER_BYTES]:
        raise CorruptData("it was not written completely", where=medium.location)
    checksums = tuple(
        Checksum(table[i : i + CHECKSUM_BYTES]) for i in range(0, len(table), CHECKSUM_BYTES)
    )
    header = OffloadHeader(
        found["about"], sizes, _compute_data_offset(length, data_bytes), data_bytes, checksums
    )
    if header.size_bytes > medium.size_bytes:
        raise CorruptData(
            f"it has {medium.size_bytes} of {header.size_bytes} bytes", where=medium.location
        )
    return header


def restore(
    medium: OffloadMedium,
    header: OffloadHeader,
    target: OffloadTarget,
    cancel: Cancellation | None = None,
) -> None:
    """Write the medium's tensors back to `target`, which names all of them.

    Raises CorruptData if bytes have changed, or CopyCancelled; the caller must then discard what
    was written.
    """
    if dict(target.sizes_bytes) != dict(header.sizes_bytes):
        differing = sorted(target.sizes_bytes.items() ^ header.sizes_bytes.items())[0]
        raise CorruptData(f"its tensors differ: {differing[0]}", where=medium.location)
    chunks = _list_chunks(header.sizes_bytes, target.piece_bytes)

    def copy(number: int) -> None:
        for span, piece in _read_verified(medium, header, chunks, number):
            target.write(span.name, span.start, piece)

    _run_chunks(copy, len(chunks), medium.thread_count, cancel)


def _read_verified(
    medium: OffloadMedium, header: OffloadHeader, chunks: list[list[Span]], number: int
) -> Iterator[tuple[Span, Octets]]:
    """Read the pieces of a chunk; raise CorruptData after the last one if any has changed."""
    at = number * CHUNK_BYTES
    count = min(CHUNK_BYTES, header.data_bytes - at)
    chunk, summed = medium.read_chunk(header.data_offset + at, count), Checksummer()
    for span in chunks[number] if len(chunk) == count else ():
        piece = chunk[span.offset : span.offset + span.count]
        yield span, piece
        summed.update(piece.data)  # after the copy, which has brought it to the core's cache
    if summed.checksum != header.checksums[number]:
        name = chunks[number][0].name
        raise CorruptData(
            f"bytes from {name} on do not match their checksum", where=medium.location
        )


def copy_offload(
    source: OffloadMedium, target: OffloadMedium, cancel: Cancellation | None = None
) -> OffloadHeader:
    """Copy the content of one medium to another, chunk by chunk.

    Raises CorruptData if it has changed, or CopyCancelled, and then leaves no complete content.
    """
    header = read_header(source)
    chunks = _list_chunks(header.sizes_bytes)

    def copy(number: int) -> None:
        at = number * CHUNK_BYTES
        offset, count = header.data_offset + at, min(CHUNK_BYTES, header.data_bytes - at)
        chunk = target.open_chunk(offset, count)
        for span, piece in _read_verified(source, header, chunks, number):
            chunk[span.offset : span.offset + span.count] = piece
        target.write_chunk(offset, chunk)

    _write_header(target, b"", header.data_offset)
    _run_chunks(copy, len(chunks), max(source.thread_count, target.thread_count), cancel)
    whole = source.read_chunk(0, header.data_offset).tobytes()
    _write_header(target, whole, header.data_offset)
    target.flush()
    if read_header(target) != header:
        raise CorruptData("its header changed while it was copied", where=source.location)
    return header


def _run_chunks(
    copy: Callable[[int], None], count: int, thread_count: int, cancel: Cancellation | None
) -> None:
    """Copy all chunks on some threads; after an error, or `cancel`, begin none."""
    numbers, lock, failure = iter(range(count)), Lock(), Cancellation()

    def run(_: None = None) -> None:
        while not failure.is_requested:
            if cancel is not None:
                cancel.check()
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                copy(number)
            except BaseException:
                failure.request()
                raise

    if min(count, thread_count) <= 1:
        run()
        return
    with ThreadPoolExecutor(min(count, thread_count), "copy") as pool:
        list(pool.map(run, repeat(None, min(count, thread_count))))
