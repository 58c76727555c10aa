"""The network interface by which ranks of a gang reach each other: loopback on one host, over
several the one that their hosts' settings say. What an operator has set in the environment wins.
"""

from __future__ import annotations

import os

from meshrl.common.base.host.interfaces import interface_of
from meshrl.common.base.host.settings import MeshSettings, advertised_host

LOOPBACK = "lo"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_ours: dict[str, str] = {}  # what this process has set, by variable


def wide(settings: MeshSettings) -> str:
    """Return the interface by which ranks on others reach this host; empty if unknown."""
    chosen = _operators(GLOO).partition(",")[0] or settings.interface
    return chosen or interface_of(advertised_host(settings.bind).strip("[]"))


def use(interface: str) -> None:
    """Process groups that are made from now on use it, unless an operator has chosen another."""
    # To gloo it is a name, to NCCL a prefix of names unless it says otherwise.
    for variable, value in ((GLOO, interface), (NCCL, f"={interface}")):
        if not _operators(variable):
            os.environ[variable] = _ours[variable] = value


def _operators(variable: str) -> str:
    value = os.environ.get(variable, "")
    return "" if value == _ours.get(variable) else value
