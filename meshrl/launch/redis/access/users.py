"""The users of Redis where each role of each host is one: the head's, and those of the hosts that
the mesh has let in. Whoever serves Redis is told digests of their passwords.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from redis.exceptions import ResponseError

from meshrl.common.base.errors import NotAllowed, Refused
from meshrl.common.base.host.settings import redis_user
from meshrl.common.mesh.access import hosts
from meshrl.common.mesh.access.hosts import AdmittedHost
from meshrl.common.state.hosts import doors, rights
from meshrl.common.state.redis.client import SCRIPTS, State, script_source

# What whoever makes users, and gives them their rights, may do itself.
NEEDS = "ACL and SCRIPT, and all commands and keys (`+@all ~* &*`)"


class HostUsers:
    """`head`: the host with Redis, which is let in while it runs; others are on record. A host that
    is expelled is so for ever, under its name.
    """

    def __init__(self, directory: Path, head: AdmittedHost) -> None:
        self._directory, self._head = directory, head
        self._joined = hosts.admitted(directory)

    @property
    def hosts(self) -> dict[str, AdmittedHost]:
        """All that are let in, the head first."""
        return {self._head.host: self._head, **self._joined}

    @property
    def lines(self) -> list[str]:
        """All users, of a configuration: off, until somebody opens."""
        return [
            f"user {name} {' '.join(words)}"
            for host in self.hosts.values()
            for name, words in _users(host, on=False)
        ]

    def remember(self, host: AdmittedHost) -> None:
        """Puts a host on record. Refused: another has its name, or it cannot be a user's."""
        known = self.hosts.get(host.host)
        if known is not None and known.passwords != host.passwords:
            raise Refused(
                f"there is a host {host.host} in the mesh already",
                fix="Each host that joins makes a name of its own: join again",
            )
        _users(host, on=True)  # whether they can be made
        if known is None:
            self._joined[host.host] = host
            hosts.keep(self._directory, self._joined.values())

    def refuse_head(self, host: str) -> None:
        """Refused for the head, which cannot be let out."""
        if host == self._head.host:
            raise Refused(f"{host} is the head of the mesh", fix="`meshrl down` stops the mesh")

    def forget(self, host: str) -> bool:
        """Strikes it off; whether it was on record."""
        was = self._joined.pop(host, None)
        if was is not None:
            hosts.keep(self._directory, self._joined.values())
        return was is not None

    async def open(self, owner: State) -> None:
        """Lets all hosts on record in, and nobody else: their users, the scripts that these may run
        by name, and the list that their keys are held to. Safe twice.
        """
        scripts = {path.stem for path in SCRIPTS.glob("*/*.lua")} - {"prelude"}
        for script in sorted(name for name in scripts if not name.startswith("_")):
            await _asked(owner, "SCRIPT", "LOAD", script_source(script)[0])
        for host in self.hosts.values():
            await self.let_in(owner, host)
        for name in await doors.hosts(owner):
            if name not in self.hosts:
                await self.let_out(owner, name)

    async def let_in(self, owner: State, host: AdmittedHost) -> None:
        for name, words in _users(host, on=True):
            await _asked(owner, "ACL", "SETUSER", name, *words)
        await doors.admit_host(owner, host.host)

    async def let_out(self, owner: State, host: str) -> None:
        """Ends the users of one, which cuts their connections off, then its keys."""
        await _asked(owner, "ACL", "DELUSER", *(redis_user(role, host) for role in rights.ROLES))
        await doors.revoke_host(owner, host)

    async def shut(self, owner: State) -> None:
        """Lets none of their users in until they are opened: for a server that is not ours, which
        has no configuration of them.
        """
        for host in self.hosts.values():
            for name, words in _users(host, on=False):
                await _asked(owner, "ACL", "SETUSER", name, *words)

    async def missing(self, owner: State) -> bool:
        """Whether the server knows none of the head's users: it was started again."""
        known = set(await _asked(owner, "ACL", "USERS"))
        return any(name not in known for name, _ in _users(self._head, on=True))


def _users(host: AdmittedHost, on: bool) -> Iterable[tuple[str, list[str]]]:
    return [
        (redis_user(role, host.host), rights.rules(role, host.host, digest, on))
        for role, digest in sorted(host.passwords.items())
    ]


async def _asked(owner: State, *words: str) -> list[str]:
    try:
        found: list[str] = await owner.command(*words)
    except (ResponseError, NotAllowed) as error:
        raise NotAllowed(
            f"Redis does not let the mesh make users of its own: {error}",
            where="$MESHRL_REDIS_URL",
            fix=f"Its user needs {NEEDS}; Redis 7 or later",
        ) from error
    return found
