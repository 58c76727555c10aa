"""Fork server for tests, from which their processes are forked as on a user's host.

A run with several workers has one (`conftest.py`). A test that runs alone starts its own if it
starts many processes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from meshrl.common.mesh.process.child_handle import SystemChild
from meshrl.common.mesh.process.forking.fork_client import FORK_SERVER_ENV, FORK_SERVER_OFF
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.spawning import SpawnOptions
from meshrl.launch.services import service_plan
from tests.load import scaled

LISTENS_S = 60.0
ROOT = Path(__file__).parents[1]


class TestForkServer:
    """Fork server from `start` to `close`, found through the environment by all child processes.

    Nothing is started if the environment already names one.
    """

    __test__ = False

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="meshrl-fork-")
        self._child: SystemChild | None = None

    def start(self) -> None:
        """Returns at once: until it listens, processes are executed."""
        if FORK_SERVER_ENV in os.environ:
            return
        socket = Path(self._scratch.name) / "fork-server"
        self._child = SystemHost().spawn(
            service_plan.build_fork_server_command(socket),
            name="fork-server",
            env={FORK_SERVER_ENV: FORK_SERVER_OFF, "OMP_NUM_THREADS": "1"},
            options=SpawnOptions(own_session=True),
        )
        os.environ[FORK_SERVER_ENV] = str(socket)

    def start_of_own(self) -> int:
        """Start a fork server for this process alone; return its pid once it listens.

        It is a fork of the fork server that this process's environment names.
        """
        socket = Path(self._scratch.name) / "fork-server"
        shared = os.environ[FORK_SERVER_ENV]
        if shared != FORK_SERVER_OFF:  # otherwise this one would import everything once more
            wait_until_listening(None, Path(shared))
        self._child = SystemHost().spawn(
            service_plan.build_fork_server_command(socket),
            name="fork-server",
            options=SpawnOptions(own_session=True),
        )
        wait_until_listening(self._child, socket)
        os.environ[FORK_SERVER_ENV] = str(socket)
        return self._child.pid

    def close(self) -> None:
        """Stop the fork server; its forked processes keep running."""
        if self._child is not None:
            self._child.kill()
            while self._child.poll() is None:
                time.sleep(0.01)
            del os.environ[FORK_SERVER_ENV]
        self._scratch.cleanup()


async def run_module(module: str, *words: str, log: Path, deadline_s: float = 200.0) -> None:
    """Run a module in its own process to its end, and require success.

    The process is a fork of the fork server, if there is one, because the import of PyTorch would
    be most of its cost. It has one thread, so that it can be forked safely.
    """
    child = SystemHost().spawn(
        [sys.executable, "-m", module, *words],
        name="program",
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        log=log,
        options=SpawnOptions(own_session=True),
    )
    try:
        assert await child.wait(scaled(deadline_s)) == 0, read_end(log)
    finally:
        child.kill()


def read_end(log: Path) -> str:
    """Return the last lines of a log."""
    return log.read_text()[-4000:]


def wait_until_listening(child: SystemChild | None, socket: Path) -> None:
    """Wait until a fork server listens; AssertionError if it exits or does not listen in
    LISTENS_S.
    """
    until = time.monotonic() + scaled(LISTENS_S)
    while not socket.exists():
        if child is not None:
            assert child.poll() is None, f"the fork server that was to listen at {socket} has ended"
        assert time.monotonic() < until, f"no fork server listens at {socket}"
        time.sleep(0.02)
