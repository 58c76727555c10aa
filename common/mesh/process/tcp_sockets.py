"""Owners of TCP connections of this host, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

STATE_ESTABLISHED, STATE_LISTENING = "01", "0A"  # states in /proc/net/tcp


class SocketAddress(NamedTuple):
    """Address of one end of a connection, or of a listener."""

    host: IPv4Address | IPv6Address
    port: int


class TcpSocket(NamedTuple):
    """TCP socket of this host."""

    local: SocketAddress
    remote: SocketAddress
    uid: int
    inode: int


def read_sockets(state: str, pid: int | str = "self") -> Iterator[TcpSocket]:
    """Yield the TCP sockets of a process's network namespace that are in a state.

    A busy host has thousands in other states. Their addresses are not parsed, which is most of the
    cost.
    """
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # no IPv6
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == state:
                    local, remote = map(_parse_address, words[1:3])
                    yield TcpSocket(local, remote, int(words[7]), int(words[9]))


def find_listen_addresses(pid: int | str = "self") -> set[SocketAddress]:
    """Return the addresses at which a process listens; raise FileNotFoundError if it has exited."""
    own = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            own.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    listening = read_sockets(STATE_LISTENING, pid)
    return {row.local for row in listening if f"socket:[{row.inode}]" in own}


def find_foreign_users(addresses: Set[SocketAddress]) -> set[int]:
    """Return other users of this host with a connection to one of these local addresses.

    The users of clients on other hosts are unknown: see `find_client_hosts`.
    """
    users = {row.uid for row in read_sockets(STATE_ESTABLISHED) if _is_at(row.remote, addresses)}
    return users - {os.geteuid()}


def find_client_hosts(addresses: Set[SocketAddress]) -> set[str]:
    """Return the addresses of clients that are connected to one of these local addresses."""
    return {
        str(row.remote.host)
        for row in read_sockets(STATE_ESTABLISHED)
        if _is_at(row.local, addresses)
    }


def _is_at(end: SocketAddress, places: Set[SocketAddress]) -> bool:
    """Return True if a listener at one of these addresses serves this end, wildcard hosts
    included.
    """
    everywhere = (
        SocketAddress(ip_address("0.0.0.0"), end.port),
        SocketAddress(ip_address("::"), end.port),
    )
    return end in places or not places.isdisjoint(everywhere)


def _parse_address(text: str) -> SocketAddress:
    """Parse the kernel's hexadecimal `host:port`, whose host has 32-bit words of native byte order.

    All supported machines are little-endian.
    """
    host, _, port = text.rpartition(":")
    words = (bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    found = ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return SocketAddress(mapped or found, int(port, 16))
