"""Meshes for tests: what one process has of a mesh, within this process or over sockets."""

from __future__ import annotations

from typing import Any

from common.clock import Clock
from common.process.host import Host, SystemHost
from common.random import Random
from common.runtime.mesh import Mesh
from common.state.client import State
from common.transport.zmq import ZmqTransport
from sim.network import MemoryNetwork, MemoryTransport
from sim.state import simulated_state


def alone(name: str, clock: Clock, random: Random, host: Host, **options: Any) -> Mesh:
    """With a Redis and a network of its own, which nobody else is in."""
    network = MemoryNetwork(clock, random.child("network"))
    defaults = {"state": simulated_state(clock), "kind": name.partition("/")[0]}
    transport = MemoryTransport(network, f"mem://{name}")
    about = defaults | options
    return Mesh(name=name, transport=transport, clock=clock, random=random, host=host, **about)


def on_sockets(name: str, state: State, clock: Clock, **options: Any) -> Mesh:
    """Beside others that share `state`, on a real host."""
    about = {"kind": "test", "host": SystemHost()} | options
    transport, random = ZmqTransport(), Random.system()
    return Mesh(name=name, state=state, transport=transport, clock=clock, random=random, **about)
