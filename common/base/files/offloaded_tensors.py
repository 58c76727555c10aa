"""Tensors that lie in a segment of memory or in a file while who computes with them sleeps.

A head names them, with a checksum of each; the mark, a checksum of the head, is written last. So
what a death has left half written is never taken for whole, and what has changed since is found.
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
READAHEAD_BYTES = 16 << 20  # of a file that are read before they are asked for
PIECE_BYTES = 1 << 20  # copied and summed at a time, while a core's cache holds it


class OffloadSource(Protocol):
    """Named runs of bytes, as whoever sleeps has them."""

    @property
    def sizes_bytes(self) -> Mapping[str, int]:
        """Bytes of each."""

    def read(self, name: str, start: int, end: int) -> Octets:
        """Bytes [start, end) of one; a view where that can be."""


class OffloadTarget(OffloadSource, Protocol):
    """Such bytes that can be put back."""

    def write(self, name: str, start: int, piece: Octets) -> None:
        """Puts bytes back where they were."""


class OffloadMedium(Protocol):
    """Where they lie meanwhile."""

    @property
    def location(self) -> str:
        """For people."""

    @property
    def size_bytes(self) -> int:
        """Bytes that it has room for, or holds."""

    def write_at(self, offset: int, piece: Octets) -> None:
        """Writes bytes."""

    def read_at(self, offset: int, count: int) -> Octets:
        """Bytes that were written; fewer where it ends."""

    def flush(self) -> None:
        """Returns once what was put is as lasting as the medium is."""

    def close(self) -> None:
        """Lets go of it; what lies there stays."""


@dataclass(frozen=True)
class OffloadHeader:
    """What a medium holds, as its head says."""

    about: dict[str, Any]  # in the words of who sleeps
    sizes_bytes: Mapping[str, int]
    offsets: Mapping[str, int]
    checksums: Mapping[str, Checksum]


def _encode_description(metadata: Mapping[str, Any], sizes: Mapping[str, int]) -> bytes:
    return json.dumps({"about": metadata, "sizes": list(sizes.items())}).encode()


def _compute_offsets(description: int, sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each begins, and where the last ends."""
    found, at = {}, HEADER_BYTES + description + CHECKSUM_BYTES * len(sizes)
    for name, size in sizes.items():
        at += -at % ALIGN_BYTES
        found[name] = at
        at += size
    return found, at


