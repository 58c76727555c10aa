"""Entry point of the gateway process."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshrl.common.base.errors import ConfigError, CorruptData
from meshrl.common.base.host.listen_addresses import EPHEMERAL_PORTS, parse_listen_address
from meshrl.common.mesh.access import gateway_identity
from meshrl.common.mesh.access.access_records import RECORDS_FILE
from meshrl.common.mesh.access.gateway_identity import GatewayIdentity
from meshrl.common.mesh.access.token_registry import TokenRegistry
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run_service
from meshrl.common.mesh.transport.keys import KeyPair, TokenKeys
from meshrl.common.mesh.transport.unauthenticated_peers import ConnectionLimits
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.services.gateway.gateway_actor import GatewayActor
from meshrl.services.gateway.listener import GatewayListener


async def main(listen: str, advertise: str) -> None:
    await serve(await Mesh.open("gateway", "gateway", MeshSettings.from_env()), listen, advertise)


async def serve(mesh: Mesh, listen: str, advertise: str = "") -> None:
    """Run the gateway until cancellation."""
    directory = Path(mesh.settings.run_root) / "mesh"
    known = TokenRegistry(directory / RECORDS_FILE, mesh.clock.wall)
    transport = create_transport(mesh, directory, listen, advertise, known)
    actor = GatewayActor(mesh, known)
    door = GatewayListener(mesh, transport, known)
    try:
        await mesh.join(None, stats=actor.stats)
        await actor.start()
        door.start(actor)
        mesh.ready = True
        while True:
            await mesh.clock.sleep(60.0)
    finally:
        await door.close()
        await mesh.leave()


def create_transport(
    mesh: Mesh, directory: Path, listen: str, advertise: str, tokens: TokenRegistry
) -> ZmqTransport:
    """Create the transport of the endpoint. Reuse the key, and if possible the port, of the last
    start, as issued tokens contain both.
    """
    try:
        before = gateway_identity.find_identity(directory)
    except CorruptData as error:
        mesh.log.warning("tokens issued so far are invalid", why=str(error))
        before = None
    own = before.key_pair if before is not None else KeyPair.generate()
    keys = TokenKeys(own, own.public, tokens.find_holder)
    connections = ConnectionLimits() if mesh.settings.joinable else None
    transport = None
    if before is not None and before.bound.rpartition(":")[0] == listen.rpartition(":")[0]:
        _, tried = parse_listen_address(listen, "--gateway")
        port = int(before.bound.rpartition(":")[2])
        bind = before.bound if tried == EPHEMERAL_PORTS or port in tried else listen
        try:
            transport = ZmqTransport(bind, advertise, keys=keys, connection_limits=connections)
        except ConfigError as error:
            mesh.log.warning("tokens issued so far name a port that is in use", why=str(error))
    if transport is None:
        transport = ZmqTransport(listen, advertise, keys=keys, connection_limits=connections)
    bound = f"{listen.rpartition(':')[0]}:{transport.address.rpartition(':')[2]}"
    now = GatewayIdentity(transport.address, bound, own.public.decode(), own.secret.decode())
    if now != before:
        now.write(directory)
    return transport


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--advertise", default="")
    arguments = parser.parse_args()
    run_service(lambda: main(arguments.listen, arguments.advertise))
