"""Where the ranks of a gang meet: at a file on one host, over several at a store of rank 0.

A store asks nobody who it is. What ranks say to each other there begins with a random word, which
only the mesh's own calls tell; that keeps generations apart, and nobody who can list the keys out.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from meshrl.common.base.errors import Refused
from meshrl.common.base.host.listen_addresses import parse_listen_address
from meshrl.common.base.host.settings import MeshSettings

LISTEN_BACKLOG = 128  # connections that come before the store is made


class NoRendezvousPort(Refused):
    """Every port that ranks of other hosts may meet at is taken."""

    code = "no_port"


def open_listener(address: str, ports: range) -> socket.socket:
    """A socket that listens at the first of `ports` (0: any) that is free; NoPort when none is."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    first: OSError | None = None
    for port in ports:
        try:
            return socket.create_server((address, port), family=family, backlog=LISTEN_BACKLOG)
        except OSError as error:
            first = first or error
    span = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else str(ports[0])
    raise NoRendezvousPort(
        f"ranks of other hosts have no port to meet at: {span} of {address} cannot be listened at, "
        f"the first one because of: {first}",
        where=f"{address}:{ports[0]}-{ports[-1]}",
        fix="Give the host more ports, `--listen HOST:FIRST-LAST` of `meshrl up` or `meshrl join`; "
        "or free one of these (`ss -tlnp`)",
    )


def parse_port_range(bind: str) -> range:
    """The ports of `mesh.bind` that a process may listen at; 0: any."""
    return parse_listen_address(bind, "mesh.bind")[1]


def format_rendezvous_url(listener: socket.socket, secret: str) -> str:
    """What ranks on other hosts are told of a store that will be at `listener`."""
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}/{secret}" if ":" in host else f"tcp://{host}:{port}/{secret}"


def rendezvous_directory(settings: MeshSettings) -> Path:
    """Where ranks of one host meet, and gradients are lent to them."""
    return Path(settings.run_root) / "mesh" / "gangs"


def is_multi_host(rendezvous: str) -> bool:
    """Whether ranks meet there that are on several hosts."""
    return rendezvous.startswith("tcp://")


def open_rendezvous_store(
    rendezvous: str, world_size: int, timeout: timedelta, listener: socket.socket | None = None
) -> Store:
    """The store through which ranks meet; rank 0 has the `listener` of one over hosts. RuntimeError
    when nobody serves it.
    """
    if not is_multi_host(rendezvous):
        Path(rendezvous).parent.mkdir(parents=True, exist_ok=True)
        file = FileStore(rendezvous, world_size)
        file.set_timeout(timeout)
        return file
    place = urlsplit(rendezvous)
    assert place.hostname is not None and place.port is not None, rendezvous
    store = TCPStore(
        place.hostname,
        place.port,
        None,
        listener is not None,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    return PrefixStore(place.path[1:], store)
