"""The chunk store, content-addressed files: a chunk lies at <directory>/<d[:2]>/<d>, where d is its
digest (`meshrl.common.base.digest`), or below a directory of the space that it was put into.

Any process of the host may write: a chunk appears whole, durable, read-only and under its own
digest, or not at all. Who stores a chunk hashes it on the way and says so (`verified.py`), so that
those who map it need not hash it again.
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

from meshrl.common.api.transfer.bulk import SPACES
from meshrl.common.base.digest import (
    DIGITS,
    Hasher,
    check_digest,
    digest_of,
    digest_of_stream,
    uncounted,
)
from meshrl.common.base.errors import BadMessage, Damaged, MeshError, NotFound, Refused, StorageFull
from meshrl.common.base.files import damage
from meshrl.common.base.files.durable import flush, flush_content, sync
from meshrl.common.weights.chunks.verified import NAME, Verified

BLOCK_BYTES = 1 << 20  # of a chunk that are in memory at a time
WHY = "it is not what its name says"  # what is told of a damaged chunk
READ_ONLY = 0o400  # once it is there; who may change a mode may do anything
COPY_BYTES = 8 << 20  # of a file that is copied to another file system
SYNC_BYTES = 256 << 20  # of a copy that may be in memory only
STALE_SCRATCH_S = 3600.0  # a scratch file this old was left by a process that ended
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINK = (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_serial = itertools.count()

Content = bytes | memoryview
DamageEvent = tuple[dict[str, Any], str]  # its fields, and the operation by which it is told once


def failure(error: OSError, path: Path) -> MeshError:
    """The error of the mesh that an OSError of a write stands for."""
    if error.errno in _FULL:
        return StorageFull(
            f"no room for {path.name}", where=str(path.parent), fix="Free some space"
        )
    return MeshError(f"cannot write: {error}", where=str(path))


class Scratch:
    """A chunk in the making: `commit` makes it durable and visible, `discard` forgets it. One of a
    cache need not be durable: after a power cut it may not be what its name says.
    """

    def __init__(
        self,
        target: Path,
        stamp: Callable[[Path], None],
        *,
        durable: bool = True,
        mode: int = 0o600,
    ) -> None:
        """`mode`: of the file once it is whole."""
        self._target, self._stamp, self._durable, self._mode = target, stamp, durable, mode
        self._path = _beside(target)
        try:
            if not target.parent.is_dir():
                target.parent.mkdir(parents=True, exist_ok=True)
                if durable:
                    sync(target.parent.parent)
            self._fd = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise failure(error, target) from error

    def write(self, content: bytes | memoryview) -> None:
        """Appends to the chunk. StorageFull: the disk is full."""
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise failure(error, self._target) from error

    def commit(self) -> None:
        """Makes the chunk durable under its name. StorageFull: the disk is full."""
        try:
            if self._durable:
                flush(self._fd)
            if self._mode != 0o600:
                os.fchmod(self._fd, self._mode)
            self._stamp(self._path)
            os.rename(self._path, self._target)
            if self._durable:
                sync(self._target.parent)
        except OSError as error:
            raise failure(error, self._target) from error

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
        wall: Callable[[], float] | None = None,
        untold: deque[DamageEvent] | None = None,
        root: Path | None = None,
    ) -> None:
        """`root`: the directory of the store that this is a space of."""
        self.directory = directory.resolve()
        self._root = root or self.directory
        self._wall = wall
        # Chunks that a writer found damaged, until events tell of them.
        self.untold: deque[DamageEvent] = deque() if untold is None else untold
        self._verified = Verified(self.directory / NAME, lambda: self._now_ns() / 1e9)
        self._spaces: dict[str, ChunkStore] = {"": self}

    def space(self, name: str) -> ChunkStore:
        """The chunks of one of `meshrl.common.api.transfer.bulk.SPACES`; `untold` is common to
        all."""
        assert name in SPACES, name
        if name not in self._spaces:
            self._spaces[name] = ChunkStore(
                self.directory / name, self._wall, self.untold, self._root
            )
        return self._spaces[name]

    @property
    def local_address(self) -> str:
        """A bulk address for clients of the same host only."""
        return f"#{self.directory}"

    def path(self, digest: str) -> Path:
        """Where a chunk lies or would lie; BadMessage for what is no digest, Refused for the name
        that an earlier version gave.
        """
        check_digest(digest, str(self.directory))
        return self.directory / digest[:2] / digest

    def has(self, digest: str) -> bool:
        """Whether the chunk is there; BadMessage for what is not a digest."""
        return self.path(digest).exists()

    def touch(self, digest: str) -> bool:
        """Whether the chunk is there; if so it counts as written now, so that a sweep does not
        delete it.
        """
        try:
            self._dated(digest, self._stamp)
        except FileNotFoundError:
            return False
        return True

    def use(self, digest: str) -> bool:
        """Whether the chunk is there; if so it counts as read now, and is the file that it was."""
        try:
            self._dated(
                digest,
                lambda path: os.utime(path, ns=(self._now_ns(), path.stat().st_mtime_ns)),
            )
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise failure(error, self.path(digest)) from error
        return True

    def _dated(self, digest: str, stamp: Callable[[Path], None]) -> None:
        """Changes a time of a chunk, which is as right afterwards as it was before."""
        path = self.path(digest)
        known = self.is_verified(digest)
        stamp(path)
        if known:
            self.verified(digest)

    def _stamp(self, path: Path) -> None:
        os.utime(path, ns=(path.stat().st_atime_ns, self._now_ns()))

    def _now_ns(self) -> int:
        return time.time_ns() if self._wall is None else int(self._wall() * 1e9)

    def scratch(self, digest: str, *, durable: bool = True) -> Scratch:
        """Room for a chunk whose bytes are still to come."""
        return Scratch(self.path(digest), self._stamp, durable=durable, mode=READ_ONLY)

    def verified(self, digest: str, stat: os.stat_result | None = None) -> None:
        """Record that the chunk's file has this digest: the file of these figures, which were taken
        before it was hashed, or the one that was just made of what was hashed.
        """
        self._verified.note(digest, stat or self.path(digest))

    def is_verified(self, digest: str, stat: os.stat_result | None = None) -> bool:
        """True if the chunk's file, or that of these figures, was hashed on this host a short time
        ago and has not been changed since.
        """
        try:
            return self._verified.knows(digest, stat or self.path(digest).stat())
        except OSError:
            return False

    def read(self, digest: str) -> bytes:
        """The chunk's bytes, checked; NotFound, or Damaged when the disk has changed them: whoever
        reads asks the store to `examine` it then.
        """
        with self.open(digest) as file:
            content = file.read()
        if digest_of(content) != digest:
            raise Damaged("a chunk is not what its name says", where=file.name)
        return content

    def open(self, digest: str) -> BinaryIO:
        """The chunk's file, whose bytes are not checked; NotFound."""
        path = self.path(digest)
        try:
            return path.open("rb")
        except FileNotFoundError:
            raise NotFound(f"no chunk {digest}", where=str(path)) from None

    def blocks(self, digest: str, offset: int = 0) -> Iterator[bytes]:
        """The chunk's bytes as they are, from `offset`, a block at a time; NotFound."""
        with self.open(digest) as opened:
            if offset:  # a pipe has none
                opened.seek(offset)
            while block := opened.read(BLOCK_BYTES):
                yield block

    def examine(self, digest: str) -> tuple[bool, Path | None]:
        """Whether the chunk is there as it was written, and where it lies now if it was not: it is
        set aside, so that whoever has its bytes writes them again.
        """
        path = self.path(digest)
        try:
            opened = path.open("rb")
        except FileNotFoundError:
            return False, None
        with opened:
            stat = os.fstat(opened.fileno())
            if digest_of_stream(opened) == digest:
                self.verified(digest, stat)
                return True, None
            # Nobody else has the number of an open file: what was written again since goes back.
            damaged = stat.st_ino
            try:
                aside = damage.set_aside(path, self._root)
            except FileNotFoundError:
                return False, None
            if aside.stat().st_ino == damaged:
                return False, aside
        os.rename(aside, path)
        return True, None

    def whole(self, digest: str) -> bool:
        """What `examine` says, for one who writes the chunk if it is not; it is read only if it has
        not been hashed a short time ago.
        """
        if self.is_verified(digest):
            return True
        whole, aside = self.examine(digest)
        if aside is not None:
            path, then = self.path(digest), "it is written again"
            told = damage.fields("weights", path, WHY, then, aside=aside)
            self.untold.append((told, uuid.uuid4().hex))
        return whole

    @contextmanager
    def making(self, digest: str, *, durable: bool = False) -> Iterator[Callable[[Content], None]]:
        """Makes a chunk of what is written in the block and was found to have this digest; one of a
        cache need not be durable. StorageFull, as any error, leaves nothing behind.
        """
        scratch = self.scratch(digest, durable=durable)
        try:
            yield scratch.write
            scratch.commit()
            self.verified(digest)
        finally:
            scratch.discard()

    def keep(self, digest: str, content: Content, *, durable: bool = False) -> None:
        """Store bytes that were just found to have this digest."""
        with self.making(digest, durable=durable) as write:
            write(content)

    def write(self, content: bytes | memoryview) -> str:
        """Makes `content` durable and returns its digest. StorageFull leaves nothing behind.

        What is there already counts once it is found to be the same: weights that a replay makes
        again are read and not written; else nobody writes the same bytes twice.
        """
        digest = digest_of(content)
        if self.has(digest) and self.whole(digest) and self.touch(digest):
            return digest
        self.keep(digest, content, durable=True)
        return digest

    def write_file(self, path: Path) -> str:
        """Makes the content of a file durable, as `write` does; it may be larger than memory.
        BadMessage when the file changes meanwhile.
        """
        with path.open("rb") as file:
            digest = digest_of_stream(file)
            if self.has(digest) and self.whole(digest) and self.touch(digest):
                return digest
            file.seek(0)
            hashed = Hasher()
            with self.making(digest, durable=True) as write:
                while block := file.read(BLOCK_BYTES):
                    hashed.update(block)
                    write(block)
                if hashed.hexdigest() != digest:
                    raise BadMessage("a file was changed as it was read", where=str(path))
        return digest

    def take_in(self, path: Path, digest: str, moved: Callable[[int], None] = uncounted) -> None:
        """Makes a file of this host the chunk of a digest, unless there is one: the same bytes on
        the disk where that can be, a copy elsewhere, of whose bytes `moved` hears. They are not
        checked: who gets them does so. NotFound without the file, StorageFull.
        """
        if self.touch(digest):
            return
        target = self.path(digest)
        beside = _beside(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(path, beside, moved)
            self._stamp(beside)
            beside.rename(target)
        except FileNotFoundError:
            raise NotFound(f"{path} is missing") from None
        except OSError as error:
            raise failure(error, path) from error
        finally:
            beside.unlink(missing_ok=True)

    def lay_out(
        self,
        files: Mapping[str, str],
        directory: Path,
        moved: Callable[[int], None] = uncounted,
    ) -> None:
        """Makes files below a directory, which is new, of chunks, by their digests; NotFound names
        one that is not there, StorageFull. `moved` hears of bytes as they are copied.
        """
        for name, digest in files.items():
            path = directory / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(self.path(digest), path, moved)
                path.chmod(path.parent.stat().st_mode & 0o666)  # as if it had been written there
            except FileNotFoundError:
                raise NotFound(f"no chunk {digest}", where=str(self.path(digest))) from None
            except OSError as error:
                raise failure(error, path) from error

    # ------------------------------------------------------------ retention

    def written(self, digests: Iterable[str]) -> dict[str, int]:
        """When each of them that is stored was last written, in nanoseconds of the disk's clock."""
        found = {}
        for digest in digests:
            with suppress(FileNotFoundError, Refused):  # what an earlier version has stored stays
                found[digest] = self.path(digest).stat().st_mtime_ns
        return found

    def older_than(self, age_s: float, now: float) -> dict[str, int]:
        """What `written` tells, for all chunks last written `age_s` before `now` (wall time) or
        earlier.
        """
        old = {}
        for path in self.directory.glob("??/*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            if path.name.startswith("."):
                if stat.st_mtime < now - STALE_SCRATCH_S:
                    path.unlink(missing_ok=True)
            elif len(path.name) == DIGITS and stat.st_mtime <= now - age_s:
                old[path.name] = stat.st_mtime_ns
        return old

    def delete(self, written: Mapping[str, int]) -> None:
        """Deletes those chunks that were not written again since `written` was asked."""
        for digest, when in written.items():
            with suppress(FileNotFoundError):
                path = self.path(digest)
                if path.stat().st_mtime_ns != when:
                    continue
                # A writer who finds the chunk between our look and its end relies on it from then
                # on: it has touched what is out of its sight by now, or finds nothing and writes it
                # again.
                aside = _beside(path)
                os.rename(path, aside)
                if aside.stat().st_mtime_ns == when:
                    aside.unlink()
                else:
                    os.rename(aside, path)


def locked(descriptor: int) -> bool:
    """Whether no other process works on an open file, as far as its file system can tell."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _link_or_copy(path: Path, target: Path, moved: Callable[[int], None]) -> None:
    """Another name for a file, or a copy where its file system has none (another disk, too many
    names, somebody else's file).
    """
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        _copy(path, target, moved)


def _copy(path: Path, target: Path, moved: Callable[[int], None]) -> None:
    """Written out as it goes, so that `moved` tells of a disk's pace and not of memory's."""
    unsynced = 0
    with path.open("rb") as source, target.open("wb") as copy:
        while block := source.read(COPY_BYTES):
            copy.write(block)
            unsynced += len(block)
            if unsynced >= SYNC_BYTES:
                copy.flush()
                flush_content(copy.fileno())
                unsynced = 0
            moved(len(block))


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{next(_serial)}")
