"""Redis of a mesh: it is started, and checked before it admits processes and after each outage.

Its state is compared with the launcher's note and with the records of the runs. A state that is
older than these, or a file that does not load, counts as lost: the file is quarantined and Redis
begins empty, above all earlier fencing tokens and event ids. A server of the user's has no gate and
no file of ours: its older keys are renamed.

With a `RedisNetwork` other hosts may join the mesh: each role of each host is a user, behind the
same gate, also in a server of the user's.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import (
    DeadlineExceeded,
    MeshError,
    Refused,
    StateUnavailable,
    StorageFull,
)
from meshrl.common.base.files import corruption
from meshrl.common.mesh.access.admitted_hosts import AdmittedHost
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.process.supervision.supervisor import (
    ChildExit,
    ChildSpec,
    Supervisor,
    SupervisorHooks,
)
from meshrl.common.state import events
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.server_state import rollback
from meshrl.common.state.server_state.rollback import StateWatermark
from meshrl.common.state.server_state.state_format import require_state_format, write_state_format
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.redis import redis_watchdog
from meshrl.launch.redis.access.redis_network import RedisNetwork, resolve_remote_url
from meshrl.launch.redis.access.redis_users import RedisHostUsers
from meshrl.launch.redis.redis_configuration import RedisAddresses, RedisConfiguration
from meshrl.launch.redis.redis_progress import RedisProgress
from meshrl.launch.redis.unusable_data import find_load_error, rename_keys

GRACE_S = 10.0  # from SIGTERM to SIGKILL
NOTE_TIMEOUT_S = 4.0  # for one read of its progress
DISK_SPACE_TIMEOUT_S = 60.0  # that a start waits for disk space


class MeshRedis(SupervisorHooks):
    """Redis server of a mesh and its gate.

    The owner receives events of the server's process. The rollback callback receives the reason
    when the state is older in mid-run: the launcher then ends all clients and calls `start_empty`.

    While `is_restoring`, the jobs of a lost Redis are being put back, and no progress is noted;
    `finish_restore` ends that. A start that was interrupted in between repeats it.
    """

    def __init__(
        self,
        host: Host,
        clock: Clock,
        mesh_paths: MeshPaths,
        secret: str,
        budget: tuple[int, float],
        owner_hooks: SupervisorHooks,
        on_rollback: Callable[[str], None],
        network: RedisNetwork | None = None,
    ) -> None:
        self._host, self._clock, self._mesh_paths = host, clock, mesh_paths
        self._budget = budget
        self._owner_hooks, self._on_rollback = owner_hooks, on_rollback
        self._network = network
        self._users = RedisHostUsers(mesh_paths.directory, network.head) if network else None
        self._configuration = RedisConfiguration(
            mesh_paths, secret, network, self._users, clock.wall
        )
        self.supervisor: Supervisor | None = None
        self.url = embedded_server.read_configured_url()  # for the launcher
        self.addresses = RedisAddresses(self.url)  # for all others
        self.rollback_reason = ""  # why its state was older at the last admission
        self._progress = RedisProgress(mesh_paths)
        self._has_pending_rollback_event = False  # the mesh has no event yet with the reason
        self._is_own_server = not self.url
        self._owner_url = self.url
        self._state: StateClient | None = None  # client of its owner
        self._children: list[ChildProcess] = []
        self._log = mesh_paths.log_path("redis")
        self._log_offset = 0  # length of its log when it ended last
        self._quarantined_path: Path | None = None  # path of its former data
        self._is_starting = False  # by `_start_or_start_empty`, which checks the server itself
        self._is_open = False  # the mesh may use the server
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def watermark(self) -> StateWatermark:
        return self._progress.watermark

    @property
    def is_restoring(self) -> bool:
        """True while the jobs of a lost Redis are to be restored."""
        return self._progress.is_restoring

    # -- life cycle -------------------------------------------------------------------------------

    async def connect(self) -> StateClient:
        """Return the owner's connection once the server answers it; no other process is admitted.

        A file that differs from the note, or does not load, has been quarantined. Raises
        ConfigError for a state of another format.
        """
        await asyncio.to_thread(self._progress.load)
        if not self._is_own_server:
            await redis_watchdog.wait_until_ready(self.url, self._clock, None, None)
            if self._network is not None:
                remote_url, authority = resolve_remote_url(self.url, self._network.listen)
                self.addresses = RedisAddresses(remote_url, authority, remote_url, authority)
        else:
            if why := await asyncio.to_thread(self._progress.explain_difference):
                await self._quarantine_data(why, DISK_SPACE_TIMEOUT_S)
            await self._start_or_start_empty(first=True)
        self._state = await StateClient.open(self._owner_url)
        await require_state_format(self._state)
        if self._users is not None and not self._is_own_server:
            await self._users.disable_all(self._state)
        return self._state

    async def open_to_mesh(self) -> None:
        """Admit the mesh, to a state that is no older than the known progress.

        An older state has been quarantined, with the reason in `rollback_reason`.
        """
        if not self.rollback_reason:
            found, why = await self._progress.check_rollback(self._owner_state)
            ours = self._is_own_server or bool(found.jobs.keys() & self.watermark.jobs.keys())
            if why and (
                not self._is_own_server if found.is_empty else ours
            ):  # a rename may have been cut off
                await self.start_empty(why, DISK_SPACE_TIMEOUT_S)
            elif why:
                self._report_rollback(why)
        await self._open_gate(DISK_SPACE_TIMEOUT_S)
        self._tasks = [
            self._start_task("record the progress of redis", self._write_notes_forever())
        ]
        if self._is_own_server:
            watching = redis_watchdog.watch_server(self._owner_url, self._clock, self._children)
            self._tasks.append(self._start_task("watch redis", watching))
            if self._users is not None:  # other users can reach the server
                cutting = redis_watchdog.kill_unauthenticated_clients(
                    self._owner_state, self._clock
                )
                self._tasks.append(
                    self._start_task("disconnect unauthenticated redis clients", cutting)
                )

    async def start_empty(self, reason: str, space_timeout_s: float | None = None) -> None:
        """Quarantine the state and begin without it; `open_to_mesh` admits the mesh afterwards.

        Waits for disk space, for `space_timeout_s` at most. Raises StorageFull, or StateUnavailable
        if the server does not start, perhaps because another process has taken its port.
        """
        self._is_open = False
        if not self._is_own_server:
            await rename_keys(
                self._owner_state, self.watermark.jobs, int(self._clock.wall() * 1000)
            )
            self._report_rollback(reason)
            return
        await self._stop_server()
        await self._quarantine_data(reason, space_timeout_s)
        await self._start_or_start_empty()

    async def reopen_to_mesh(self) -> None:
        await self._open_gate()

    async def admit_host(self, host: AdmittedHost) -> None:
        """Admit a host's processes, now and whenever the mesh runs. Safe twice.

        Raises Refused if its name is another's or it cannot be admitted; StateUnavailable if it may
        be admitted by now, or with the next try.
        """
        self._required_users.add_host(host)
        if self._is_own_server:
            self._configuration.write()
        if self._is_open:
            await self._required_users.enable_host(self._owner_state, host)

    async def expel_host(self, host: str) -> bool:
        """Expel a host and cut off its connections; return whether it was admitted. Safe twice.

        Raises Refused for the head; StateUnavailable as in `admit_host`.
        """
        self._required_users.require_not_head(host)
        await self._required_users.delete_host_users(
            self._owner_state, host
        )  # first: a full disk must not keep a host admitted
        was = self._required_users.remove_host(host)
        if self._is_own_server:
            self._configuration.write()
        return was

    @property
    def _required_users(self) -> RedisHostUsers:
        if self._users is None:
            raise Refused(
                "this mesh accepts no other hosts",
                fix="Run `meshrl up --listen HOST` to start a mesh that hosts can join",
            )
        return self._users

    async def finish_restore(self) -> None:
        """Finish the restore: jobs that are not present now are no longer expected."""
        self._progress.finish_restore(await self._progress.read_watermark(self._owner_state))
        await self._write_when_space(self._progress.write, None)

    async def stop(self) -> None:
        """Stop the server, if it is our own, and note its progress."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S)
        if self._is_open and not self.is_restoring:
            with contextlib.suppress(MeshError, OSError):
                await self._write_note()
        if self._state is not None:
            await self._state.close()
        await self._stop_server()

    # -- the server ------------------------------------------------------------------------------

    async def _start_or_start_empty(self, first: bool = False) -> None:
        """Start our own server, without its file if that does not load.

        `first`: no process knows its address yet, so it moves to another port if its own is taken.
        """
        self._is_starting = True
        try:
            since = self._read_log_length()
            try:
                await self._start()
            except StateUnavailable:
                await self._stop_server()
                load_error = find_load_error(self._log, since)
                if load_error:
                    await self._quarantine_data(
                        f"Redis cannot load its file: {load_error}", DISK_SPACE_TIMEOUT_S
                    )
                elif not (first and await asyncio.to_thread(self._configuration.drop_taken_port)):
                    raise
                await self._start()
        finally:
            self._is_starting = False

    async def _start(self) -> None:
        server, self.addresses = await self._configuration.prepare()
        self.url, self._owner_url = server.url, server.owner_url
        spec = ChildSpec(
            "redis",
            server.argv,
            log=self._log,
            budget=self._budget,
            is_critical=True,
            own_session=True,
        )
        self.supervisor = Supervisor(self._host, self._clock, [spec], hooks=self)
        await self.supervisor.start()
        child = self._children[-1]
        await redis_watchdog.wait_until_ready(self._owner_url, self._clock, child, self._log)

    async def _stop_server(self) -> None:
        supervisor, self.supervisor = self.supervisor, None
        if supervisor is not None:
            await supervisor.stop(GRACE_S)

    async def on_start(self, child: ChildProcess) -> None:
        self._children[:] = [child]
        if not self._is_starting:
            looking = self._start_task("check redis", self._check_restarted_server(child))
            self._tasks = [task for task in self._tasks if not task.done()] + [looking]

    async def on_exit(self, child: ChildProcess, child_exit: ChildExit) -> None:
        since, self._log_offset = self._log_offset, self._read_log_length()
        if child_exit.is_requested or self._is_starting:
            return
        had_been_in, self._is_open = self._is_open, False
        load_error = (
            find_load_error(self._log, since) if not had_been_in and child_exit.code > 0 else ""
        )
        self._mesh_paths.redis_directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        await self._owner_hooks.on_exit(child, child_exit)
        if load_error:
            self._on_rollback(f"Redis cannot load its file: {load_error}")

    async def on_give_up(self, spec: ChildSpec, why: str) -> None:
        await self._owner_hooks.on_give_up(spec, why)

    async def on_critical_loss(self, name: str) -> None:
        await self._owner_hooks.on_critical_loss(name)

    async def _check_restarted_server(self, child: ChildProcess) -> None:
        """Compare a restarted server with its former progress, and admit the mesh."""
        while child.poll() is None:
            try:
                await redis_watchdog.wait_until_ready(
                    self._owner_url, self._clock, child, self._log
                )
                progress = self._progress
                why = await asyncio.to_thread(progress.explain_difference)
                if not why:
                    _, why = await progress.check_rollback(self._owner_state)
                if why:
                    self._on_rollback(why)
                else:
                    await self._open_gate(0.0)
                return
            except (StateUnavailable, StorageFull, OSError):
                # It loads for long, or does not answer: the watch kills it for that; or the disk is
                # full, so that there is no space for the note.
                await self._clock.sleep(redis_watchdog.CHECK_INTERVAL_S)

    def _start_task(self, name: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task; report its failure to the owner by name, as its work stops."""

        async def run_and_report() -> None:
            try:
                await coroutine
            except Exception as error:
                why = f"the task to {name} failed: {type(error).__name__}: {error}"
                spec = ChildSpec("redis", [], log=self._log, is_critical=True)
                await self._owner_hooks.on_give_up(spec, why)
                await self._owner_hooks.on_critical_loss("redis")
                raise

        return asyncio.create_task(run_and_report(), name=name)

    def _read_log_length(self) -> int:
        return self._log.stat().st_size if self._log.is_file() else 0

    # -- admission and progress -------------------------------------------------

    @property
    def _owner_state(self) -> StateClient:
        assert self._state is not None
        return self._state

    async def _open_gate(self, space_timeout_s: float | None = None) -> None:
        """Open the gate, when no fencing token can be issued a second time."""
        floor = self._progress.compute_token_floor(
            await rollback.read_watermark(self._owner_state, self.watermark)
        )
        await self._write_when_space(self._progress.write, space_timeout_s)
        await write_state_format(self._owner_state)
        await rollback.raise_token_floor(self._owner_state, floor)
        if self._has_pending_rollback_event:
            then = corruption.RECOVERY_BY_KIND["redis"]
            fields = corruption.make_event_fields(
                "redis",
                self._mesh_paths.redis_directory,
                self.rollback_reason,
                then,
                quarantined_path=self._quarantined_path,
            )
            self._progress.pending_events.insert(0, fields)
            self._has_pending_rollback_event = False
        while (
            self._progress.pending_events
        ):  # with ids above all known ones, independent of the clock
            found = self._progress.pending_events[0]
            await events.append(
                self._owner_state, corruption.CORRUPTION_EVENT, found, after_id=self.watermark.event
            )
            del self._progress.pending_events[0]
        if self._is_own_server:
            await self._owner_state.run_command("ACL", "SETUSER", embedded_server.MESH_USER, "on")
        if self._users is not None:
            await self._users.enable_all(self._owner_state)
        self._progress.reset_aof_follower()  # the server may have cut off half a command
        self._is_open = True

    async def _write_notes_forever(self) -> None:
        while True:
            await self._clock.sleep(redis_watchdog.CHECK_INTERVAL_S)
            if not self._is_open or self.is_restoring:
                continue
            with contextlib.suppress(StateUnavailable, DeadlineExceeded, StorageFull, OSError):
                why = await self._write_note()
                if why and self._is_open:
                    self._is_open = False
                    self._on_rollback(why)
                elif self._users is not None and await self._users.has_lost_users(
                    self._owner_state
                ):
                    await self._users.enable_all(self._owner_state)

    async def _write_note(self) -> str:
        """Note the progress; return why the state is older than it was, or an empty text."""
        async with self._clock.timeout(NOTE_TIMEOUT_S, "reading the progress of Redis"):
            found, why = await self._progress.check_rollback(self._owner_state, reads_records=False)
            if why:
                return why
            files = (
                await asyncio.to_thread(self._progress.read_extents) if self._is_own_server else {}
            )
            # It answers when a write during the read is complete, or was
            # taken back: half a command, which is cut off when it is loaded, is not noted.
            newest = await events.read_last_id(self._owner_state)
            if not self._is_open:
                return ""
            self._progress.record_progress(found, newest, files)
            await asyncio.to_thread(self._progress.write)
        return ""

    async def _write_when_space(
        self, write: Callable[[], None], space_timeout_s: float | None
    ) -> None:
        """Call `write` until the disk has space, for `space_timeout_s` at most, or as long as the
        mesh runs.

        Raises StorageFull.
        """
        until, notice_printed = self._clock.monotonic() + (space_timeout_s or 0.0), False
        while True:
            try:
                return write()
            except StorageFull as error:
                if space_timeout_s is not None and self._clock.monotonic() >= until:
                    raise
                if not notice_printed:
                    print(f"the mesh waits for disk space: {error}", file=sys.stderr, flush=True)
                notice_printed = True
                await self._clock.sleep(redis_watchdog.CHECK_INTERVAL_S)

    # -- unusable data -----------------------------------------------------------------------

    async def _quarantine_data(self, reason: str, space_timeout_s: float | None) -> None:
        """Quarantine the data; wait for disk space, for `space_timeout_s` at most. Raises
        StorageFull.
        """
        self._progress.file_extents, self._quarantined_path = {}, None
        await self._write_when_space(self._move_data, space_timeout_s)
        self._report_rollback(reason)

    def _move_data(self) -> None:
        place = self._mesh_paths
        try:
            if place.redis_directory.is_dir() and any(place.redis_directory.iterdir()):
                self._quarantined_path = corruption.quarantine(place.redis_directory, place.root)
        except OSError as error:
            raise StorageFull(
                f"quarantining the Redis files failed: {error}",
                where=str(place.redis_directory),
                fix="Free disk space there",
            ) from error

    def _report_rollback(self, reason: str) -> None:
        self.rollback_reason, self._progress.is_restoring, self._has_pending_rollback_event = (
            reason,
            True,
            True,
        )
        where = (
            f"; its files were moved to {self._quarantined_path}" if self._quarantined_path else ""
        )
        print(f"redis lost state: {reason}{where}", file=sys.stderr, flush=True)
        print(f"recovery: {corruption.RECOVERY_BY_KIND['redis']}", file=sys.stderr, flush=True)
