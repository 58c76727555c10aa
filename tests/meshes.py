"""Meshes for tests: one process's part of a mesh, within this process or over sockets."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import zmq

from meshrl.common.base.clock import Clock
from meshrl.common.base.host.settings import SECRET_BYTES, MeshSettings
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import Host, SystemHost
from meshrl.common.mesh.runtime.dependencies import AccessRules, LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.process_credentials import LOOKUP_TIMEOUT_S, ProcessCredentials
from meshrl.common.mesh.transport.address import format_bulk_key
from meshrl.common.mesh.transport.base import Transport
from meshrl.common.mesh.transport.keys import KeyHolders, ProcessKeys
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.common.state.hosts import credentials
from meshrl.common.state.redis.client import StateClient, open_sync_client
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport
from tests import ends
from tests.simulated_host import SimulatedHost

SECRET = "5e" * SECRET_BYTES  # of the meshes that tests make
# Long leases, so that a mesh within a test process survives a pause of the machine.
PATIENT: dict[str, Any] = {"ttl_s": 60.0, "stall_limit_s": 60.0}


_HOLDERS: defaultdict[str, dict[str, KeyHolders]] = defaultdict(dict)  # by mesh and public key


def make_keys(role: str, mesh: str = "", *, known: bool = True) -> ProcessKeys:
    """Return keys of a new process of `role`.

    If `known`, other processes of the same `mesh` in this interpreter admit them.
    """
    holders = _HOLDERS[mesh]
    keys = ProcessKeys(lambda asked: [holders.get(key, ()) for key in asked], time.monotonic)
    if known:
        holders[keys.public_key_text] = holders[format_bulk_key(keys.bulk_public_key)] = (
            f"{role}@here",
        )
    return keys


async def register_process(
    name: str, role: str, settings: MeshSettings, state: StateClient, clock: Clock
) -> ProcessCredentials:
    """Return the credentials of a process whose key is registered in the mesh's Redis."""
    await credentials.admit_host(state, settings.host)
    client = open_sync_client(settings.redis_url, LOOKUP_TIMEOUT_S)
    return await ProcessCredentials.register(name, role, settings.host, state, client, clock)


def make_curve_socket(socket: zmq.Socket[bytes], keys: ProcessKeys, address: str) -> None:
    """Make a socket that calls `address` with these keys and without a client's checks."""
    socket.set(zmq.CURVE_SERVERKEY, keys.find_expected_key(address))
    socket.set(zmq.CURVE_PUBLICKEY, keys.own_pair.public)
    socket.set(zmq.CURVE_SECRETKEY, keys.own_pair.secret)


def encode_first_frame(header: bytes, body: bytes = b"") -> bytes:
    """Return the first frame of a message as it crosses the wire."""
    return len(header).to_bytes(2, "little") + header + body


def alone(name: str, clock: Clock, random: Random, host: Host, **options: Any) -> Mesh:
    """Return a mesh with a Redis and a network of its own, without other members."""
    network = MemoryNetwork(clock, random.child("network"))
    defaults: dict[str, Any] = {
        "state": open_simulated_state(clock),
        "kind": name.partition("/")[0],
    }
    transport = MemoryTransport(network, f"mem://{name}")
    return build_mesh(name, transport, clock, random, defaults | {"host": host} | options)


def on_sockets(name: str, state: StateClient, clock: Clock, **options: Any) -> Mesh:
    """Return a mesh on a real host beside others that share `state`."""
    about: dict[str, Any] = (
        {"kind": "test", "host": SystemHost(), "on_lost": ends.report_lost_lease}
        | PATIENT
        | options
    )
    transport = about.pop("transport", None) or ZmqTransport(keys=make_keys(about["kind"]))
    return build_mesh(name, transport, clock, Random.from_os_entropy(), about | {"state": state})


def make_virtual_mesh(
    name: str, state: StateClient, network: MemoryNetwork, clock: Clock, random: Random
) -> Mesh:
    """Return a mesh of a process on a virtual network; each call is another process."""
    options: dict[str, Any] = {"state": state, "kind": name.partition("/")[0]}
    options["host"] = SimulatedHost(clock, random.child(f"host {name}"))
    transport = MemoryTransport(network, f"mem://{name}/{random.random()}")
    return build_mesh(name, transport, clock, Random(random.randrange(1 << 30)), options)


def build_mesh(
    name: str, transport: Transport, clock: Clock, random: Random, about: dict[str, Any]
) -> Mesh:
    """Return a mesh whose parts take their options from `about`."""

    def part(cls: type[Any], **more: Any) -> Any:
        names = cls.__dataclass_fields__
        return cls(**more, **{key: about.pop(key) for key in names if key in about})

    kind, terms, access = about.pop("kind"), part(LeaseTerms), part(AccessRules)
    seams = part(MeshDependencies, transport=transport, clock=clock, random=random)
    return Mesh(name, kind, seams, terms=terms, access=access, **about)
