"""Record of the hosts that have joined a mesh, in the mesh's directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from meshrl.common.base.files import documents
from meshrl.common.mesh.access.admitted_hosts import REPAIR_HINT
from meshrl.directory.directory_paths import MeshPaths, write_json


@dataclass(frozen=True)
class JoinedHost:
    """Host that was admitted."""

    host: str
    address: str
    worker_prefix: str  # prefix of its workers' names
    planner_name: str  # name of the planner that stands by there; empty: none does
    workers: int
    joined_at_s: float  # wall clock
    key_digest: str  # digest of that by which it is known at the gateway
    ephemeral: bool = False  # it is removed after an absence of `pool.forget_after_s`


_OLD_HOST_KEYS = {
    "prefix": "worker_prefix",
    "planner": "planner_name",
    "joined_s": "joined_at_s",
    "key": "key_digest",
}
_OLD_RECORD_KEYS = {"count": "joined_count", "left": "departed_hosts"}


@dataclass(frozen=True)
class JoinedHosts:
    """Hosts that were admitted, and the count of all so far."""

    joined_count: int = 0
    hosts: Mapping[str, JoinedHost] = field(default_factory=dict)
    departed_hosts: tuple[str, ...] = ()  # names of hosts that are in no more: none comes back

    @classmethod
    def read(cls, mesh_paths: MeshPaths) -> JoinedHosts:
        """Return the joined hosts of a mesh. Raises CorruptData."""
        try:
            document = documents.read(
                mesh_paths.joined_hosts, REPAIR_HINT.format(other="hosts.json")
            )
        except FileNotFoundError:
            return cls()
        try:
            document = documents.rename_keys(document, _OLD_RECORD_KEYS)
            rows = {
                name: documents.rename_keys(row, _OLD_HOST_KEYS)
                for name, row in document["hosts"].items()
            }
            hosts = {name: JoinedHost(**row) for name, row in rows.items()}
            return cls(document["joined_count"], hosts, tuple(document["departed_hosts"]))
        except (KeyError, TypeError, AttributeError) as error:
            fix = REPAIR_HINT.format(other="hosts.json")
            why = f"it is not a valid list of hosts: {error!r}"
            raise documents.make_corrupt_error(mesh_paths.joined_hosts, why, fix) from error

    def write(self, mesh_paths: MeshPaths) -> None:
        """Write the record."""
        write_json(mesh_paths.joined_hosts, asdict(self))


def read_joined_hosts(mesh_paths: MeshPaths) -> Mapping[str, JoinedHost]:
    """Return the hosts that have joined a mesh, by name. Raises CorruptData."""
    return JoinedHosts.read(mesh_paths).hosts
