"""Root process of a joined host: it starts, supervises and stops a fork server and the agent.

It also runs a standby planner where the host has one. Redis, the weight store and the gateway are
the head's. While the head is unreachable the processes here continue as well as they can. The
host's part ends when the mesh has removed the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshrl.common.api.gateway import Gateway
from meshrl.common.base.errors import (
    ConfigError,
    CorruptData,
    DeadlineExceeded,
    MeshError,
    NotAllowed,
    NotFound,
    Refused,
    StateUnavailable,
)
from meshrl.common.base.files.documents import rename_keys
from meshrl.common.base.host.settings import MeshSettings, parse_advertised_host
from meshrl.common.mesh.process.output.streams import install_lossy_output
from meshrl.common.state import events
from meshrl.common.state.pool.scheduling import host_services
from meshrl.common.state.pool.workers import process_names
from meshrl.common.state.redis.client import StateClient, find_auth_error
from meshrl.common.state.redis.keys import MESH_PREFIX
from meshrl.directory.directory_paths import MeshPaths, read_json, write_json
from meshrl.launch.directory_lock import handle_stop_signals
from meshrl.launch.foreground import (
    EXIT_FATAL,
    EXIT_OK,
    EXIT_RETRY,
    REPORTED_ERRORS,
    report_error_after_stop,
    start_unless_stopped,
)
from meshrl.launch.hosts import host_drain, membership
from meshrl.launch.hosts.preemption_notices import follow_notices
from meshrl.launch.monitoring.health_endpoint import serve_health
from meshrl.launch.root_process import RootProcess
from meshrl.launch.root_program import run_root_program
from meshrl.launch.services import service_plan
from meshrl.launch.shutdown import STOP_TIMEOUT_S

REDIS_ROLE = "node"  # role with which the root process itself connects to Redis
ADMITTED_HOSTS_KEY = f"{MESH_PREFIX}:admitted"  # hosts that may belong to the mesh
POLL_S = 2.0  # between two checks of the host's membership
REDIS_TIMEOUT_S = 5.0
HEAD_TIMEOUT_S = 30.0  # a start waits for the head so long
EVENT_TIMEOUT_S = 2.0


_OLD_KEYS = {
    "prefix": "worker_prefix",
    "planner": "planner_name",
    "takes": "accepted_services",
    "asked_s": "join_requested_s",
}


@dataclass(frozen=True)
class HostShape:
    workers: int = 1
    device: str = "cpu"
    worker_prefix: str = "w"  # prefix of its workers' names, which are unique in the mesh
    market: str = "reserved"
    price: float = 0.0  # of an hour of each worker
    notice_source: str = ""  # of preemption notices; empty: none
    memory_bytes: int = 0  # that instances may take; 0: all memory
    disk_bytes: int = 0
    planner_name: str = ""  # the name of the planner that stands by here; empty: none
    # the services that may be placed here
    accepted_services: Sequence[str] = host_services.ALL_SERVICES
    listen: str = ""  # as it was named; empty: as it reaches the head
    ephemeral: bool = False  # it leaves the mesh on its stop order
    join_requested_s: float = 0.0  # wall clock of the join request; 0: it was a member before

    def plan_services(self, host: str) -> list[service_plan.ServiceSpec]:
        """Return the services of this host, in the order of their start."""
        options = ["--worker-prefix", self.worker_prefix, "--market", self.market]
        options += ["--price", str(self.price)]
        options += ["--memory-bytes", str(self.memory_bytes), "--disk-bytes", str(self.disk_bytes)]
        agent = service_plan.make_agent(
            host, self.workers, self.device, self.accepted_services, *options
        )
        return (
            [service_plan.make_planner(self.planner_name, True), agent]
            if self.planner_name
            else [agent]
        )

    def write(self, mesh_paths: MeshPaths) -> None:
        write_json(mesh_paths.shape, asdict(self))

    @classmethod
    def read(cls, mesh_paths: MeshPaths) -> HostShape:
        """Return the shape of the host with this directory. Raises ConfigError."""
        try:
            return cls(**rename_keys(read_json(mesh_paths.shape), _OLD_KEYS))
        except (CorruptData, FileNotFoundError, TypeError) as error:
            raise ConfigError(
                f"the file of this host's capacity is missing or corrupt: {error}",
                where=str(mesh_paths.shape),
                fix="Run `meshrl leave`, then join with a new token",
            ) from error


class HostLauncher(RootProcess):
    """Host's part of a mesh from start to stop. `failed` is set, with `failure_reason`, when it
    gives up or is no member any more.
    """

    def __init__(self, mesh_paths: MeshPaths, drain_timeout_s: float = 0.0) -> None:
        """`drain_timeout_s`: longest wait of its end for everything to move away.

        Raises ConfigError if the host has never joined, or its files are corrupt.
        """
        super().__init__(
            mesh_paths, waits_for_head=True, stop_timeout_s=drain_timeout_s + STOP_TIMEOUT_S
        )
        self.settings = MeshSettings.from_file(mesh_paths.settings)
        self.shape = HostShape.read(mesh_paths)
        self.is_expelled = False  # the mesh has removed the host
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start, and return when the agent and its workers have registered; on an error nothing is
        left running.
        """
        self._directory_lock.acquire()
        place, host = self.mesh_paths, self.settings.host
        place.logs.mkdir(parents=True, exist_ok=True)
        try:
            await self._services.prepare()
            self.state = await self._connect_to_redis()
            self._services.connect_state(self.state, host)
            planned = self.shape.plan_services(host)
            await self._services.start(planned)
            await self._services.wait_until_registered(
                {s.name for s in planned}, self.shape.workers
            )
            back = await self._report_joined()
            self._start_task(self._watch_membership(), "watch the membership")
            if back and (member := membership.read_membership(place)) is not None:
                address = parse_advertised_host(self.settings.advertise or self.settings.bind)
                report = host_drain.report_returned(member, self.clock, address)
                self._start_task(report, "report the return of this host")
            if self.shape.notice_source and (member := membership.read_membership(place)):
                address = parse_advertised_host(self.settings.advertise or self.settings.bind)
                source = self.shape.notice_source
                notices = follow_notices(member, self.clock, source, address)
                self._start_task(notices, "follow preemption notices")
            self._directory_lock.set_ready(ready=True)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every process of this host, the agent with its workers first. Safe twice."""
        self._cancel_tasks()
        await self._services.stop()
        if self._directory_lock.is_locked:
            await self._services.kill_leftovers()
        self._services.close()
        if hasattr(self, "state"):
            await self.state.close()
        self._directory_lock.release()

    async def drain(self, timeout_s: float) -> None:
        """Make the mesh move everything off this host, and wait up to `timeout_s` for that."""
        self._cancel_tasks()
        # The agent moves everything off the host in order.
        agent = process_names.agent_name(self.settings.host)

        def hindered() -> str:
            return "" if agent in dict(self._services.children) else f"{agent} is down"

        if (member := membership.read_membership(self.mesh_paths)) is not None:
            await host_drain.drain_host(member, self.clock, timeout_s, hindered)

    @property
    def leaves_on_stop(self) -> bool:
        return self.shape.ephemeral or self.mesh_paths.leave_marker.exists()

    async def leave_mesh(self) -> None:
        """Leave the mesh after the stop. The host stays a member while the head is unreachable."""
        if (member := membership.read_membership(self.mesh_paths)) and await host_drain.leave_mesh(
            member
        ):
            membership.delete_membership(self.mesh_paths)

    def kill(self) -> None:
        self._services.kill_now()

    # -- membership --------------------------------------------------------------------------------

    async def _connect_to_redis(self) -> StateClient:
        """Return a client of the mesh's Redis, which admits this host. Waits for a mesh that
        restarts.
        """
        until = self.clock.monotonic() + HEAD_TIMEOUT_S
        while True:
            try:
                state = await StateClient.open(
                    self.settings.make_redis_url(REDIS_ROLE), connect_timeout_s=REDIS_TIMEOUT_S
                )
            except StateUnavailable as error:
                is_refused, why, where = (
                    find_auth_error(error) is not None,
                    error.message,
                    error.where,
                )
            else:
                if await self._is_admitted(state):
                    return state
                is_refused, why, where = True, "its Redis has no record of this host", ""
                await state.close()
            if is_refused and await self._is_removed():
                raise make_expelled_error(self.settings.host)
            if self.clock.monotonic() > until:
                raise StateUnavailable(
                    f"the head of the mesh is unreachable: {why}",
                    where=where,
                    fix="Check that it runs (`meshrl status` there) and that this host can "
                    "connect to it",
                )
            await self.clock.sleep(POLL_S)

    async def _is_admitted(self, state: StateClient) -> bool:
        if not self.settings.joinable:
            return True
        found = await state.run_command(
            "SISMEMBER", ADMITTED_HOSTS_KEY, self.settings.host, deadline_s=REDIS_TIMEOUT_S
        )
        return bool(found)

    async def _watch_membership(self) -> None:
        """End this host's part when the mesh has removed it.

        An empty Redis admits no host until the head's launcher has run, however long that takes.
        """
        was_refused = False
        while True:
            await self.clock.sleep(POLL_S)
            try:
                is_refused = not await self._is_admitted(self.state)
            except StateUnavailable as error:
                is_refused = find_auth_error(error) is not None
            if is_refused and await self._is_removed():
                self.is_expelled = True
                self._services.fail(str(make_expelled_error(self.settings.host)))
                return
            if is_refused and not was_refused:
                host_drain.print_line(
                    f"Redis rejects {self.settings.host}: it waits for the head to admit it"
                )
            was_refused = is_refused

    async def _is_removed(self) -> bool:
        """Return True if the gateway rejects this host's key, which it knows for each member."""
        member = membership.read_membership(self.mesh_paths)
        if member is None:
            return False
        async with membership.connect_gateway(member.member_token) as line:
            try:
                await line.call(Gateway.membership, None, REDIS_TIMEOUT_S)
            except (NotAllowed, NotFound):
                return True
            except MeshError:  # the gateway is away too: the mesh may be restarting
                return False
        return False

    def _start_task(self, coroutine: Coroutine[Any, Any, None], description: str) -> None:
        task = asyncio.create_task(coroutine, name=description)
        self._services.watch_task(task, description)
        self._tasks.append(task)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    async def _report_joined(self) -> bool:
        """Publish that this host has joined, and return whether it was a member before. The event
        has the duration of the command so far.
        """
        took_s = (
            max(0.0, time.time() - self.shape.join_requested_s)
            if self.shape.join_requested_s
            else 0.0
        )
        fields = {
            "host": self.settings.host,
            "workers": self.shape.workers,
            "join_s": round(took_s, 3),
            "back": (back := not self.shape.join_requested_s),
        }
        with contextlib.suppress(StateUnavailable, DeadlineExceeded):
            async with self.clock.timeout(EVENT_TIMEOUT_S, "appending the event"):
                await events.append(self.state, "host_joined", fields)
        self.shape = replace(self.shape, join_requested_s=0.0)
        self.shape.write(self.mesh_paths)
        return back


