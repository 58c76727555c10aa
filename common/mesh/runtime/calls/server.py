"""Server half of a mesh's calls: it runs requests on the actor, answers them, and sends streams
under credits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from meshrl.common.api.calls.call_permissions import CallPermissions
from meshrl.common.api.calls.interface import Call, Cast, Method, Stream
from meshrl.common.base.clock import Clock
from meshrl.common.base.encoding.messages import Frame, decode, encode
from meshrl.common.base.errors import (
    DeadlineExceeded,
    MeshError,
    NotAllowed,
    NotFound,
    Overloaded,
    RemoteFailure,
    StaleIncarnation,
    UnknownMethod,
    to_wire,
)
from meshrl.common.mesh.runtime.calls.actor import BoundMethod
from meshrl.common.mesh.runtime.calls.deadline_timer import (
    NEVER,
    PROBE_INTERVAL_S,
    DeadlineTimer,
)
from meshrl.common.mesh.telemetry.logs import Telemetry
from meshrl.common.mesh.telemetry.tracing import CallScope, adopt_trace, current_call
from meshrl.common.mesh.transport.base import Peer, Transport
from meshrl.common.mesh.wire.frames import (
    CALL,
    CANCEL,
    CAST,
    CREDIT,
    END,
    ERROR,
    ITEM,
    PROBE,
    REPLY,
    check_sizes,
    pack_error,
    pack_header,
)

_REQUEST_KINDS = (CALL, CAST)
NO_ROLES: frozenset[str] = frozenset()
# Running calls and streams; more are rejected, so that memory stays bounded.
MAX_RUNNING = 10_000
# Of these, per requester: 16 times the calls of a correct one (`CREDITS`), plus streams. So no
# requester blocks the others.
MAX_RUNNING_PER_PEER = 4_096
MAX_EARLY_REQUESTS = 1_000  # requests that may wait while an actor starts
STOP_TIMEOUT_S = 2.0  # seconds for running calls when a process leaves
MAX_UNANSWERED_PROBES = 12
# Per sender, to reject repetitions: 16 times the calls that its credits allow.
REMEMBERED_IDS = 4096
REMEMBERED_SENDERS = 1024
NEVER_YET = float("-inf")
REJECTION_LOG_INTERVAL_S = 30.0  # seconds between two log lines about rejections


@dataclass(slots=True, eq=False)
class _RunningCall(CallScope):
    """Call or stream that has a task."""

    key: tuple[Peer, int]
    label: str
    due_at: float  # when the deadline timer checks it
    task: asyncio.Task[None] | None = None
    error: MeshError | None = None  # error to report when the runtime ends it
    sent_count: int = 0  # this and the following: streams only
    granted_count: int = 0
    unanswered_probes: int = 0
    wake: asyncio.Future[None] | None = None

    def cancel(self, error: MeshError | None) -> None:
        self.error = error
        if self.task is not None:
            self.task.cancel()


class RequestServer:
    """Server of the requests to one process's actor."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        transport: Transport,
        incarnation: str,
        telemetry: Telemetry,
        sweep: DeadlineTimer,
        callers: CallPermissions | None = None,
    ) -> None:
        self._callers = callers
        self._allowed_roles: dict[
            str, frozenset[str]
        ] = {}  # roles that may call a method, by its name
        self._rejection_logged_at = NEVER_YET
        self._name, self._clock = name, clock
        self._transport, self._incarnation = transport, incarnation
        self._telemetry, self._deadline_timer = telemetry, sweep
        self._methods: dict[str, BoundMethod] = {}
        self._is_open = False
        # requests that arrived while the actor starts
        self._early_requests: list[tuple[Peer, tuple[Any, ...], list[Frame], str]] = []
        self._running: dict[tuple[Peer, int], _RunningCall] = {}
        self._calls_per_owner: dict[str | Peer, int] = {}  # running calls by requester
        self._seen_ids: dict[str, _SeenIds] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        sweep.add_callback(self._expire)

    @property
    def running_count(self) -> int:
        """Number of running requests."""
        return len(self._running)

    def start(self) -> None:
        """Bind the server to the running loop."""
        self._loop = asyncio.get_running_loop()

    def set_methods(self, methods: dict[str, BoundMethod]) -> None:
        """Accept requests for these methods from permitted roles; they wait until `open`."""
        self._methods = methods
        self.allow_methods(entry.method for entry in methods.values())

    def allow_methods(self, methods: Iterable[Method[Any]]) -> None:
        """Let permitted roles' requests for these methods wait."""
        for method in methods:
            self._allowed_roles[method.name] = (self._callers or {}).get(method.label, NO_ROLES)

    def open(self) -> None:
        """Run requests from now on, beginning with those that have waited."""
        self._is_open = True
        early, self._early_requests = self._early_requests, []
        for peer, header, frames, role in early:
            self.receive(peer, header, frames, role)

    def receive(self, peer: Peer, header: tuple[Any, ...], frames: list[Frame], role: str) -> None:
        """Receive a frame of a requester with this role; run its method, or answer with the error.

        A requester without permission receives only that error, whatever else is wrong.
        """
        kind, call_id = header[1], header[2]
        if kind in _REQUEST_KINDS:
            try:
                self._request(peer, header, frames, role)
            except MeshError as error:
                self._telemetry.count(f"refused_{error.code}")
                if kind == CALL:
                    self._send_error(peer, call_id, header[5], error, ran=False)
            return
        running = self._running.get((peer, call_id))
        if kind == PROBE:
            if running is None and not self._is_early(peer, call_id):
                self._send_control(PROBE, peer, call_id, header[5])
        elif running is None:
            self._telemetry.count("late_frames")
            if kind == CANCEL and self._early_requests:
                self._early_requests = [
                    e for e in self._early_requests if (e[0], e[1][2]) != (peer, call_id)
                ]
        elif kind == CANCEL:
            running.cancel(None)
        elif kind == CREDIT:
            running.granted_count = max(running.granted_count, header[7])
            running.unanswered_probes = 0
            if running.wake is not None and not running.wake.done():
                running.wake.set_result(None)
        else:
            self._telemetry.count("bad_frames")

    def _request(self, peer: Peer, header: tuple[Any, ...], frames: list[Frame], role: str) -> None:
        _, kind, call_id, actor, name, sender, target, number, trace = header
        if self._callers is not None and self._allowed_roles.get(name, NO_ROLES).isdisjoint(
            role.split()
        ):
            self._log_rejection(role, actor, name)
            raise NotAllowed("not allowed")
        if not self._is_open and target == self._incarnation:
            if len(self._early_requests) >= MAX_EARLY_REQUESTS:
                raise Overloaded(
                    f"{self._name} is starting, and {MAX_EARLY_REQUESTS} requests already wait "
                    "for it"
                )
            self._early_requests.append((peer, header, frames, role))
            return
        if target != self._incarnation:
            raise StaleIncarnation(f"{self._name} has restarted, or took over this address")
        if actor != self._name:
            raise NotFound(f"the process of {self._name} has no actor {actor!r:.80}")
        entry = self._methods.get(name)
        if entry is None or (kind == CAST) != isinstance(entry.method, Cast):
            raise UnknownMethod(f"{self._name} has no method {name!r:.80} of that kind")
        if len(frames) > 2:
            check_sizes(frames)
        request = decode(entry.method.request, frames[1], frames[2:])
        known_ids = self._seen_ids.get(sender)
        if known_ids is None:
            if len(self._seen_ids) >= REMEMBERED_SENDERS:
                del self._seen_ids[next(iter(self._seen_ids))]
            known_ids = self._seen_ids[sender] = _SeenIds()
        if known_ids.is_repeated(call_id):
            self._telemetry.count("repeated_requests")
            return
        adopt_trace(trace)
        if entry.is_async or isinstance(entry.method, Stream):
            self._spawn(peer, call_id, sender, entry, request, number)
            return
        current_call.set(None)
        try:
            reply = entry.run(request)
            if kind == CALL:
                self._answer(peer, call_id, sender, entry, reply)
        except Exception as error:
            self._report_exception(peer, call_id, sender, entry, error, kind == CALL)

    def _is_early(self, peer: Peer, call_id: int) -> bool:
        return any((early[0], early[1][2]) == (peer, call_id) for early in self._early_requests)

    def _log_rejection(self, role: str, actor: str, name: str) -> None:
        now = self._clock.monotonic()
        if now - self._rejection_logged_at >= REJECTION_LOG_INTERVAL_S:
            self._rejection_logged_at = now
            self._telemetry.log.warning(
                "a call was rejected", role=role, actor=actor[:80], method=name[:80]
            )

    def _spawn(
        self,
        peer: Peer,
        call_id: int,
        sender: str,
        entry: BoundMethod,
        request: Any,
        remaining_ms: int,
    ) -> None:
        assert self._loop is not None
        if len(self._running) >= MAX_RUNNING:
            raise Overloaded(f"{self._name} has {MAX_RUNNING} calls in progress")
        owner = self._transport.find_owner(peer)
        if (others := self._calls_per_owner.get(owner, 0)) >= MAX_RUNNING_PER_PEER:
            raise Overloaded(
                f"{self._name} has {MAX_RUNNING_PER_PEER} calls of this process in progress"
            )
        now = self._clock.monotonic()
        deadline = now + remaining_ms / 1000 if remaining_ms > 0 else NEVER
        due = now + PROBE_INTERVAL_S if isinstance(entry.method, Stream) else deadline
        running = _RunningCall(deadline, sender, owner, (peer, call_id), entry.method.label, due)
        current_call.set(running)
        if running.due_at < NEVER:
            self._deadline_timer.schedule(running.due_at)
        self._running[running.key] = running
        self._calls_per_owner[owner] = others + 1
        work = self._run(running, entry, request)
        running.task = self._loop.create_task(work, name=entry.method.label)
        # not in the coroutine, which never runs if it is cancelled before its first step
        running.task.add_done_callback(lambda _: self._forget_call(running))

    def _forget_call(self, running: _RunningCall) -> None:
        running.is_finished = True
        if self._running.get(running.key) is running:
            del self._running[running.key]
        if self._calls_per_owner[running.owner] > 1:
            self._calls_per_owner[running.owner] -= 1
        else:
            del self._calls_per_owner[running.owner]

    async def _run(self, running: _RunningCall, entry: BoundMethod, request: Any) -> None:
        peer, call_id = running.key
        replies = not isinstance(entry.method, Cast)
        try:
            if isinstance(entry.method, Stream):
                await self._run_stream(running, entry, entry.method, request)
            else:
                reply = await entry.run(request)
                if replies:
                    self._answer(peer, call_id, running.sender, entry, reply)
        except asyncio.CancelledError:
            if replies and running.error is not None:
                self._send_error(peer, call_id, running.sender, running.error)
        except Exception as error:
            self._report_exception(peer, call_id, running.sender, entry, error, replies)

    async def _run_stream(
        self, running: _RunningCall, entry: BoundMethod, method: Stream[Any, Any], request: Any
    ) -> None:
        peer, call_id = running.key
        async with aclosing(entry.run(request)) as items:
            async for item in items:
                body, buffers = self._encode_reply(item, method.reply, entry)
                while running.sent_count >= running.granted_count + method.credits:
                    running.wake = asyncio.get_running_loop().create_future()
                    await running.wake
                header = self._header(ITEM, call_id, running.sender, running.sent_count)
                running.sent_count += 1
                self._transport.reply(peer, (header, body, *buffers))
        end = self._header(END, call_id, running.sender, running.sent_count)
        self._transport.reply(peer, (end, b"\xc0"))

    # ------------------------------------------------------------ answers

    def _encode_reply(
        self, reply: Any, kind: type, entry: BoundMethod
    ) -> tuple[bytes, list[memoryview]]:
        if type(reply) is not kind:
            raise RemoteFailure(
                f"{entry.method.label} returned a {type(reply).__name__}, not a {kind.__name__}"
            )
        body, buffers = encode(reply)
        if buffers or len(body) > 65_536:
            check_sizes((b"", body, *buffers))
        return body, buffers

    def _answer(
        self, peer: Peer, call_id: int, sender: str, entry: BoundMethod, reply: Any
    ) -> None:
        assert isinstance(entry.method, Call)
        body, buffers = self._encode_reply(reply, entry.method.reply, entry)
        self._transport.reply(peer, (self._header(REPLY, call_id, sender), body, *buffers))

    def _report_exception(
        self,
        peer: Peer,
        call_id: int,
        sender: str,
        entry: BoundMethod,
        error: Exception,
        replies: bool,
    ) -> None:
        self._telemetry.count("failed_requests")
        if not isinstance(error, MeshError):  # a defect of ours: its stack belongs in the log
            self._telemetry.log.error("a method raised", method=entry.method.label, exc_info=error)
        if replies:
            self._send_error(peer, call_id, sender, error)

    def _send_error(
        self, peer: Peer, call_id: int, sender: str, error: Exception, ran: bool = True
    ) -> None:
        header = self._header(ERROR, call_id, sender, 0 if ran else 1)
        try:
            self._transport.reply(peer, (header, pack_error(*to_wire(error))))
        except MeshError:
            self._telemetry.count("replies_dropped")

    def _header(self, kind: int, call_id: int, sender: str, number: int = 0) -> bytes:
        return pack_header(kind, call_id, "", "", self._incarnation, sender, number)

    # ------------------------------------------------------------ ends

    def cancel_revoked(self, holders: Callable[[str], Sequence[str]]) -> None:
        """Cancel the calls of processes whose keys have no holders any more."""
        for running in list(self._running.values()):
            if isinstance(running.owner, str) and not holders(running.owner):
                running.cancel(NotAllowed("not allowed"))

    def cancel_peer(self, peer: Peer) -> None:
        """Cancel the calls of a requester that has gone."""
        for running in [r for r in self._running.values() if r.key[0] == peer]:
            running.cancel(None)

    def _expire(self, now: float) -> float:
        soonest = NEVER
        for running in list(self._running.values()):
            if running.due_at <= now:
                if running.deadline <= now:
                    running.due_at = NEVER
                    running.cancel(
                        DeadlineExceeded(f"{running.label} ran past its deadline", where=self._name)
                    )
                    continue
                self._probe(running, now)
            soonest = min(soonest, running.due_at)
        return soonest

    def _probe(self, running: _RunningCall, now: float) -> None:
        running.due_at = now + PROBE_INTERVAL_S
        running.unanswered_probes += 1
        if running.unanswered_probes > MAX_UNANSWERED_PROBES:
            running.cancel(None)
            return
        self._send_control(CREDIT, *running.key, running.sender, running.sent_count)

    def _send_control(
        self, kind: int, peer: Peer, call_id: int, sender: str, number: int = 0
    ) -> None:
        try:
            header = self._header(kind, call_id, sender, number)
            self._transport.reply(peer, (header, b"\xc0"))
        except MeshError:
            self._telemetry.count("control_dropped")

    async def stop(self) -> None:
        """Cancel running calls; callers see the loss of this process when the connection closes."""
        tasks = [r.task for r in self._running.values() if r.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)


class _SeenIds:
    """Received call ids of one sender, for at-most-once calls over a network that repeats."""

    __slots__ = ("_floor", "_ids")

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._floor = 0

    def is_repeated(self, call_id: int) -> bool:
        """Return True if `call_id` was received before or is too old to tell; remember it."""
        if call_id in self._ids or call_id < self._floor:
            return True
        self._ids.add(call_id)
        if len(self._ids) > 2 * REMEMBERED_IDS:
            ids = sorted(self._ids)
            self._floor = ids[REMEMBERED_IDS]
            self._ids = set(ids[REMEMBERED_IDS:])
        return False
