"""Meshes over sockets whose leases outlast a load test, so that no renewal falls into a round."""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.seams import Seams, Terms
from meshrl.common.mesh.transport.keys import Keys, ProcessKeys
from meshrl.common.mesh.transport.zmq import ZmqTransport
from meshrl.common.state import registry
from meshrl.sim.redis.state import simulated_state

FOREVER_S = 3600.0  # lease length


ROLE = "loadtest"


def own_keys(others: Sequence[str] = ()) -> ProcessKeys:
    """Return a key for this process that admits itself and `others`, in hexadecimal digits."""

    def whose(asked: Sequence[str]) -> list[tuple[str, ...]]:
        return [(f"{ROLE}@here",) if key in known else () for key in asked]

    keys = ProcessKeys(whose, SystemClock().monotonic)
    known = frozenset([*others, keys.public])
    return keys


def unrenewed(name: str, keys: Keys | None = None) -> Mesh:
    """With a Redis of its own in this process: `knows` tells it of others. Without keys anybody
    may connect.
    """
    clock = SystemClock()
    return Mesh(
        name,
        ROLE,
        Seams(
            state=simulated_state(clock),
            transport=ZmqTransport(keys=keys),
            clock=clock,
            random=Random.system(),
            host=SystemHost(),
        ),
        terms=Terms(ttl_s=FOREVER_S, renew_s=FOREVER_S / 2),
    )


async def knows(mesh: Mesh, name: str, address: str, incarnation: str) -> None:
    """Puts another process into the mesh's registry."""
    entry = registry.Entry(name, ROLE, address=address, incarnation=incarnation)
    await registry.register(mesh.state, entry, int(FOREVER_S * 1000))
