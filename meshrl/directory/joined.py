"""Record of the hosts that have joined a mesh, in the mesh's directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from meshrl.common.base.files import documents
from meshrl.common.mesh.access.hosts import REPAIR
from meshrl.directory.places import MeshPlace, write_json


@dataclass(frozen=True)
class JoinedHost:
    """A host that was let in."""

    host: str
    address: str
    prefix: str  # of its workers' names
    planner: str  # name of the planner that stands by there; empty: none does
    workers: int
    joined_s: float  # wall clock
    key: str  # digest of that by which it is known at the gateway
    ephemeral: bool = False  # it is forgotten when it has been away for `pool.gone_s`


@dataclass(frozen=True)
class HostBook:
    """The hosts that were let in, and how many there have been."""

    count: int = 0
    hosts: Mapping[str, JoinedHost] = field(default_factory=dict)
    left: tuple[str, ...] = ()  # names of hosts that are in no more: none comes back

    @classmethod
    def of(cls, place: MeshPlace) -> HostBook:
        """That of a mesh; Damaged."""
        try:
            held = documents.read(place.joined, REPAIR.format(other="hosts.json"))
        except FileNotFoundError:
            return cls()
        try:
            hosts = {name: JoinedHost(**row) for name, row in held["hosts"].items()}
            return cls(held["count"], hosts, tuple(held["left"]))
        except (KeyError, TypeError, AttributeError) as error:
            fix = REPAIR.format(other="hosts.json")
            why = f"it tells of no hosts: {error!r}"
            raise documents.damaged(place.joined, why, fix) from error

    def write(self, place: MeshPlace) -> None:
        """Puts it on record."""
        write_json(place.joined, asdict(self))


def joined_hosts(place: MeshPlace) -> Mapping[str, JoinedHost]:
    """The hosts that have joined a mesh, by name; Damaged."""
    return HostBook.of(place).hosts
