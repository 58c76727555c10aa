"""Rendezvous of a gang's ranks: a file on one host, a store of rank 0 across hosts.

A store does not authenticate clients. Keys of ranks therefore begin with a random secret that only
the mesh's own calls transmit. It separates generations, but does not exclude clients that can list
the keys.
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

LISTEN_BACKLOG = 128  # connections that arrive before the store is made


class NoRendezvousPort(Refused):
    """Every port for ranks of other hosts is in use."""

    code = "no_port"


def open_listener(address: str, ports: range) -> socket.socket:
    """Return a socket that listens on the first free port of `ports` (0: any).

    NoRendezvousPort: none is free.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    first: OSError | None = None
    for port in ports:
        try:
            return socket.create_server((address, port), family=family, backlog=LISTEN_BACKLOG)
        except OSError as error:
            first = first or error
    span = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else str(ports[0])
    raise NoRendezvousPort(
        f"no rendezvous port for ranks of other hosts: all of {span} of {address} fail, the first "
        f"with: {first}",
        where=f"{address}:{ports[0]}-{ports[-1]}",
        fix="Set a wider port range with `--listen HOST:FIRST-LAST` of `meshrl up` or `meshrl "
        "join`; or free one of these ports (`ss -tlnp`)",
    )


def parse_port_range(bind: str) -> range:
    """Return the ports of `mesh.bind` that a process may listen on; 0: any."""
    return parse_listen_address(bind, "mesh.bind")[1]


def format_rendezvous_url(listener: socket.socket, secret: str) -> str:
    """Return the URL of a store at `listener` for ranks on other hosts."""
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}/{secret}" if ":" in host else f"tcp://{host}:{port}/{secret}"


def rendezvous_directory(settings: MeshSettings) -> Path:
    """Return the directory for rendezvous files and gradient transfer on one host."""
    return Path(settings.run_root) / "mesh" / "gangs"


def is_multi_host(rendezvous: str) -> bool:
    """Return True if the rendezvous is for ranks on several hosts."""
    return rendezvous.startswith("tcp://")


def open_rendezvous_store(
    rendezvous: str, world_size: int, timeout: timedelta, listener: socket.socket | None = None
) -> Store:
    """Open the store of a rendezvous; rank 0 passes the `listener` of one across hosts.

    RuntimeError: no store is served there.
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
