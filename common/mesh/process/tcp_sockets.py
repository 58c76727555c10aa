"""Whose processes are at the other end of TCP connections of this host, as the kernel tells it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

STATE_ESTABLISHED, STATE_LISTENING = "01", "0A"  # states in /proc/net/tcp


class SocketAddress(NamedTuple):
    """Of a connection, or where one is awaited."""

    host: IPv4Address | IPv6Address
    port: int


class TcpSocket(NamedTuple):
    """A socket of this host."""

    local: SocketAddress
    remote: SocketAddress
    state: str
    uid: int
    inode: int


def read_sockets(pid: int | str = "self") -> Iterator[TcpSocket]:
    """All TCP sockets of the network namespace of a process."""
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # no IPv6
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                yield TcpSocket(
                    _parse_address(words[1]),
                    _parse_address(words[2]),
                    words[3],
                    int(words[7]),
                    int(words[9]),
                )


def find_listen_addresses(pid: int | str = "self") -> set[SocketAddress]:
    """Where a process listens, this one or another. FileNotFoundError: it has ended."""
    own = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            own.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    listening = (row for row in read_sockets(pid) if row.state == STATE_LISTENING)
    return {row.local for row in listening if f"socket:[{row.inode}]" in own}


def find_foreign_users(addresses: Set[SocketAddress]) -> set[int]:
    """Users of this host other than this one who have a connection to one of these of its places.
    Clients on other hosts are nobody's that can be told: see `client_hosts`.
    """
    users = {
        row.uid
        for row in read_sockets()
        if row.state == STATE_ESTABLISHED and _is_at(row.remote, addresses)
    }
    return users - {os.geteuid()}


def find_client_hosts(addresses: Set[SocketAddress]) -> set[str]:
    """Addresses from which there is a connection to one of these places of this host."""
    return {
        str(row.remote.host)
        for row in read_sockets()
        if row.state == STATE_ESTABLISHED and _is_at(row.local, addresses)
    }


def _is_at(end: SocketAddress, places: Set[SocketAddress]) -> bool:
    """Whether who listens at one of these is at this end; who listens everywhere has no host."""
    everywhere = (
        SocketAddress(ip_address("0.0.0.0"), end.port),
        SocketAddress(ip_address("::"), end.port),
    )
    return end in places or not places.isdisjoint(everywhere)


def _parse_address(text: str) -> SocketAddress:
    """Of `host:port` in hexadecimal, as the kernel writes it: hosts in words of its own byte order
    (little on all that we run on).
    """
    host, _, port = text.rpartition(":")
    words = (bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    found = ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return SocketAddress(mapped or found, int(port, 16))
