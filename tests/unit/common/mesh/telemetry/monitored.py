"""Service in its own mesh, for tests. SIGUSR1 blocks its loop until a line arrives; SIGUSR2 makes
it ready.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.dependencies import LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh, run_service
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.common.state import registry
from meshrl.sim.redis.simulated_state import open_simulated_state

MAX_LIFETIME_S = 600.0  # if no test ends it


async def main() -> None:
    clock = SystemClock()
    state = open_simulated_state(clock)
    mesh = Mesh(
        "monitored/0",
        "monitored",
        MeshDependencies(
            state=state,
            transport=ZmqTransport(),
            clock=clock,
            random=Random.from_os_entropy(),
            host=SystemHost(),
        ),
        terms=LeaseTerms(ttl_s=120.0, renew_interval_s=60.0, stall_limit_s=1.0),
    )
    mesh.serve_metrics(sys.argv[1])
    mesh.ready = False
    mesh.telemetry.count("answers", 3)
    stats = {
        "job": "j",
        "busy_s": 2.5,
        "requests": {"rollout/0": 4},
        "path": "native",
        "core": True,
    }
    await mesh.join(None, stats=lambda: stats)
    entry = await registry.lookup(state, "monitored/0")
    assert entry is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, sys.stdin.readline)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, setattr, mesh, "ready", True)
    print(json.dumps({"address": entry.metrics}), flush=True)
    try:
        await asyncio.sleep(MAX_LIFETIME_S)
    finally:
        await mesh.leave()


if __name__ == "__main__":
    run_service(main)
