"""Content-addressed chunk files at <directory>/<d[:2]>/<d>, where d is the digest.

The digest is that of `meshrl.common.base.digest`. A space has its own directory below.

Any process of the host may write. A chunk appears complete, durable, read-only and under its
digest, or not at all. The writer hashes a chunk while storing it and records that
(`verified_files.py`), so that processes that map it need not hash it again.
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

BLOCK_BYTES = 1 << 20  # of a chunk in memory at a time
CORRUPTION_REASON = "its content does not match its digest"  # why a chunk is reported as corrupt
READ_ONLY_MODE = 0o400  # of a committed chunk; the owner can change the mode anyway
COPY_BLOCK_BYTES = 8 << 20  # of a file copied to another file system
MAX_UNSYNCED_BYTES = 256 << 20  # of a copy, in memory only
SCRATCH_MAX_AGE_S = 3600.0  # an older scratch file was left by a process that exited
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINK_ERRNOS = (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_scratch_numbers = itertools.count()

BytesLike = bytes | memoryview
CorruptionEvent = tuple[
    dict[str, Any], str
]  # fields of the event, and the idempotency key of its append


def make_write_error(error: OSError, path: Path) -> MeshError:
    """Return the MeshError for an OSError of a write."""
    if error.errno in _DISK_FULL_ERRNOS:
        return StorageFull(
            f"the disk has no space for {path.name}", where=str(path.parent), fix="Free disk space"
        )
    return MeshError(f"cannot write: {error}", where=str(path))


class ScratchFile:
    """Chunk being written: `commit` makes it durable and visible, `discard` removes it.

    It is locked until `discard` or `unlock`, so that a process that maps it does not hash it before
    it is recorded as verified. A cached chunk need not be durable: after a power failure it may not
    match its digest.
    """

    def __init__(
        self,
        target: Path,
        set_times: Callable[[Path], None],
        *,
        durable: bool = True,
        mode: int = 0o600,
    ) -> None:
        """Create the scratch file.

        Args:
            mode: File mode after the commit.
        """
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
        try_lock(self._fd)

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes to the chunk. StorageFull: the disk is full."""
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise make_write_error(error, self._target) from error

    def commit(self) -> None:
        """Make the chunk durable under its name. StorageFull: the disk is full."""
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

    def unlock(self) -> None:
        """Let other processes hash the file."""
        with suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def discard(self) -> None:
        """Close the file, and remove it unless it was committed."""
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


