"""`--foreground` mode: the command becomes the root process of its host, as a container's main
process.

Its exit status tells an orchestrator whether a restart may help.
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

# Orderly end on request; failure that a restart may fix; failure that no restart fixes.
EXIT_OK, EXIT_RETRY, EXIT_FATAL = 0, 1, 2
REPORTED_ERRORS = (MeshError, OSError)  # printed without a traceback
FATAL_ERRORS = (ConfigError, CorruptData, NotAllowed, NotFound, Refused)


def choose_exit_status(error: MeshError) -> int:
    return EXIT_FATAL if isinstance(error, FATAL_ERRORS) and not error.retryable else EXIT_RETRY


def run_foreground(work: Callable[[], int]) -> int:
    """Run `work` and return its exit status; print an error and return its status instead.

    SIGINT and SIGTERM stop it in order from now on; what it starts takes the signals over.
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
        fix = ". Set a directory that this user can write to: --root" if barred else ""
        print(f"error: {error}{fix}", file=sys.stderr, flush=True)
        return EXIT_FATAL if barred else EXIT_RETRY
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_on_signal(number: int, frame: object) -> NoReturn:
    """Exit at once: nothing has been started that would have to end first."""
    raise SystemExit(EXIT_OK)


def report_error_after_stop(error: Exception, stop: asyncio.Event) -> int:
    """Return EXIT_OK and print the error if it came after the stop order; else raise it again."""
    if not stop.is_set():
        raise error
    print(f"error: {error}", file=sys.stderr, flush=True)
    return EXIT_OK


async def start_unless_stopped(start: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Return True if the start finished before `stop` was set, which cancels it.

    Raises the error of the start; after the stop order it is only printed.
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
    """Make this mesh the default of commands without --mesh.

    Print how to name it instead where the file is not writable: a container's working directory is
    often on a read-only root file system.
    """
    try:
        directory_paths.set_current_mesh(mesh_paths)
    except OSError as error:
        where = f"--mesh {mesh_paths.root}, or $MESHRL_HOME={mesh_paths.root}"
        print(f"commands in this directory need {where}: {error}", flush=True)
