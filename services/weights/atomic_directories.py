"""Directories that are replaced atomically, even if the writing process is killed.

They are written beside the target and then renamed in one step.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshrl.common.base.errors import ConfigError, MeshError, NotFound, Refused, StorageFull
from meshrl.common.base.files.append_file import DISK_FULL_ERRNOS
from meshrl.common.base.files.disk_sync import fsync_path, fsync_tree
from meshrl.common.base.files.remote_directory import is_url, redact_url

EXPORT_MARKER = "meshrl.json"  # marks an exported directory, which the next export may replace
NEW_FOLDER = "made"  # new directory in a scratch directory; models are not opened under that path
OLD_FOLDER = "old"  # beside it: the replaced directory, until it is removed
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
_UNSUPPORTED_ERRNOS = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # by this kind of disk
TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "config.json"
_DENIED_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)


def check_replaceable(out: Path) -> None:
    """Raise Refused unless `out` is absent, empty or an export."""
    if not out.exists() or (out / EXPORT_MARKER).is_file():
        return
    if not out.is_dir() or any(out.iterdir()):
        raise Refused(
            f"{out} is not the directory of an export: it has no {EXPORT_MARKER}",
            fix="Name another --out, or move the directory away",
        )


@contextmanager
def scratch_directory(scratch: Path, out: Path | None = None) -> Iterator[Path]:
    """Provide an empty directory in `scratch`, to be filled and then moved.

    Leftovers of killed processes in `scratch` are removed first, and everything in it at the end.
    If a replacement of `out` was interrupted, the old directory is moved back.

    Raises:
        Refused: `scratch` is something else, or another process writes it.
    """
    descriptor = _lock_scratch(scratch)
    try:
        check_replaceable(scratch)
        marker = scratch / EXPORT_MARKER
        if marker.is_file() and marker.stat().st_size:
            raise Refused(
                f"{scratch} is an export, and the scratch directory of another export",
                fix="Move it away, or name another --out for the new export",
            )
        try:
            marker.touch()
            _clear_scratch(scratch, out)
            new_directory = scratch / NEW_FOLDER
            new_directory.mkdir()
            yield new_directory
        finally:
            _clear_scratch(scratch, out)
            marker.unlink(missing_ok=True)  # last: a directory without marker has no owner
            with suppress(OSError):  # another process has put something there
                scratch.rmdir()
    finally:
        os.close(descriptor)


def replace_directory(new_directory: Path, out: Path) -> None:
    """Replace `out`, an export, an empty directory or nothing, by `new_directory`.

    Either the old or the new directory is complete at any time. Refused: `out` has other content
    now.
    """
    fsync_tree(new_directory)
    check_replaceable(out)
    if not out.exists():
        new_directory.rename(out)
    elif not _exchange(new_directory, out):
        out.rename(new_directory.with_name(OLD_FOLDER))  # this kind of disk cannot exchange paths
        new_directory.rename(out)
    fsync_path(out.parent)


def _lock_scratch(scratch: Path) -> int:
    while True:
        try:
            scratch.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            with suppress(FileNotFoundError):  # its owner has just finished
                if not stat.S_ISDIR(os.lstat(scratch).st_mode):
                    raise
            continue
        try:
            descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(scratch)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise Refused(
                f"another process writes to {scratch}",
                fix="Wait until it has finished, or name another --out",
            ) from None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _clear_scratch(scratch: Path, out: Path | None) -> None:
    """Remove everything except the marker, after moving `out` back if nothing has replaced it."""
    if out is not None and (scratch / OLD_FOLDER).exists() and not out.exists():
        (scratch / OLD_FOLDER).rename(out)
    for entry in scratch.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != EXPORT_MARKER:
            entry.unlink()


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths in one step; return False if this is not supported."""
    libc = ctypes.CDLL(None, use_errno=True)
    swap = getattr(libc, "renameat2", None)
    if swap is None:
        return False
    if swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in _UNSUPPORTED_ERRNOS:
        return False
    raise OSError(number, os.strerror(number), str(other))


def check_import(directory: Path, run: Path) -> None:
    """Check that a directory may contain a model, and that `run` can be created.

    NotFound, ConfigError, Refused.
    """
    if not directory.is_dir():
        file = directory.exists()
        raise NotFound(
            f"{directory} is not a directory" if file else f"there is no directory {directory}",
            fix="Name a Hugging Face directory",
        )
    if (directory / "job.json").is_file():
        raise Refused(
            f"{directory} is a run", fix="Name a Hugging Face directory, such as the run's `model`"
        )
    if not (directory / TOKENIZER_FILE).is_file():
        raise ConfigError(
            f"{directory} has no {TOKENIZER_FILE}",
            fix="Save its tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    if not (directory / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{directory} has no {CONFIG_FILE}",
            fix="Name a directory that `save_pretrained` has written; merge adapters first",
        )
    if run.exists():
        raise Refused(f"{run} exists already", fix="Name another --out")


def check_export_target(out: str) -> None:
    """Check that a model may be written to `out`, as far as this can be checked early.

    Raises:
        ConfigError: The target takes no model.
        Refused: It has other content.
    """
    if not is_url(out):
        if not Path(out).resolve().name:
            raise ConfigError(
                f"{out} is the root directory, and cannot become a model",
                fix="Name a new directory: --out DIR",
            )
        check_replaceable(Path(out))
    elif out.startswith("memory://"):
        raise ConfigError(
            f"{redact_url(out)} exists only in the memory of the process that writes it",
            where="--out",
            fix="Use s3://BUCKET/PATH, gs://, file:///DIRECTORY, ...",
        )


def convert_os_error(error: OSError) -> MeshError:
    """Return the error for a file that cannot be read or written."""
    why = error.strerror or str(error)
    where = str(error.filename2 or error.filename or "")
    if error.errno in DISK_FULL_ERRNOS:
        return StorageFull(
            f"the disk is full: {why}",
            where=where,
            fix="Free disk space, or name a path on another disk; no partial result remains",
        )
    if error.errno in _DENIED_ERRNOS:
        return Refused(
            f"this user lacks the permission: {why}",
            where=where,
            fix="Name a path that you may write to, or ask its owner",
        )
    return MeshError(
        f"a file or directory cannot be read or written: {why}",
        where=where,
        fix="Check the path, and that its disk responds",
    )
