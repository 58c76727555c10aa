"""Settings of a mesh's processes: a file, written by the process that starts them."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import secrets
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.files import documents

SETTINGS_ENV = "MESHRL_SETTINGS"
REDIS_ENV = "MESHRL_REDIS_URL"  # of an external Redis
WORKER_ENV = "MESHRL_WORKER"  # name of the worker that started a role process
DEVICE_ENV = "MESHRL_DEVICE"  # device of that worker: cpu or cuda
ACCELERATOR_ENV = "MESHRL_ACCELERATOR"  # name of its accelerator, such as cuda:0 NVIDIA H200
# Bytes that a worker's instances may use of each tier; 0: all.
BUDGET_VARIABLES = {
    tier: f"MESHRL_{tier.upper()}_BYTES" for tier in ("accelerator", "memory", "disk")
}
MESH_TAG_ENV = "MESHRL_MESH"  # identifies a process of a mesh, wherever its settings are
# Processes that run a job's own code are no members of the mesh and have only a channel to their
# parent. They do not get the path of the settings, nor the URL of a Redis, which may contain a
# password.
SCRUBBED_ENV = {SETTINGS_ENV: "", REDIS_ENV: ""}
METRICS_OFF = "off"  # value of `metrics` without an endpoint
SECRET_BYTES = 32  # of a mesh's secret, which its members share
MAX_HOST_NAME_CHARS = 24  # characters of the machine's own name in a host's


def derive_key(secret: str, purpose: str) -> bytes:
    """Derive 32 bytes for one purpose ("redis/trainer") from the secret of a mesh, by keyed
    BLAKE2b.

    The secret itself is never sent, and the key of one purpose reveals neither the secret nor
    another key.
    """
    return hashlib.blake2b(purpose.encode(), key=bytes.fromhex(secret), digest_size=32).digest()


def make_redis_user(role: str, host: str) -> str:
    """Return the Redis user of processes with `role` on `host`."""
    return f"{role}@{host}"


def derive_redis_password(secret: str, role: str) -> str:
    """Return the Redis password of a role, derived from the host's `secret`."""
    return derive_key(secret, f"redis/{role}").hex()


def compute_mesh_tag(settings: str | Path) -> str:
    """Return the value of MESH_TAG_ENV in the processes of the mesh with this settings file."""
    return hashlib.blake2b(os.fsencode(settings), digest_size=16).hexdigest()


def make_offload_path(directory: str | Path, process: str, part: str = "") -> Path:
    """Return the file of a part of a role process's offloaded state, in a `make_offload_directory`.

    Part "" is the record of the whole state; the names of all parts begin with its file name.
    """
    return Path(directory) / (process.replace("/", "-") + ".kept" + (f".{part}" if part else ""))


def generate_host_name() -> str:
    """Generate a unique name for the host whose processes these settings are for.

    Containers and namespaces of one machine share its name and boot, but have separate files and
    processes.
    """
    name = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().partition(".")[0].lower())
    return f"{name[:MAX_HOST_NAME_CHARS]}-{secrets.token_hex(3)}"


def parse_advertised_host(advertise: str) -> str:
    """Return the host in `mesh.advertise`, which is HOST or tcp://HOST, with or without a port.

    Returns an empty text for an empty `mesh.advertise`.
    """
    found = re.fullmatch(r"(?:\w+://)?(\[.*\]|[^:]+)(?::.*)?", advertise)
    return found.group(1) if found else advertise


def require_private_file(path: Path) -> None:
    """Raise ConfigError for a file with servers and secrets that other users can read or have
    written.
    """
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"the settings belong to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}",
            where=str(path),
            fix=f"Run chown to user {os.geteuid()} and chmod 600: the file contains the secret of "
            "a mesh",
        )


