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

from meshrl.common.base.files.file_locks import is_file_at, try_lock_file
from meshrl.common.generation.kv_directories import (
    acquire_directory,
    downgrade_lock,
    release_directory,
)
from meshrl.common.generation.prefix_loading import ChunkBytes
from meshrl.services.engine.kv.chunk_files import (
    HEADER_BYTES,
    NAME_DIGITS,
    ChunkFiles,
    ChunkHeader,
    StoredChunk,
)
from meshrl.services.engine.kv.eviction import choose_evictions

USED_FILE, DOMAIN_LOCK_FILE, SESSIONS_DIRECTORY = ".used", ".loaded", ".sessions"
_USED_FORMAT = struct.Struct("<q")
ROOM_DIVISOR = 16  # room is made for one part in so many of the budget at once: a count takes long
RETRY_S = 10.0  # after a write that failed: a full disk does not become empty at once
MIN_FREE_SHARE = 0.05  # of the file system that is never taken


class KVTier:
    """A directory of chunks, of `budget` bytes. `clock` is the wall's."""

    def __init__(
        self, name: str, directory: Path, budget_bytes: int, clock: Callable[[], float]
    ) -> None:
        """OSError where there can be no such directory."""
        self.name, self.budget_bytes = name, budget_bytes
        self.files = ChunkFiles(directory)
        self.last_error = ""  # why the last write failed; empty: it did not
        self._clock = clock
        self._retry_at_s = 0.0
        while True:
            self._engines_lock, alone = acquire_directory(directory)
            (directory / SESSIONS_DIRECTORY).mkdir(exist_ok=True, mode=0o700)
            if alone:  # whoever was here was killed, and may have left these
                for path in (
                    *(directory / SESSIONS_DIRECTORY).iterdir(),
                    *directory.glob("*/??/.*"),
                ):
                    path.unlink(missing_ok=True)
                (directory / USED_FILE).unlink(missing_ok=True)
            if downgrade_lock(directory, self._engines_lock):
                break
            os.close(self._engines_lock)
        self._used_descriptor = os.open(
            directory / USED_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        os.ftruncate(self._used_descriptor, _USED_FORMAT.size)
        self._used_map = mmap.mmap(self._used_descriptor, _USED_FORMAT.size)
        if alone:
            self._recount()

    def close(self) -> None:
        """It is not used any more; the last engine of the host takes all away."""
        self._used_map.close()
        os.close(self._used_descriptor)
        release_directory(self.files.directory, self._engines_lock)

    @property
    def used_bytes(self) -> int:
        return int(_USED_FORMAT.unpack_from(self._used_map)[0])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._used_descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._used_descriptor, fcntl.LOCK_UN)

    def _add_used(self, size: int) -> None:
        _USED_FORMAT.pack_into(self._used_map, 0, max(0, self.used_bytes + size))

    def _recount(self) -> list[StoredChunk]:
        there = list(self.files.scan())
        _USED_FORMAT.pack_into(self._used_map, 0, sum(one.bytes for one in there))
        return there

    def mark_resumable(self, session: int) -> None:
        """A trajectory may go on whose chunks are kept for it."""
        with suppress(OSError):
            (self.files.directory / SESSIONS_DIRECTORY / f"{session:016x}").touch(0o600)

    def unmark_resumable(self, session: int) -> None:
        """Nobody asks any more for what was kept for this trajectory alone."""
        with suppress(OSError):
            (self.files.directory / SESSIONS_DIRECTORY / f"{session:016x}").unlink()

    def list_resumable(self) -> set[int]:
        try:
            return {
                int(path.name, 16) for path in (self.files.directory / SESSIONS_DIRECTORY).iterdir()
            }
        except OSError:
            return set()

    def put(
        self,
        domain: str,
        name: str,
        header: ChunkHeader,
        content: ChunkBytes,
        reload_s_per_byte: float = 0.0,
        demote: Callable[[StoredChunk], None] = lambda _: None,
    ) -> bool:
        """Whether a chunk lies there now. `demote` gets what has to go for it; `again_s` as in
        `retention`.
        """
        size = content.nbytes + HEADER_BYTES
        if self.files.has(domain, name):
            return True
        write = partial(self.files.write, domain, name, header, content)
        return self.reserve_room(size, reload_s_per_byte, demote) and self._try_write(size, write)

    def copy_from(self, chunk: StoredChunk) -> bool:
        domain, name = chunk.path.parent.parent.name, chunk.path.name
        if self.files.has(domain, name):
            return True
        room = self.reserve_room(chunk.bytes, 0.0, lambda _: None)
        take_in = partial(self.files.copy_from, chunk.path, domain, name)
        return room and self._try_write(chunk.bytes, take_in)

    def _try_write(self, size_bytes: int, write: Callable[[], int]) -> bool:
        try:
            write()
        except OSError as error:
            with self._locked():
                self._add_used(-size_bytes)
            self.last_error = str(error)
            self._retry_at_s = self._clock() + RETRY_S
            return False
        self.last_error = ""
        return True

    def reserve_room(
        self, size_bytes: int, reload_s_per_byte: float, demote: Callable[[StoredChunk], None]
    ) -> bool:
        """Takes room for so many bytes, if it can be had; others go for it."""
        if size_bytes > self.budget_bytes or self._clock() < self._retry_at_s:
            return False
        disk = shutil.disk_usage(self.files.directory)
        if disk.free - size_bytes < MIN_FREE_SHARE * disk.total:
            return False
        gone: list[StoredChunk] = []
        with self._locked():
            if self.used_bytes + size_bytes > self.budget_bytes:
                there = self._recount()
                wanted = self.used_bytes + size_bytes - self.budget_bytes
                if wanted > 0:
                    wanted += self.budget_bytes // ROOM_DIVISOR
                    gone = choose_evictions(
                        there, wanted, self._clock(), self.list_resumable(), reload_s_per_byte
                    )
        for one in gone:  # not under the lock: what goes to a disk takes its time
            demote(one)
            if self.files.remove(one.path):
                with self._locked():
                    self._add_used(-one.bytes)
        with self._locked():
            if self.used_bytes + size_bytes > self.budget_bytes:
                return False
            self._add_used(size_bytes)
        return True

    def remove_session_chunks(self, domain: str, names: Collection[str], session: int) -> None:
        """Removes chunks of a session that has ended; those that are others' too stay."""
        for name in names:
            path = self.files.path(domain, name)
            found = self.files.read_header(path)
            if found is not None and found.session_tag == session:
                with suppress(OSError):
                    size = path.stat().st_size
                    if self.files.remove(path):
                        with self._locked():
                            self._add_used(-size)

    def lock_domain(self, domain: str) -> int | None:
        """Says that an engine has the weights of a domain, until what it returns is closed."""
        path = self.files.directory / domain / DOMAIN_LOCK_FILE
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
            if is_file_at(descriptor, path):
                return descriptor
            os.close(descriptor)

    def remove_unusable(self) -> int:
        """Removes what no engine can use: chunks of weights that none has, and of which no session
        may go on. The bytes that are free for it.
        """
        waiting = self.list_resumable()
        freed = 0
        for directory in self.files.directory.glob("?" * NAME_DIGITS):
            with try_lock_file(directory / DOMAIN_LOCK_FILE, create=True) as nobody:
                there = list(self.files.scan(directory.name)) if nobody else []
                if any(
                    one.header is not None and one.header.session_tag in waiting for one in there
                ):
                    continue  # it needs those before its own, too
                freed += sum(one.bytes for one in there if self.files.remove(one.path))
                if nobody and not any(directory.glob("??")):
                    with suppress(OSError):
                        (directory / DOMAIN_LOCK_FILE).unlink(missing_ok=True)
                        directory.rmdir()
        with self._locked():
            self._add_used(-freed)
        return freed
