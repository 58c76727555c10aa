"""Membership of a process in the mesh: its name, its calls to others, and their calls to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

from meshrl.common.api.calls.call_permissions import CALL_PERMISSIONS, ROLES
from meshrl.common.api.calls.interface import Interface, Method
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.encoding.messages import Frame
from meshrl.common.base.errors import BadMessage, ConfigError, MeshError, NotAllowed
from meshrl.common.base.host.settings import METRICS_OFF, MeshSettings
from meshrl.common.base.job_clock import JobClock
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.service_loop import run_service
from meshrl.common.mesh.runtime.actor_ref import ActorRef, CallContext
from meshrl.common.mesh.runtime.calls.actor import Actor, bind
from meshrl.common.mesh.runtime.calls.caller import Caller
from meshrl.common.mesh.runtime.calls.deadline_timer import DeadlineTimer
from meshrl.common.mesh.runtime.calls.directory import ActorDirectory
from meshrl.common.mesh.runtime.calls.server import RequestServer
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.common.mesh.runtime.dependencies import (
    UNRESTRICTED,
    AccessRules,
    LeaseTerms,
    MeshDependencies,
)
from meshrl.common.mesh.runtime.lease import Lease
from meshrl.common.mesh.runtime.monitor_pages import MonitorPages
from meshrl.common.mesh.runtime.process_credentials import (
    LOOKUP_TIMEOUT_S,
    PeerVerifier,
    ProcessCredentials,
)
from meshrl.common.mesh.runtime.retry_policy import CURRENT_WAITS
from meshrl.common.mesh.telemetry.logs import ConnectionRejections, Telemetry, log_to_stderr
from meshrl.common.mesh.telemetry.metrics_endpoint import MetricsEndpoint
from meshrl.common.mesh.telemetry.tracing import Tracer
from meshrl.common.mesh.telemetry.watchdog import Watchdog
from meshrl.common.mesh.transport.base import Peer
from meshrl.common.mesh.transport.unauthenticated_peers import ConnectionLimits
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.common.mesh.wire.frames import unpack_header
from meshrl.common.state import registry
from meshrl.common.state.hosts import credentials
from meshrl.common.state.redis.client import StateClient, open_sync_client

ACTOR_STOP_S = 10.0
HOUSEKEEPING_S = 2.0
IDLE_CONNECTION_S = 120.0

__all__ = ["Mesh", "MeshSettings", "run_service"]


class Mesh:
    """Membership of one process in a mesh: its name, its lease, its calls and its actor.

    A simulation holds many in one process. `token` is the fencing token of the lease. With access
    rules the process makes and answers only calls that the rules allow by role; its own role is its
    `kind`.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        dependencies: MeshDependencies,
        *,
        job: str = "",
        settings: MeshSettings | None = None,
        terms: LeaseTerms | None = None,
        access: AccessRules = UNRESTRICTED,
    ) -> None:
        terms = terms or LeaseTerms()
        state, clock, host, own_credentials = (
            dependencies.state,
            dependencies.clock,
            dependencies.host,
            access.credentials,
        )
        self.name, self.kind = name, kind
        self.state, self.transport, self.clock = state, dependencies.transport, clock
        self.random, self.host = dependencies.random, host
        self.job_clock = JobClock(clock)  # clock of the one job that the process works for, if any
        self.settings = settings or MeshSettings(redis_url=state.url, run_root="", host="")
        self.incarnation = dependencies.random.hex_token(8)
        self.ready: bool | None = None  # published with the stats once it is set
        self.telemetry = Telemetry(name, job)
        self.log = self.telemetry.log  # `mesh.log.warning("what", key=value)`
        self.waits = WaitTable(clock)
        CURRENT_WAITS.set(self.waits)
        self.credentials = own_credentials  # None in a simulation
        self._directory = ActorDirectory(
            state, clock, self.waits, self.verify_peer if own_credentials else None
        )
        self._watchdog = Watchdog(clock, terms.stall_limit_s)
        # `with mesh.loading():` allows the loop to block for 300 s, for reading large files or
        # compiling code. `with mesh.wait(what, on):` publishes with every renewal that this
        # process waits for `on`: an actor, "redis", "group:12".
        self.loading, self.wait = self._watchdog.loading, self.waits.wait
        self._deadline_timer = DeadlineTimer(clock.monotonic)
        transport, telemetry = dependencies.transport, self.telemetry
        incarnation, tracer = self.incarnation, Tracer(dependencies.random.child("trace"))
        self._caller = Caller(
            clock,
            transport,
            incarnation,
            tracer,
            telemetry,
            self._deadline_timer,
            lambda: self.redis_silent_at,
        )
        self._callers = access.callers
        self._server = RequestServer(
            name, clock, transport, incarnation, telemetry, self._deadline_timer, access.callers
        )
        self._peer_verifier = PeerVerifier(own_credentials, host, self._directory, self._server)
        self._lease = Lease(
            state,
            host,
            clock,
            terms,
            self._watchdog,
            self.telemetry,
            self._snapshot,
            own_credentials,
        )
        self._stats: Callable[[], dict[str, Any]] = dict
        self._call_context = CallContext(
            clock,
            self._directory,
            self._caller,
            self.telemetry,
            self.start,
            self.require_may_call,
            self._peer_verifier.mark_suspect,
        )
        self._references: dict[str, ActorRef] = {}
        self._actor: Actor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._housekeeping: asyncio.Task[None] | None = None
        self._owns_state = dependencies.owns_state
        self._is_closed = False
        self.rejections = ConnectionRejections(self.telemetry)
        self.rejections.add_listener(lambda: self.transport.rejected_connections)
        self._endpoint: MetricsEndpoint | None = None

    @classmethod
    async def open(cls, name: str, kind: str, settings: MeshSettings, job: str = "") -> Mesh:
        """Connect a real process to Redis and open its sockets; call `join` to take the name.

        `job` is the job that the process serves, if any.

        Raises:
            ConfigError: The settings hold no secret, or `kind` is not a role.
            Refused: This host is not admitted to the mesh any more.
        """
        if not settings.secret:
            raise ConfigError(
                "the settings contain no secret, from which the mesh derives its passwords",
                where="settings.json",
                fix="Restart the mesh with `meshrl up` or `meshrl run`, which creates one",
            )
        if kind not in ROLES:
            raise ConfigError(
                f"{kind!r} is not a process role; the roles are {', '.join(sorted(ROLES))}",
                where="common/api/calls/call_permissions.py",
            )
        log_to_stderr(name, job)
        clock = SystemClock()
        async with AsyncExitStack() as resources:
            state = await StateClient.open(settings.make_redis_url(kind))
            resources.push_async_callback(state.close)
            if not settings.joinable:  # otherwise only the head admits hosts
                await credentials.admit_if_first(state, settings.host)
            # The key is registered before the transport answers peers, who look it up.
            client = open_sync_client(settings.make_redis_url(kind), LOOKUP_TIMEOUT_S)
            own_credentials = await ProcessCredentials.register(
                name, kind, settings.host, state, client, clock
            )
            resources.push_async_callback(own_credentials.withdraw)
            transport = ZmqTransport(
                settings.bind,
                settings.advertise,
                keys=own_credentials.keys,
                connection_limits=ConnectionLimits() if settings.joinable else None,
            )
            resources.push_async_callback(transport.close)
            mesh = cls(
                name,
                kind,
                MeshDependencies(
                    state, transport, clock, Random.from_os_entropy(), SystemHost(), owns_state=True
                ),
                job=job,
                settings=settings,
                terms=LeaseTerms(stall_limit_s=settings.stall_s),
                access=AccessRules(CALL_PERMISSIONS, own_credentials),
            )
            state.renew_lease = mesh._lease.renew_now
            if settings.metrics != METRICS_OFF:
                mesh.serve_metrics(settings.metrics)
            resources.pop_all()  # the mesh closes them when it leaves
        return mesh

    @property
    def redis_silent_at(self) -> float:
        """Monotonic time of the last look-up of a process that Redis did not answer."""
        return self._directory.redis_silent_at

    @property
    def token(self) -> int:
        """Fencing token of this process's lease, for writes to Redis."""
        return self._lease.token

    # ------------------------------------------------------------ joining and leaving

    def start(self) -> None:
        """Start the transport and timers, so that this process can make calls without a registry
        name.

        `join` calls it; a process that serves no actor may call it alone. Later calls do nothing.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._deadline_timer.start()
            self._server.start()
            self.transport.start(self._deliver, self._on_peer_lost, self._server.cancel_peer)
            self._housekeeping = asyncio.create_task(self._run_housekeeping(), name="housekeeping")

    async def announce(
        self, interface: type[Interface], stats: Callable[[], dict[str, Any]]
    ) -> None:
        """Acquire the name before `join`, so that the stats of a long start are published.

        Requests wait until `join`. After any error the mesh is closed.

        Args:
            interface: Interface of the actor that will join.
            stats: As for `join`; the process is not `ready` by them.
        """
        try:
            self._server.allow_methods(interface.methods.values())
            self._stats = stats
            self.start()
            await self._lease.acquire(self._make_entry(""))
        except BaseException as error:
            await self._close(error)
            raise

    async def join(
        self,
        actor: Actor | None,
        *,
        stats: Callable[[], dict[str, Any]] = dict,
        bulk_address: str = "",
    ) -> None:
        """Acquire the name, start the actor, then answer requests; requests that arrived earlier
        wait.

        Wait for the end of a predecessor's lease. After any error the mesh is closed.

        Args:
            stats: Returns the counters to publish with each renewal; called on the event loop.
            bulk_address: Address of the process's bulk port; empty: none.

        Raises:
            Refused: Another incarnation renews the name.
        """
        try:
            methods = bind(actor) if actor is not None else {}
            self._server.set_methods(methods)
            self._stats = stats
            self.start()
            await self._lease.acquire(self._make_entry(bulk_address))
            self._actor = actor
            if actor is not None:
                await actor.start()
        except BaseException as error:
            await self._close(error)
            raise
        self._server.open()

    def _make_entry(self, bulk_address: str) -> registry.RegistryEntry:
        pid, start_time = self.host.identity
        return registry.RegistryEntry(
            name=self.name,
            kind=self.kind,
            address=self.transport.address,
            bulk=bulk_address,
            metrics=self._endpoint.address if self._endpoint is not None else "",
            host=self.settings.host,
            pid=pid,
            start_time=start_time,
            incarnation=self.incarnation,
            run_root=self.settings.run_root,
        )

    async def leave(self) -> None:
        """Stop answering, stop the actor, release the name, then close the connections.

        Every step runs, even after an error or a cancellation; the first error is raised. Later
        calls do nothing.
        """
        await self._close(None)

    async def _close(self, first_error: BaseException | None) -> None:
        """Run the closing steps once; raise `first_error` or their first error, log the others."""
        if not self._is_closed:
            self._is_closed = True
            for step in self._list_closing_steps():
                try:
                    await step()
                except BaseException as error:
                    if first_error is None:
                        first_error = error
                    else:
                        self.log.error("leaving", step=step.__qualname__, error=repr(error))
        if first_error is not None:
            raise first_error

    def _list_closing_steps(self) -> Iterator[Callable[[], Awaitable[None]]]:
        """Yield the steps of `leave`; all run, even if an earlier one fails."""
        yield self._server.stop
        yield self._stop_actor
        yield self._lease.release
        yield self._stop_calling
        yield self.transport.close
        if self.credentials is not None:
            yield self.credentials.withdraw
        if self._owns_state:
            yield self.state.close

    async def _stop_actor(self) -> None:
        """Stop the actor within ACTOR_STOP_S seconds."""
        actor, self._actor = self._actor, None
        if actor is not None:
            async with self.clock.timeout(ACTOR_STOP_S, f"stopping {self.name}"):
                await actor.stop()

    async def _stop_calling(self) -> None:
        self._directory.stop()
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        self._caller.stop()
        self._deadline_timer.stop()
        if self._endpoint is not None:
            self._endpoint.close()

    async def publish(self) -> None:
        """Renew the registry entry now with current stats and waits, instead of at the next
        renewal.
        """
        await self._lease.publish()

    def serve_metrics(self, where: str) -> None:
        """Serve metrics and health over HTTP until the process leaves.

        Call it before `join`, which publishes the address. Raises ConfigError if `where` (as
        `mesh.metrics`) has no free port.
        """
        pages = MonitorPages(
            self.name, self.kind, self._lease, self._watchdog, self.telemetry
        ).pages
        self._endpoint = MetricsEndpoint(where, self.settings.advertise, self.host, pages)

    @property
    def running_calls(self) -> int:
        """Number of calls and streams that this process is answering."""
        return self._server.running_count

    def ref(self, name: str) -> ActorRef:
        """Return a reference to the actor with this name; its first call looks the name up."""
        ref = self._references.get(name)
        if ref is None:
            ref = self._references[name] = ActorRef(self._call_context, name)
        return ref

    # ------------------------------------------------------------ what arrives

    def _deliver(self, peer: Peer, frames: list[Frame], role: str) -> None:
        """Pass a message to the server if a peer sent it, or to the caller if it is a reply."""
        try:
            header = unpack_header(frames[0])
            if len(frames) < 2:
                raise BadMessage("a header arrived without a body")
        except BadMessage:
            self.telemetry.count("bad_frames")
            return
        if peer:
            self._server.receive(peer, header, frames, role)
        else:
            self._caller.receive(header, frames)

    async def verify_peer(self, entry: registry.RegistryEntry, *, bulk: bool = False) -> None:
        """Verify that a peer's key belongs to the process of a registry entry.

        With `bulk`, verify the key of its bulk port. Where processes prove only their roles, return
        at once.

        Raises:
            StateUnavailable: Redis, which stores the keys, does not answer.
            HandshakeFailed: The key is another process's; WrongKeys if that lasts.
        """
        await self._peer_verifier.verify(entry, bulk)

    def _on_peer_lost(self, address: str, reached: bool, refused: bool = False) -> None:
        """Forget a peer's address and fail the calls that wait for it."""
        if refused:
            self._peer_verifier.mark_address_suspect(address)
        self._directory.forget_address(address)
        self._caller.fail_peer(address, reached, refused)

    # ------------------------------------------------------------ bookkeeping

    def _snapshot(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the stats and the longest waits, to publish with a renewal."""
        stats = {
            "loop_lag_ms": round(self._watchdog.lag_s * 1000, 1),
            **self.host.measure_usage(),
            "serving": self._server.running_count,
            **self.telemetry.counters,
            **self._read_stats(),
        }
        if self.ready is not None:
            stats["ready"] = self.ready
        return stats, self.waits.list_longest(self._caller.iterate_waits())

    def _read_stats(self) -> dict[str, Any]:
        """Return the actor's stats; empty after an error, which is logged."""
        try:
            return self._stats()
        except Exception:  # a defect in a service's statistics must not end its lease
            self.log.exception("stats")
            self.telemetry.count("stats_failed")
            return {}

    async def _run_housekeeping(self) -> None:
        """Close idle connections, apply revoked keys and fail calls to exited processes, until
        cancelled.
        """
        while True:
            await self.clock.sleep(HOUSEKEEPING_S)
            now = self.clock.monotonic()
            self._caller.close_idle(now - IDLE_CONNECTION_S)
            self.rejections.report(now)
            await self._peer_verifier.apply_revocations(self._lease, self.telemetry)
            awaited_routes = self._caller.list_awaited_routes(now - HOUSEKEEPING_S)
            if not awaited_routes:
                continue
            try:
                dead_routes = await self._directory.find_dead(awaited_routes)
            except MeshError as error:  # this task has other duties, whatever the error
                self.telemetry.count(f"not_looked_up_{error.code}")
                continue
            for route in dead_routes:
                self.transport.disconnect(route.address)
                self._on_peer_lost(route.address, True)

    def require_may_call(self, method: Method[Any]) -> None:
        """Raise NotAllowed if a process of this role may not call `method`."""
        if self._callers is not None and self.kind not in self._callers.get(method.label, ()):
            raise NotAllowed(
                f"a {self.kind} may not call {method.label}",
                where=self.name,
                fix="See common/api/calls/call_permissions.py for the permitted roles",
            )
