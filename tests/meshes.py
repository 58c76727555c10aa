"""Meshes for tests: what one process has of a mesh, within this process or over sockets."""

from __future__ import annotations

from typing import Any

import zmq

from common.api.callers import ROLES
from common.clock import Clock
from common.process.host import Host, SystemHost
from common.random import Random
from common.runtime.mesh import Mesh
from common.secret import SECRET_BYTES
from common.state.client import State
from common.transport.keys import MeshKeys
from common.transport.zmq import ZmqTransport
from sim.network import MemoryNetwork, MemoryTransport
from sim.redis.state import simulated_state
from tests import ends

SECRET = "5e" * SECRET_BYTES  # of the meshes that tests make
# Of meshes within a process of tests: where the machine stands still for a while, it is not to end.
PATIENT: dict[str, Any] = {"ttl_s": 60.0, "stall_s": 60.0}


def keys_of(role: str, secret: str = SECRET) -> MeshKeys:
    """What a process of a test's mesh has; "test" is a role there too."""
    return MeshKeys(secret, role, ROLES | {"test", "loadtest"})


def curve(socket: zmq.Socket[bytes], keys: MeshKeys) -> None:
    """Makes a socket of somebody who has these keys, and need follow no rules."""
    socket.set(zmq.CURVE_SERVERKEY, keys.answering.public)
    socket.set(zmq.CURVE_PUBLICKEY, keys.asking.public)
    socket.set(zmq.CURVE_SECRETKEY, keys.asking.secret)


def begun(header: bytes, body: bytes = b"") -> bytes:
    """The first frame of a message as it crosses the wire."""
    return len(header).to_bytes(2, "little") + header + body


def alone(name: str, clock: Clock, random: Random, host: Host, **options: Any) -> Mesh:
    """With a Redis and a network of its own, which nobody else is in."""
    network = MemoryNetwork(clock, random.child("network"))
    defaults: dict[str, Any] = {"state": simulated_state(clock), "kind": name.partition("/")[0]}
    transport = MemoryTransport(network, f"mem://{name}")
    about = defaults | options
    return Mesh(name=name, transport=transport, clock=clock, random=random, host=host, **about)


def on_sockets(name: str, state: State, clock: Clock, **options: Any) -> Mesh:
    """Beside others that share `state`, on a real host."""
    about: dict[str, Any] = (
        {"kind": "test", "host": SystemHost(), "on_lost": ends.lost} | PATIENT | options
    )
    transport, random = ZmqTransport(keys=keys_of(about["kind"])), Random.system()
    return Mesh(name=name, state=state, transport=transport, clock=clock, random=random, **about)