class ChunkStore:
    """Chunks below one directory.

    File times come from `wall_clock` (seconds since the epoch), or from the disk's clock.
    """

    def __init__(
        self,
        directory: Path,
        wall_clock: Callable[[], float] | None = None,
        pending_events: deque[CorruptionEvent] | None = None,
        root: Path | None = None,
    ) -> None:
        """Open the store.

        Args:
            root: Directory of the store that this space belongs to.
        """
        self.directory = directory.resolve()
        self._root = root or self.directory
        self._wall_clock = wall_clock
        # Chunks that a writer found corrupt, until events report them.
        self.pending_events: deque[CorruptionEvent] = (
            deque() if pending_events is None else pending_events
        )
        self._verified_files = VerifiedFiles(
            self.directory / RECORD_FILE, lambda: self._read_clock_ns() / 1e9
        )
        self._spaces: dict[str, ChunkStore] = {"": self}

    def open_space(self, name: str) -> ChunkStore:
        """Return the store of a space; `pending_events` is shared by all spaces.

        Args:
            name: One of `meshrl.common.api.transfer.bulk_permissions.SPACES`.
        """
        assert name in SPACES, name
        if name not in self._spaces:
            self._spaces[name] = ChunkStore(
                self.directory / name, self._wall_clock, self.pending_events, self._root
            )
        return self._spaces[name]

    @property
    def local_address(self) -> str:
        """Bulk address for clients on the same host only."""
        return f"#{self.directory}"

    def chunk_path(self, digest: str) -> Path:
        """Return the path of a chunk, present or not.

        Raises:
            BadMessage: Not a digest.
            Refused: A name of an earlier version's format.
        """
        check_digest(digest, str(self.directory))
        return self.directory / digest[:2] / digest

    def has(self, digest: str) -> bool:
        """Return True if the chunk exists. BadMessage: not a digest."""
        return self.chunk_path(digest).exists()

    def mark_written(self, digest: str) -> bool:
        """Set the write time of a chunk to now, which protects it from a sweep; False if
        missing.
        """
        try:
            self._set_chunk_time(digest, self._set_write_time)
        except FileNotFoundError:
            return False
        return True

    def mark_used(self, digest: str) -> bool:
        """Set the access time of a chunk to now and keep it verified; False if missing.

        Another process that has locked the chunk is using it, and so records that.
        """

        def set_access_time(path: Path) -> None:
            os.utime(path, ns=(self._read_clock_ns(), path.stat().st_mtime_ns))

        try:
            self._set_chunk_time(digest, set_access_time, even_if_locked=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise make_write_error(error, self.chunk_path(digest)) from error
        return True

    def _set_chunk_time(
        self, digest: str, set_times: Callable[[Path], None], *, even_if_locked: bool = True
    ) -> None:
        """Change a time of a chunk's file and keep its verification record valid.

        The file is locked until then, so that a process that maps it does not hash it again.
        """
        path = self.chunk_path(digest)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not try_lock(descriptor) and not even_if_locked:
                return
            known = self.is_verified(digest)
            set_times(path)
            if known:
                self.record_verified(digest)
        finally:
            os.close(descriptor)  # releases the lock

    def _set_write_time(self, path: Path) -> None:
        os.utime(path, ns=(path.stat().st_atime_ns, self._read_clock_ns()))

    def _read_clock_ns(self) -> int:
        return time.time_ns() if self._wall_clock is None else int(self._wall_clock() * 1e9)

    def open_scratch(self, digest: str, *, durable: bool = True) -> ScratchFile:
        """Open a scratch file for a chunk."""
        return ScratchFile(
            self.chunk_path(digest), self._set_write_time, durable=durable, mode=READ_ONLY_MODE
        )

    def record_verified(self, digest: str, stat: os.stat_result | None = None) -> None:
        """Record that the chunk's file has this digest.

        Args:
            stat: File status from before hashing; without it, the file was just written from
                hashed bytes.
        """
        self._verified_files.record(digest, stat or self.chunk_path(digest))

    def is_verified(self, digest: str, stat: os.stat_result | None = None) -> bool:
        """Return True if the chunk's file was hashed on this host recently and is unchanged
        since.
        """
        try:
            return self._verified_files.is_verified(digest, stat or self.chunk_path(digest).stat())
        except OSError:
            return False

    def read(self, digest: str) -> bytes:
        """Return the chunk's bytes after checking their digest.

        Raises:
            NotFound: No such chunk.
            CorruptData: The bytes do not match; the caller requests `verify_or_quarantine` of the
                store.
        """
        with self.open(digest) as file:
            content = file.read()
        if compute_digest(content) != digest:
            raise CorruptData("a chunk does not match its digest", where=file.name)
        return content

    def open(self, digest: str) -> BinaryIO:
        """Open the chunk's file without checking its bytes. NotFound: no such chunk."""
        path = self.chunk_path(digest)
        try:
            return path.open("rb")
        except FileNotFoundError:
            raise NotFound(f"no chunk {digest}", where=str(path)) from None

    def iter_blocks(self, digest: str, offset: int = 0) -> Iterator[bytes]:
        """Yield the chunk's unchecked bytes from `offset` in blocks. NotFound: no such chunk."""
        with self.open(digest) as opened:
            if offset:  # a pipe cannot seek
                opened.seek(offset)
            while block := opened.read(BLOCK_BYTES):
                yield block

    def verify_or_quarantine(self, digest: str) -> tuple[bool, Path | None]:
        """Hash the chunk, and quarantine it if it is corrupt so that it can be written again.

        Returns:
            True if the chunk is present and valid; the quarantine path if it was moved.
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
            # The inode number of an open file is not reused: a newer file of that name is restored.
            damaged = stat.st_ino
            try:
                quarantined = corruption.quarantine(path, self._root)
            except FileNotFoundError:
                return False, None
            if quarantined.stat().st_ino == damaged:
                return False, quarantined
        os.rename(quarantined, path)
        return True, None

    def is_valid(self, digest: str) -> bool:
        """Return True if the chunk is present and valid, for a caller that writes it otherwise.

        A chunk that was hashed recently is not read. A corrupt one is quarantined and reported in
        `pending_events`.
        """
        if self.is_verified(digest):
            return True
        is_intact, quarantined = self.verify_or_quarantine(digest)
        if quarantined is not None:
            path, then = self.chunk_path(digest), "it is written again"
            event_fields = corruption.make_event_fields(
                "weights", path, CORRUPTION_REASON, then, quarantined_path=quarantined
            )
            self.pending_events.append((event_fields, uuid.uuid4().hex))
        return is_intact

    @contextmanager
    def write_chunk(
        self, digest: str, *, durable: bool = False
    ) -> Iterator[Callable[[BytesLike], None]]:
        """Write a chunk in the block; the caller has verified its digest.

        A cached chunk need not be durable. Any error, such as StorageFull, leaves no file.
        """
        scratch = self.open_scratch(digest, durable=durable)
        try:
            yield scratch.write
            scratch.commit()
            self.record_verified(digest)
        finally:
            scratch.discard()

    def save(self, digest: str, content: BytesLike, *, durable: bool = False) -> None:
        """Store bytes whose digest was just verified."""
        with self.write_chunk(digest, durable=durable) as write:
            write(content)

    def write(self, content: bytes | memoryview) -> str:
        """Store `content` durably and return its digest. StorageFull leaves no file.

        An existing chunk is verified and kept. A replay that makes the same weights therefore reads
        them and does not write them.
        """
        digest = compute_digest(content)
        if self.has(digest) and self.is_valid(digest) and self.mark_written(digest):
            return digest
        self.save(digest, content, durable=True)
        return digest

    def write_file(self, path: Path) -> str:
        """Store a file's content durably, as `write` does; it may exceed memory.

        Raises:
            BadMessage: The file changed while it was read.
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
                    raise BadMessage("a file was changed during the read", where=str(path))
        return digest

    def import_file(
        self, path: Path, digest: str, on_progress: Callable[[int], None] = ignore_byte_count
    ) -> None:
        """Make a file of this host the chunk of a digest, unless the chunk exists.

        It is a hard link if possible, else a copy that calls `on_progress` with byte counts. The
        receiver checks the bytes.

        Raises:
            NotFound: The file is missing.
            StorageFull: The disk is full.
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
        """Make files in a new directory from chunks.

        Args:
            files: Digests by path below the directory.
            on_progress: Called with byte counts while files are copied.
        Raises:
            NotFound: A chunk is missing.
            StorageFull: The disk is full.
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
        """Return the last write time of each stored chunk, in nanoseconds of the disk's clock."""
        found = {}
        for digest in digests:
            with suppress(FileNotFoundError, Refused):  # chunks of an earlier version stay
                found[digest] = self.chunk_path(digest).stat().st_mtime_ns
        return found

    def find_older_than(self, age_s: float, now_s: float) -> dict[str, int]:
        """Return write times as `read_write_times` does, of chunks at least `age_s` old.

        Args:
            now_s: Wall time in seconds.
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
        """Delete the chunks whose write time is still that of `write_times`."""
        for digest, when in write_times.items():
            with suppress(FileNotFoundError):
                path = self.chunk_path(digest)
                if path.stat().st_mtime_ns != when:
                    continue
                # A writer that finds the chunk between the check and the rename relies on it. Its
                # mark of a write happened before the rename, so the file is restored; or it finds
                # no
                # file and writes the chunk again.
                scratch = _make_scratch_path(path)
                os.rename(path, scratch)
                if scratch.stat().st_mtime_ns == when:
                    scratch.unlink()
                else:
                    os.rename(scratch, path)


def try_lock(descriptor: int) -> bool:
    """Return True if no other process has locked the open file, as far as the file system
    supports.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _link_or_copy(path: Path, target: Path, on_progress: Callable[[int], None]) -> None:
    """Hard-link a file, or copy it if the file system cannot link it.

    Causes are another disk, too many links, or another user's file.
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
    """Copy a file and sync it in steps, so that `on_progress` reflects the disk's speed."""
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
