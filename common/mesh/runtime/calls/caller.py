"""Client half of a mesh's calls: calls and streams in progress, credits, deadlines and
cancellation.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from meshrl.common.api.calls.interface import Call, Method, Stream
from meshrl.common.base.clock import Clock
from meshrl.common.base.encoding.messages import Frame
from meshrl.common.base.errors import (
    DeadlineExceeded,
    HandshakeFailed,
    MeshError,
    PeerLost,
    WrongKeys,
)
from meshrl.common.mesh.runtime.calls.deadline_timer import (
    NEVER,
    PROBE_INTERVAL_S,
    DeadlineTimer,
)
from meshrl.common.mesh.runtime.calls.directory import Route
from meshrl.common.mesh.runtime.calls.pending_calls import (
    IncomingStream,
    PeerCalls,
    PendingCall,
    decode_reported_error,
    make_peer_lost,
)
from meshrl.common.mesh.telemetry.logs import Telemetry
from meshrl.common.mesh.telemetry.tracing import Tracer
from meshrl.common.mesh.transport.address import format_key, parse_endpoint, parse_key
from meshrl.common.mesh.transport.base import Transport
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
    pack_header,
)

R = TypeVar("R")
_ANSWER_KINDS = (REPLY, ERROR)
# Calls in progress per peer: a quarter of the high-water mark, so that no reply is parked for
# long.
CREDITS_PER_PEER = 256
LONG_CALL_S = 10.0  # a longer call is probed, if it is idempotent
# Seconds without a frame until a producer counts as lost: it probes its consumer every 5 s.
STREAM_SILENCE_S = 30.0
# The registry lists a process for the 6 s of a lease after its key or host was revoked, or another
# process took its port; after that the keys are wrong.
WRONG_KEYS_AFTER_S = 10.0
MAX_REMEMBERED_REJECTIONS = 1024


class Caller:
    """Sender of one process's calls and streams, which matches answers with them."""

    def __init__(
        self,
        clock: Clock,
        transport: Transport,
        incarnation: str,
        tracer: Tracer,
        telemetry: Telemetry,
        sweep: DeadlineTimer,
        redis_silent_at: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """Create a caller. `redis_silent_at` returns when Redis, which stores the keys, last did
        not answer.
        """
        self._clock, self._redis_silent_at = clock, redis_silent_at
        self._transport, self._incarnation = transport, incarnation
        self._tracer, self._telemetry, self._deadline_timer = tracer, telemetry, sweep
        self._peers: dict[str, PeerCalls] = {}
        self._calls: dict[int, PendingCall] = {}
        self._streams: dict[int, IncomingStream[Any]] = {}
        self._last_id = 0
        self._rejected_since: dict[str, float] = {}  # by incarnation, until an answer
        sweep.add_callback(self._expire)

    # ------------------------------------------------------------ calls

    def call(
        self,
        route: Route,
        method: Call[Any, Any],
        body: Frame,
        buffers: Sequence[Frame],
        now: float,
        deadline: float,
    ) -> PendingCall:
        """Send the call, or queue it until a credit is free.

        The call's future returns the reply's frames.
        """
        link = self._peers.get(route.address)
        if link is None:
            link = self._peers[route.address] = PeerCalls(route.address, now)
        self._last_id = call_id = self._last_id + 1
        future = asyncio.get_running_loop().create_future()
        frames = [b"", body, *buffers]
        row = PendingCall(call_id, route, method, frames, future, link, now, deadline)
        if buffers:
            check_sizes(frames)
        self._calls[call_id] = row
        self._deadline_timer.schedule(deadline)
        if link.in_flight < CREDITS_PER_PEER:
            self._send(row, now)
        else:
            link.queue.append(row)
        return row

    def _send(self, row: PendingCall, now: float) -> None:
        link = row.peer
        row.is_sent = True
        link.in_flight += 1
        link.last_used_at = now
        if row.method.idempotent and row.deadline - now > LONG_CALL_S:
            row.probe_at = now + PROBE_INTERVAL_S
            self._deadline_timer.schedule(row.probe_at)
        remaining_ms = max(int((row.deadline - now) * 1000), 1)
        row.frames[0] = self._pack_call_header(
            CALL, row.call_id, row.route, row.method, remaining_ms
        )
        try:
            self._transport.send(link.address, row.frames)
        except MeshError as error:
            self._remove_call(row.call_id)
            row.fail(error)

    def _pack_call_header(
        self, kind: int, call_id: int, route: Route, method: Method[Any], remaining_ms: int = 0
    ) -> bytes:
        return pack_header(
            kind,
            call_id,
            route.actor,
            method.name,
            self._incarnation,
            route.incarnation,
            remaining_ms,
            self._tracer.make_traceparent(call_id),
        )

    def _remove_call(self, call_id: int) -> PendingCall | None:
        """Remove a row from the table and pass its credit on."""
        row = self._calls.pop(call_id, None)
        if row is None:
            return None
        row.frames = []
        link = row.peer
        if row.is_sent:
            link.in_flight -= 1
        while link.queue and link.in_flight < CREDITS_PER_PEER:
            waiting = link.queue.popleft()
            if waiting.call_id in self._calls:
                self._send(waiting, self._clock.monotonic())
        return row

    def cancel(self, row: PendingCall) -> None:
        """Notify the callee that the caller no longer waits, so that it can stop."""
        if self._remove_call(row.call_id) is not None and row.is_sent:
            self._send_control(CANCEL, row.peer.address, row.call_id, row.route)

    def cast(
        self, route: Route, method: Method[Any], body: Frame, buffers: Sequence[Frame]
    ) -> None:
        """Send a message without an answer; its arrival remains unknown."""
        self._last_id = call_id = self._last_id + 1
        link = self._peers.get(route.address)
        if link is not None:
            link.last_used_at = self._clock.monotonic()
        header = self._pack_call_header(CAST, call_id, route, method)
        frames = [header, body, *buffers]
        check_sizes(frames)
        self._transport.send(route.address, frames)

    def _send_control(
        self, kind: int, address: str, call_id: int, route: Route, number: int = 0
    ) -> None:
        header = pack_header(
            kind, call_id, route.actor, "", self._incarnation, route.incarnation, number
        )
        try:
            self._transport.send(address, (header, b"\xc0"))
        except MeshError:
            self._telemetry.count("control_dropped")

    # ------------------------------------------------------------ streams

    def open_stream(
        self, route: Route, method: Stream[Any, R], body: Frame, buffers: Sequence[Frame]
    ) -> IncomingStream[R]:
        """Open a stream and return its reading end at once.

        Raises BadMessage if the request is too large, and Overloaded if too much is parked for that
        process.
        """
        self._last_id = call_id = self._last_id + 1
        now = self._clock.monotonic()
        incoming: IncomingStream[R] = IncomingStream(self, call_id, route, method, now)
        header = self._pack_call_header(CALL, call_id, route, method)
        frames = [header, body, *buffers]
        check_sizes(frames)
        self._streams[call_id] = incoming
        if route.address not in self._peers:
            self._peers[route.address] = PeerCalls(route.address, now)
        self._transport.send(route.address, frames)
        return incoming

    def grant_credits(self, incoming: IncomingStream[Any], taken: int) -> None:
        """Report to the producer that `taken` items were read."""
        self._send_control(CREDIT, incoming.route.address, incoming.call_id, incoming.route, taken)

    def cancel_stream(self, incoming: IncomingStream[Any]) -> None:
        """Cancel the producer of a stream that is still open."""
        if self._streams.pop(incoming.call_id, None) is not None:
            self._send_control(CANCEL, incoming.route.address, incoming.call_id, incoming.route)

    def begin_wait(self, incoming: IncomingStream[Any]) -> float:
        """Record that the reader waits from now on, and return the time of its deadline."""
        incoming.wait_started_at = self._clock.monotonic()
        deadline = incoming.wait_started_at + incoming.method.idle_s
        self._deadline_timer.schedule(min(deadline, incoming.wait_started_at + STREAM_SILENCE_S))
        return deadline

    # ------------------------------------------------------------ what arrives

    def receive(self, header: tuple[Any, ...], frames: list[Frame]) -> None:
        """Receive a frame of an answer. Late and repeated frames are counted and dropped."""
        kind, call_id = header[1], header[2]
        if header[6] != self._incarnation:
            self._telemetry.count("frames_for_another_incarnation")
            return
        if self._rejected_since:
            self._rejected_since.pop(header[5], None)
        incoming = self._streams.get(call_id)
        if incoming is not None:
            self._receive_stream_frame(incoming, kind, header[7], frames)
            return
        if kind == CREDIT:  # a producer probes a closed stream
            self._telemetry.count("probes_of_closed_streams")
            return
        row = self._remove_call(call_id) if kind in (*_ANSWER_KINDS, PROBE) else None
        if row is None:
            self._telemetry.count("late_frames")
            return
        if row.future.done():
            return
        if kind == REPLY:
            row.future.set_result(frames)
            return
        if kind == PROBE:
            self._telemetry.count("lost_messages")
            why = "the request or its answer was lost in transit"
            row.fail(PeerLost(f"{row.method.label}: {why}", where=row.route.actor))
            return
        row.is_answered = True
        row.may_have_run = header[7] == 0
        row.fail(decode_reported_error(frames, row.route.actor))

    def _receive_stream_frame(
        self, incoming: IncomingStream[Any], kind: int, place: int, frames: list[Frame]
    ) -> None:
        incoming.last_frame_at = self._clock.monotonic()
        if kind == ITEM:
            incoming.add_item(place, frames)
        elif kind == END:
            incoming.set_length(place)
        elif kind == ERROR:
            self._streams.pop(incoming.call_id, None)
            incoming.may_have_run = place == 0
            incoming.fail(decode_reported_error(frames, incoming.route.actor))
        elif kind == CREDIT:  # the producer probes its consumer
            if incoming.is_item_lost(place):
                self._break_stream(incoming, "an item was lost in transit")
            else:
                self.grant_credits(incoming, incoming.taken_count)
        else:
            self._telemetry.count("late_frames")
        if incoming.is_complete:
            self._streams.pop(incoming.call_id, None)

    def _break_stream(self, incoming: IncomingStream[Any], why: str) -> None:
        """End a stream that brings no more items; its reader may open another."""
        self.cancel_stream(incoming)
        incoming.fail(PeerLost(f"{incoming.method.label}: {why}", where=incoming.route.actor))

    def fail_peer(self, address: str, was_reached: bool, was_rejected: bool = False) -> None:
        """Fail all calls and streams that wait for the process at `address`.

        `was_rejected`: the two could not authenticate each other as members of one mesh.
        """
        why = self._make_key_error if was_rejected else make_peer_lost
        self._peers.pop(address, None)
        for row in [r for r in self._calls.values() if r.peer.address == address]:
            del self._calls[row.call_id]
            row.may_have_run = row.is_sent and was_reached
            row.fail(why(row.route, row.method))
        for incoming in [s for s in self._streams.values() if s.route.address == address]:
            del self._streams[incoming.call_id]
            incoming.may_have_run = was_reached
            incoming.fail(why(incoming.route, incoming.method))

    def _make_key_error(self, route: Route, method: Method[Any]) -> PeerLost:
        now = self._clock.monotonic()
        if len(self._rejected_since) >= MAX_REMEMBERED_REJECTIONS:
            self._rejected_since.clear()
        since = self._rejected_since.setdefault(route.incarnation, now)
        since = max(since, self._redis_silent_at())
        error = WrongKeys if now - since > WRONG_KEYS_AFTER_S else HandshakeFailed
        key = parse_key(route.address)
        return error(
            f"{method.label}: wrong keys: {route.actor} did not prove its registered key "
            f"{format_key(key)[:8] if key else ''}, or rejected this process's key; another "
            "process may have its port",
            where=parse_endpoint(route.address),
            fix="Run `meshrl keys` at the head to list the admitted keys",
        )

    def _expire(self, now: float) -> float:
        soonest = NEVER
        for row in list(self._calls.values()):
            if row.deadline > now:
                if row.probe_at <= now:
                    row.probe_at = now + PROBE_INTERVAL_S
                    self._send_control(PROBE, row.peer.address, row.call_id, row.route)
                soonest = min(soonest, row.deadline, row.probe_at)
                continue
            self.cancel(row)
            row.fail(
                DeadlineExceeded(
                    f"{row.method.label} was not answered within {now - row.started_at:.3g} s",
                    where=row.route.actor,
                )
            )
        for incoming in list(self._streams.values()):
            heard = (
                max(incoming.wait_started_at, incoming.last_frame_at)
                if incoming.is_awaited
                else NEVER
            )
            if incoming.deadline <= now:
                self.cancel_stream(incoming)
                incoming.fail(
                    DeadlineExceeded(
                        f"{incoming.method.label} sent no item for {incoming.method.idle_s:g} s",
                        where=incoming.route.actor,
                    )
                )
            elif heard + STREAM_SILENCE_S <= now:
                why = f"its producer has sent nothing for {STREAM_SILENCE_S:g} s"
                self._break_stream(incoming, why)
            else:
                soonest = min(soonest, incoming.deadline, heard + STREAM_SILENCE_S)
        return soonest

    # ------------------------------------------------------------ for the watchdog

    def iterate_waits(self) -> Iterator[tuple[str, str, float]]:
        """Yield (actor, method, since) of every awaited call and stream; `since` is monotonic
        seconds.
        """
        for row in self._calls.values():
            yield row.route.actor, row.method.label, row.started_at
        for incoming in self._streams.values():
            if incoming.deadline < NEVER:
                yield incoming.route.actor, incoming.method.label, incoming.wait_started_at

    def list_awaited_routes(self, since: float) -> list[Route]:
        """Return the routes whose answers have been awaited since that time or longer."""
        rows = [row.route for row in self._calls.values() if row.started_at <= since]
        streams = [
            s.route
            for s in self._streams.values()
            if s.deadline < NEVER and s.wait_started_at <= since
        ]
        return list(dict.fromkeys(rows + streams))

    def close_idle(self, before: float) -> None:
        """Close connections without waits that were last used before `before`."""
        busy = {s.route.address for s in self._streams.values()}
        for link in list(self._peers.values()):
            waiting = link.in_flight or link.queue or link.address in busy
            if link.last_used_at < before and not waiting:
                del self._peers[link.address]
                self._transport.disconnect(link.address)

    def stop(self) -> None:
        """Fail all calls and streams in progress, and notify their callees."""
        for row in list(self._calls.values()):
            self.cancel(row)
            row.fail(make_peer_lost(row.route, row.method))
        for incoming in list(self._streams.values()):
            self.cancel_stream(incoming)
            incoming.fail(make_peer_lost(incoming.route, incoming.method))
