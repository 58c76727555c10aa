"""The entry of the gateway's process."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshrl.common.base.errors import ConfigError, Damaged
from meshrl.common.base.host.ports import ANY, ports
from meshrl.common.mesh.access import identity
from meshrl.common.mesh.access.identity import Identity
from meshrl.common.mesh.access.records import FILE
from meshrl.common.mesh.access.tokens import TokenTable
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run
from meshrl.common.mesh.transport.keys import KeyPair, TokenKeys
from meshrl.common.mesh.transport.strangers import Limits
from meshrl.common.mesh.transport.zmq import ZmqTransport
from meshrl.services.gateway.front import FrontDoor
from meshrl.services.gateway.gateway import GatewayActor


async def main(listen: str, advertise: str) -> None:
    await serve(await Mesh.open("gateway", "gateway", MeshSettings.from_env()), listen, advertise)


async def serve(mesh: Mesh, listen: str, advertise: str = "") -> None:
    """The life of the gateway, until it is cancelled."""
    directory = Path(mesh.settings.run_root) / "mesh"
    known = TokenTable(directory / FILE, mesh.clock.wall)
    transport = listening(mesh, directory, listen, advertise, known)
    actor = GatewayActor(mesh, known)
    door = FrontDoor(mesh, transport, known)
    try:
        await mesh.join(None, stats=actor.stats)
        await actor.start()
        door.open(actor)
        mesh.ready = True
        while True:
            await mesh.clock.sleep(60.0)
    finally:
        await door.close()
        await mesh.leave()


def listening(
    mesh: Mesh, directory: Path, listen: str, advertise: str, known: TokenTable
) -> ZmqTransport:
    """The front door's transport, with the key and, if it can be had, the port of the last start:
    tokens that were given tell of both.
    """
    try:
        before = identity.known(directory)
    except Damaged as error:
        mesh.log.warning("tokens that were given are good no more", why=str(error))
        before = None
    own = before.keys if before is not None else KeyPair.new()
    keys = TokenKeys(own, own.public, known.holder)
    connections = Limits() if mesh.settings.joinable else None
    transport = None
    if before is not None and before.bound.rpartition(":")[0] == listen.rpartition(":")[0]:
        _, tried = ports(listen, "--gateway")
        port = int(before.bound.rpartition(":")[2])
        bind = before.bound if tried == ANY or port in tried else listen
        try:
            transport = ZmqTransport(bind, advertise, keys=keys, connections=connections)
        except ConfigError as error:
            mesh.log.warning("tokens that were given name a port that is taken", why=str(error))
    if transport is None:
        transport = ZmqTransport(listen, advertise, keys=keys, connections=connections)
    bound = f"{listen.rpartition(':')[0]}:{transport.address.rpartition(':')[2]}"
    now = Identity(transport.address, bound, own.public.decode(), own.secret.decode())
    if now != before:
        now.write(directory)
    return transport


if __name__ == "__main__":
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--listen", required=True)
    found.add_argument("--advertise", default="")
    arguments = found.parse_args()
    run(lambda: main(arguments.listen, arguments.advertise))
