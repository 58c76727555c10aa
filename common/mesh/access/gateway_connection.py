"""Connection to one actor at a known address, for callers that are no process of the mesh.

It needs no registry: the key authenticates the actor.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from meshrl.common.api.calls.interface import Call, Stream
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.encoding.messages import Frame, decode, encode
from meshrl.common.base.errors import (
    BadMessage,
    ConfigError,
    DeadlineExceeded,
    HandshakeFailed,
    MeshError,
    NotAllowed,
    PeerLost,
)
from meshrl.common.base.random import Random
from meshrl.common.mesh.access.access_token import AccessToken
from meshrl.common.mesh.runtime.calls.caller import Caller
from meshrl.common.mesh.runtime.calls.deadline_timer import DeadlineTimer
from meshrl.common.mesh.runtime.calls.directory import FIRST_RETRY_S, LONGEST_RETRY_S, Route
from meshrl.common.mesh.telemetry.logs import Telemetry
from meshrl.common.mesh.telemetry.tracing import Tracer
from meshrl.common.mesh.transport.base import Peer
from meshrl.common.mesh.transport.keys import KeyPair, TokenKeys
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.common.mesh.wire.frames import unpack_header

Q = TypeVar("Q")
R = TypeVar("R")

GATEWAY_ACTOR = (
    "gateway"  # name and incarnation of the gateway's actor: its permanent key authenticates it
)
_UNREACHABLE = "inproc://nobody"  # no caller can reach this listener


class GatewayConnection:
    """Connection of a token's user; `open` it on the loop that uses it, and `close` it."""

    def __init__(self, token: AccessToken) -> None:
        """Create a connection. Raises ConfigError if the access token has no keys or no address."""
        self._clock, random = SystemClock(), Random.from_os_entropy()
        try:
            keys = TokenKeys(KeyPair.from_secret(token.secret.encode()), token.gateway.encode())
        except ValueError as error:
            raise ConfigError(f"the token contains no valid key: {error}") from None
        self._address = token.address
        self._route = Route(GATEWAY_ACTOR, token.address, GATEWAY_ACTOR)
        self._transport = ZmqTransport(_UNREACHABLE, keys=keys, silence_is_rejection=False)
        self._sweep = DeadlineTimer(self._clock.monotonic)
        telemetry = Telemetry("client")
        self._caller = Caller(
            self._clock,
            self._transport,
            random.hex_token(8),
            Tracer(random.child("trace")),
            telemetry,
            self._sweep,
        )

    def open(self) -> None:
        """Start listening for answers on the running loop."""
        self._sweep.start()
        self._transport.start(self._deliver, self._caller.fail_peer, lambda peer: None)

    def _deliver(self, peer: Peer, frames: list[Frame], role: str) -> None:
        try:
            header = unpack_header(frames[0])
        except BadMessage:
            return
        if not peer and len(frames) > 1:
            self._caller.receive(header, frames)

    async def call(self, method: Call[Q, R], request: Q, deadline_s: float | None = None) -> R:
        """Call a method; return its reply or raise the error of the actor.

        While the actor is unavailable, idempotent calls are repeated until the deadline. Raises
        NotAllowed if the mesh rejects the token.
        """
        body, buffers = encode(request)
        now = self._clock.monotonic()
        deadline = now + (method.deadline_s if deadline_s is None else deadline_s)
        pause = FIRST_RETRY_S
        while True:
            row = self._caller.call(self._route, method, body, buffers, now, deadline)
            try:
                frames = await row.future
            except PeerLost as error:
                again = (method.idempotent or not row.may_have_run) and not row.is_answered
                if not again or isinstance(error, HandshakeFailed):
                    raise self._explain_error(error) from error
                if self._clock.monotonic() + pause >= deadline:
                    raise self._explain_error(error) from error
            except MeshError as error:
                raise self._explain_error(error) from error
            except BaseException:
                self._caller.cancel(row)
                raise
            else:
                return decode(method.reply, frames[1], frames[2:])
            await self._clock.sleep(pause)
            pause, now = min(2 * pause, LONGEST_RETRY_S), self._clock.monotonic()

    async def stream(self, method: Stream[Q, R], request: Q) -> AsyncGenerator[R, None]:
        """Yield replies as they arrive; closing the iterator cancels the stream at the other
        end.
        """
        body, buffers = encode(request)
        incoming: Any = self._caller.open_stream(self._route, method, body, buffers)
        try:
            async for item in incoming:
                yield item
        except MeshError as error:
            raise self._explain_error(error) from error
        finally:
            incoming.close()

    def _explain_error(self, error: MeshError) -> MeshError:
        """Translate the error of a call for the user of a token."""
        if isinstance(error, HandshakeFailed | NotAllowed):
            return NotAllowed(
                "the mesh rejects this token: it was revoked, has expired, belongs to another "
                "mesh, or does not permit this",
                where=self._address,
                fix="Ask the person who issued it for a new token",
            )
        if isinstance(error, PeerLost):
            return PeerLost(
                "no mesh answers at this address: no process listens there, the mesh was "
                "stopped, or its key differs from the token's",
                where=self._address,
                fix="Ask the person who issued the token whether the mesh runs and the token "
                "belongs to it; check for a firewall in between",
            )
        if isinstance(error, DeadlineExceeded):
            return DeadlineExceeded(error.message, where=self._address)
        return error

    async def close(self) -> None:
        """Cancel calls in progress and close the connection."""
        self._caller.stop()
        self._sweep.stop()
        await self._transport.close()
