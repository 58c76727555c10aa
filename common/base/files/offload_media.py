"""Media of offloaded tensors: memory segments of a worker, and files."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path
from threading import local

import numpy as np

from meshrl.common.base.errors import Refused, StorageFull
from meshrl.common.base.files.append_file import DISK_FULL_ERRNOS
from meshrl.common.base.files.disk_sync import fsync, fsync_path
from meshrl.common.base.files.offloaded_tensors import BLOCK_BYTES, CHUNK_BYTES, Octets

# One thread copies and sums at about half the speed of a plain copy.
MEMORY_THREADS = 2
DISK_THREADS = 4  # direct accesses under way, which a disk needs to reach its speed
READ_BYTES = 1 << 20  # of one access; with 4 MiB a virtual disk was a third slower


def make_segment_name(process: str) -> str:
    """Return the name of a process's memory segments."""
    return process.replace("/", "-")


def make_segment_key(process: str, part: str = "") -> str:
    """Return the key of the memory segment of a part of a process's state."""
    return f"{process}:{part}"


def get_segment_process(key: str) -> str:
    """Return the process whose state a segment has."""
    return key.partition(":")[0]


class MemorySegment:
    """Mapped memory segment of another process."""

    thread_count = MEMORY_THREADS

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
            about = os.fstat(descriptor)
            self.size_bytes, self.inode = about.st_size, about.st_ino
            mapped = mmap.mmap(descriptor, self.size_bytes)
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(mapped, np.uint8)

    def open_chunk(self, offset: int, count: int) -> Octets:
        """Return a view of a range, visible to all processes that map the segment."""
        return self._bytes[offset : offset + count]

    def write_chunk(self, offset: int, chunk: Octets) -> None:
        """Do nothing: `chunk` is the segment's memory."""

    def read_chunk(self, offset: int, count: int) -> Octets:
        """Return a view of a range."""
        return self._bytes[offset : offset + count]

    def flush(self) -> None:
        """Do nothing: memory needs no flush."""

    def close(self) -> None:
        """Unmap the segment once it has no views."""
        self._bytes = np.zeros(0, np.uint8)


class OffloadFile:
    """File of one copy; it has a temporary name until `commit`.

    The file system's cache is bypassed where it allows that: tensors would displace its content.
    """

    thread_count = DISK_THREADS

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
            self._descriptor = _open_direct(self._current_path, flags | os.O_CLOEXEC)
        except OSError as error:
            raise self._to_storage_full(error) from error
        self._memory = local()  # of each thread: `chunk`

    def reserve(self, size_bytes: int) -> None:
        """Reserve space for a new file, so that writes only fill it; StorageFull without space."""
        try:
            os.posix_fallocate(self._descriptor, 0, size_bytes)
        except OSError as error:
            raise self._to_storage_full(error) from error

    @property
    def location(self) -> str:
        """Path of the file."""
        return str(self._current_path)

    @property
    def size_bytes(self) -> int:
        """Length of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def open_chunk(self, offset: int, count: int) -> Octets:
        """Return memory of the thread, aligned to blocks."""
        count += -count % BLOCK_BYTES
        chunk: Octets | None = getattr(self._memory, "chunk", None)
        if chunk is None or len(chunk) < count:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            room = mmap.mmap(-1, max(count, CHUNK_BYTES), flags=private)
            with suppress(OSError):  # a kernel without huge pages
                room.madvise(mmap.MADV_HUGEPAGE)  # small ones cost as much as the copy
            self._memory.chunk = chunk = np.frombuffer(room, np.uint8)
        return chunk[:count]

    def write_chunk(self, offset: int, chunk: Octets) -> None:
        """Write whole blocks; raise StorageFull without space."""
        view = chunk.data
        try:
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise self._to_storage_full(error) from error

    def read_chunk(self, offset: int, count: int) -> Octets:
        """Read a range to memory of the thread."""
        before = offset % BLOCK_BYTES
        chunk = self.open_chunk(offset - before, before + count)
        done = 0
        while done < before + count:
            part = chunk.data[done : done + READ_BYTES]
            read = os.preadv(self._descriptor, [part], offset - before + done)
            done += read
            if not read or done % BLOCK_BYTES:  # the end
                break
        return chunk[before : min(done, before + count)]

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


def _open_direct(path: Path, flags: int) -> int:
    """Open a file past the file system's cache, or with it where that is impossible."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)
