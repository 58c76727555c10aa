"""Whose processes are at the other end of TCP connections of this host, as the kernel tells it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ESTABLISHED, LISTENING = "01", "0A"  # states in /proc/net/tcp


class Row(NamedTuple):
    """A socket of this host; addresses as the kernel writes them, `host:port` in hexadecimal."""

    local: str
    remote: str
    state: str
    uid: int
    inode: int


def rows() -> Iterator[Row]:
    """All TCP sockets of this network namespace."""
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # no IPv6
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                yield Row(words[1], words[2], words[3], int(words[7]), int(words[9]))


def own_inodes() -> set[int]:
    """Inodes of this process's sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return found


def own_listeners() -> set[int]:
    """The TCP ports that this process listens at."""
    own = own_inodes()
    return {_port(row.local) for row in rows() if row.state == LISTENING and row.inode in own}


def foreign_clients(ports: set[int]) -> set[int]:
    """Users other than this one who have a connection to one of these ports of this host. Clients
    on other hosts are nobody's that can be told.
    """
    found, us = set(), os.geteuid()
    for row in rows():
        if row.state == ESTABLISHED and _port(row.remote) in ports and row.uid != us:
            found.add(row.uid)
    return found


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
