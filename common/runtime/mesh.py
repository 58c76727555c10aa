"""A process's membership of the mesh: its name, its calls to others, and their calls to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any, TypeVar

from common.api.callers import CALLERS, ROLES, Callers
from common.clock import Clock, SystemClock
from common.errors import (
    BadMessage,
    ConfigError,
    DeadlineExceeded,
    MeshError,
    NotAllowed,
    PeerLost,
    StaleIncarnation,
    StateUnavailable,
    WrongKeys,
)
from common.process.host import Host, SystemHost
from common.process.running import run
from common.random import Random
from common.runtime.actor import Actor, bind
from common.runtime.calling import Caller, Outstanding
from common.runtime.directory import FIRST_RETRY_S, LONGEST_RETRY_S, Directory
from common.runtime.interface import Call, Cast, Method, Stream
from common.runtime.lease import Lease
from common.runtime.patience import WAITS
from common.runtime.serving import Server
from common.runtime.sweep import Sweep
from common.runtime.waits import WaitTable
from common.settings import OFF, MeshSettings
from common.state import registry
from common.state.client import State
from common.telemetry.endpoint import MetricsEndpoint
from common.telemetry.logs import Telemetry, log_to_stderr
from common.telemetry.monitor import Monitor
from common.telemetry.tracing import Tracer, scope
from common.telemetry.watchdog import Watchdog
from common.transport.base import Peer, Transport
from common.transport.keys import MeshKeys
from common.transport.zmq import ZmqTransport
from common.wire.frames import Frame, decode, encode, unpack_header

Q = TypeVar("Q")
R = TypeVar("R")

CAST_S = 0.5  # a cast is a hint: it does not wait long for somebody to hint to
STOP_S = 2.0  # for what runs when a process leaves
ACTOR_STOP_S = 10.0
HOUSEKEEPING_S = 2.0
REFUSED_EVERY_S = 30.0  # between two lines of the log on strangers, however many there are
IDLE_CONNECTION_S = 120.0

__all__ = ["Mesh", "MeshSettings", "Ref", "run"]


class Mesh:
    """One per process (a simulation holds many). `token` is the fencing token of the process's
    registry lease. Whoever made `state` closes it, unless the mesh `owns_state`. With `callers`
    a process asks, and is asked, only what the table allows by role; its own role is its `kind`.
    """

    def __init__(
        self,
        *,
        name: str,
        kind: str,
        state: State,
        owns_state: bool = False,
        transport: Transport,
        clock: Clock,
        random: Random,
        host: Host,
        ttl_s: float = 6.0,
        renew_s: float = 1.5,
        stall_s: float = 30.0,
        settings: MeshSettings | None = None,
        callers: Callers | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self.name, self.kind = name, kind
        self.state, self.transport, self.clock, self.random, self.host = (
            state,
            transport,
            clock,
            random,
            host,
        )
        self.settings = settings or MeshSettings(redis_url=state.url, run_root="", host="")
        self.incarnation = random.token(8)
        self.ready: bool | None = None  # published with the stats once it is set
        self.telemetry = Telemetry(name)
        self.waits = WaitTable(clock)
        WAITS.set(self.waits)
        self._directory = Directory(state, clock, self.waits)
        self._watchdog = Watchdog(clock, stall_s)
        self._sweep = Sweep(clock.monotonic)
        self._caller = Caller(
            clock,
            transport,
            self.incarnation,
            Tracer(random.child("trace")),
            self.telemetry,
            self._sweep,
        )
        self._callers = callers
        self._server = Server(
            name, clock, transport, self.incarnation, self.telemetry, self._sweep, callers
        )
        self._lease = Lease(
            state,
            host,
            clock,
            self._watchdog,
            self.telemetry,
            ttl_s=ttl_s,
            renew_s=renew_s,
            snapshot=self._snapshot,
            on_lost=on_lost,
        )
        self._stats: Callable[[], dict[str, Any]] = dict
        self._refs: dict[str, Ref] = {}
        self._actor: Actor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._housekeeping: asyncio.Task[None] | None = None
        self._owns_state = owns_state
        self._left = False
        self._strangers: dict[str, int] = {}  # connections that were turned away, as last logged
        self._strangers_logged = -REFUSED_EVERY_S
        self._endpoint: MetricsEndpoint | None = None

    @classmethod
    async def open(cls, name: str, kind: str, settings: MeshSettings) -> Mesh:
        """The mesh of a real process: sockets, Redis, the machine's clock, threads. ConfigError:
        without a secret, or as of no role that there is.
        """
        if not settings.secret:
            raise ConfigError(
                "the settings hold no secret, by which processes of a mesh know each other",
                where="settings.json",
                fix="Start the mesh anew with `meshrl up` or `meshrl run`, which makes one",
            )
        keys = MeshKeys(settings.secret, kind, ROLES)
        log_to_stderr(name)
        async with AsyncExitStack() as opened:
            state = await State.open(settings.redis_url)
            opened.push_async_callback(state.close)
            transport = ZmqTransport(settings.bind, settings.advertise, keys=keys)
            opened.push_async_callback(transport.close)
            mesh = cls(
                name=name,
                kind=kind,
                state=state,
                owns_state=True,
                transport=transport,
                clock=SystemClock(),
                random=Random.system(),
                host=SystemHost(),
                stall_s=settings.stall_s,
                settings=settings,
                callers=CALLERS,
            )
            state.renewed = mesh._lease.renewed
            if settings.metrics != OFF:
                mesh.show_metrics(settings.metrics)
            opened.pop_all()  # the mesh closes them when it leaves
        return mesh

    @property
    def log(self) -> Any:
        """This process's log: `mesh.log.warning("what", key=value)`."""
        return self.telemetry.log

    @property
    def token(self) -> int:
        """The fencing token of this process's lease."""
        return self._lease.token

    # ------------------------------------------------------------ joining and leaving

    def start(self) -> None:
        """Opens the mesh for asking, without a name of its own. `join` does it too."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._sweep.start()
            self._server.start()
            self.transport.start(self._deliver, self._lost, self._server.gone)
            self._housekeeping = asyncio.create_task(self._keep_house(), name="housekeeping")

    async def join(
        self,
        actor: Actor | None,
        *,
        stats: Callable[[], dict[str, Any]] = dict,
        bulk_address: str = "",
    ) -> None:
        """Takes the name, starts the actor, then lets requests in: those that came meanwhile wait.

        Waits out a predecessor's lease; Refused if another incarnation keeps the name. `stats` runs
        on the loop.
        """
        try:
            methods = bind(actor) if actor is not None else {}
            self._server.expect(methods)
            self._stats = stats
            self.start()
            await self._lease.take(self._entry(bulk_address))
            self._actor = actor
            if actor is not None:
                await actor.start()
        except BaseException as error:
            await self._close(error)
            raise
        self._server.offer()

    def _entry(self, bulk_address: str) -> registry.Entry:
        pid, start_time = self.host.identity
        return registry.Entry(
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
        """Ends what runs, stops the actor, gives the name back, then closes the connections. It
        does all of it, whatever fails on the way or if it is cancelled; the first error is raised.
        """
        await self._close(None)

    async def _close(self, first: BaseException | None) -> None:
        """Raises `first`, or else the first error of closing; what else fails is logged."""
        if not self._left:
            self._left = True
            for step in self._closing():
                try:
                    await step()
                except BaseException as error:
                    if first is None:
                        first = error
                    else:
                        self.log.error("leaving", step=step.__qualname__, error=repr(error))
        if first is not None:
            raise first

    def _closing(self) -> Iterator[Callable[[], Awaitable[None]]]:
        """What `leave` does, step by step: none is left out because one before it failed."""
        yield self._stop_serving
        yield self._stop_actor
        yield self._lease.give_back
        yield self._stop_asking
        yield self.transport.close
        if self._endpoint is not None:
            yield self._close_endpoint
        if self._owns_state:
            yield self.state.close

    async def _stop_serving(self) -> None:
        await self._server.stop(STOP_S)

    async def _stop_actor(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            async with self.clock.timeout(ACTOR_STOP_S, f"stopping {self.name}"):
                await actor.stop()

    async def _stop_asking(self) -> None:
        self._directory.stop()
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        self._caller.stop()
        self._sweep.stop()

    async def _close_endpoint(self) -> None:
        assert self._endpoint is not None
        self._endpoint.close()

    async def publish(self) -> None:
        """Publishes stats and waits now instead of with the next renewal."""
        await self._lease.publish()

    def show_metrics(self, where: str) -> None:
        """Serves metrics and health by HTTP, from now until it leaves; before `join`, which
        publishes the address. ConfigError when `where` (as `mesh.metrics`) has no free port.
        """
        pages = Monitor(self.name, self.kind, self._lease, self._watchdog, self.telemetry).pages
        self._endpoint = MetricsEndpoint(where, self.settings.advertise, self.host, pages)

    @property
    def serving(self) -> int:
        """The number of calls and streams under way here."""
        return self._server.running

    def loading(self) -> AbstractContextManager[None]:
        """Within this block the loop may stand still for 300 s: large files are read, code is
        compiled.
        """
        return self._watchdog.loading()

    def wait(self, what: str, on: str) -> AbstractContextManager[None]:
        """Records that this process waits for `on`: an actor, "redis", "group:12". Published with
        every renewal.
        """
        return self.waits.wait(what, on)

    def ref(self, name: str) -> Ref:
        """The actor of this name, to be asked; it is looked up at the first call."""
        ref = self._refs.get(name)
        if ref is None:
            ref = self._refs[name] = Ref(self, name)
        return ref

    # ------------------------------------------------------------ what arrives

    def _deliver(self, peer: Peer, frames: list[Frame], role: str) -> None:
        try:
            header = unpack_header(frames[0])
            if len(frames) < 2:
                raise BadMessage("a header without a body")
        except BadMessage:
            self.telemetry.count("bad_frames")
            return
        if peer:
            self._server.accept(peer, header, frames, role)
        else:
            self._caller.accept(header, frames)

    def _lost(self, address: str, reached: bool, refused: bool = False) -> None:
        self._directory.forget_address(address)
        self._caller.lost(address, reached, refused)

    # ------------------------------------------------------------ bookkeeping

    def _snapshot(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        stats = {
            "loop_lag_ms": round(self._watchdog.lag_s * 1000, 1),
            **self.host.usage(),
            "serving": self._server.running,
            **self.telemetry.snapshot(),
            **self._own_stats(),
        }
        if self.ready is not None:
            stats["ready"] = self.ready
        return stats, self.waits.published(self._caller.waits())

    def _own_stats(self) -> dict[str, Any]:
        try:
            return self._stats()
        except Exception:  # a service's defect in a figure must not cost it its lease
            self.log.exception("stats")
            self.telemetry.count("stats_failed")
            return {}

    async def _keep_house(self) -> None:
        while True:
            await self.clock.sleep(HOUSEKEEPING_S)
            now = self.clock.monotonic()
            self._caller.forget_idle(now - IDLE_CONNECTION_S)
            self._count_strangers(now)
            waited_for = self._caller.waited_for(now - HOUSEKEEPING_S)
            if not waited_for:
                continue
            try:
                dead = await self._directory.dead(waited_for)
            except StateUnavailable:
                continue
            for route in dead:
                self.transport.forget(route.address)
                self._lost(route.address, True)

    def _count_strangers(self, now: float) -> None:
        turned_away = dict(self.transport.refused)
        if turned_away == self._strangers or now - self._strangers_logged < REFUSED_EVERY_S:
            return
        new = {why: n - self._strangers.get(why, 0) for why, n in turned_away.items()}
        for why, number in new.items():
            self.telemetry.count(f"refused_{why}", number)
        self.log.warning("connections were turned away", **new)
        self._strangers, self._strangers_logged = turned_away, now

    def check_may_ask(self, method: Method[Any]) -> None:
        """NotAllowed: a process of this role may not call `method`, whoever would be asked."""
        if self._callers is not None and self.kind not in self._callers.get(method.label, ()):
            raise NotAllowed(
                f"a {self.kind} may not call {method.label}",
                where=self.name,
                fix="common/api/callers.py says who may",
            )


class Ref:
    """A reference to an actor by its name, wherever it runs at the moment."""

    __slots__ = ("_mesh", "name")

    def __init__(self, mesh: Mesh, name: str) -> None:
        self._mesh = mesh
        self.name = name

    async def call(self, method: Call[Q, R], request: Q, *, deadline_s: float | None = None) -> R:
        """The reply, or the error that the actor raised.

        Within the deadline (the method's own, and that of the call being served) it waits for a
        free credit, looks for an actor that is starting again, and repeats what surely did not run;
        what may have run is repeated only if `idempotent`.
        """
        mesh = self._mesh
        mesh.check_may_ask(method)
        mesh.start()
        now = mesh.clock.monotonic()
        deadline = now + (method.deadline_s if deadline_s is None else deadline_s)
        serving = scope.get()
        if serving is not None and not serving.over and serving.deadline < deadline:
            deadline = serving.deadline
        body, buffers = encode(request)
        pause = FIRST_RETRY_S
        while True:
            route = mesh._directory.known(self.name) or await mesh._directory.find(
                self.name, deadline
            )
            row = mesh._caller.ask(route, method, body, buffers, now, deadline)
            try:
                frames: Sequence[Frame] = await row.future
            except asyncio.CancelledError:
                mesh._caller.cancel(row)
                raise
            except DeadlineExceeded:
                mesh._directory.forget(route)
                raise
            except (PeerLost, StaleIncarnation, NotAllowed) as error:
                # NotAllowed: we may call that, so another process has the address by now
                if (
                    not _may_repeat(row, method, error)
                    or mesh.clock.monotonic() + pause >= deadline
                ):
                    raise
                mesh._directory.forget(route)
                mesh.telemetry.count(f"repeated_{error.code}")
            else:
                return decode(method.reply, frames[1], frames[2:])
            await mesh.clock.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_S)
            now = mesh.clock.monotonic()

    async def stream(self, method: Stream[Q, R], request: Q) -> AsyncGenerator[R, None]:
        """The replies as they come; closing the iterator cancels across the wire; PeerLost when the
        peer ends early.
        """
        mesh = self._mesh
        mesh.check_may_ask(method)
        mesh.start()
        body, buffers = encode(request)
        deadline = mesh.clock.monotonic() + method.idle_s
        pause = FIRST_RETRY_S
        while True:
            route = mesh._directory.known(self.name) or await mesh._directory.find(
                self.name, deadline
            )
            incoming = mesh._caller.open(route, method, body, buffers)
            try:
                async for item in incoming:
                    yield item
                return
            except (PeerLost, StaleIncarnation, NotAllowed) as error:
                settled = incoming.ran or isinstance(error, WrongKeys)
                if settled or mesh.clock.monotonic() + pause >= deadline:
                    raise
                mesh._directory.forget(route)
            finally:
                incoming.close()
            await mesh.clock.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_S)

    async def cast(self, method: Cast[Q], request: Q) -> None:
        """Sends the message if the actor is there; otherwise it is dropped and counted."""
        mesh = self._mesh
        mesh.check_may_ask(method)
        mesh.start()
        body, buffers = encode(request)
        try:
            route = mesh._directory.known(self.name) or await mesh._directory.find(
                self.name, mesh.clock.monotonic() + CAST_S
            )
            mesh._caller.cast(route, method, body, buffers)
        except MeshError as error:
            mesh.telemetry.count(f"casts_dropped_{error.code}")


def _may_repeat(row: Outstanding, method: Call[Any, Any], error: MeshError) -> bool:
    if isinstance(error, WrongKeys):
        return False
    if (
        row.answered
    ):  # the actor's own trouble with a third process; or the runtime's answer that nothing ran
        return not row.ran
    return method.idempotent or not row.ran
