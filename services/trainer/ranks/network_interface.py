"""Network interface between the ranks of a gang.

Ranks on one host use loopback. Ranks on several use the interface of their hosts' settings. A value
that the operator has set in the environment takes precedence.
"""

from __future__ import annotations

import os

from meshrl.common.base.host.interfaces import find_interface
from meshrl.common.base.host.settings import MeshSettings, parse_advertised_host

LOOPBACK = "lo"
GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_own_values: dict[str, str] = {}  # set by this process, by variable


def find_rank_interface(settings: MeshSettings) -> str:
    """Return the interface for ranks on other hosts; empty if unknown."""
    chosen = _read_operator_value(GLOO_VARIABLE).partition(",")[0] or settings.interface
    return chosen or find_interface(parse_advertised_host(settings.bind).strip("[]"))


def set_interface(interface: str) -> None:
    """Set the interface of later process groups, unless an operator has chosen one."""
    # Gloo takes a name, NCCL a prefix of names unless `=` precedes it.
    for variable, value in ((GLOO_VARIABLE, interface), (NCCL_VARIABLE, f"={interface}")):
        if not _read_operator_value(variable):
            os.environ[variable] = _own_values[variable] = value


def _read_operator_value(variable: str) -> str:
    value = os.environ.get(variable, "")
    return "" if value == _own_values.get(variable) else value
