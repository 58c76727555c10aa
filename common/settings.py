"""The settings of a mesh's processes: a file, written by whoever starts them."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ConfigError
from common.records import documents

SETTINGS_ENV = "MESHRL_SETTINGS"
REDIS_ENV = "MESHRL_REDIS_URL"  # of a Redis to use in place of one of ours
MESH_ENV = "MESHRL_MESH"  # by which a process is known to be a mesh's, wherever its settings are
# Processes that run a job author's code have no part in the mesh beside the channel to who started
# them, and are not told where its settings are, nor the URL of a Redis, which may hold a password.
WITHOUT_SETTINGS = {SETTINGS_ENV: "", REDIS_ENV: ""}
OFF = "off"  # value of `metrics` that serves none


def mark_of(settings: str | Path) -> str:
    """The value of MESH_ENV in the processes of the mesh with this file of settings."""
    return hashlib.blake2b(os.fsencode(settings), digest_size=16).hexdigest()


def this_host() -> str:
    """The name of this boot of this machine or container, within which shared memory and local
    files are in reach.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()}-{boot}"


def metrics_ports(where: str) -> tuple[str, range]:
    """Interface and the ports to try, of `HOST:*` (0: any), `HOST:PORT` or `HOST:LOW-HIGH`;
    ConfigError for anything else.
    """
    interface, _, ports = where.rpartition(":")
    low, _, high = ports.partition("-")
    try:
        found = range(0, 1) if ports == "*" else range(int(low), int(high or low) + 1)
    except ValueError:
        found = range(0)
    if not interface or not found or found[-1] > 65535:
        raise ConfigError(
            f"{where!r} is no place to serve metrics from",
            where="mesh.metrics",
            fix="Write HOST:*, HOST:PORT, HOST:LOW-HIGH, or off",
        )
    return interface, found


def advertised_host(advertise: str) -> str:
    """The host in `mesh.advertise`, which is HOST or tcp://HOST, with or without a port; empty when
    that is.
    """
    found = re.fullmatch(r"(?:\w+://)?(\[.*\]|[^:]+)(?::.*)?", advertise)
    return found.group(1) if found else advertise


def _refuse_shared(path: Path) -> None:
    """ConfigError for a file that names servers and holds secrets, and is not this user's alone."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"settings of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}",
            where=str(path),
            fix=f"They hold the secret of a mesh: chown it to user {os.geteuid()}, chmod 600",
        )


@dataclass(frozen=True)
class MeshSettings:
    """The settings of one mesh."""

    redis_url: str = field(repr=False)  # may hold a password
    run_root: str
    bind: str = "tcp://127.0.0.1:*"
    advertise: str = ""
    stall_s: float = 30.0
    host: str = field(default_factory=this_host)
    metrics: str = "127.0.0.1:*"  # see `metrics_ports`; off: nowhere
    nice: int = 0  # for the role processes that this process starts
    # Of this start of the mesh, in hexadecimal digits; see common.secret.
    secret: str = field(default="", repr=False)

    @classmethod
    def from_env(cls) -> MeshSettings:
        """The settings in the file that $MESHRL_SETTINGS names; ConfigError if there is none, a
        key is unknown, or another user can read or has made the file.
        """
        path = os.environ.get(SETTINGS_ENV, "")
        if not path:
            raise ConfigError(
                f"${SETTINGS_ENV} is not set",
                fix="Start services through `meshrl up` or `meshrl run`",
            )
        return cls.from_file(Path(path))

    @classmethod
    def from_file(cls, path: Path) -> MeshSettings:
        """The settings in a file; ConfigError as for `from_env`."""
        where = str(path)
        try:
            _refuse_shared(path)
            return cls(**documents.decode(path.read_bytes(), where))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"unusable settings: {error}", where=where) from None

    def to_file(self, path: str | Path) -> None:
        """Writes the file whole or not at all, for this user's eyes: the URL of a Redis may hold a
        password.
        """
        place = Path(path)
        fresh = place.with_name(place.name + ".new")
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(documents.encode(dataclasses.asdict(self)))
        fresh.replace(place)
