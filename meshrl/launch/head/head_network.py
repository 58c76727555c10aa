"""Network of the head of a mesh of several hosts: its secrets, and data for joining hosts."""

from __future__ import annotations

import dataclasses
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.common.api.calls.call_permissions import ROLES
from meshrl.common.base.errors import NotFound
from meshrl.common.base.host.interfaces import find_bind_interface
from meshrl.common.base.host.settings import SECRET_BYTES, MeshSettings, generate_host_name
from meshrl.common.mesh.access.admitted_hosts import AdmittedHost
from meshrl.common.mesh.access.owner import PERSON_ROLE, MeshOwner, read_owner
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.redis.access.redis_network import RedisNetwork
from meshrl.launch.redis.redis_configuration import RedisAddresses

SHARED_SETTINGS = ("stall_s", "encrypt")  # settings that all hosts have alike


@dataclass(frozen=True)
class HeadNetwork:
    """Network identity of the head as a host: its name stays, its secret is of this start. Its
    processes are reached at `listen`.
    """

    listen: str
    host: str
    secret: str = field(repr=False)

    @classmethod
    def create(cls, mesh_paths: MeshPaths, listen: str) -> HeadNetwork:
        """Return the network of a start of the mesh. Raises CorruptData."""
        try:
            host = read_owner(mesh_paths.directory).host
        except NotFound:
            host = generate_host_name()
        return cls(listen, host, secrets.token_hex(SECRET_BYTES))

    def make_redis_network(self, mesh_secret: str, advertise: str) -> RedisNetwork:
        """Return the Redis network, in which commands of the mesh's owner have passwords by the
        mesh's secret.
        """
        now_s = time.time()
        own = AdmittedHost.from_secret(self.host, self.secret, ROLES - {PERSON_ROLE}, now_s)
        user_access = AdmittedHost.from_secret(self.host, mesh_secret, [PERSON_ROLE], now_s)
        admitted = dataclasses.replace(own, passwords={**own.passwords, **user_access.passwords})
        return RedisNetwork(admitted, self.listen, advertise)

    def make_settings(self, addresses: RedisAddresses, base: MeshSettings) -> MeshSettings:
        return dataclasses.replace(
            base,
            redis_url=addresses.url,
            authority=addresses.ca_file,
            bind=self.listen,
            interface=find_bind_interface(self.listen, base.advertise),
            host=self.host,
            secret=self.secret,
            joinable=True,
        )

    def write_owner(self, mesh_paths: MeshPaths, mesh_secret: str) -> None:
        """Record what commands at the head need."""
        MeshOwner(mesh_secret, self.host).write(mesh_paths.directory)


def describe_mesh(addresses: RedisAddresses, settings: MeshSettings) -> dict[str, Any]:
    """Return what every joining host receives; see `meshrl.common.api.gateway.HostAdmitted`."""
    ca_pem = Path(addresses.remote_ca_file).read_text() if addresses.remote_ca_file else ""
    shared = {name: getattr(settings, name) for name in SHARED_SETTINGS if hasattr(settings, name)}
    return {"redis_url": addresses.remote_url, "ca_pem": ca_pem, "settings": shared}
