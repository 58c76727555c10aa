"""An actor that answers with what it gets."""

from __future__ import annotations

import asyncio

from common.api.calls.interface import Call, Interface
from common.base.encoding.messages import Array, message
from common.mesh.runtime.calls.actor import Actor, call

BODY_BYTES = 100


@message
class Ping:
    job: str
    sequence: int
    payload: bytes


@message
class Block:
    block: Array


@message
class Size:
    size: int


class Echo(Interface):
    inline = Call(Ping, Ping)
    block = Call(Block, Size)
    suspending = Call(Ping, Ping)


class EchoActor(Actor):
    interface = Echo

    @call(Echo.inline)
    def inline(self, m: Ping) -> Ping:
        return m

    @call(Echo.block)
    def block(self, m: Block) -> Size:
        return Size(m.block.nbytes)

    @call(Echo.suspending)
    async def suspending(self, m: Ping) -> Ping:
        await asyncio.sleep(0)
        return m


PING = Ping("load-test", 123_456, b"x" * (BODY_BYTES - 18))
