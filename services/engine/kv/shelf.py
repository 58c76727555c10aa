"""One place for chunks, the host's memory or its disk: files with a budget that all engines of the
host share.

How much is used stands in a file beside them, under whose lock room is made; a process that is
killed leaves it wrong by what it had in hand, until somebody counts again.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from meshrl.common.base.files.file_locks import lies_at, unheld
from meshrl.common.generation.kv_directories import enter, entered, leave
from meshrl.common.generation.loading import Content
from meshrl.services.engine.kv.chunk_files import (
    DIGITS,
    HEAD_BYTES,
    ChunkFiles,
    ChunkHead,
    FoundChunk,
)
from meshrl.services.engine.kv.retention import leaving

USED, LOADED, SESSIONS = ".used", ".loaded", ".sessions"
_COUNT = struct.Struct("<q")
SLACK = 16  # room is made for one part in so many of the budget at once: a count takes long
REST_S = 10.0  # after a write that failed: a full disk does not become empty at once
FREE_SHARE = 0.05  # of the file system that is never taken


class KVTier:
    """A directory of chunks, of `budget` bytes. `clock` is the wall's."""

    def __init__(self, name: str, directory: Path, budget: int, clock: Callable[[], float]) -> None:
        """OSError where there can be no such directory."""
        self.name, self.budget = name, budget
        self.files = ChunkFiles(directory)
        self.refused = ""  # why the last write failed; empty: it did not
        self._clock = clock
        self._rests_until = 0.0
        while True:
            self._engines, alone = enter(directory)
            (directory / SESSIONS).mkdir(exist_ok=True, mode=0o700)
            if alone:  # whoever was here was killed, and may have left these
                for path in (*(directory / SESSIONS).iterdir(), *directory.glob("*/??/.*")):
                    path.unlink(missing_ok=True)
                (directory / USED).unlink(missing_ok=True)
            if entered(directory, self._engines):
                break
            os.close(self._engines)
        self._descriptor = os.open(directory / USED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, _COUNT.size)
        self._count = mmap.mmap(self._descriptor, _COUNT.size)
        if alone:
            self._recount()

    def close(self) -> None:
        """It is not used any more; the last engine of the host takes all away."""
        self._count.close()
        os.close(self._descriptor)
        leave(self.files.directory, self._engines)

    @property
    def used(self) -> int:
        return int(_COUNT.unpack_from(self._count)[0])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _add(self, size: int) -> None:
        _COUNT.pack_into(self._count, 0, max(0, self.used + size))

    def _recount(self) -> list[FoundChunk]:
        there = list(self.files.scan())
        _COUNT.pack_into(self._count, 0, sum(one.bytes for one in there))
        return there

    def wait_for(self, session: int) -> None:
        """A trajectory may go on whose chunks are kept for it."""
        with suppress(OSError):
            (self.files.directory / SESSIONS / f"{session:016x}").touch(0o600)

    def forget(self, session: int) -> None:
        """Nobody asks any more for what was kept for this trajectory alone."""
        with suppress(OSError):
            (self.files.directory / SESSIONS / f"{session:016x}").unlink()

    def waiting(self) -> set[int]:
        try:
            return {int(path.name, 16) for path in (self.files.directory / SESSIONS).iterdir()}
        except OSError:
            return set()

    def put(
        self,
        domain: str,
        name: str,
        head: ChunkHead,
        content: Content,
        again_s: float = 0.0,
        demote: Callable[[FoundChunk], None] = lambda _: None,
    ) -> bool:
        """Whether a chunk lies there now. `demote` gets what has to go for it; `again_s` as in
        `retention`.
        """
        size = content.nbytes + HEAD_BYTES
        if self.files.has(domain, name):
            return True
        write = partial(self.files.write, domain, name, head, content)
        return self.room(size, again_s, demote) and self._written(size, write)

    def take_in(self, found: FoundChunk) -> bool:
        domain, name = found.path.parent.parent.name, found.path.name
        if self.files.has(domain, name):
            return True
        room = self.room(found.bytes, 0.0, lambda _: None)
        take_in = partial(self.files.take_in, found.path, domain, name)
        return room and self._written(found.bytes, take_in)

    def _written(self, size: int, write: Callable[[], int]) -> bool:
        try:
            write()
        except OSError as error:
            with self._locked():
                self._add(-size)
            self.refused = str(error)
            self._rests_until = self._clock() + REST_S
            return False
        self.refused = ""
        return True

    def room(self, size: int, again_s: float, demote: Callable[[FoundChunk], None]) -> bool:
        """Takes room for so many bytes, if it can be had; others go for it."""
        if size > self.budget or self._clock() < self._rests_until:
            return False
        disk = shutil.disk_usage(self.files.directory)
        if disk.free - size < FREE_SHARE * disk.total:
            return False
        gone: list[FoundChunk] = []
        with self._locked():
            if self.used + size > self.budget:
                there = self._recount()
                wanted = self.used + size - self.budget
                if wanted > 0:
                    wanted += self.budget // SLACK
                    gone = leaving(there, wanted, self._clock(), self.waiting(), again_s)
        for one in gone:  # not under the lock: what goes to a disk takes its time
            demote(one)
            if self.files.remove(one.path):
                with self._locked():
                    self._add(-one.bytes)
        with self._locked():
            if self.used + size > self.budget:
                return False
            self._add(size)
        return True

    def drop(self, domain: str, names: Collection[str], session: int) -> None:
        """Removes chunks of a session that has ended; those that are others' too stay."""
        for name in names:
            path = self.files.path(domain, name)
            found = self.files.head(path)
            if found is not None and found.session == session:
                with suppress(OSError):
                    size = path.stat().st_size
                    if self.files.remove(path):
                        with self._locked():
                            self._add(-size)

    def hold(self, domain: str) -> int | None:
        """Says that an engine has the weights of a domain, until what it returns is closed."""
        path = self.files.directory / domain / LOADED
        while True:
            try:
                path.parent.mkdir(exist_ok=True, mode=0o700)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # it was emptied in between
                if self.files.directory.exists():
                    continue
                return None
            except OSError:
                return None
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # whoever empties it is soon done
            if lies_at(descriptor, path):
                return descriptor
            os.close(descriptor)

    def empty(self) -> int:
        """Removes what no engine can use: chunks of weights that none has, and of which no session
        may go on. The bytes that are free for it.
        """
        waiting = self.waiting()
        freed = 0
        for directory in self.files.directory.glob("?" * DIGITS):
            with unheld(directory / LOADED, create=True) as nobody:
                there = list(self.files.scan(directory.name)) if nobody else []
                if any(one.head is not None and one.head.session in waiting for one in there):
                    continue  # it needs those before its own, too
                freed += sum(one.bytes for one in there if self.files.remove(one.path))
                if nobody and not any(directory.glob("??")):
                    with suppress(OSError):
                        (directory / LOADED).unlink(missing_ok=True)
                        directory.rmdir()
        with self._locked():
            self._add(-freed)
        return freed
