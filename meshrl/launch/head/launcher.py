"""Root process of a mesh: it starts Redis and the services, keeps them running, and stops them.

`meshrl run` has a Launcher in its own process; `meshrl up` starts this file as a program. Every
process of the mesh dies with it, or (workers, which may outlive an agent) within 75 s.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from meshrl.common.base.errors import Refused
from meshrl.common.base.files import corruption
from meshrl.common.base.files.run_host import PROBE_BYTES as PROBE_BYTES
from meshrl.common.base.files.run_host import create_run_host as make_home
from meshrl.common.base.host.settings import METRICS_OFF, SECRET_BYTES, MeshSettings
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.output.streams import install_lossy_output
from meshrl.common.mesh.process.supervision.exit_reports import clear_last_exits
from meshrl.common.state import events, registry
from meshrl.common.state.hosts import credentials
from meshrl.common.state.pool.store.pool_rows import write_settings
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.server_state import run_host
from meshrl.common.state.server_state.rollback import JobWatermark
from meshrl.directory.directory_paths import MeshPaths, write_json
from meshrl.directory.joined_hosts import read_joined_hosts
from meshrl.directory.watched_documents import WatchedDocument, watch_documents
from meshrl.launch.directory_lock import handle_stop_signals
from meshrl.launch.foreground import EXIT_OK, EXIT_RETRY, start_unless_stopped
from meshrl.launch.head import durable_restore, event_trimming
from meshrl.launch.head.head_network import HeadNetwork, describe_mesh
from meshrl.launch.head.host_admission import HostAdmission
from meshrl.launch.head.job_restore import restore_all_jobs
from meshrl.launch.head.mesh_shape import POOL_FILE, MeshShape, read_pool_settings
from meshrl.launch.head.profile_file import ProfileFile
from meshrl.launch.monitoring.health_endpoint import serve_health
from meshrl.launch.redis.mesh_redis import MeshRedis
from meshrl.launch.redis.redis_configuration import RedisAddresses
from meshrl.launch.root_process import RootProcess
from meshrl.launch.root_program import run_root_program
from meshrl.launch.scaler.spot_scaler import create_scaler
from meshrl.launch.services import service_plan
from meshrl.launch.services.service_supervisor import GRACE_S, RESTART_BUDGET

T = TypeVar("T")

MAX_RECOVERY_TRIES = 3  # times that Redis may go back again before the mesh has


class Launcher(RootProcess):
    def __init__(
        self, mesh_paths: MeshPaths, shape: MeshShape, pool: PoolSettings | None = None
    ) -> None:
        """`pool`: its settings; None: as at the mesh's last start."""
        super().__init__(mesh_paths)
        self.shape, self._pool = shape, pool
        self._may_have_processes = False  # the mesh may have processes
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._head_network = HeadNetwork.create(mesh_paths, shape.listen) if shape.listen else None
        self._redis = MeshRedis(
            *(self.host, self.clock, mesh_paths, self._secret, RESTART_BUDGET, self._services),
            self._on_redis_rollback,
            self._head_network.make_redis_network(self._secret, shape.advertise)
            if self._head_network
            else None,
        )
        self._profiles = ProfileFile(mesh_paths, self.clock, self.host)
        self._tasks: list[asyncio.Task[Any]] = []
        self._recovery: asyncio.Task[None] | None = None
        self._failed_recoveries = 0  # times in a row that the mesh could not
        self._pending_recovery_reason = ""  # reason of a rollback while the mesh was not up

    async def start(self, before_services: Callable[[], Awaitable[None]] | None = None) -> None:
        """Start the mesh and return when every service has registered; on an error nothing is left
        running.

        `before_services` is awaited when Redis answers and no service runs yet.
        """
        self._directory_lock.acquire()
        self._may_have_processes = True
        try:
            await self._services.prepare()
            await self._require_single_mesh(await self._redis.connect())
            await self._redis.open_to_mesh()
            self._write_settings(self._redis.addresses)
            self.state = await StateClient.open(self._redis.url)
            await self._publish_run_host()
            self._services.connect_state(self.state, self.settings.host)
            await clear_last_exits(self.state)
            if self._redis.is_restoring:
                await restore_all_jobs(self.state, self._redis.watermark, required=False)
            if before_services is not None:
                await before_services()
            if self._redis.is_restoring:
                await self._redis.finish_restore()
            await write_settings(self.state, self.pool)
            await self._profiles.restore(self.state)
            scaler = await create_scaler(self.state, self.clock, self.pool.scaler, self.mesh_paths)
            if scaler is not None:
                scaling = asyncio.create_task(scaler.run(), name="scale spot hosts")
                self._services.watch_task(scaling, "scale spot hosts")
                self._tasks.append(scaling)
            if self._head_network is not None:
                about = partial(describe_mesh, self._redis.addresses, self.settings)
                who = self._redis, about, self.pool.forget_after_s, self.settings.host
                hosts = HostAdmission(self.mesh_paths, self.state, self.clock, *who)
                admitting = asyncio.create_task(hosts.run(), name="admit hosts")
                self._services.watch_task(admitting, "admit hosts")
                self._tasks.append(admitting)
            await self._services.start(self._plan_services())
            names = {service.name for service in self._plan_services()}
            await self._services.wait_until_registered(names, self.shape.workers)
            trimmed = event_trimming.trim_forever(self.state, self.clock)
            self._tasks.append(asyncio.create_task(trimmed, name="trim events"))
            saving = self._profiles.save_forever(self.state)
            self._tasks.append(asyncio.create_task(saving, name="save profiles"))
            self._directory_lock.set_ready(ready=True)
            if self._recovery is None:
                self._start_pending_recovery()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every process of the mesh, Redis last. Safe after a failed start, and twice."""
        await self.stop_services()
        await self._services.stop()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GRACE_S)
        self._tasks.clear()
        self._services.close()
        if hasattr(self, "state"):
            await self.state.close()
        await self._redis.stop()
        if self._directory_lock.is_locked:
            self._may_have_processes = False  # later processes may be another mesh's
            self._directory_lock.release()

    async def query_redis(self, query: Callable[[StateClient], Awaitable[T]]) -> T:
        """Return the answer of the mesh's Redis, which runs only for the duration of the query."""
        self._directory_lock.acquire()
        try:
            return await query(await self._redis.connect())
        finally:
            await self.stop()

    async def stop_services(self) -> None:
        """End everything but Redis and the fork server, in reverse order of the start. The accounts
        are final then.
        """
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            recovery.cancel()
            await asyncio.wait([recovery], timeout=GRACE_S)
        await self._services.stop(fork_server=False)
        if self._may_have_processes:
            await self._services.kill_leftovers()

    def start_program(self, argv: list[str], name: str) -> ChildProcess:
        """Start a MeshRL program that is no service, forked by the fork server while that runs."""
        environment = self._services.fork_environment
        return self.host.spawn(argv, name=name, env=environment, log=self.mesh_paths.log_path(name))

    def kill(self) -> None:
        if self._redis.supervisor is not None:
            for child in self._redis.supervisor.children.values():
                child.kill()
        self._services.kill_now()

    @property
    def unready_reason(self) -> str:
        """Reason why the launcher is not ready; empty if it is."""
        if self._recovery is not None:
            return "Redis lost state, and all processes that used it are restarting"
        if (supervisor := self._redis.supervisor) is not None and not supervisor.children:
            return "redis is down"
        return super().unready_reason

    @property
    def process_names(self) -> dict[int, str]:
        """Names of the running launcher, Redis and services, by pid."""
        found = {os.getpid(): "meshrl"}
        if self._redis.supervisor is not None:
            found |= {child.pid: name for name, child in self._redis.supervisor.children.items()}
        return found | {child.pid: name for name, child in self._services.children}

    def find_watermark(self, job: str) -> JobWatermark:
        """Return the furthest known progress of a job; an empty watermark when there is none."""
        return self._redis.watermark.jobs.get(job, JobWatermark())

    # When the state goes back

    @property
    def is_restoring_state(self) -> bool:
        """True while Redis has lost its state and the jobs are being restored."""
        return self._recovery is not None or bool(self._pending_recovery_reason)

    def _on_redis_rollback(self, reason: str) -> None:
        """Start the recovery after a Redis rollback: admit no process, restart all that acted on
        the state.
        """
        self._pending_recovery_reason = reason
        if self._recovery is None and self._services.is_running:
            self._start_pending_recovery()

    def _start_pending_recovery(self) -> None:
        """Start a recovery if Redis has rolled back, also from before the mesh could recover."""
        why, self._pending_recovery_reason = self._pending_recovery_reason, ""
        if why:
            self._recovery = asyncio.create_task(self._recover(why), name="recover from rollback")
            self._recovery.add_done_callback(partial(self._on_recovery_done, why))

    async def _recover(self, reason: str) -> None:
        await self._services.kill()
        await self._redis.start_empty(reason)
        await self._redis.reopen_to_mesh()
        await self._publish_run_host()
        await restore_all_jobs(self.state, self._redis.watermark, required=True)
        await write_settings(self.state, self.pool)
        await self._profiles.restore(self.state)
        await self._redis.finish_restore()
        await self._services.prepare()
        await self._services.start(self._plan_services())

    def _on_recovery_done(self, reason: str, task: asyncio.Task[None]) -> None:
        if self._recovery is not task:  # the mesh stops
            return
        self._recovery = None
        if task.cancelled():
            return
        error = task.exception()
        self._failed_recoveries = self._failed_recoveries + 1 if error is not None else 0
        if error is not None and (
            not self._pending_recovery_reason or self._failed_recoveries > MAX_RECOVERY_TRIES
        ):
            self._services.fail(
                f"redis lost state ({reason}), and the mesh cannot recover: {error}"
            )
        else:
            self._start_pending_recovery()

    # Parts of the start

    async def _require_single_mesh(self, state: StateClient) -> None:
        """Raise an error if another mesh uses this Redis: a shared server belongs to one mesh."""
        joined = read_joined_hosts(self.mesh_paths)
        alive = [e for e in await registry.list_entries(state) if e.alive and e.host not in joined]
        if (
            embedded_server.read_configured_url()
            and alive
            and alive[0].run_root != str(self.mesh_paths.root)
        ):
            raise Refused(
                f"another mesh ({alive[0].run_root}) uses the Redis "
                f"{embedded_server.redact_password(embedded_server.read_configured_url())}",
                fix="Stop that mesh with `meshrl down`, or use another Redis",
            )
        for entry in alive:  # left by an earlier launcher, whose processes have just been ended
            await registry.evict(state, entry.name, entry.incarnation)

    async def _publish_run_host(self) -> None:
        """Publish where the runs are stored, and how another host detects whether it sees them."""
        content = secrets.token_bytes(PROBE_BYTES)
        run_home = make_home(self.settings.host, self.mesh_paths.root, content)
        await run_host.write_run_host(self.state, run_home)
        if self._head_network is None:
            await credentials.admit_only(self.state, self.settings.host)

    def _write_settings(self, addresses: RedisAddresses) -> None:
        shape = self.shape
        self.settings = MeshSettings(
            redis_url=addresses.url,
            run_root=str(self.mesh_paths.root),
            bind=shape.bind,
            advertise=shape.advertise,
            metrics=shape.metrics,
            secret=self._secret,
            encrypt=shape.encrypt_bulk,
            rate_up=shape.upload_bytes_per_s,
            rate_down=shape.download_bytes_per_s,
        )
        if self._head_network is not None:
            self._head_network.write_owner(self.mesh_paths, self._secret)
            self.settings = self._head_network.make_settings(addresses, self.settings)
        self.settings.to_file(self.mesh_paths.settings)
        write_json(self.mesh_paths.shape, asdict(shape))
        self.pool = self._pool or read_pool_settings(self.mesh_paths)
        write_json(self.mesh_paths.directory / POOL_FILE, asdict(self.pool))
        self._tasks.append(asyncio.create_task(self._watch_files(), name="repair files"))

    async def _watch_files(self) -> None:
        """Repair the mesh's own files when they are corrupt: restarted processes read them."""
        place = self.mesh_paths

        def write(path: Path, content: dict[str, Any]) -> None:
            self.settings.to_file(path)

        async def append_event(told: dict[str, Any]) -> None:
            await events.append(self.state, corruption.CORRUPTION_EVENT, told)

        own = (place.shape, place.directory / POOL_FILE, place.root_marker)
        documents = [WatchedDocument("mesh", path, place.root) for path in own]
        documents.append(WatchedDocument("mesh", place.settings, place.root, write=write))
        await watch_documents(documents, self.clock, append_event)

    def _plan_services(self) -> list[service_plan.ServiceSpec]:
        shape = self.shape
        found = service_plan.plan_services(
            shape.workers, shape.device, self.settings.host, shape.accepted_services
        )
        if shape.gateway != METRICS_OFF:
            found.append(service_plan.make_gateway(shape.gateway, shape.advertise))
        return found