def compute_size_bytes(metadata: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """Bytes that a medium must have room for."""
    return _compute_offsets(len(_encode_description(metadata, sizes)), sizes)[1]


def offload(medium: OffloadMedium, metadata: Mapping[str, Any], source: OffloadSource) -> None:
    """Writes all of `content` to the medium, and the mark when the rest is there. `about` is JSON.
    StorageFull, and nothing that could be read, where there is no room.
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
    """What lies there; Damaged when it is not whole."""
    first = medium.read_at(0, HEADER_BYTES).tobytes()
    length = int.from_bytes(first[8:16], "little")
    if first[:8] != MAGIC or len(first) < HEADER_BYTES or length > medium.size_bytes:
        raise CorruptData("nothing whole is kept there", where=medium.location)
    description = medium.read_at(HEADER_BYTES, length).tobytes()
    try:
        told = json.loads(description)
        sizes = {str(name): int(size) for name, size in told["sizes"]}
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData("its head is garbled", where=medium.location) from error
    table = medium.read_at(HEADER_BYTES + length, CHECKSUM_BYTES * len(sizes)).tobytes()
    if compute_checksum(description + table) != first[COMMIT_MARK]:
        raise CorruptData("it was not written to its end", where=medium.location)
    offsets, end = _compute_offsets(length, sizes)
    if end > medium.size_bytes:
        raise CorruptData(f"it has {medium.size_bytes} of {end} bytes", where=medium.location)
    cut = [Checksum(table[i : i + CHECKSUM_BYTES]) for i in range(0, len(table), CHECKSUM_BYTES)]
    return OffloadHeader(told["about"], sizes, offsets, dict(zip(sizes, cut, strict=True)))


def restore(medium: OffloadMedium, header: OffloadHeader, target: OffloadTarget) -> None:
    """Writes back to `content` what it has names for. Damaged when bytes are not those that were
    kept: what was written by then is to be thrown away.
    """
    for name, size in target.sizes_bytes.items():
        if header.sizes_bytes.get(name) != size:
            raise CorruptData(f"{name} of {size} bytes is not there", where=medium.location)
        summed = Checksummer()
        for start, end in _split_pieces(size):
            piece = medium.read_at(header.offsets[name] + start, end - start)
            summed.update(piece.data)
            target.write(name, start, piece)
        if summed.checksum != header.checksums[name]:
            raise CorruptData(f"{name} is not what its checksum says", where=medium.location)


class MediumSource:
    """What lies on one medium, as the content of another."""

    def __init__(self, medium: OffloadMedium, header: OffloadHeader) -> None:
        self._medium, self._header, self.sizes_bytes = medium, header, header.sizes_bytes

    def read(self, name: str, start: int, end: int) -> Octets:
        """Bytes of one, as they lie there."""
        return self._medium.read_at(self._header.offsets[name] + start, end - start)


def copy_offload(source: OffloadMedium, target: OffloadMedium) -> OffloadHeader:
    """Copies what lies on one medium to another; Damaged, and nothing whole there, when it is not
    what was kept.
    """
    head = read_header(source)
    offload(target, head.about, MediumSource(source, head))
    copy = read_header(target)
    if copy.checksums != head.checksums:
        target.write_at(COMMIT_MARK.start, _as_array(bytes(CHECKSUM_BYTES)))
        raise CorruptData("it is not what its checksums say", where=source.location)
    return copy


def _split_pieces(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, PIECE_BYTES):
        yield start, min(size, start + PIECE_BYTES)


def _as_array(content: bytes) -> Octets:
    return np.frombuffer(content, np.uint8)


def make_segment_name(process: str) -> str:
    """What the segment of a process is called."""
    return process.replace("/", "-")


class MemorySegment:
    """A segment of memory that another process owns, opened by its path."""

    def __init__(self, path: str, process: str = "") -> None:
        """`process`: whose tensors it is for. Refused, and nothing is written, when it is for
        another's, or something else than a segment.
        """
        self.location = path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.readlink(f"/proc/self/fd/{descriptor}")
            if process and found != f"/memfd:{make_segment_name(process)} (deleted)":
                raise Refused(f"{found} is no segment for {process}", where=path)
            self.size_bytes = os.fstat(descriptor).st_size
            mapped = mmap.mmap(descriptor, self.size_bytes)
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(mapped, np.uint8)

    def write_at(self, offset: int, piece: Octets) -> None:
        """Copies bytes there; they are there for whoever maps it."""
        self._bytes[offset : offset + len(piece)] = piece

    def read_at(self, offset: int, count: int) -> Octets:
        """A view of bytes."""
        return self._bytes[offset : offset + count]

    def flush(self) -> None:
        """Memory is as lasting as it gets."""

    def close(self) -> None:
        """Unmaps it, once nobody has a view."""
        self._bytes = np.zeros(0, np.uint8)


class OffloadFile:
    """A file; one that is being written has another name until it is `finished`."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """FileNotFoundError without one, unless it is to be `fresh`: then StorageFull where none
        can be made.
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
        self._readahead_end = 0  # up to where the kernel has been told that it will be read

    @property
    def location(self) -> str:
        """Its path."""
        return str(self._current_path)

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return os.fstat(self._descriptor).st_size

    def write_at(self, offset: int, piece: Octets) -> None:
        """Writes bytes; StorageFull where there is no room for them."""
        view = piece.data
        try:
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise self._to_storage_full(error) from error

    def read_at(self, offset: int, count: int) -> Octets:
        """Bytes, which the next call overwrites if they are a piece at most."""
        if (
            offset + count > self._readahead_end - READAHEAD_BYTES // 2
        ):  # the disk reads while this is digested
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
        """Returns once its bytes are on the disk."""
        try:
            fsync(self._descriptor)
        except OSError as error:
            raise self._to_storage_full(error) from error

    def commit(self) -> None:
        """Gives it its name, for good."""
        self._current_path.replace(self._path)
        self._current_path = self._path
        fsync_path(self._path.parent)

    def close(self) -> None:
        """Closes it; one without its name is gone."""
        os.close(self._descriptor)
        if self._current_path != self._path:
            self._current_path.unlink(missing_ok=True)

    def _to_storage_full(self, error: OSError) -> Exception:
        if error.errno not in DISK_FULL_ERRNOS:
            return error
        return StorageFull(
            "no room for what a process keeps while it sleeps",
            where=str(self._path),
            fix="free space on this disk; it computes on meanwhile",
        )
