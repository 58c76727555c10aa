"""Fork servers of single tests, which import little and listen at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshrl.common.mesh.process.child_handle import SystemChild
from meshrl.common.mesh.process.forking.fork_client import FORK_SERVER_ENV, FORK_SERVER_OFF
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.spawning import SpawnOptions
from tests.fork_server import wait_until_listening

Open = Callable[..., SystemChild]


def start_fork_server(socket: Path, *modules: str) -> SystemChild:
    """Start a fork server that imports some modules and then listens."""
    argv = [sys.executable, "-m", "meshrl.common.mesh.process.forking.fork_server"]
    return SystemHost().spawn(
        [*argv, str(socket), *modules],
        name="fork-server",
        env={FORK_SERVER_ENV: FORK_SERVER_OFF},
        log=socket.parent / "fork-server.log",
        options=SpawnOptions(own_session=True),
    )


@pytest.fixture
def open_fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Start a fork server that has imported some modules; the test's processes are forked from
    it.
    """
    children: list[SystemChild] = []

    def start(*modules: str) -> SystemChild:
        socket = tmp_path / f"fork-{len(children)}"
        children.append(child := start_fork_server(socket, *modules))
        wait_until_listening(child, socket)
        monkeypatch.setenv(FORK_SERVER_ENV, str(socket))
        return child

    yield start
    for child in children:
        child.kill()
