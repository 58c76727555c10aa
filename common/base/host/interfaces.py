"""The network interfaces of this host, and their addresses."""

from __future__ import annotations

import socket

import psutil

from meshrl.common.base.host.listen_addresses import WILDCARD_HOSTS, parse_listen_address
from meshrl.common.base.host.settings import parse_advertised_host


def find_interface(address: str) -> str:
    """The interface that has this address; empty when none has."""
    name: str
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return ""


def find_bind_interface(bind: str, advertise: str) -> str:
    """The interface with the address that this host advertises, where `bind` is all of them; empty
    where it is not, or that address is another's, as a router's in front of it. Blocks.
    """
    if parse_listen_address(bind, "mesh.bind")[0] not in WILDCARD_HOSTS:
        return ""
    try:
        return find_interface(socket.gethostbyname(parse_advertised_host(advertise)))
    except OSError:
        return ""


def find_address(interface: str) -> str:
    """The address of an interface at which others reach it, of version 4 if it has one; empty when
    it has none, or there is no such interface.
    """
    there = psutil.net_if_addrs().get(interface, [])
    four = [one.address for one in there if one.family == socket.AF_INET]
    six = [one.address for one in there if one.family == socket.AF_INET6]
    return next(iter(four + [address for address in six if "%" not in address]), "")
