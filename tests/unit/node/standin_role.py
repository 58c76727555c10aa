"""A role process without a model: registers, says that it is ready, drains."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from common.api.callers import ROLES
from common.api.role import Drain, Drainable, Drained
from common.clock import SystemClock
from common.process.host import SystemHost
from common.random import Random
from common.runtime.actor import Actor, call
from common.runtime.mesh import Mesh, MeshSettings, run
from common.state.client import State
from common.transport.keys import MeshKeys
from common.transport.zmq import ZmqTransport


class Standin(Actor):
    interface = Drainable

    def __init__(self, note: Path) -> None:
        self._note = note

    @call(Drainable.drain)
    def drain(self, m: Drain) -> Drained:
        with self._note.open("a") as file:
            file.write(f"{m.reason}\n")
        return Drained()


async def main(a: argparse.Namespace) -> None:
    settings = MeshSettings.from_env()
    name = f"trainer/{a.job}" if a.core else f"{a.kind}/{a.gang}"
    if a.rank:
        name = f"rank/{a.job}/{a.rank}"
    keys = MeshKeys(settings.secret, a.kind, ROLES)
    mesh = Mesh(
        name=name,
        kind=a.kind,
        state=await State.open(settings.redis_url),
        transport=ZmqTransport(settings.bind, settings.advertise, keys=keys),
        clock=SystemClock(),
        random=Random.system(),
        host=SystemHost(),
        ttl_s=1.5,  # in place of 6: a test waits for it to expire
        renew_s=0.3,
        settings=settings,
    )
    about: dict[str, Any] = {"epoch": a.epoch, "job": a.job}
    mesh.ready = False
    await mesh.join(Standin(Path(settings.run_root) / "drained"), stats=lambda: about)
    if a.job == "broken":
        os._exit(9)
    mesh.ready = True
    try:
        await asyncio.Event().wait()
    finally:
        await mesh.leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--gang", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--core", action="store_true")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    run(lambda: main(arguments))