def make_expelled_error(host: str) -> Refused:
    return Refused(
        f"the mesh rejects {host}: it was removed, or its keys were revoked",
        fix="Run `meshrl leave` here, then join with a new token (`meshrl token create "
        "--host` at the head)",
    )


async def serve_host(root: Path, health_address: str = "", drain_timeout_s: float = 0.0) -> int:
    """Run a host's part of a mesh, until SIGTERM or until it cannot continue.

    `health_address`: HOST:PORT, where it answers for the whole host; empty: nowhere.
    """
    install_lossy_output()
    stop = asyncio.Event()
    hosting = HostLauncher(MeshPaths(root), drain_timeout_s)
    handle_stop_signals(stop, hosting.kill)
    try:
        async with serve_health(hosting, stop, health_address, is_head=False):
            status = await _run_until_stopped(hosting, stop, drain_timeout_s)
        if status == EXIT_OK and hosting.leaves_on_stop:
            await hosting.leave_mesh()
    except REPORTED_ERRORS as error:
        return report_error_after_stop(error, stop)
    return status


async def _run_until_stopped(
    hosting: HostLauncher, stop: asyncio.Event, drain_timeout_s: float
) -> int:
    if not await start_unless_stopped(hosting.start(), stop):
        return EXIT_OK
    failing = asyncio.create_task(hosting.failed.wait())
    try:
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([stopping, failing], return_when=asyncio.FIRST_COMPLETED)
        stop_requested = not hosting.failed.is_set()
        if drain_timeout_s and stop_requested:
            draining = asyncio.create_task(hosting.drain(drain_timeout_s), name="drain")
            await asyncio.wait([draining, failing], return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await draining
    finally:
        await hosting.stop()
    if hosting.failed.is_set():
        print(f"error: {hosting.failure_reason}", file=sys.stderr, flush=True)
        if not stop_requested:
            return EXIT_FATAL if hosting.is_expelled else EXIT_RETRY
    return EXIT_OK


if __name__ == "__main__":
    run_root_program("meshrl.launch.hosts.host_launcher", lambda a: serve_host(a.root, a.health))
