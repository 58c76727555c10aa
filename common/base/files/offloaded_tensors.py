"""Tensors in a memory segment or a file while their process sleeps.

A header names them, with a checksum of each. The commit mark, a checksum of the header, is written
last. So a half-written copy never counts as complete, and later changes are detected.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.common.base.checksum import CHECKSUM_BYTES, Checksum, Checksummer, compute_checksum
from meshrl.common.base.errors import CorruptData, Refused, StorageFull
from meshrl.common.base.files.append_file import DISK_FULL_ERRNOS
from meshrl.common.base.files.disk_sync import fsync, fsync_path

Octets = NDArray[np.uint8]
MAGIC = b"MeshKept"
COMMIT_MARK = slice(16, 32)
HEADER_BYTES = 32  # magic, length of the description, mark
ALIGN_BYTES = 64  # a cache line, and the widest vector
READAHEAD_BYTES = 16 << 20  # of a file, read ahead of requests
COPIES_BYTES = "copies_bytes"  # key in the metadata of a record: bytes of the copies that it names
PIECE_BYTES = 1 << 20  # copied and summed at a time, so that it fits in a core's cache


class OffloadSource(Protocol):
    """Named byte ranges of a sleeping process."""

    @property
    def sizes_bytes(self) -> Mapping[str, int]:
        """Size of each in bytes."""

    def read(self, name: str, start: int, end: int) -> Octets:
        """Return bytes [start, end) of one, as a view where possible."""


class OffloadTarget(OffloadSource, Protocol):
    """Named byte ranges that can be restored."""

    def write(self, name: str, start: int, piece: Octets) -> None:
        """Write bytes back to their place."""


class OffloadMedium(Protocol):
    """Storage for tensors during sleep."""

    @property
    def location(self) -> str:
        """Location for users to read."""

    @property
    def size_bytes(self) -> int:
        """Capacity or content in bytes."""

    def write_at(self, offset: int, piece: Octets) -> None:
        """Write bytes."""

    def read_at(self, offset: int, count: int) -> Octets:
        """Read bytes; return fewer at the end."""

    def flush(self) -> None:
        """Flush: return once written bytes are as durable as the medium allows."""

    def close(self) -> None:
        """Close the medium; its content stays."""


@dataclass(frozen=True)
class OffloadHeader:
    """Content of a medium, according to its header."""

    metadata: dict[str, Any]  # metadata of the sleeping process
    sizes_bytes: Mapping[str, int]
    offsets: Mapping[str, int]
    checksums: Mapping[str, Checksum]


def _encode_description(metadata: Mapping[str, Any], sizes: Mapping[str, int]) -> bytes:
    return json.dumps({"about": metadata, "sizes": list(sizes.items())}).encode()


def _compute_offsets(description: int, sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return the offset of each tensor, and the end of the last."""
    found, at = {}, HEADER_BYTES + description + CHECKSUM_BYTES * len(sizes)
    for name, size in sizes.items():
        at += -at % ALIGN_BYTES
        found[name] = at
        at += size
    return found, at


