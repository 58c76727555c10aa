"""Meshes over sockets whose leases outlast a load test, so that no renewal falls into a round."""

from __future__ import annotations

from collections.abc import Sequence

from common.clock import SystemClock
from common.process.host import SystemHost
from common.random import Random
from common.runtime.mesh import Mesh
from common.state import registry
from common.transport.keys import Keys, MeshKeys, ProcessKeys
from common.transport.zmq import ZmqTransport
from sim.redis.state import simulated_state

FOREVER_S = 3600.0  # lease length


ROLE = "loadtest"


def own_keys(others: Sequence[str] = ()) -> ProcessKeys:
    """A key for this process, which lets in who has one of `others`, in hexadecimal digits."""
    known = frozenset(others)

    def whose(asked: Sequence[str]) -> list[tuple[str, ...]]:
        return [(f"{ROLE}@here",) if key in known else () for key in asked]

    return ProcessKeys(whose, SystemClock().monotonic)


def unrenewed(name: str, secret: str = "", keys: Keys | None = None) -> Mesh:
    """With a Redis of its own in this process: `knows` tells it of others. Without a secret, or
    keys, anybody may connect.
    """
    clock = SystemClock()
    if secret:
        keys = MeshKeys(secret, ROLE, {ROLE})
    return Mesh(
        name=name,
        kind=ROLE,
        state=simulated_state(clock),
        transport=ZmqTransport(keys=keys),
        clock=clock,
        random=Random.system(),
        host=SystemHost(),
        ttl_s=FOREVER_S,
        renew_s=FOREVER_S / 2,
    )


async def knows(mesh: Mesh, name: str, address: str, incarnation: str) -> None:
    """Puts another process into the mesh's registry."""
    entry = registry.Entry(name, ROLE, address=address, incarnation=incarnation)
    await registry.register(mesh.state, entry, int(FOREVER_S * 1000))
