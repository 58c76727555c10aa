"""Finds processes that a mesh left behind, by the mark of its settings in their environment, and
ends them.

Every process of a mesh inherits $MESHRL_MESH, whoever its parent is by now, so this finds what
no registry and no process tree names any more. A stop ends with it, and a start begins with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from common.process.handle import start_time
from common.settings import MESH_ENV, mark_of

POLL_S = 0.05


def belonging_to(settings: Path) -> list[int]:
    """Pids of running processes, other than this one, that were started with these settings."""
    wanted = os.fsencode(f"{MESH_ENV}={mark_of(settings)}")
    return [
        pid
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit())
        if pid != os.getpid() and wanted in _environment(pid) and start_time(pid)
    ]


async def end_all(settings: Path, deadline_s: float) -> list[int]:
    """SIGKILLs what is left until nothing is; the pids that were found. They are gone on return."""
    found: set[int] = set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            while pids := belonging_to(settings):
                found.update(pids)
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(POLL_S)
    return sorted(found)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or it has just ended
        return []
