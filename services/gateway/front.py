"""The front door: a socket of its own, with keys of its own, at which holders of tokens are served.

Nothing of the mesh's secret is behind it: who comes in reaches the methods of the gateway's actor,
and no other process.
"""

from __future__ import annotations

from contextvars import ContextVar

from meshrl.common.api.calls.callers import CALLERS, CLIENT, JOINER
from meshrl.common.base.encoding.messages import Frame
from meshrl.common.base.errors import BadMessage
from meshrl.common.mesh.access.line import FRONT
from meshrl.common.mesh.access.records import HOST
from meshrl.common.mesh.access.tokens import TokenTable
from meshrl.common.mesh.runtime.calls.actor import Actor, bind
from meshrl.common.mesh.runtime.calls.serving import Server
from meshrl.common.mesh.runtime.calls.sweep import Sweep
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.transport.base import Peer, Transport
from meshrl.common.mesh.wire.frames import unpack_header

# The id of the token, or of the member, that the request which is being served came with.
holder: ContextVar[str] = ContextVar("holder")


class FrontDoor:
    """Serves `actor` at `transport`, whose doorkeeper says which token a connection has."""

    def __init__(self, mesh: Mesh, transport: Transport, tokens: TokenTable) -> None:
        self._mesh, self._transport, self._tokens = mesh, transport, tokens
        self._sweep = Sweep(mesh.clock.monotonic)
        self._server = Server(
            FRONT, mesh.clock, transport, FRONT, mesh.telemetry, self._sweep, CALLERS
        )

    def open(self, actor: Actor) -> None:
        """Lets requests in from now on."""
        self._sweep.start()
        self._server.start()
        self._server.expect(bind(actor))
        self._server.offer()
        self._transport.start(self._deliver, lambda *_: None, self._server.gone)

    def _deliver(self, peer: Peer, frames: list[Frame], token: str) -> None:
        try:
            header = unpack_header(frames[0])
            if len(frames) < 2:
                raise BadMessage("a header without a body")
        except BadMessage:
            self._mesh.telemetry.count("bad_frames")
            return
        # A connection outlives the token that it was opened with: that is asked each time.
        role = ""  # nobody's any more
        if self._tokens.good(token):
            known = self._tokens.token(token)
            role = CLIENT if known is not None and known.kind != HOST else JOINER  # or a member
        holder.set(token)
        self._server.accept(peer, header, frames, role)

    async def close(self) -> None:
        """Ends what is being served, and all connections."""
        await self._server.stop()
        self._sweep.stop()
        await self._transport.close()
