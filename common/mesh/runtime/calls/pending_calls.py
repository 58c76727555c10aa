"""Calls and streams that wait for answers, and the errors that end them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from meshrl.common.api.calls.interface import Call, Method, Stream
from meshrl.common.base.encoding.messages import Frame, decode
from meshrl.common.base.errors import BadMessage, MeshError, PeerLost, from_wire
from meshrl.common.mesh.runtime.calls.deadline_timer import NEVER
from meshrl.common.mesh.runtime.calls.directory import Route
from meshrl.common.mesh.wire.frames import check_sizes, unpack_error

if TYPE_CHECKING:
    from meshrl.common.mesh.runtime.calls.caller import Caller

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class PeerCalls:
    """Calls in progress to one address, and those that wait for a credit."""

    address: str
    last_used_at: float  # monotonic seconds
    in_flight: int = 0
    queue: deque[PendingCall] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class PendingCall:
    """Call without an answer yet: a row of the table."""

    call_id: int
    route: Route
    method: Call[Any, Any]
    frames: list[Frame]
    future: asyncio.Future[Sequence[Frame]]
    peer: PeerCalls
    started_at: float
    deadline: float
    is_sent: bool = False
    probe_at: float = NEVER  # when to probe whether the callee still runs it
    may_have_run: bool = True  # False once it is known that the method did not run
    is_answered: bool = False  # True for an error that the peer itself reported

    def fail(self, error: MeshError) -> None:
        """Set the caller's error, unless the call has an answer."""
        if not self.future.done():
            self.future.set_exception(error)


class IncomingStream(AsyncIterator[R], Generic[R]):
    """Consumer's end of a stream. Closing or dropping it cancels the producer on the other process.

    It holds at most `credits` items. It restores the order of items, because a network may reorder
    them.
    """

    def __init__(
        self, caller: Caller, call_id: int, route: Route, method: Stream[Any, R], now: float
    ) -> None:
        self.call_id, self.route, self.method = call_id, route, method
        self.wait_started_at = self.last_frame_at = (
            now  # start of the wait, and arrival of the last frame
        )
        self.deadline = NEVER  # finite while a reader waits
        self._caller = caller
        self._loop = asyncio.get_running_loop()
        self.may_have_run = True  # False once it is known that the method did not run
        self._items: dict[int, list[Frame]] = {}
        self._missing_position = -1  # the item that a probe found missing
        self.taken_count = 0
        self._granted_count = 0
        self._length = -1
        self._error: MeshError | None = None
        self._closed = False
        self._wake: asyncio.Future[None] | None = None

    @property
    def is_awaited(self) -> bool:
        """True if a reader waits for the next item."""
        return self._wake is not None

    def is_item_lost(self, sent: int) -> bool:
        """Return True if one of the `sent` items is lost: missing at two probes in a row."""
        place = self.taken_count
        while place in self._items:
            place += 1
        before, self._missing_position = self._missing_position, place if place < sent else -1
        return self._missing_position >= 0 and self._missing_position == before

    @property
    def is_complete(self) -> bool:
        """True if every item up to the stream's end has arrived."""
        return self._length >= 0 and self.taken_count + len(self._items) >= self._length

    def add_item(self, position: int, frames: list[Frame]) -> None:
        """Add item number `position`; drop repetitions.

        An item beyond the credits ends the stream with BadMessage.
        """
        if position < self.taken_count or position in self._items:
            return  # a repetition
        if position >= self.taken_count + self.method.credits:
            self._caller.cancel_stream(self)
            self.fail(
                BadMessage(
                    f"{self.method.label} sent more items than its credits permit",
                    where=self.route.actor,
                )
            )
            return
        self._items[position] = frames
        if position == self.taken_count:
            self._notify()

    def set_length(self, length: int) -> None:
        """Set the number of items after which the producer ended the stream."""
        self._length = length
        self._notify()

    def fail(self, error: MeshError) -> None:
        """Make the reader raise `error` after the items that have arrived."""
        self._error = error
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def __aiter__(self) -> IncomingStream[R]:
        return self

    async def __anext__(self) -> R:
        while (frames := self._items.pop(self.taken_count, None)) is None:
            if self._closed or self.taken_count == self._length:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._wake = self._loop.create_future()
            self.deadline = self._caller.begin_wait(self)
            try:
                await self._wake
            finally:
                self._wake = None
                self.deadline = NEVER
        self.taken_count += 1
        if (
            self.taken_count - self._granted_count >= (self.method.credits + 1) // 2
            and self._length < 0
        ):
            self._granted_count = self.taken_count
            self._caller.grant_credits(self, self.taken_count)
        if len(frames) > 2:
            check_sizes(frames)
        return decode(self.method.reply, frames[1], frames[2:])

    def close(self) -> None:
        """Drop unread items and cancel the producer."""
        if not self._closed:
            self._closed = True
            self._items.clear()
            self._caller.cancel_stream(self)
            self._notify()

    def __del__(self) -> None:
        # `async for` with a break drops the iterator without closing it
        if not self._closed and not self._loop.is_closed():
            self.close()


def decode_reported_error(frames: list[Frame], actor: str) -> MeshError:
    """Decode the error that the peer raised.

    An invalid answer is an error too: it must end the call, which no deadline watches any more.
    """
    try:
        return from_wire(*unpack_error(frames[1]), where=actor)
    except BadMessage as error:
        return error
    except Exception as error:
        description = f"an error from {actor} cannot be decoded: {type(error).__name__}: {error}"
        return BadMessage(description, where=actor)


def make_peer_lost(route: Route, method: Method[Any]) -> PeerLost:
    """Make the error of a call whose callee's process has exited."""
    return PeerLost(f"{method.label}: the process of {route.actor} has exited", where=route.actor)
