"""What the head of a mesh of several hosts keeps to itself, and what it tells those that join."""

from __future__ import annotations

import dataclasses
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.common.api.calls.callers import ROLES
from meshrl.common.base.errors import NotFound
from meshrl.common.base.host.interfaces import interface_behind
from meshrl.common.base.host.settings import SECRET_BYTES, MeshSettings, new_host
from meshrl.common.mesh.access.hosts import AdmittedHost
from meshrl.common.mesh.access.owner import PERSON, Owner, owner
from meshrl.directory.places import MeshPlace
from meshrl.launch.redis.access.network import Network
from meshrl.launch.redis.serving import RedisAddresses

SHARED = ("stall_s", "encrypt")  # settings that all hosts have alike


@dataclass(frozen=True)
class HeadNetwork:
    """The head itself as a host: its name stays, its secret is of this start. `listen` is where its
    processes are reached.
    """

    listen: str
    host: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls, place: MeshPlace, listen: str) -> HeadNetwork:
        """That of a start of the mesh. Damaged."""
        try:
            host = owner(place.directory).host
        except NotFound:
            host = new_host()
        return cls(listen, host, secrets.token_hex(SECRET_BYTES))

    def network(self, mesh_secret: str, advertise: str) -> Network:
        """What Redis is told: commands of the mesh's owner have passwords by the mesh's secret."""
        now_s = time.time()
        own = AdmittedHost.of(self.host, self.secret, ROLES - {PERSON}, now_s)
        people = AdmittedHost.of(self.host, mesh_secret, [PERSON], now_s)
        admitted = dataclasses.replace(own, passwords={**own.passwords, **people.passwords})
        return Network(admitted, self.listen, advertise)

    def settings(self, told: RedisAddresses, base: MeshSettings) -> MeshSettings:
        return dataclasses.replace(
            base,
            redis_url=told.url,
            authority=told.authority,
            bind=self.listen,
            interface=interface_behind(self.listen, base.advertise),
            host=self.host,
            secret=self.secret,
            joinable=True,
        )

    def keep(self, place: MeshPlace, mesh_secret: str) -> None:
        """Puts on record what commands at the head need."""
        Owner(mesh_secret, self.host).write(place.directory)


def told_to_hosts(told: RedisAddresses, settings: MeshSettings) -> dict[str, Any]:
    """What every host that joins is told; see `meshrl.common.api.gateway.HostAdmitted`."""
    authority = Path(told.far_authority).read_text() if told.far_authority else ""
    shared = {name: getattr(settings, name) for name in SHARED if hasattr(settings, name)}
    return {"redis_url": told.far_url, "authority": authority, "settings": shared}