@dataclass(frozen=True)
class MeshSettings:
    """Settings of one mesh."""

    redis_url: str = field(repr=False)  # may hold a password
    run_root: str
    bind: str = "tcp://127.0.0.1:*"
    advertise: str = ""
    stall_s: float = 30.0
    host: str = field(default_factory=generate_host_name)  # generated once, with the settings
    metrics: str = "127.0.0.1:*"  # see `meshrl.common.base.host.listen_addresses`; off: nowhere
    nice: int = 0  # for the role processes that this process starts
    worker: str = ""  # worker that started this role process
    device: str = ""  # of that worker: cpu or cuda
    accelerator: str = ""  # of that worker, by name
    # In hexadecimal digits; see `derive_key`. Where hosts may join, the Redis passwords of this
    # host's processes are derived from it.
    secret: str = field(default="", repr=False)
    joinable: bool = False  # hosts may join: each role of each host is a user of Redis
    encrypt: bool | None = None  # bulk bytes; None: where hosts may join
    # Interface that connects ranks of a gang on several hosts, such as eth1; empty: the one with
    # the address in `bind`.
    interface: str = ""
    network: str = ""  # name of the network of hosts that gangs may span; empty: the head's
    # Cache of weight chunks on hosts other than the weight store's; 0: none. The default holds
    # several versions of the models of one host.
    chunks_bytes: int = 64 << 30
    # Bytes per second that all processes of the host together send, and receive, at bulk ports; 0:
    # unlimited.
    rate_up: int = 0
    rate_down: int = 0
    # File of the certificate that signs Redis' own; empty: no TLS, or the host's default
    # certificates.
    authority: str = ""

    @property
    def offload_targets(self) -> tuple[str, str]:
        """Worker that owns memory segments of this process, and directory of its offloaded tensors.

        Both are empty if no worker has started the process.
        """
        return self.worker, self.make_offload_directory(self.worker) if self.worker else ""

    @property
    def is_bulk_encrypted(self) -> bool:
        """True if bulk bytes are encrypted."""
        return self.joinable if self.encrypt is None else self.encrypt

    def make_redis_url(self, role: str) -> str:
        """Return the URL by which a process of `role` connects to Redis.

        Where hosts may join, it connects as that role's user of this host.
        """
        if not self.joinable:
            return self.redis_url
        scheme, _, rest = self.redis_url.partition("://")
        authority = f"?ssl_ca_certs={quote(self.authority)}" if self.authority else ""
        user = quote(make_redis_user(role, self.host), safe="")
        return f"{scheme}://{user}:{derive_redis_password(self.secret, role)}@{rest}{authority}"

    def make_offload_directory(self, worker: str) -> str:
        """Return the directory of the offloaded tensors of a worker's role processes."""
        return str(Path(self.run_root) / "mesh" / "kept" / worker.replace("/", "-"))

    @classmethod
    def from_env(cls) -> MeshSettings:
        """Read the settings in the file that $MESHRL_SETTINGS names.

        Raises ConfigError without a file, for an unknown key, or if another user can read or has
        created the file.
        """
        path = os.environ.get(SETTINGS_ENV, "")
        if not path:
            raise ConfigError(
                f"${SETTINGS_ENV} is not set", fix="Start services with `meshrl up` or `meshrl run`"
            )
        return dataclasses.replace(
            cls.from_file(Path(path)),
            worker=os.environ.get(WORKER_ENV, ""),
            device=os.environ.get(DEVICE_ENV, ""),
            accelerator=os.environ.get(ACCELERATOR_ENV, ""),
        )

    @classmethod
    def from_file(cls, path: Path) -> MeshSettings:
        """Read the settings in a file; raise ConfigError as `from_env` does."""
        where = str(path)
        try:
            require_private_file(path)
            return cls(**documents.decode(path.read_bytes(), where))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"the settings are invalid: {error}", where=where) from None

    def to_file(self, path: str | Path) -> None:
        """Write the file atomically, readable by this user only: a Redis URL may contain a
        password.

        Raises StorageFull.
        """
        documents.write(Path(path), dataclasses.asdict(self), durable=False)
