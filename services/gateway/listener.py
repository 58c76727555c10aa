"""Gateway listener: a separate socket with separate keys, which serves holders of tokens.

It gives no access to the mesh's secret. A connected client reaches the methods of the gateway's
actor, and no other process.
"""

from __future__ import annotations

from contextvars import ContextVar

from meshrl.common.api.calls.call_permissions import CALL_PERMISSIONS, CLIENT, JOINER
from meshrl.common.base.encoding.messages import Frame
from meshrl.common.base.errors import BadMessage
from meshrl.common.mesh.access.access_records import HOST_TOKEN
from meshrl.common.mesh.access.gateway_connection import GATEWAY_ACTOR
from meshrl.common.mesh.access.token_registry import TokenRegistry
from meshrl.common.mesh.runtime.calls.actor import Actor, bind
from meshrl.common.mesh.runtime.calls.deadline_timer import DeadlineTimer
from meshrl.common.mesh.runtime.calls.server import RequestServer
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.transport.base import Peer, Transport
from meshrl.common.mesh.wire.frames import unpack_header

# Id of the token, or of the member, of the current request.
caller_id: ContextVar[str] = ContextVar("holder")


class GatewayListener:
    """Listener that serves `actor` on `transport`, whose authenticator identifies the token of a
    connection.
    """

    def __init__(self, mesh: Mesh, transport: Transport, tokens: TokenRegistry) -> None:
        self._mesh, self._transport, self._tokens = mesh, transport, tokens
        self._deadline_timer = DeadlineTimer(mesh.clock.monotonic)
        self._server = RequestServer(
            GATEWAY_ACTOR,
            mesh.clock,
            transport,
            GATEWAY_ACTOR,
            mesh.telemetry,
            self._deadline_timer,
            CALL_PERMISSIONS,
        )

    def start(self, actor: Actor) -> None:
        """Start to serve requests."""
        self._deadline_timer.start()
        self._server.start()
        self._server.set_methods(bind(actor))
        self._server.open()
        self._transport.start(self._serve_request, lambda *_: None, self._server.cancel_peer)

    def _serve_request(self, peer: Peer, frames: list[Frame], token: str) -> None:
        try:
            header = unpack_header(frames[0])
            if len(frames) < 2:
                raise BadMessage("a message has a header but no body")
        except BadMessage:
            self._mesh.telemetry.count("bad_frames")
            return
        # A connection outlives its token, so the token is checked for each request.
        role = ""  # no longer valid
        if self._tokens.is_valid(token):
            known = self._tokens.find_token(token)
            # or a member
            role = CLIENT if known is not None and known.kind != HOST_TOKEN else JOINER
        caller_id.set(token)
        self._server.receive(peer, header, frames, role)

    async def close(self) -> None:
        """Close all connections, and end the current requests."""
        await self._server.stop()
        self._deadline_timer.stop()
        await self._transport.close()
