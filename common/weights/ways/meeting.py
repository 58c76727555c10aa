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
from meshrl.common.base.host.ports import ports
from meshrl.common.base.host.settings import MeshSettings

WAITING = 128  # connections that come before the store is made


class NoPort(Refused):
    """Every port that ranks of other hosts may meet at is taken."""

    code = "no_port"


def listen(address: str, free: range) -> socket.socket:
    """A socket that listens at the first of `free` (0: any) that is free; NoPort when none is."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    first: OSError | None = None
    for port in free:
        try:
            return socket.create_server((address, port), family=family, backlog=WAITING)
        except OSError as error:
            first = first or error
    span = f"{free[0]} to {free[-1]}" if len(free) > 1 else str(free[0])
    raise NoPort(
        f"ranks of other hosts have no port to meet at: {span} of {address} cannot be listened at, "
        f"the first one because of: {first}",
        where=f"{address}:{free[0]}-{free[-1]}",
        fix="Give the host more ports, `--listen HOST:FIRST-LAST` of `meshrl up` or `meshrl join`; "
        "or free one of these (`ss -tlnp`)",
    )


def ports_of(bind: str) -> range:
    """The ports of `mesh.bind` that a process may listen at; 0: any."""
    return ports(bind, "mesh.bind")[1]


def place_of(door: socket.socket, word: str) -> str:
    """What ranks on other hosts are told of a store that will be at `door`."""
    host, port = door.getsockname()[:2]
    return f"tcp://[{host}]:{port}/{word}" if ":" in host else f"tcp://{host}:{port}/{word}"


def meetings_of(settings: MeshSettings) -> Path:
    """Where ranks of one host meet, and gradients are lent to them."""
    return Path(settings.run_root) / "mesh" / "gangs"


def spans_hosts(where: str) -> bool:
    """Whether ranks meet there that are on several hosts."""
    return where.startswith("tcp://")


def store_at(where: str, ranks: int, within: timedelta, door: socket.socket | None = None) -> Store:
    """The store through which ranks meet; rank 0 has the `door` of one over hosts. RuntimeError
    when nobody serves it.
    """
    if not spans_hosts(where):
        Path(where).parent.mkdir(parents=True, exist_ok=True)
        file = FileStore(where, ranks)
        file.set_timeout(within)
        return file
    place = urlsplit(where)
    assert place.hostname is not None and place.port is not None, where
    store = TCPStore(
        place.hostname,
        place.port,
        None,
        door is not None,
        within,
        wait_for_workers=False,
        master_listen_fd=door.detach() if door is not None else None,
    )
    return PrefixStore(place.path[1:], store)
