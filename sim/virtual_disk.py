"""Disk of a virtual machine: it may be full or slow, and it computes the state after a power cut.

Files are real. Each sync is reported to the disk (`meshrl.common.base.files.disk_sync`). After a
power cut a synced file has its content and its name, as on ext4 and XFS. Later appended data
survives in part. A rename or a removal survives once its directory was synced. A lying disk ignores
syncs of the configured paths.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from meshrl.common.base.files.disk_sync import simulate_disk
from meshrl.common.base.random import Random

MEAN_DELAY_S = 0.0005  # mean delay of a blocking operation, without faults
_DEFAULT_FILE_LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)


@dataclass
class _DurableState:
    """Durable state of the disk, by inode."""

    file_bytes: dict[int, int] = field(default_factory=dict)  # by file: bytes that were synced
    directory_entries: dict[int, dict[str, int]] = field(default_factory=dict)  # by directory


class VirtualDisk:
    """Virtual disk. `root` is its content; a directory beside it stores the disk's own data."""

    def __init__(self, root: Path) -> None:
        self.max_file_bytes: int | None = None  # limit of a file's size; None: the disk is not full
        self.mean_delay_s = MEAN_DELAY_S
        self.skips_sync: Callable[[str], bool] | None = (
            None  # paths, relative to the root, whose syncs are skipped
        )
        self._root = root.resolve()
        self._links_dir = root.with_name(f"{root.name}.disk")  # a link to each file, named by inode
        self._durable = _DurableState()

    @property
    def is_full(self) -> bool:
        return self.max_file_bytes is not None

    @contextmanager
    def limit_writes(self) -> Iterator[None]:
        """Limit writes in this context to the disk's bound: the kernel raises EFBIG in any
        library.
        """
        if self.max_file_bytes is None:
            yield
            return
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.max_file_bytes, _DEFAULT_FILE_LIMIT[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, _DEFAULT_FILE_LIMIT)

    def get_max_file_bytes(self) -> int:
        """Return the maximum size of a file in bytes; -1: no limit."""
        return -1 if self.max_file_bytes is None else self.max_file_bytes

    def check_has_space(self) -> None:
        """Raise ENOSPC if no byte fits."""
        if self.max_file_bytes == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def clear_faults(self) -> None:
        """Clear the faults: the disk is neither full nor slow."""
        self.max_file_bytes, self.mean_delay_s = None, MEAN_DELAY_S

    # -- durable state ---------------------------------------------------------------------------

    def start_tracking(self) -> None:
        """Start to track durable state; present files are durable."""
        simulate_disk(self._record_sync)
        self._mark_all_durable()

    def _mark_all_durable(self) -> None:
        self.skips_sync = None
        shutil.rmtree(self._links_dir, ignore_errors=True)
        self._links_dir.mkdir()
        self._durable = _DurableState()
        for directory, _, files in os.walk(self._root):
            self._record_directory(directory)
            for name in files:
                path = os.path.join(directory, name)
                self._durable.file_bytes[os.lstat(path).st_ino] = os.lstat(path).st_size

    def _record_sync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not path.startswith(f"{self._root}/") and path != str(self._root):
            return
        if self.skips_sync is not None and self.skips_sync(path[len(str(self._root)) + 1 :]):
            return
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            self._record_directory(path)
        else:
            self._durable.file_bytes[status.st_ino] = status.st_size
            self._link_inode(path, status.st_ino)
        self._record_name(path, status.st_ino)

    def _record_directory(self, path: str) -> None:
        found = {}
        with os.scandir(path) as entries:
            for entry in entries:
                found[entry.name] = entry.inode()
                if not entry.is_dir(follow_symlinks=False):
                    self._link_inode(entry.path, entry.inode())
        self._durable.directory_entries[os.stat(path).st_ino] = found

    def _record_name(self, path: str, inode: int) -> None:
        """Record its name as durable, with the names of its parent directories."""
        while path != str(self._root):
            parent, name = os.path.split(path)
            above = os.stat(parent).st_ino
            known = self._durable.directory_entries.setdefault(above, {})
            if known.get(name) == inode:
                return
            known[name] = inode
            path, inode = parent, above

    def _link_inode(self, path: str, inode: int) -> None:
        link = self._links_dir / str(inode)
        if not os.path.lexists(link):  # a symbolic link may be dangling
            os.link(path, link, follow_symlinks=False)

    # -- power cut -------------------------------------------------------------------------------

    def cut_power(self, random: Random) -> set[str]:
        """Replace the root by its state after a power cut; return the missing or shortened files. A
        random part of unsynced appended data survives. No process may have a file open.
        """
        before = self._read_sizes()
        after = self._root.with_name(f"{self._root.name}.after")
        after.mkdir()
        self._rebuild_directory(os.stat(self._root).st_ino, after, random)
        for path in self._root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in after.iterdir():
            path.rename(self._root / path.name)
        after.rmdir()
        self._mark_all_durable()
        now = self._read_sizes()
        return {name for name, size in before.items() if now.get(name, -1) < size}

    def _read_sizes(self) -> dict[str, int]:
        return {
            str(path.relative_to(self._root)): path.lstat().st_size
            for path in self._root.rglob("*")
            if not path.is_dir()
        }

    def _rebuild_directory(self, inode: int, target: Path, random: Random) -> None:
        for name, child in sorted(self._durable.directory_entries.get(inode, {}).items()):
            link = self._links_dir / str(child)
            if os.path.lexists(link):
                os.link(link, target / name, follow_symlinks=False)
                status, durable = (target / name).lstat(), self._durable.file_bytes.get(child, 0)
                if stat.S_ISREG(status.st_mode) and status.st_size > durable:
                    drawn = random.child(f"{durable} of {status.st_size}")
                    os.truncate(target / name, drawn.randint(durable, status.st_size))
                    os.utime(target / name, ns=(status.st_atime_ns, status.st_mtime_ns))
            else:
                (target / name).mkdir()
                self._rebuild_directory(child, target / name, random)

    def close(self) -> None:
        """Remove the disk's own data."""
        simulate_disk(None)
        shutil.rmtree(self._links_dir, ignore_errors=True)
