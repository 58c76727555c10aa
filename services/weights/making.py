"""Directories that are made whole or not at all, whenever whoever makes them is killed: beside the
place that is meant, and then put there in one step.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import Refused
from common.records.durable import sync, sync_tree

MARKER = "meshrl.json"  # marks a directory that an export wrote, and the next one may replace
MADE = "made"  # what is being made, in a scratch directory: no model is opened by that one's name
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # to this kind of disk


def check_ours(out: Path) -> None:
    """Refused when `out` is anything but absent, empty or an export."""
    if not out.exists() or (out / MARKER).is_file():
        return
    if not out.is_dir() or any(out.iterdir()):
        raise Refused(
            f"{out} was not written by an export: it has no {MARKER}",
            fix="name another --out, or move it away",
        )


@contextmanager
def making(scratch: Path) -> Iterator[Path]:
    """An empty directory in `scratch`, to be filled and then put elsewhere. What somebody who was
    killed has left of `scratch` goes, and all of it does in the end. Refused when it is something
    else, or while another process makes it.
    """
    descriptor = _alone(scratch)
    try:
        check_ours(scratch)
        (scratch / MARKER).touch()
        for left in scratch.iterdir():
            if left.name != MARKER:
                _remove(left)
        made = scratch / MADE
        made.mkdir()
        yield made
    finally:
        if (scratch / MARKER).is_file():  # it is last to go: what has none is nobody's
            for left in scratch.iterdir():
                if left.name != MARKER:
                    _remove(left)
            (scratch / MARKER).unlink()
        with suppress(OSError):  # it is somebody else's, and not empty
            scratch.rmdir()
        os.close(descriptor)


def put(made: Path, out: Path) -> None:
    """Has `made` take the place of `out`, an export or an empty directory, or nothing. At every
    moment all of the one or of the other is there.
    """
    sync_tree(made)
    if not out.exists():
        made.rename(out)
    elif not _exchanged(made, out):
        out.rename(made.with_name("old"))  # this kind of disk cannot do both in one step
        made.rename(out)
    sync(out.parent)


def _alone(scratch: Path) -> int:
    """A descriptor of the directory, which nobody else has meanwhile; it is made if need be."""
    while True:
        scratch.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(scratch)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise Refused(
                f"another process writes {scratch}",
                fix="Wait until it is done, or name another place",
            ) from None
        except FileNotFoundError:  # whoever had it was done just now
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _exchanged(one: Path, other: Path) -> bool:
    """Whether both have changed their places, in one step."""
    libc = ctypes.CDLL(None, use_errno=True)
    swap = getattr(libc, "renameat2", None)
    if swap is None:
        return False
    if swap(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in _UNKNOWN:
        return False
    raise OSError(number, os.strerror(number), str(other))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