def compute_size_bytes(metadata: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """Return the required size of a medium in bytes."""
    return _compute_offsets(len(_encode_description(metadata, sizes)), sizes)[1]


def offload(medium: OffloadMedium, metadata: Mapping[str, Any], source: OffloadSource) -> None:
    """Write all of `source` to the medium, and the commit mark last. `metadata` is JSON.

    Raises StorageFull without space, and then leaves nothing readable.
    """
    description = _encode_description(metadata, source.sizes_bytes)
    offsets, _ = _compute_offsets(len(description), source.sizes_bytes)
    checksums = b""
    for name in source.sizes_bytes:
        summed = Checksummer()
        for start, end in _split_pieces(source.sizes_bytes[name]):
            piece = source.read(name, start, end)
            summed.update(piece.data)
            medium.write_at(offsets[name] + start, piece)
        checksums += summed.checksum
    length = len(description).to_bytes(8, "little")
    medium.write_at(0, _as_array(MAGIC + length + bytes(CHECKSUM_BYTES) + description + checksums))
    medium.flush()
    medium.write_at(COMMIT_MARK.start, _as_array(compute_checksum(description + checksums)))
    medium.flush()


def read_header(medium: OffloadMedium) -> OffloadHeader:
    """Read the header of a medium; raise CorruptData if the content is incomplete."""
    first = medium.read_at(0, HEADER_BYTES).tobytes()
    length = int.from_bytes(first[8:16], "little")
    if first[:8] != MAGIC or len(first) < HEADER_BYTES or length > medium.size_bytes:
        raise CorruptData("no complete offloaded state is there", where=medium.location)
    description = medium.read_at(HEADER_BYTES, length).tobytes()
    try:
        header = json.loads(description)
        sizes = {str(name): int(size) for name, size in header["sizes"]}
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData("its header is invalid", where=medium.location) from error
    table = medium.read_at(HEADER_BYTES + length, CHECKSUM_BYTES * len(sizes)).tobytes()
    if compute_checksum(description + table) != first[COMMIT_MARK]:
        raise CorruptData("it was not written completely", where=medium.location)
    offsets, end = _compute_offsets(length, sizes)
    if end > medium.size_bytes:
        raise CorruptData(f"it has {medium.size_bytes} of {end} bytes", where=medium.location)
    cut = [Checksum(table[i : i + CHECKSUM_BYTES]) for i in range(0, len(table), CHECKSUM_BYTES)]
    return OffloadHeader(header["about"], sizes, offsets, dict(zip(sizes, cut, strict=True)))


def restore(medium: OffloadMedium, header: OffloadHeader, target: OffloadTarget) -> None:
    """Write the medium's tensors that `target` names back to it.

    Raises CorruptData if bytes have changed; the caller must then discard what was written.
    """
    for name, size in target.sizes_bytes.items():
        if header.sizes_bytes.get(name) != size:
            raise CorruptData(f"{name} of {size} bytes is missing", where=medium.location)
        summed = Checksummer()
        for start, end in _split_pieces(size):
            piece = medium.read_at(header.offsets[name] + start, end - start)
            summed.update(piece.data)
            target.write(name, start, piece)
        if summed.checksum != header.checksums[name]:
            raise CorruptData(f"{name} does not match its checksum", where=medium.location)


class MediumSource:
    """Content of one medium as the source of another."""

    def __init__(self, medium: OffloadMedium, header: OffloadHeader) -> None:
        self._medium, self._header, self.sizes_bytes = medium, header, header.sizes_bytes

    def read(self, name: str, start: int, end: int) -> Octets:
        """Read bytes of one tensor from the medium."""
        return self._medium.read_at(self._header.offsets[name] + start, end - start)


def copy_offload(source: OffloadMedium, target: OffloadMedium) -> OffloadHeader:
    """Copy the content of one medium to another.

    Raises CorruptData if it has changed, and then leaves no complete content.
    """
    head = read_header(source)
    offload(target, head.metadata, MediumSource(source, head))
    copy = read_header(target)
    if copy.checksums != head.checksums:
        target.write_at(COMMIT_MARK.start, _as_array(bytes(CHECKSUM_BYTES)))
        raise CorruptData("its content does not match its checksums", where=source.location)
    return copy


def _split_pieces(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, PIECE_BYTES):
        yield start, min(size, start + PIECE_BYTES)


def _as_array(content: bytes) -> Octets:
    return np.frombuffer(content, np.uint8)


def make_segment_name(process: str) -> str:
    """Return the name of a process's memory segment."""
    return process.replace("/", "-")


class MemorySegment:
    """Memory segment of another process, opened by its path."""

    def __init__(self, path: str, process: str = "") -> None:
        """Open a segment that is for the tensors of `process`.

        Raises Refused, and writes nothing, if it is for another process or no segment.
        """
        self.location = path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.readlink(f"/proc/self/fd/{descriptor}")
            if process and found != f"/memfd:{make_segment_name(process)} (deleted)":
                raise Refused(f"{found} is not a segment of {process}", where=path)
            self.size_bytes = os.fstat(descriptor).st_size
            mapped = mmap.mmap(descriptor, self.size_bytes)
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(mapped, np.uint8)

    def write_at(self, offset: int, piece: Octets) -> None:
        """Copy bytes to the segment, visible to all processes that map it."""
        self._bytes[offset : offset + len(piece)] = piece

    def read_at(self, offset: int, count: int) -> Octets:
        """Return a view of bytes."""
        return self._bytes[offset : offset + count]

    def flush(self) -> None:
        """Do nothing: memory needs no flush."""

    def close(self) -> None:
        """Unmap the segment once it has no views."""
        self._bytes = np.zeros(0, np.uint8)


class OffloadFile:
    """File for tensors; it has a temporary name until `commit`."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Open a file, or create one with `create`.

        Raises FileNotFoundError for a missing file, and StorageFull if none can be created.
        """
        self._path = path
        self._current_path = path.with_name(f"{path.name}.new") if create else path
        if create:
            self._current_path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC if create else os.O_RDONLY
        try:
            self._descriptor = os.open(self._current_path, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._to_storage_full(error) from error
        self._scratch = np.zeros(PIECE_BYTES, np.uint8)
        self._readahead_end = 0  # end of the range that was announced to the kernel

    @property
    def location(self) -> str:
        """Path of the file."""
        return str(self._current_path)

    @property
    def size_bytes(self) -> int:
        """Length of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def write_at(self, offset: int, piece: Octets) -> None:
        """Write bytes; raise StorageFull without space."""
        view = piece.data
        try:
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise self._to_storage_full(error) from error

    def read_at(self, offset: int, count: int) -> Octets:
        """Read bytes; the next call overwrites results of at most PIECE_BYTES."""
        # the disk reads ahead while this range is processed
        if offset + count > self._readahead_end - READAHEAD_BYTES // 2:
            self._readahead_end = offset + count + READAHEAD_BYTES
            os.posix_fadvise(self._descriptor, offset, READAHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        into = self._scratch[:count] if count <= PIECE_BYTES else np.zeros(count, np.uint8)
        done = 0
        while done < len(into):
            read = os.preadv(self._descriptor, [into.data[done:]], offset + done)
            if not read:
                break
            done += read
        return into[:done]

    def flush(self) -> None:
        """Return once the bytes are on disk."""
        try:
            fsync(self._descriptor)
        except OSError as error:
            raise self._to_storage_full(error) from error

    def commit(self) -> None:
        """Rename the file to its permanent name."""
        self._current_path.replace(self._path)
        self._current_path = self._path
        fsync_path(self._path.parent)

    def close(self) -> None:
        """Close the file; delete it if it was not committed."""
        os.close(self._descriptor)
        if self._current_path != self._path:
            self._current_path.unlink(missing_ok=True)

    def _to_storage_full(self, error: OSError) -> Exception:
        if error.errno not in DISK_FULL_ERRNOS:
            return error
        return StorageFull(
            "the disk has no space for the offloaded state of a process",
            where=str(self._path),
            fix="Free space on this disk; until then the process continues to compute",
        )
