"""Fork server for a load test, and the remaining processes of a trial."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.host.settings import SETTINGS_ENV
from meshrl.common.mesh.process.child_handle import ChildProcess, read_start_time
from meshrl.common.mesh.process.forking.fork_client import FORK_SERVER_ENV
from meshrl.common.mesh.process.host import Host
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.services.mesh_fork_server import MeshForkServer

BUDGET = (5, 60.0)
GRACE_S = 5.0
LOOK_S = 0.1


def processes_of(mark: str) -> list[int]:
    """Return the pids of the running ones, without this process and zombies."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            place = Path("/proc") / name
            about = (place / "environ").read_bytes() + (place / "cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in about and int(name) != os.getpid() and read_start_time(int(name)):
            found.append(int(name))
    return found


async def left(mark: str, within_s: float, but: frozenset[int] = frozenset()) -> list[int]:
    """Wait until no process of a trial is left; return the pids that remain after `within_s`."""
    until = time.monotonic() + within_s
    while found := [pid for pid in processes_of(mark) if pid not in but]:
        if time.monotonic() > until:
            break
        await asyncio.sleep(LOOK_S)
    return found


@contextlib.contextmanager
def starting(how: str) -> Iterator[None]:
    """Start processes in this block by the fork server at the socket `how`, or by execution."""
    before = os.environ.get(FORK_SERVER_ENV)
    os.environ[FORK_SERVER_ENV] = how
    try:
        yield
    finally:
        if before is None:
            del os.environ[FORK_SERVER_ENV]
        else:
            os.environ[FORK_SERVER_ENV] = before


@contextlib.asynccontextmanager
async def fork_server(host: Host, root: Path) -> AsyncIterator[tuple[str, ChildProcess]]:
    """Start a mesh's fork server; yield its socket and its process, which ends with the block."""
    place = MeshPaths(root)
    environment = {SETTINGS_ENV: str(place.settings), "OMP_NUM_THREADS": "1"}
    os.environ.pop(FORK_SERVER_ENV, None)  # a mesh below another one's fork server starts none
    fork_server = MeshForkServer(host, SystemClock(), place, environment, BUDGET)
    await fork_server.start()
    try:
        await fork_server.wait_until_listening()
        [process] = fork_server.supervisor.children.values()
        yield fork_server.environment[FORK_SERVER_ENV], process
    finally:
        await fork_server.stop(GRACE_S)
