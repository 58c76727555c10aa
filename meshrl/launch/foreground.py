"""`--foreground`: what was started is the root process of its host itself, as the main process of a
container is. Its exit status tells whoever started it whether starting it again may help.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from meshrl.common.base.errors import (
    ConfigError,
    CorruptData,
    MeshError,
    NotAllowed,
    NotFound,
    Refused,
)
from meshrl.directory import directory_paths
from meshrl.directory.directory_paths import MeshPaths

# It was asked to end and ended in order; started again it may go on; it never will as it is.
EXIT_OK, EXIT_RETRY, EXIT_FATAL = 0, 1, 2
REPORTED_ERRORS = (MeshError, OSError)  # that are told
FATAL_ERRORS = (ConfigError, CorruptData, NotAllowed, NotFound, Refused)


def choose_exit_status(error: MeshError) -> int:
    return EXIT_FATAL if isinstance(error, FATAL_ERRORS) and not error.retryable else EXIT_RETRY


def run_foreground(work: Callable[[], int]) -> int:
    """What `work` ends with; an error is told, and is its status. SIGINT and SIGTERM end it in
    order from now on: what it starts takes them over.
    """
    before = {
        number: signal.signal(number, _exit_on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        return work()
    except MeshError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return choose_exit_status(error)
    except OSError as error:
        barred = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        fix = "; its files need a directory that this user can write to: --root" if barred else ""
        print(f"error: {error}{fix}", file=sys.stderr, flush=True)
        return EXIT_FATAL if barred else EXIT_RETRY
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_on_signal(number: int, frame: object) -> NoReturn:
    """Nothing has been started yet that would have to end before."""
    raise SystemExit(EXIT_OK)


def report_error_after_stop(error: Exception, stop: asyncio.Event) -> int:
    """ENDED, with the error told, when it came after the order to end; else it is raised again."""
    if not stop.is_set():
        raise error
    print(f"error: {error}", file=sys.stderr, flush=True)
    return EXIT_OK


async def start_unless_stopped(start: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Whether a start came to its end before `stop` was set, which cancels it; its error, which is
    only told after that.
    """
    starting = asyncio.create_task(start, name="start")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
    finally:
        stopping.cancel()
    if starting.cancelled():
        return False
    try:
        starting.result()
    except REPORTED_ERRORS as error:
        report_error_after_stop(error, stop)
        return False
    return True


def set_current_mesh(mesh_paths: MeshPaths) -> None:
    """Commands without --mesh mean this one from now on, unless nobody may write where that is
    said: a container's working directory is often one of the read-only root file system.
    """
    try:
        directory_paths.set_current_mesh(mesh_paths)
    except OSError as error:
        where = f"--mesh {mesh_paths.root}, or $MESHRL_HOME={mesh_paths.root}"
        print(f"commands here need {where}: {error}", flush=True)
