"""Users of Redis, one per role and host: the head's, and those of admitted hosts.

The server receives only digests of their passwords.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from redis.exceptions import ResponseError

from meshrl.common.base.errors import NotAllowed, Refused
from meshrl.common.base.host.settings import make_redis_user
from meshrl.common.mesh.access import admitted_hosts
from meshrl.common.mesh.access.admitted_hosts import AdmittedHost
from meshrl.common.state.hosts import acl, credentials
from meshrl.common.state.redis.client import SCRIPTS_DIR, StateClient, load_script

# Rights of the user that creates users and grants them their rights.
REQUIRED_RIGHTS = "ACL and SCRIPT, and all commands and keys (`+@all ~* &*`)"


class RedisHostUsers:
    """Users of Redis by host. `head` is the host with Redis, admitted while it runs; others are on
    record.

    An expelled host stays expelled under its name for ever.
    """

    def __init__(self, directory: Path, head: AdmittedHost) -> None:
        self._directory, self._head = directory, head
        self._joined_hosts = admitted_hosts.read_hosts(directory)

    @property
    def hosts(self) -> dict[str, AdmittedHost]:
        """All admitted hosts, the head first."""
        return {self._head.host: self._head, **self._joined_hosts}

    @property
    def acl_lines(self) -> list[str]:
        """All users as lines of a configuration, disabled until `enable_all`."""
        return [
            f"user {name} {' '.join(words)}"
            for host in self.hosts.values()
            for name, words in _build_users(host, enabled=False)
        ]

    def add_host(self, host: AdmittedHost) -> None:
        """Record a host. Raises Refused if another has its name, or the name cannot be a user's."""
        known = self.hosts.get(host.host)
        if known is not None and known.passwords != host.passwords:
            raise Refused(
                f"the mesh already has a host {host.host}",
                fix="Join again: each joining host generates a new name",
            )
        _build_users(host, enabled=True)  # whether they can be made
        if known is None:
            self._joined_hosts[host.host] = host
            admitted_hosts.write_hosts(self._directory, self._joined_hosts.values())

    def require_not_head(self, host: str) -> None:
        """Raise Refused for the head, which cannot be removed."""
        if host == self._head.host:
            raise Refused(
                f"{host} is the head of the mesh", fix="Run `meshrl down` to stop the mesh"
            )

    def remove_host(self, host: str) -> bool:
        """Remove a host from the record; return whether it was on record."""
        was = self._joined_hosts.pop(host, None)
        if was is not None:
            admitted_hosts.write_hosts(self._directory, self._joined_hosts.values())
        return was is not None

    async def enable_all(self, owner: StateClient) -> None:
        """Enable the users of all recorded hosts and of no other.

        Loads the scripts that they may run by name, and the list that their keys are limited to.
        Safe twice.
        """
        scripts = {path.stem for path in SCRIPTS_DIR.glob("*/*.lua")} - {"prelude"}
        for script in sorted(name for name in scripts if not name.startswith("_")):
            await _run_command(owner, "SCRIPT", "LOAD", load_script(script)[0])
        for host in self.hosts.values():
            await self.enable_host(owner, host)
        for name in await credentials.list_admitted_hosts(owner):
            if name not in self.hosts:
                await self.delete_host_users(owner, name)

    async def enable_host(self, owner: StateClient, host: AdmittedHost) -> None:
        for name, words in _build_users(host, enabled=True):
            await _run_command(owner, "ACL", "SETUSER", name, *words)
        await credentials.admit_host(owner, host.host)

    async def delete_host_users(self, owner: StateClient, host: str) -> None:
        """Delete the users of one host, which cuts their connections off, then its keys."""
        await _run_command(
            owner, "ACL", "DELUSER", *(make_redis_user(role, host) for role in acl.ROLES)
        )
        await credentials.revoke_host(owner, host)

    async def disable_all(self, owner: StateClient) -> None:
        """Disable all users until they are enabled: for a server of the user's, which has no
        configuration of them.
        """
        for host in self.hosts.values():
            for name, words in _build_users(host, enabled=False):
                await _run_command(owner, "ACL", "SETUSER", name, *words)

    async def has_lost_users(self, owner: StateClient) -> bool:
        """Return True if the server knows none of the head's users, because it was restarted."""
        known = set(await _run_command(owner, "ACL", "USERS"))
        return any(name not in known for name, _ in _build_users(self._head, enabled=True))


def _build_users(host: AdmittedHost, enabled: bool) -> Iterable[tuple[str, list[str]]]:
    return [
        (make_redis_user(role, host.host), acl.build_acl_rules(role, host.host, digest, enabled))
        for role, digest in sorted(host.passwords.items())
    ]


async def _run_command(owner: StateClient, *command: str) -> list[str]:
    try:
        found: list[str] = await owner.run_command(*command)
    except (ResponseError, NotAllowed) as error:
        raise NotAllowed(
            f"Redis rejects the mesh's request to create users: {error}",
            where="$MESHRL_REDIS_URL",
            fix=f"Grant its user {REQUIRED_RIGHTS}; use Redis 7 or later",
        ) from error
    return found
