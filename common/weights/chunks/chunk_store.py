"""The chunk store, content-addressed files: a chunk lies at <directory>/<d[:2]>/<d>, where d is its
digest (`meshrl.common.base.digest`), or below a directory of the space that it was put into.

Any process of the host may write: a chunk appears whole, durable, read-only and under its own
digest, or not at all. Who stores a chunk hashes it on the way and says so (`verified_files.py`), so
that those who map it need not hash it again.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from meshrl.common.api.transfer.bulk_permissions import SPACES
from meshrl.common.base.digest import (
    DIGEST_DIGITS,
    Hasher,
    check_digest,
    compute_digest,
    compute_stream_digest,
    ignore_byte_count,
)
from meshrl.common.base.errors import (
    BadMessage,
    CorruptData,
    MeshError,
    NotFound,
    Refused,
    StorageFull,
)
from meshrl.common.base.files import corruption
from meshrl.common.base.files.disk_sync import fdatasync, fsync, fsync_path
from meshrl.common.weights.chunks.verified_files import RECORD_FILE, VerifiedFiles

BLOCK_BYTES = 1 << 20  # of a chunk that are in memory at a time
CORRUPTION_REASON = "it is not what its name says"  # what is told of a damaged chunk
READ_ONLY_MODE = 0o400  # once it is there; who may change a mode may do anything
COPY_BLOCK_BYTES = 8 << 20  # of a file that is copied to another file system
MAX_UNSYNCED_BYTES = 256 << 20  # of a copy that may be in memory only
SCRATCH_MAX_AGE_S = 3600.0  # a scratch file this old was left by a process that ended
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINK_ERRNOS = (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_scratch_numbers = itertools.count()

BytesLike = bytes | memoryview
CorruptionEvent = tuple[
    dict[str, Any], str
]  # its fields, and the operation by which it is told once


def make_write_error(error: OSError, path: Path) -> MeshError:
    """The error of the mesh that an OSError of a write stands for."""
    if error.errno in _DISK_FULL_ERRNOS:
        return StorageFull(
            f"no room for {path.name}", where=str(path.parent), fix="Free some space"
        )
    return MeshError(f"cannot write: {error}", where=str(path))


class ScratchFile:
    """A chunk in the making: `commit` makes it durable and visible, `discard` forgets it. One of a
    cache need not be durable: after a power cut it may not be what its name says.
    """

    def __init__(
        self,
        target: Path,
        set_times: Callable[[Path], None],
        *,
        durable: bool = True,
        mode: int = 0o600,
    ) -> None:
        """`mode`: of the file once it is whole."""
        self._target, self._set_times, self._durable, self._mode = target, set_times, durable, mode
        self._path = _make_scratch_path(target)
        try:
            if not target.parent.is_dir():
                target.parent.mkdir(parents=True, exist_ok=True)
                if durable:
                    fsync_path(target.parent.parent)
            self._fd = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise make_write_error(error, target) from error

    def write(self, content: bytes | memoryview) -> None:
        """Appends to the chunk. StorageFull: the disk is full."""
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise make_write_error(error, self._target) from error

    def commit(self) -> None:
        """Makes the chunk durable under its name. StorageFull: the disk is full."""
        try:
            if self._durable:
                fsync(self._fd)
            if self._mode != 0o600:
                os.fchmod(self._fd, self._mode)
            self._set_times(self._path)
            os.rename(self._path, self._target)
            if self._durable:
                fsync_path(self._target.parent)
        except OSError as error:
            raise make_write_error(error, self._target) from error

    def discard(self) -> None:
        """Closes the file, and removes it unless it was committed."""
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


class ChunkStore:
    """The chunks below one directory. Its files are dated by `wall`, in seconds of the epoch, or by
    the disk's clock.
    """

    def __init__(
        self,
        directory: Path,
        wall_clock: Callable[[], float] | None = None,
        pending_events: deque[CorruptionEvent] | None = None,
        root: Path | None = None,
    ) -> None:
        """`root`: the directory of the store that this is a space of."""
        self.directory = directory.resolve()
        self._root = root or self.directory
        self._wall_clock = wall_clock
        # Chunks that a writer found damaged, until events tell of them.
        self.pending_events: deque[CorruptionEvent] = (
            deque() if pending_events is None else pending_events
        )
        self._verified_files = VerifiedFiles(
            self.directory / RECORD_FILE, lambda: self._read_clock_ns() / 1e9
        )
        self._spaces: dict[str, ChunkStore] = {"": self}

    def open_space(self, name: str) -> ChunkStore:
        """The chunks of one of `meshrl.common.api.transfer.bulk_permissions.SPACES`; `untold` is
        common to
        all."""
        assert name in SPACES, name
        if name not in self._spaces:
            self._spaces[name] = ChunkStore(
                self.directory / name, self._wall_clock, self.pending_events, self._root
            )
        return self._spaces[name]

    @property
    def local_address(self) -> str:
        """A bulk address for clients of the same host only."""
        return f"#{self.directory}"

    def chunk_path(self, digest: str) -> Path:
        """Where a chunk lies or would lie; BadMessage for what is no digest, Refused for the name
        that an earlier version gave.
        """
        check_digest(digest, str(self.directory))
        return self.directory / digest[:2] / digest

    def has(self, digest: str) -> bool:
        """Whether the chunk is there; BadMessage for what is not a digest."""
        return self.chunk_path(digest).exists()

    def mark_written(self, digest: str) -> bool:
        """Whether the chunk is there; if so it counts as written now, so that a sweep does not
        delete it.
        """
        try:
            self._set_chunk_time(digest, self._set_write_time)
        except FileNotFoundError:
            return False
        return True

    def mark_used(self, digest: str) -> bool:
        """Whether the chunk is there; if so it counts as read now, and is the file that it was."""
        try:
            self._set_chunk_time(
                digest,
                lambda path: os.utime(path, ns=(self._read_clock_ns(), path.stat().st_mtime_ns)),
            )
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise make_write_error(error, self.chunk_path(digest)) from error
        return True

    def _set_chunk_time(self, digest: str, set_times: Callable[[Path], None]) -> None:
        """Changes a time of a chunk, which is as right afterwards as it was before."""
        path = self.chunk_path(digest)
        known = self.is_verified(digest)
        set_times(path)
        if known:
            self.record_verified(digest)

    def _set_write_time(self, path: Path) -> None:
        os.utime(path, ns=(path.stat().st_atime_ns, self._read_clock_ns()))

    def _read_clock_ns(self) -> int:
        return time.time_ns() if self._wall_clock is None else int(self._wall_clock() * 1e9)

    def open_scratch(self, digest: str, *, durable: bool = True) -> ScratchFile:
        """Room for a chunk whose bytes are still to come."""
        return ScratchFile(
            self.chunk_path(digest), self._set_write_time, durable=durable, mode=READ_ONLY_MODE
        )

    def record_verified(self, digest: str, stat: os.stat_result | None = None) -> None:
        """Record that the chunk's file has this digest: the file of these figures, which were taken
        before it was hashed, or the one that was just made of what was hashed.
        """
        self._verified_files.record(digest, stat or self.chunk_path(digest))

    def is_verified(self, digest: str, stat: os.stat_result | None = None) -> bool:
        """True if the chunk's file, or that of these figures, was hashed on this host a short time
        ago and has not been changed since.
        """
        try:
            return self._verified_files.is_verified(digest, stat or self.chunk_path(digest).stat())
        except OSError:
            return False

    def read(self, digest: str) -> bytes:
        """The chunk's bytes, checked; NotFound, or Damaged when the disk has changed them: whoever
        reads asks the store to `examine` it then.
        """
        with self.open(digest) as file:
            content = file.read()
        if compute_digest(content) != digest:
            raise CorruptData("a chunk is not what its name says", where=file.name)
        return content

    def open(self, digest: str) -> BinaryIO:
        """The chunk's file, whose bytes are not checked; NotFound."""
        path = self.chunk_path(digest)
        try:
            return path.open("rb")
        except FileNotFoundError:
            raise NotFound(f"no chunk {digest}", where=str(path)) from None

    def iter_blocks(self, digest: str, offset: int = 0) -> Iterator[bytes]:
        """The chunk's bytes as they are, from `offset`, a block at a time; NotFound."""
        with self.open(digest) as opened:
            if offset:  # a pipe has none
                opened.seek(offset)
            while block := opened.read(BLOCK_BYTES):
                yield block

    def verify_or_quarantine(self, digest: str) -> tuple[bool, Path | None]:
        """Whether the chunk is there as it was written, and where it lies now if it was not: it is
        set aside, so that whoever has its bytes writes them again.
        """
        path = self.chunk_path(digest)
        try:
            opened = path.open("rb")
        except FileNotFoundError:
            return False, None
        with opened:
            stat = os.fstat(opened.fileno())
            if compute_stream_digest(opened) == digest:
                self.record_verified(digest, stat)
                return True, None
            # Nobody else has the number of an open file: what was written again since goes back.
            damaged = stat.st_ino
            try:
                aside = corruption.quarantine(path, self._root)
            except FileNotFoundError:
                return False, None
            if aside.stat().st_ino == damaged:
                return False, aside
        os.rename(aside, path)
        return True, None

    def is_valid(self, digest: str) -> bool:
        """What `examine` says, for one who writes the chunk if it is not; it is read only if it has
        not been hashed a short time ago.
        """
        if self.is_verified(digest):
            return True
        whole, aside = self.verify_or_quarantine(digest)
        if aside is not None:
            path, then = self.chunk_path(digest), "it is written again"
            told = corruption.make_event_fields(
                "weights", path, CORRUPTION_REASON, then, quarantined_path=aside
            )
            self.pending_events.append((told, uuid.uuid4().hex))
        return whole

    @contextmanager
    def write_chunk(
        self, digest: str, *, durable: bool = False
    ) -> Iterator[Callable[[BytesLike], None]]:
        """Makes a chunk of what is written in the block and was found to have this digest; one of a
        cache need not be durable. StorageFull, as any error, leaves nothing behind.
        """
        scratch = self.open_scratch(digest, durable=durable)
        try:
            yield scratch.write
            scratch.commit()
            self.record_verified(digest)
        finally:
            scratch.discard()

    def save(self, digest: str, content: BytesLike, *, durable: bool = False) -> None:
        """Store bytes that were just found to have this digest."""
        with self.write_chunk(digest, durable=durable) as write:
            write(content)

    def write(self, content: bytes | memoryview) -> str:
        """Makes `content` durable and returns its digest. StorageFull leaves nothing behind.

        What is there already counts once it is found to be the same: weights that a replay makes
        again are read and not written; else nobody writes the same bytes twice.
        """
        digest = compute_digest(content)
        if self.has(digest) and self.is_valid(digest) and self.mark_written(digest):
            return digest
        self.save(digest, content, durable=True)
        return digest

    def write_file(self, path: Path) -> str:
        """Makes the content of a file durable, as `write` does; it may be larger than memory.
        BadMessage when the file changes meanwhile.
        """
        with path.open("rb") as file:
            digest = compute_stream_digest(file)
            if self.has(digest) and self.is_valid(digest) and self.mark_written(digest):
                return digest
            file.seek(0)
            hashed = Hasher()
            with self.write_chunk(digest, durable=True) as write:
                while block := file.read(BLOCK_BYTES):
                    hashed.update(block)
                    write(block)
                if hashed.hexdigest() != digest:
                    raise BadMessage("a file was changed as it was read", where=str(path))
        return digest

    def import_file(
        self, path: Path, digest: str, on_progress: Callable[[int], None] = ignore_byte_count
    ) -> None:
        """Makes a file of this host the chunk of a digest, unless there is one: the same bytes on
        the disk where that can be, a copy elsewhere, of whose bytes `on_progress` hears. They are
        not checked: who gets them does so. NotFound without the file, StorageFull.
        """
        if self.mark_written(digest):
            return
        target = self.chunk_path(digest)
        beside = _make_scratch_path(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(path, beside, on_progress)
            self._set_write_time(beside)
            beside.rename(target)
        except FileNotFoundError:
            raise NotFound(f"{path} is missing") from None
        except OSError as error:
            raise make_write_error(error, path) from error
        finally:
            beside.unlink(missing_ok=True)

    def assemble(
        self,
        files: Mapping[str, str],
        directory: Path,
        on_progress: Callable[[int], None] = ignore_byte_count,
    ) -> None:
        """Makes files below a directory, which is new, of chunks, by their digests; NotFound names
        one that is not there, StorageFull. `on_progress` hears of bytes as they are copied.
        """
        for name, digest in files.items():
            path = directory / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(self.chunk_path(digest), path, on_progress)
                path.chmod(path.parent.stat().st_mode & 0o666)  # as if it had been written there
            except FileNotFoundError:
                raise NotFound(f"no chunk {digest}", where=str(self.chunk_path(digest))) from None
            except OSError as error:
                raise make_write_error(error, path) from error

    # ------------------------------------------------------------ retention

    def read_write_times(self, digests: Iterable[str]) -> dict[str, int]:
        """When each of them that is stored was last written, in nanoseconds of the disk's clock."""
        found = {}
        for digest in digests:
            with suppress(FileNotFoundError, Refused):  # what an earlier version has stored stays
                found[digest] = self.chunk_path(digest).stat().st_mtime_ns
        return found

    def find_older_than(self, age_s: float, now_s: float) -> dict[str, int]:
        """What `written` tells, for all chunks last written `age_s` before `now_s` (wall time) or
        earlier.
        """
        old = {}
        for path in self.directory.glob("??/*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            if path.name.startswith("."):
                if stat.st_mtime < now_s - SCRATCH_MAX_AGE_S:
                    path.unlink(missing_ok=True)
            elif len(path.name) == DIGEST_DIGITS and stat.st_mtime <= now_s - age_s:
                old[path.name] = stat.st_mtime_ns
        return old

    def delete_unchanged(self, write_times: Mapping[str, int]) -> None:
        """Deletes those chunks that were not written again since `write_times` was asked."""
        for digest, when in write_times.items():
            with suppress(FileNotFoundError):
                path = self.chunk_path(digest)
                if path.stat().st_mtime_ns != when:
                    continue
                # A writer who finds the chunk between our look and its end relies on it from then
                # on: it has touched what is out of its sight by now, or finds nothing and writes it
                # again.
                aside = _make_scratch_path(path)
                os.rename(path, aside)
                if aside.stat().st_mtime_ns == when:
                    aside.unlink()
                else:
                    os.rename(aside, path)


def try_lock(descriptor: int) -> bool:
    """Whether no other process works on an open file, as far as its file system can tell."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _link_or_copy(path: Path, target: Path, on_progress: Callable[[int], None]) -> None:
    """Another name for a file, or a copy where its file system has none (another disk, too many
    names, somebody else's file).
    """
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno not in _NO_LINK_ERRNOS:
            raise
        _copy_file(path, target, on_progress)


def _copy_file(path: Path, target: Path, on_progress: Callable[[int], None]) -> None:
    """Written out as it goes, so that `on_progress` tells of a disk's pace and not of memory's."""
    unsynced = 0
    with path.open("rb") as source, target.open("wb") as copy:
        while block := source.read(COPY_BLOCK_BYTES):
            copy.write(block)
            unsynced += len(block)
            if unsynced >= MAX_UNSYNCED_BYTES:
                copy.flush()
                fdatasync(copy.fileno())
                unsynced = 0
            on_progress(len(block))


def _make_scratch_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{next(_scratch_numbers)}")
