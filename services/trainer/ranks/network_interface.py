"""The network interface by which ranks of a gang reach each other: loopback on one host, over
several the one that their hosts' settings say. What an operator has set in the environment wins.
"""

from __future__ import annotations

import os

from meshrl.common.base.host.interfaces import find_interface
from meshrl.common.base.host.settings import MeshSettings, parse_advertised_host

LOOPBACK = "lo"
GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_own_values: dict[str, str] = {}  # what this process has set, by variable


def find_rank_interface(settings: MeshSettings) -> str:
    """Return the interface by which ranks on others reach this host; empty if unknown."""
    chosen = _read_operator_value(GLOO_VARIABLE).partition(",")[0] or settings.interface
    return chosen or find_interface(parse_advertised_host(settings.bind).strip("[]"))


def set_interface(interface: str) -> None:
    """Process groups that are made from now on use it, unless an operator has chosen another."""
    # To gloo it is a name, to NCCL a prefix of names unless it says otherwise.
    for variable, value in ((GLOO_VARIABLE, interface), (NCCL_VARIABLE, f"={interface}")):
        if not _read_operator_value(variable):
            os.environ[variable] = _own_values[variable] = value


def _read_operator_value(variable: str) -> str:
    value = os.environ.get(variable, "")
    return "" if value == _own_values.get(variable) else value
