"""Network interfaces of this host, and their addresses."""

from __future__ import annotations

import socket

import psutil

from meshrl.common.base.host.listen_addresses import WILDCARD_HOSTS, parse_listen_address
from meshrl.common.base.host.settings import parse_advertised_host


def find_interface(address: str) -> str:
    """Return the interface with this address; empty if there is none."""
    name: str
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return ""


def find_bind_interface(bind: str, advertise: str) -> str:
    """Return the interface with the advertised address of this host, if `bind` is a wildcard.

    Returns an empty text otherwise, or if the address belongs to another machine, such as a router.
    Blocks.
    """
    if parse_listen_address(bind, "mesh.bind")[0] not in WILDCARD_HOSTS:
        return ""
    try:
        return find_interface(socket.gethostbyname(parse_advertised_host(advertise)))
    except OSError:
        return ""


def find_address(interface: str) -> str:
    """Return the address of an interface for other hosts, IPv4 if it has one.

    Returns an empty text if the interface is missing or has no address.
    """
    there = psutil.net_if_addrs().get(interface, [])
    four = [one.address for one in there if one.family == socket.AF_INET]
    six = [one.address for one in there if one.family == socket.AF_INET6]
    return next(iter(four + [address for address in six if "%" not in address]), "")
