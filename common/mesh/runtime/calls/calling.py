"""The client half of a mesh's calls: outstanding calls and streams, with their credits, deadlines
and cancellation.
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
from meshrl.common.mesh.runtime.calls.directory import Route
from meshrl.common.mesh.runtime.calls.outstanding import Incoming, Link, Outstanding, gone, reported
from meshrl.common.mesh.runtime.calls.sweep import NEVER, Sweep
from meshrl.common.mesh.telemetry.logs import Telemetry
from meshrl.common.mesh.telemetry.tracing import Tracer
from meshrl.common.mesh.transport.address import endpoint_of, key_of, key_text
from meshrl.common.mesh.transport.base import Transport
from meshrl.common.mesh.wire.frames import (
    CALL,
    CANCEL,
    CAST,
    CREDIT,
    END,
    ERROR,
    ITEM,
    REPLY,
    check_sizes,
    pack_header,
)

R = TypeVar("R")
_ANSWERS = (REPLY, ERROR)
# calls outstanding towards one peer: a quarter of the high-water mark, so that no reply is parked
# for long
CREDITS = 256
# a producer asks after its consumer every 5 s: without a sign for so long there is none
SILENCE_S = 30.0
# The registry names a process for the 6 s of a lease after its key or host was revoked, or its port
# was taken by another; after that the keys are wrong.
REFUSED_S = 10.0
REMEMBERED_REFUSALS = 1024


class Caller:
    """Sends calls and opens streams for one process, and matches answers with them."""

    def __init__(
        self,
        clock: Clock,
        transport: Transport,
        incarnation: str,
        tracer: Tracer,
        telemetry: Telemetry,
        sweep: Sweep,
        silent_at: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """`silent_at`: when Redis, which knows the keys, last did not answer."""
        self._clock, self._silent_at = clock, silent_at
        self._transport, self._incarnation = transport, incarnation
        self._tracer, self._telemetry, self._sweep = tracer, telemetry, sweep
        self._links: dict[str, Link] = {}
        self._calls: dict[int, Outstanding] = {}
        self._streams: dict[int, Incoming[Any]] = {}
        self._last_id = 0
        self._refused_since: dict[str, float] = {}  # by incarnation, until it answers
        sweep.add(self._expire)

    # ------------------------------------------------------------ calls

    def ask(
        self,
        route: Route,
        method: Call[Any, Any],
        body: Frame,
        buffers: Sequence[Frame],
        now: float,
        deadline: float,
    ) -> Outstanding:
        """Sends the call, or queues it until a credit is free. The call's future gives the reply's
        frames.
        """
        link = self._links.get(route.address)
        if link is None:
            link = self._links[route.address] = Link(route.address, now)
        self._last_id = call_id = self._last_id + 1
        future = asyncio.get_running_loop().create_future()
        frames = [b"", body, *buffers]
        row = Outstanding(call_id, route, method, frames, future, link, now, deadline)
        if buffers:
            check_sizes(frames)
        self._calls[call_id] = row
        self._sweep.by(deadline)
        if link.in_flight < CREDITS:
            self._send(row, now)
        else:
            link.queue.append(row)
        return row

    def _send(self, row: Outstanding, now: float) -> None:
        link = row.link
        row.sent = True
        link.in_flight += 1
        link.used = now
        remaining_ms = max(int((row.deadline - now) * 1000), 1)
        row.frames[0] = self._header(CALL, row.call_id, row.route, row.method, remaining_ms)
        try:
            self._transport.send(link.address, row.frames)
        except MeshError as error:
            self._take(row.call_id)
            row.fail(error)

    def _header(
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
            self._tracer.traceparent(call_id),
        )

    def _take(self, call_id: int) -> Outstanding | None:
        """Removes a row from the table and passes its credit on."""
        row = self._calls.pop(call_id, None)
        if row is None:
            return None
        row.frames = []
        link = row.link
        if row.sent:
            link.in_flight -= 1
        while link.queue and link.in_flight < CREDITS:
            waiting = link.queue.popleft()
            if waiting.call_id in self._calls:
                self._send(waiting, self._clock.monotonic())
        return row

    def cancel(self, row: Outstanding) -> None:
        """Tells the callee that the caller no longer waits, so that it need not go on."""
        if self._take(row.call_id) is not None and row.sent:
            self._control(CANCEL, row.link.address, row.call_id, row.route)

    def cast(
        self, route: Route, method: Method[Any], body: Frame, buffers: Sequence[Frame]
    ) -> None:
        """Sends a message that is not answered; nobody learns whether it arrived."""
        self._last_id = call_id = self._last_id + 1
        link = self._links.get(route.address)
        if link is not None:
            link.used = self._clock.monotonic()
        header = self._header(CAST, call_id, route, method)
        frames = [header, body, *buffers]
        check_sizes(frames)
        self._transport.send(route.address, frames)

    def _control(
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

    def open(
        self,
        route: Route,
        method: Stream[Any, R],
        body: Frame,
        buffers: Sequence[Frame],
    ) -> Incoming[R]:
        """Opens a stream and returns its reading end at once. BadMessage: the request is too large.
        Overloaded: too much is parked for that process.
        """
        self._last_id = call_id = self._last_id + 1
        now = self._clock.monotonic()
        incoming: Incoming[R] = Incoming(self, call_id, route, method, now)
        header = self._header(CALL, call_id, route, method)
        frames = [header, body, *buffers]
        check_sizes(frames)
        self._streams[call_id] = incoming
        if route.address not in self._links:
            self._links[route.address] = Link(route.address, now)
        self._transport.send(route.address, frames)
        return incoming

    def grant(self, incoming: Incoming[Any], taken: int) -> None:
        """Tells the producer that `taken` items were read."""
        self._control(CREDIT, incoming.route.address, incoming.call_id, incoming.route, taken)

    def abandon(self, incoming: Incoming[Any]) -> None:
        """Cancels the producer of a stream that is still open."""
        if self._streams.pop(incoming.call_id, None) is not None:
            self._control(CANCEL, incoming.route.address, incoming.call_id, incoming.route)

    def waiting_until(self, incoming: Incoming[Any]) -> float:
        """Notes that the reader waits from now on, and returns the time at which it gives up."""
        incoming.since = self._clock.monotonic()
        deadline = incoming.since + incoming.method.idle_s
        self._sweep.by(min(deadline, incoming.since + SILENCE_S))
        return deadline

    # ------------------------------------------------------------ what arrives

    def accept(self, header: tuple[Any, ...], frames: list[Frame]) -> None:
        """Takes in a frame of an answer. Late and repeated ones are counted and dropped."""
        kind, call_id = header[1], header[2]
        if header[6] != self._incarnation:
            self._telemetry.count("frames_for_another_incarnation")
            return
        if self._refused_since:
            self._refused_since.pop(header[5], None)
        incoming = self._streams.get(call_id)
        if incoming is not None:
            self._feed(incoming, kind, header[7], frames)
            return
        if kind == CREDIT:  # a producer probes a stream that we have closed
            self._telemetry.count("probes_of_closed_streams")
            return
        row = self._take(call_id) if kind in _ANSWERS else None
        if row is None:
            self._telemetry.count("late_frames")
            return
        if row.future.done():
            return
        if kind == REPLY:
            row.future.set_result(frames)
            return
        row.answered = True
        row.ran = header[7] == 0
        row.fail(reported(frames, row.route.actor))

    def _feed(self, incoming: Incoming[Any], kind: int, place: int, frames: list[Frame]) -> None:
        incoming.heard = self._clock.monotonic()
        if kind == ITEM:
            incoming.put(place, frames)
        elif kind == END:
            incoming.end(place)
        elif kind == ERROR:
            self._streams.pop(incoming.call_id, None)
            incoming.ran = place == 0
            incoming.fail(reported(frames, incoming.route.actor))
        elif kind == CREDIT:  # the producer asks whether anybody is still there
            if incoming.lacks(place):
                self._break(incoming, "an item was lost on its way")
            else:
                self.grant(incoming, incoming.taken)
        else:
            self._telemetry.count("late_frames")
        if incoming.complete:
            self._streams.pop(incoming.call_id, None)

    def _break(self, incoming: Incoming[Any], why: str) -> None:
        """Ends a stream that will bring no more; its reader may open another."""
        self.abandon(incoming)
        incoming.fail(PeerLost(f"{incoming.method.label}: {why}", where=incoming.route.actor))

    def lost(self, address: str, reached: bool, refused: bool = False) -> None:
        """Fails all calls and streams that wait for the process at `address`. `refused`: because
        the two could not prove to each other that they are of one mesh.
        """
        why = self._keys_differ if refused else gone
        self._links.pop(address, None)
        for row in [r for r in self._calls.values() if r.link.address == address]:
            del self._calls[row.call_id]
            row.ran = row.sent and reached
            row.fail(why(row.route, row.method))
        for incoming in [s for s in self._streams.values() if s.route.address == address]:
            del self._streams[incoming.call_id]
            incoming.ran = reached
            incoming.fail(why(incoming.route, incoming.method))

    def _keys_differ(self, route: Route, method: Method[Any]) -> PeerLost:
        now = self._clock.monotonic()
        if len(self._refused_since) >= REMEMBERED_REFUSALS:
            self._refused_since.clear()
        since = self._refused_since.setdefault(route.incarnation, now)
        since = max(since, self._silent_at())
        error = WrongKeys if now - since > REFUSED_S else HandshakeFailed
        key = key_of(route.address)
        return error(
            f"{method.label}: what answers for {route.actor} has not proved the key "
            f"{key_text(key)[:8] if key else ''} that the registry has for it, or does not know "
            "this process's: wrong keys, or another process has its port by now",
            where=endpoint_of(route.address),
            fix="`meshrl keys` at the head lists whose keys are let in",
        )

    def _expire(self, now: float) -> float:
        soonest = NEVER
        for row in list(self._calls.values()):
            if row.deadline > now:
                soonest = min(soonest, row.deadline)
                continue
            self.cancel(row)
            row.fail(
                DeadlineExceeded(
                    f"{row.method.label} was not answered within {now - row.since:.3g} s",
                    where=row.route.actor,
                )
            )
        for incoming in list(self._streams.values()):
            heard = max(incoming.since, incoming.heard) if incoming.waited_for else NEVER
            if incoming.deadline <= now:
                self.abandon(incoming)
                incoming.fail(
                    DeadlineExceeded(
                        f"{incoming.method.label} brought nothing for {incoming.method.idle_s:g} s",
                        where=incoming.route.actor,
                    )
                )
            elif heard + SILENCE_S <= now:
                why = f"nobody produces it any more, {SILENCE_S:g} s without a sign"
                self._break(incoming, why)
            else:
                soonest = min(soonest, incoming.deadline, heard + SILENCE_S)
        return soonest

    # ------------------------------------------------------------ for the watchdog

    def waits(self) -> Iterator[tuple[str, str, float]]:
        """(actor, method, since) of every call and stream that is waited for; `since` is monotonic
        seconds.
        """
        for row in self._calls.values():
            yield row.route.actor, row.method.label, row.since
        for incoming in self._streams.values():
            if incoming.deadline < NEVER:
                yield incoming.route.actor, incoming.method.label, incoming.since

    def waited_for(self, since: float) -> list[Route]:
        """Whose answers have been waited for since then or longer."""
        rows = [row.route for row in self._calls.values() if row.since <= since]
        streams = [
            s.route for s in self._streams.values() if s.deadline < NEVER and s.since <= since
        ]
        return list(dict.fromkeys(rows + streams))

    def forget_idle(self, before: float) -> None:
        """Closes connections that nothing waits on and nothing used since `before`."""
        busy = {s.route.address for s in self._streams.values()}
        for link in list(self._links.values()):
            waiting = link.in_flight or link.queue or link.address in busy
            if link.used < before and not waiting:
                del self._links[link.address]
                self._transport.forget(link.address)

    def stop(self) -> None:
        """Fails all calls and streams under way, and tells those who work on them."""
        for row in list(self._calls.values()):
            self.cancel(row)
            row.fail(gone(row.route, row.method))
        for incoming in list(self._streams.values()):
            self.abandon(incoming)
            incoming.fail(gone(incoming.route, incoming.method))
