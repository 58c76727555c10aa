"""Actor that returns its argument, and its process.

Usage:

    python -m loadtests.rpc.echo [CLIENT]

CLIENT is the public key of the calling process; without one, unauthenticated peers may connect.
Prints the address and the incarnation.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop

from loadtests.measuring.meshed import FOREVER_S, knows, own_keys, unrenewed
from loadtests.measuring.processes import served
from meshrl.common.api.calls.interface import Call, Interface
from meshrl.common.base.encoding.messages import Array, message
from meshrl.common.mesh.runtime.actor_ref import ActorRef
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.transport.keys import ProcessKeys

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


class EchoActor(Actor):
    interface = Echo

    @call(Echo.inline)
    def inline(self, m: Ping) -> Ping:
        return m

    @call(Echo.block)
    def block(self, m: Block) -> Size:
        return Size(m.block.nbytes)


PING = Ping("load-test", 123_456, b"x" * (BODY_BYTES - 18))


async def serve(client: str = "") -> None:
    mesh = unrenewed("echo", own_keys([client]) if client else None)
    await mesh.join(EchoActor())
    print(mesh.transport.address, mesh.incarnation, flush=True)
    await asyncio.sleep(FOREVER_S)


@asynccontextmanager
async def reached(keys: ProcessKeys | None = None) -> AsyncIterator[tuple[int, ActorRef]]:
    """Yield the pid of a process that answers, and how this one calls it."""
    with served("loadtests.rpc.echo", *([keys.public_key_text] if keys else [])) as (pid, line):
        mesh = unrenewed("load", keys)
        mesh.start()
        try:
            await knows(mesh, "echo", *line.split())
            yield pid, mesh.ref("echo")
        finally:
            await mesh.leave()


if __name__ == "__main__":
    uvloop.run(serve(*sys.argv[1:]))
