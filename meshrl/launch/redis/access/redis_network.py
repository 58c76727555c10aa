"""Redis for joined hosts: a port with TLS, on a server that supports TLS."""

from __future__ import annotations

import datetime
import errno
import socket
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.files import documents
from meshrl.common.base.host.listen_addresses import (
    WILDCARD_HOSTS,
    AddressInUse,
    parse_listen_address,
)
from meshrl.common.base.host.settings import parse_advertised_host
from meshrl.common.mesh.access.admitted_hosts import AdmittedHost
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.embedded_server import ServerListener

PORT_FILE = "redis-port.json"  # in the mesh's directory: hosts that have joined come back to it
REPAIR_HINT = "Remove it. Joined hosts reconnect only if Redis gets the same port again"


@dataclass(frozen=True)
class RedisNetwork:
    """Network of a mesh with several hosts.

    `listen` and `advertise` are as in its settings (`bind`, `advertise`); `head` has the users of
    the head's own processes.
    """

    head: AdmittedHost
    listen: str
    advertise: str = ""

    @property
    def reachable_host(self) -> str:
        """Host by which others reach the head. Raises ConfigError if no address is given."""
        host = parse_advertised_host(self.advertise) or self._listen_range[0]
        if host in WILDCARD_HOSTS:
            raise ConfigError(
                f"the head listens at {host}, at which other hosts cannot reach it",
                where="--listen",
                fix="Set one of its addresses, or add --advertise HOST",
            )
        return host

    @property
    def _listen_range(self) -> tuple[str, range]:
        host, among = parse_listen_address(self.listen, "--listen")
        return "0.0.0.0" if host == "*" else host, among

    def make_listener(self, directory: Path, now: datetime.datetime | None) -> ServerListener:
        """Return the listener of a server; with TLS and a new certificate if `now` is given."""
        host, among = self._listen_range
        port = _choose_port(directory / PORT_FILE, host, among)
        if now is None:
            return ServerListener(host, port)
        from meshrl.launch.redis.access import certificates as made

        made.issue_certificate(directory, list(dict.fromkeys([self.reachable_host, host])), now)
        files = (made.CERTIFICATE_FILE, made.KEY_FILE, made.CA_FILE)
        return ServerListener(host, port, *(str((directory / file).resolve()) for file in files))

    def format_url(self, listener: ServerListener) -> str:
        """Return the URL at which joined hosts reach the listener, without user and password."""
        host = (
            f"[{self.reachable_host}]"
            if ":" in self.reachable_host and "[" not in self.reachable_host
            else self.reachable_host
        )
        return f"{listener.scheme}://{host}:{listener.port}/0"


def is_port_taken(listener: ServerListener) -> bool:
    """Return True if another process listens there, given that none of our servers does.

    Raises ConfigError if no process can listen there.
    """
    return not _find_free_port(listener.host.strip("[]"), listener.port)


def is_loopback_only(listen: str) -> bool:
    """Return True if only this machine reaches a server that listens there."""
    return embedded_server.is_loopback(parse_listen_address(listen, "--listen")[0])


def resolve_remote_url(url: str, listen: str) -> tuple[str, str]:
    """Return the URL by which joined hosts reach a user's server, and its authority's file.

    Raises ConfigError if they cannot reach it, or would send it passwords in the clear.
    """
    bare, authority = embedded_server.strip_credentials(url)
    scheme, _, rest = bare.partition("://")
    host = rest.partition("/")[0].rpartition(":")[0] or rest.partition("/")[0]
    is_local = scheme == "unix" or embedded_server.is_loopback(host)
    if (is_local or scheme != "rediss") and not (is_local and is_loopback_only(listen)):
        raise ConfigError(
            "joining hosts cannot reach this Redis"
            if is_local
            else "joining hosts would send passwords to this Redis unencrypted",
            where=f"$MESHRL_REDIS_URL: {bare}",
            fix="Set a Redis with TLS, by an address that they reach: "
            "rediss://USER:PASSWORD@HOST:PORT/0. Add ?ssl_ca_certs=FILE if your own "
            "authority signed its certificate",
        )
    return bare, authority


def _choose_port(port_file: Path, host: str, allowed: range) -> int:
    """Return the last port, if it is free and still allowed, else the first free one."""
    before = documents.read(port_file, REPAIR_HINT)["port"] if port_file.is_file() else 0
    anyone = allowed == range(0, 1)
    preferred = [before] if before and (anyone or before in allowed) else []
    for port in [*preferred, *allowed]:
        if free := _find_free_port(host.strip("[]"), port):
            if free != before:
                documents.write(port_file, {"port": free})
            return free
    raise AddressInUse(
        f"no port of {host} from {allowed[0]} to {allowed[-1]} is free for Redis",
        where="--listen",
        fix="Set a wider range: --listen HOST:LOW-HIGH",
    )


def _find_free_port(host: str, port: int) -> int:
    """Return the port, or one that the kernel picks for 0; 0 if it is taken.

    Raises ConfigError if the host is not this machine's, or the port not for this user.
    """
    try:
        families = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(
            f"the host name {host} does not resolve: {error}", where="--listen"
        ) from error
    family, kind, protocol, _, address = families[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return 0
            raise ConfigError(
                f"Redis cannot listen at {host}, port {port}: {error}",
                where="--listen",
                fix="Set an address of this host, and ports from 1024 on",
            ) from error
        return int(probe.getsockname()[1])
