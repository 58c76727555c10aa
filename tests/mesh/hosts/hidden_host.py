"""Host without access to the head's files, which a mount namespace of its own covers.

Only Redis' socket is visible in it; all data comes over the network.
"""

from __future__ import annotations

import os
import shlex
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from meshrl.common.base.host.settings import REDIS_ENV, MeshSettings
from meshrl.common.mesh.process.forking.fork_client import FORK_SERVER_ENV
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch import leftover_processes
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.hosts.host_launcher import HostShape
from tests.load import scaled
from tests.mesh.hosts.joined_host import END_S, JoinedHost, admit


class HiddenHost(JoinedHost):
    """Host whose processes see an empty directory in place of the head's root."""

    left_out = (
        REDIS_ENV,
        FORK_SERVER_ENV,
    )  # children of the head's fork server have access to its files

    def __init__(self, place: MeshPaths, mesh: Launcher, workers: int, prefix: str = "h1w") -> None:
        super().__init__(place)
        self._head = mesh.mesh_paths
        place.directory.mkdir(parents=True, mode=0o700)
        visible_socket = self._redis / "redis.sock"
        url = mesh.settings.redis_url.replace(
            str(mesh.mesh_paths.redis_directory.resolve() / "redis.sock"), str(visible_socket)
        )
        assert str(visible_socket) in url, url
        host = f"{place.root.name}-1"
        admit(mesh, host)
        settings = replace(mesh.settings, host=host, run_root=str(place.root), redis_url=url)
        settings.to_file(place.settings)
        HostShape(workers=workers, worker_prefix=prefix).write(place)

    @property
    def _redis(self) -> Path:
        return self.place.root / "r"

    @property
    def command(self) -> list[str]:
        """Return the command that runs `meshrl join` without access to the head's files."""
        self._redis.mkdir(exist_ok=True)
        steps = [
            ["mount", "--bind", str(self._head.redis_directory.resolve()), str(self._redis)],
            ["mount", "-t", "tmpfs", "none", str(self._head.root.resolve())],
            ["exec", *super().command],
        ]
        script = " && ".join(shlex.join(step) for step in steps)
        return ["unshare", "--mount", "sh", "-c", script]

    def lose(self) -> None:
        """Kill all processes there at once."""
        assert self.program is not None
        self.program.kill()  # first, because it restarts others
        self.program.wait(scaled(END_S))
        while there := leftover_processes.find_leftovers(self.place.settings.resolve()):
            for pid in there:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @property
    def settings(self) -> MeshSettings:
        return MeshSettings.from_file(self.place.settings)
