"""KV tier in memory or on disk: files within a budget that the host's engines share.

A file beside the chunks holds the used size, and its lock guards evictions. A killed process leaves
the size wrong by its unfinished work, until the next count.
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
# An eviction frees one part in this many of the budget at once, because a count takes long.
ROOM_DIVISOR = 16
RETRY_S = 10.0  # pause after a failed write: a full disk stays full for a while
MIN_FREE_SHARE = 0.05  # share of the file system that always stays free


class KVTier:
    """Directory of chunks with a budget in bytes. `clock` is the wall clock."""

    def __init__(
        self, name: str, directory: Path, budget_bytes: int, clock: Callable[[], float]
    ) -> None:
        """Open the tier; raise OSError if the directory cannot be created."""
        self.name, self.budget_bytes = name, budget_bytes
        self.files = ChunkFiles(directory)
        self.last_error = ""  # error of the last write; empty: it succeeded
        self._clock = clock
        self._retry_at_s = 0.0
        while True:
            self._engines_lock, alone = acquire_directory(directory)
            (directory / SESSIONS_DIRECTORY).mkdir(exist_ok=True, mode=0o700)
            if alone:  # a killed process may have left these files
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
        """Close the tier; the last engine of the host removes all chunks."""
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
        """Record that the trajectory with these chunks may continue."""
        with suppress(OSError):
            (self.files.directory / SESSIONS_DIRECTORY / f"{session:016x}").touch(0o600)

    def unmark_resumable(self, session: int) -> None:
        """Record that no request will use the chunks of this trajectory alone."""
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
        """Store a chunk and return True if the tier has it now.

        `demote` receives evicted chunks; `reload_s_per_byte` is defined in `eviction`.
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
        """Reserve `size_bytes` if possible; evict other chunks to make room."""
        if size_bytes > self.budget_bytes or self._clock() < self._retry_at_s:
            return False
        disk = shutil.disk_usage(self.files.directory)
        if disk.free - size_bytes < MIN_FREE_SHARE * disk.total:
            return False
        evicted: list[StoredChunk] = []
        with self._locked():
            if self.used_bytes + size_bytes > self.budget_bytes:
                there = self._recount()
                excess_bytes = self.used_bytes + size_bytes - self.budget_bytes
                if excess_bytes > 0:
                    excess_bytes += self.budget_bytes // ROOM_DIVISOR
                    evicted = choose_evictions(
                        there, excess_bytes, self._clock(), self.list_resumable(), reload_s_per_byte
                    )
        for one in evicted:  # outside the lock, because writes to a disk are slow
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
        """Remove the chunks of an ended session; retain those that others share."""
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
        """Lock a domain as in use by an engine until the returned object is closed."""
        path = self.files.directory / domain / DOMAIN_LOCK_FILE
        while True:
            try:
                path.parent.mkdir(exist_ok=True, mode=0o700)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # another process removed the directory in between
                if self.files.directory.exists():
                    continue
                return None
            except OSError:
                return None
            # a process that empties the directory finishes soon
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if is_file_at(descriptor, path):
                return descriptor
            os.close(descriptor)

    def remove_unusable(self) -> int:
        """Remove chunks that no engine can use and return the freed bytes.

        Such chunks are of weights that no engine has and that no resumable session needs.
        """
        waiting = self.list_resumable()
        freed = 0
        for directory in self.files.directory.glob("?" * NAME_DIGITS):
            with try_lock_file(directory / DOMAIN_LOCK_FILE, create=True) as nobody:
                there = list(self.files.scan(directory.name)) if nobody else []
                if any(
                    one.header is not None and one.header.session_tag in waiting for one in there
                ):
                    continue  # a chunk needs those before it, too
                freed += sum(one.bytes for one in there if self.files.remove(one.path))
                if nobody and not any(directory.glob("??")):
                    with suppress(OSError):
                        (directory / DOMAIN_LOCK_FILE).unlink(missing_ok=True)
                        directory.rmdir()
        with self._locked():
            self._add_used(-freed)
        return freed
