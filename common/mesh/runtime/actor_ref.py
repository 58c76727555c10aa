"""References to actors by name: they look up the actor, and repeat calls that certainly did not
run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from meshrl.common.api.calls.interface import Call, Cast, Method, Stream
from meshrl.common.base.clock import Clock
from meshrl.common.base.encoding.messages import Frame, decode, encode
from meshrl.common.base.errors import (
    DeadlineExceeded,
    MeshError,
    NotAllowed,
    PeerLost,
    StaleIncarnation,
    WrongKeys,
)
from meshrl.common.mesh.runtime.calls.caller import Caller
from meshrl.common.mesh.runtime.calls.directory import (
    FIRST_RETRY_S,
    LONGEST_RETRY_S,
    ActorDirectory,
    Route,
)
from meshrl.common.mesh.runtime.calls.pending_calls import PendingCall
from meshrl.common.mesh.telemetry.logs import Telemetry
from meshrl.common.mesh.telemetry.tracing import current_call

Q = TypeVar("Q")
R = TypeVar("R")

CAST_LOOKUP_S = 0.5  # seconds; a cast is a hint, so it waits briefly for its actor


@dataclass(frozen=True, slots=True)
class CallContext:
    """Dependencies of a process's calls.

    `start` lets the process make calls. `require_may_call` raises NotAllowed for a method that its
    role may not call. `mark_suspect` receives a route whose peer rejects a permitted call.
    """

    clock: Clock
    directory: ActorDirectory
    caller: Caller
    telemetry: Telemetry
    start: Callable[[], None]
    require_may_call: Callable[[Method[Any]], None]
    mark_suspect: Callable[[Route], None]


class ActorRef:
    """Reference to an actor by its name, in whichever process it runs."""

    __slots__ = ("_context", "name")

    def __init__(self, context: CallContext, name: str) -> None:
        self._context = context
        self.name = name

    async def call(self, method: Call[Q, R], request: Q, *, deadline_s: float | None = None) -> R:
        """Call a method; return its reply or raise the actor's error.

        Within the deadline (the method's own, and that of the call being served) it waits for a
        free credit and looks for a restarting actor. It repeats calls that certainly did not run,
        and calls that may have run only if `idempotent`.
        """
        asking = self._context
        asking.require_may_call(method)
        asking.start()
        now = asking.clock.monotonic()
        deadline = now + (method.deadline_s if deadline_s is None else deadline_s)
        serving = current_call.get()
        if serving is not None and not serving.is_finished and serving.deadline < deadline:
            deadline = serving.deadline
        body, buffers = encode(request)
        pause = FIRST_RETRY_S
        while True:
            route = asking.directory.find_cached(self.name) or await asking.directory.find(
                self.name, deadline
            )
            row = asking.caller.call(route, method, body, buffers, now, deadline)
            try:
                frames: Sequence[Frame] = await row.future
            except asyncio.CancelledError:
                asking.caller.cancel(row)
                raise
            except DeadlineExceeded:
                asking.directory.forget(route)
                raise
            except (PeerLost, StaleIncarnation, NotAllowed) as error:
                # NotAllowed: our role may call the method. So another process has the address by
                # now, or this process's key was revoked.
                if isinstance(error, NotAllowed):
                    asking.mark_suspect(route)
                late = asking.clock.monotonic() + pause >= deadline
                if late or not _may_repeat(row, method, error):
                    raise
                asking.directory.forget(route)
                asking.telemetry.count(f"repeated_{error.code}")
            else:
                return decode(method.reply, frames[1], frames[2:])
            await asking.clock.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_S)
            now = asking.clock.monotonic()

    async def stream(self, method: Stream[Q, R], request: Q) -> AsyncGenerator[R, None]:
        """Yield replies as they arrive; closing the iterator cancels the stream at the peer.

        Raises PeerLost if the peer ends early.
        """
        asking = self._context
        asking.require_may_call(method)
        asking.start()
        body, buffers = encode(request)
        deadline = asking.clock.monotonic() + method.idle_s
        pause = FIRST_RETRY_S
        while True:
            route = asking.directory.find_cached(self.name) or await asking.directory.find(
                self.name, deadline
            )
            incoming = asking.caller.open_stream(route, method, body, buffers)
            try:
                async for item in incoming:
                    yield item
                return
            except (PeerLost, StaleIncarnation, NotAllowed) as error:
                if isinstance(error, NotAllowed):
                    asking.mark_suspect(route)
                settled = incoming.may_have_run or isinstance(error, WrongKeys)
                if settled or asking.clock.monotonic() + pause >= deadline:
                    raise
                asking.directory.forget(route)
            finally:
                incoming.close()
            await asking.clock.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_S)

    async def cast(self, method: Cast[Q], request: Q) -> None:
        """Send the message if the actor is there; otherwise drop and count it."""
        asking = self._context
        asking.require_may_call(method)
        asking.start()
        body, buffers = encode(request)
        try:
            route = asking.directory.find_cached(self.name) or await asking.directory.find(
                self.name, asking.clock.monotonic() + CAST_LOOKUP_S
            )
            asking.caller.cast(route, method, body, buffers)
        except MeshError as error:
            asking.telemetry.count(f"casts_dropped_{error.code}")


def _may_repeat(row: PendingCall, method: Call[Any, Any], error: MeshError) -> bool:
    # An answered error concerns the actor and a third process, or means that nothing ran.
    again = not row.may_have_run or (method.idempotent and not row.is_answered)
    return again and not isinstance(error, WrongKeys)
