"""Sandbox without a mesh: one parent sends requests through a channel, one at a time.

`python -m meshrl.services.sandbox.standalone`. A frame is [method, body] of
`meshrl.common.api.sandbox`; the answer is ["ok", body] or ["error", code, text].
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack

from meshrl.common.api.sandbox import LoadJob, RewardBatch, RunTools
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.encoding.messages import decode, encode
from meshrl.common.base.errors import BadMessage, MeshError, to_wire
from meshrl.common.mesh.process.entry.child import ChildChannel
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.actor import SandboxActor, SandboxIdentity
from meshrl.services.sandbox.workers.calls import PoolLimits

REQUEST_TYPES: dict[str, Any] = {
    "load_job": LoadJob,
    "run_tools": RunTools,
    "score_trajectories": RewardBatch,
}
IDLE_S = 7 * 86_400.0  # between two requests, as long as a person may think
SEND_S = 60.0


async def main() -> None:
    """Serve until the parent closes its end."""
    host, clock, channel = SystemHost(), SystemClock(), ChildChannel.from_env()
    actor = SandboxActor(
        host, clock, None, PoolLimits(warm_workers=1, max_workers=2), SandboxIdentity("sandbox")
    )
    await actor.start()
    try:
        while (frame := await host.run_blocking(channel.recv, deadline_s=IDLE_S)) is not None:
            reply = await answer_frame(actor, frame)
            await host.run_blocking(channel.send, reply, deadline_s=SEND_S)
    finally:
        await actor.stop()


async def answer_frame(actor: SandboxActor, frame: bytes) -> bytes:
    try:
        method, body = msgpack.unpackb(frame, raw=False)
        if method not in REQUEST_TYPES:
            raise BadMessage(f"the sandbox has no method {method!r}")
        answer = await getattr(actor, method)(decode(REQUEST_TYPES[method], body))
        reply: list[Any] = ["ok", encode(answer)[0]]
    except MeshError as error:
        reply = ["error", *to_wire(error)]
    packed: bytes = msgpack.packb(reply, use_bin_type=True)
    return packed


if __name__ == "__main__":
    asyncio.run(main())
