"""Fork server of a mesh: it starts before everything that it forks, and restarts when it ends."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.forking.fork_client import (
    ANSWER_TIMEOUT_S,
    FORK_SERVER_ENV,
    FORK_SERVER_OFF,
    is_answering,
)
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.process.supervision.supervisor import (
    ChildExit,
    ChildSpec,
    Supervisor,
    SupervisorHooks,
)
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.services import service_plan

START_TIMEOUT_S = 60.0  # until it has imported everything; without it processes are executed
POLL_S = 0.02
CHECK_INTERVAL_S = 2.0  # between two health checks
STOPPED_STATES = "Tt"  # states of a process that was stopped, in /proc
MAX_SILENCES = 3  # in a row, of 2 s each: it was stopped, or hangs, and every start waits for it


class MeshForkServer(SupervisorHooks):
    """The mesh's own fork server, unless the environment names another one, or none."""

    def __init__(
        self,
        host: Host,
        clock: Clock,
        mesh_paths: MeshPaths,
        environment: Mapping[str, str],
        budget: tuple[int, float],
        on_exit: Callable[[ChildProcess, ChildExit], Awaitable[None]] | None = None,
    ) -> None:
        self._host, self._clock, self._socket = host, clock, mesh_paths.fork_server_socket
        self._on_exit = on_exit
        self._watch_task: asyncio.Task[None] | None = None
        inherited_socket = os.environ.get(FORK_SERVER_ENV)
        self._is_disabled = bool(inherited_socket)
        self.environment = {FORK_SERVER_ENV: inherited_socket or str(self._socket.resolve())}
        spec = ChildSpec(
            "fork-server",
            service_plan.build_fork_server_command(self._socket),
            env={**environment, FORK_SERVER_ENV: FORK_SERVER_OFF},
            log=mesh_paths.log_path("fork-server"),
            budget=budget,
            own_session=True,
        )
        self.supervisor = Supervisor(host, clock, [] if inherited_socket else [spec], hooks=self)

    async def start(self) -> None:
        """Start the fork server; see `wait_until_listening`. Print a message when the environment
        names one that does not exist.
        """
        self._check_configured_path()
        self._socket.unlink(missing_ok=True)
        await self.supervisor.start()
        if not self._is_disabled:
            self._watch_task = asyncio.create_task(self._watch(), name="watch the fork server")

    async def wait_until_listening(self) -> None:
        """Wait while it imports: a process that imports by itself takes as long."""
        until = self._clock.monotonic() + START_TIMEOUT_S
        while not self._is_disabled and not self._socket.exists():
            if self._clock.monotonic() > until:
                return
            await self._clock.sleep(POLL_S)

    async def stop(self, grace_s: float) -> None:
        """Stop the fork server; the processes that it has forked continue."""
        if self._watch_task is not None:
            self._watch_task.cancel()
        await self.supervisor.stop(grace_s)

    async def _watch(self) -> None:
        """Kill a fork server that does not answer, so that its supervisor starts another.

        Silences are counted, not timed: a launcher that was stopped itself must not blame it.
        """
        silent: tuple[int, int] = (0, 0)  # pid, silences in a row
        while True:
            await self._clock.sleep(CHECK_INTERVAL_S)
            child = self.supervisor.children.get("fork-server")
            if child is None or not self._socket.exists():
                continue
            has_answered = await self._is_answering(child)
            silent = (
                child.pid,
                0 if has_answered else 1 + (silent[1] if silent[0] == child.pid else 0),
            )
            if silent[1] >= MAX_SILENCES:
                # No process sends requests until another one listens.
                self._socket.unlink(missing_ok=True)
                child.kill()

    async def _is_answering(self, child: ChildProcess) -> bool:
        usage = child.read_usage()
        if usage is not None and usage.state in STOPPED_STATES:
            return False
        try:
            return await self._host.run_blocking(
                is_answering, self._socket, deadline_s=2 * ANSWER_TIMEOUT_S
            )
        except DeadlineExceeded:
            return False

    async def on_exit(self, child: ChildProcess, child_exit: ChildExit) -> None:
        if self._on_exit is not None:
            await self._on_exit(child, child_exit)

    async def on_give_up(self, spec: ChildSpec, why: str) -> None:
        self._is_disabled = True
        self._warn_unavailable(f"{why}; its log: {spec.log}")

    def _check_configured_path(self) -> None:
        named = self.environment[FORK_SERVER_ENV]
        if self._is_disabled and named != FORK_SERVER_OFF and not Path(named).exists():
            self._warn_unavailable(f"{named}, which ${FORK_SERVER_ENV} names, does not exist")

    def _warn_unavailable(self, reason: str) -> None:
        slower = "processes start in seconds instead of milliseconds"
        print(f"no fork server: {slower}: {reason}", file=sys.stderr)
