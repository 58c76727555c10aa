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

from meshrl.common.base.errors import ConfigError, Damaged, MeshError, NotAllowed, NotFound, Refused
from meshrl.directory import places
from meshrl.directory.places import MeshPlace

# It was asked to end and ended in order; started again it may go on; it never will as it is.
ENDED, AGAIN, NEVER = 0, 1, 2
ERRORS = (MeshError, OSError)  # that are told
MISTAKES = (ConfigError, Damaged, NotAllowed, NotFound, Refused)


def status_of(error: MeshError) -> int:
    return NEVER if isinstance(error, MISTAKES) and not error.retryable else AGAIN


def ended(work: Callable[[], int]) -> int:
    """What `work` ends with; an error is told, and is its status. SIGINT and SIGTERM end it in
    order from now on: what it starts takes them over.
    """
    before = {number: signal.signal(number, _end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return work()
    except MeshError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return status_of(error)
    except OSError as error:
        barred = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        fix = "; its files need a directory that this user can write to: --root" if barred else ""
        print(f"error: {error}{fix}", file=sys.stderr, flush=True)
        return NEVER if barred else AGAIN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: object) -> NoReturn:
    """Nothing has been started yet that would have to end before."""
    raise SystemExit(ENDED)


def ended_with(error: Exception, stop: asyncio.Event) -> int:
    """ENDED, with the error told, when it came after the order to end; else it is raised again."""
    if not stop.is_set():
        raise error
    print(f"error: {error}", file=sys.stderr, flush=True)
    return ENDED


async def begun(start: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
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
    except ERRORS as error:
        ended_with(error, stop)
        return False
    return True


def point_to(place: MeshPlace) -> None:
    """Commands without --mesh mean this one from now on, unless nobody may write where that is
    said: a container's working directory is often one of the read-only root file system.
    """
    try:
        places.point_to(place)
    except OSError as error:
        where = f"--mesh {place.root}, or $MESHRL_HOME={place.root}"
        print(f"commands here need {where}: {error}", flush=True)
