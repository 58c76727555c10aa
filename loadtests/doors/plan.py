"""Plan and results of an unauthenticated peer's attempts, as plain data that both sides read.

The plan has more than a real peer could find out: all ports, paths and process ids, each process's
name and right incarnation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NOBODY = 65534

REFUSED = "refused"  # nothing came, or no more than that it is refused
# No more than which protocol it is: the banner of every ZeroMQ socket; a Redis that does not
# understand what is no command says so before it asks for a password.
GREETED = "greeted"
METRICS = "metrics"  # open on purpose
ANSWERED = "answered"  # it returned data, or had an effect


@dataclass(frozen=True)
class Process:
    name: str
    address: str
    incarnation: str


@dataclass(frozen=True)
class Port:
    """A listening TCP socket. `serves`: calls, bulk, metrics, redis, or whatever else."""

    host: str
    port: int
    serves: str
    owner: str


@dataclass
class Plan:
    ports: list[Port] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    sockets: list[str] = field(default_factory=list)  # unix sockets; abstract ones begin with @
    files: list[str] = field(default_factory=list)  # directories too
    pids: dict[int, str] = field(default_factory=dict)

    @classmethod
    def decode(cls, document: dict[str, Any]) -> Plan:
        ports = [Port(**port) for port in document.pop("ports")]
        processes = [Process(**process) for process in document.pop("processes")]
        pids = {int(pid): name for pid, name in document.pop("pids").items()}
        return cls(ports, processes, pids=pids, **document)


@dataclass(frozen=True)
class Tried:
    """Attempt of a plan; `told` has the start of the answer in Latin-1."""

    what: str
    outcome: str
    told: str = ""