async def serve_mesh(
    root: Path,
    shape: MeshShape,
    pool: PoolSettings,
    health_address: str = "",
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Run `meshrl up`: a mesh that runs until SIGTERM and records each submitted job.

    Returns the exit status. `health_address`: HOST:PORT, where it answers for this host and for the
    mesh; empty: nowhere. `on_ready` is called when all services are registered.
    """
    install_lossy_output()
    stop = asyncio.Event()
    launcher = Launcher(MeshPaths(root), shape, pool)
    handle_stop_signals(stop, launcher.kill)
    async with serve_health(launcher, stop, health_address, is_head=True):
        return await _run_until_stopped(launcher, stop, on_ready)


async def _run_until_stopped(
    launcher: Launcher, stop: asyncio.Event, on_ready: Callable[[], None]
) -> int:
    from meshrl.view.job_recorders import record_all

    restore = durable_restore.make_pending_restore(launcher.mesh_paths)
    begin = (lambda: restore(launcher.state)) if restore is not None else None
    if not await start_unless_stopped(launcher.start(begin), stop):
        return EXIT_OK
    recording = asyncio.create_task(record_all(launcher, stop))
    ends = [asyncio.create_task(event.wait()) for event in (stop, launcher.failed)]
    try:
        on_ready()
        await asyncio.wait([*ends, recording], return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        await recording
    finally:
        await launcher.stop()
    if launcher.failed.is_set():
        print(f"error: {launcher.failure_reason}", file=sys.stderr, flush=True)
    return EXIT_RETRY if launcher.failed.is_set() else EXIT_OK


if __name__ == "__main__":
    run_root_program(
        "meshrl.launch.head.launcher",
        lambda a: serve_mesh(
            a.root, MeshShape(**a.shape), PoolSettings.from_document(a.pool), a.health
        ),
        *("--shape", "--pool"),
    )
