"""The settings of a mesh's processes: a file, written by whoever starts them."""

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
REDIS_ENV = "MESHRL_REDIS_URL"  # of a Redis to use in place of one of ours
WORKER_ENV = "MESHRL_WORKER"  # the name of the worker that has started a role process
DEVICE_ENV = "MESHRL_DEVICE"  # what that worker is: cpu or cuda
ACCELERATOR_ENV = "MESHRL_ACCELERATOR"  # and what its accelerator is called, as cuda:0 NVIDIA H200
MESH_TAG_ENV = (
    "MESHRL_MESH"  # by which a process is known to be a mesh's, wherever its settings are
)
# Processes that run a job author's code have no part in the mesh beside the channel to who started
# them, and are not told where its settings are, nor the URL of a Redis, which may hold a password.
SCRUBBED_ENV = {SETTINGS_ENV: "", REDIS_ENV: ""}
METRICS_OFF = "off"  # value of `metrics` that serves none
SECRET_BYTES = 32  # of a mesh: who knows its secret belongs to it
MAX_HOST_NAME_CHARS = 24  # characters of the machine's own name in a host's


def derive_key(secret: str, purpose: str) -> bytes:
    """32 bytes of the secret of a mesh for one purpose ("redis/trainer"), by keyed BLAKE2b: the
    secret is never sent itself, and those of one purpose tell nothing of it, or of another's.
    """
    return hashlib.blake2b(purpose.encode(), key=bytes.fromhex(secret), digest_size=32).digest()


def make_redis_user(role: str, host: str) -> str:
    """The user of Redis that processes of `role` on `host` are."""
    return f"{role}@{host}"


def derive_redis_password(secret: str, role: str) -> str:
    """Its password, under the host's `secret`."""
    return derive_key(secret, f"redis/{role}").hex()


def compute_mesh_tag(settings: str | Path) -> str:
    """The value of MESH_ENV in the processes of the mesh with this file of settings."""
    return hashlib.blake2b(os.fsencode(settings), digest_size=16).hexdigest()


def make_offload_path(directory: str | Path, process: str) -> Path:
    """Where a role process keeps its tensors in a directory that is `kept_directory`."""
    return Path(directory) / (process.replace("/", "-") + ".kept")


def generate_host_name() -> str:
    """A name for the host whose processes these settings are for, which no other has: containers
    and namespaces of one machine share its name and boot, and see neither each other's files nor
    each other's processes.
    """
    name = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().partition(".")[0].lower())
    return f"{name[:MAX_HOST_NAME_CHARS]}-{secrets.token_hex(3)}"


def parse_advertised_host(advertise: str) -> str:
    """The host in `mesh.advertise`, which is HOST or tcp://HOST, with or without a port; empty when
    that is.
    """
    found = re.fullmatch(r"(?:\w+://)?(\[.*\]|[^:]+)(?::.*)?", advertise)
    return found.group(1) if found else advertise


def require_private_file(path: Path) -> None:
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
    host: str = field(default_factory=generate_host_name)  # made once, where the settings are
    metrics: str = "127.0.0.1:*"  # see `meshrl.common.base.host.listen_addresses`; off: nowhere
    nice: int = 0  # for the role processes that this process starts
    worker: str = ""  # that has started this process, a role process
    device: str = ""  # of that worker: cpu or cuda
    accelerator: str = ""  # of that worker, by name
    # In hexadecimal digits; see `derived`. Passwords of this host's processes for
    # Redis are derived from it where hosts may join.
    secret: str = field(default="", repr=False)
    joinable: bool = False  # hosts may join: each role of each host is a user of Redis
    encrypt: bool | None = None  # bulk bytes; None: where hosts may join
    # The interface by which ranks of a gang on several hosts reach each other, as eth1; empty: the
    # one that has the address in `bind`.
    interface: str = ""
    network: str = ""  # of hosts that gangs may span, by name; empty: the head's
    # Of chunks of weights that a host keeps which is not the weight store's; 0: it keeps none.
    # As much as several versions of what one host trains and serves.
    chunks_bytes: int = 64 << 30
    # Bytes a second that all processes of the host together send, and receive, at bulk ports; 0: as
    # many as can be.
    rate_up: int = 0
    rate_down: int = 0
    # The file of the certificate that Redis' own is signed with; empty: that is not TLS, or is
    # checked as this host checks any.
    authority: str = ""

    @property
    def offload_targets(self) -> tuple[str, str]:
        """Who owns segments of memory for this process, and the directory of the files in which it
        keeps its tensors while it sleeps; both are empty where no worker has started it.
        """
        return self.worker, self.make_offload_directory(self.worker) if self.worker else ""

    @property
    def is_bulk_encrypted(self) -> bool:
        """Whether bulk bytes are encrypted."""
        return self.joinable if self.encrypt is None else self.encrypt

    def make_redis_url(self, role: str) -> str:
        """The URL by which a process of `role` reaches Redis: as that role's user of this host
        where hosts may join.
        """
        if not self.joinable:
            return self.redis_url
        scheme, _, rest = self.redis_url.partition("://")
        authority = f"?ssl_ca_certs={quote(self.authority)}" if self.authority else ""
        user = quote(make_redis_user(role, self.host), safe="")
        return f"{scheme}://{user}:{derive_redis_password(self.secret, role)}@{rest}{authority}"

    def make_offload_directory(self, worker: str) -> str:
        """Where role processes of a worker keep their tensors on disk."""
        return str(Path(self.run_root) / "mesh" / "kept" / worker.replace("/", "-"))

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
        return dataclasses.replace(
            cls.from_file(Path(path)),
            worker=os.environ.get(WORKER_ENV, ""),
            device=os.environ.get(DEVICE_ENV, ""),
            accelerator=os.environ.get(ACCELERATOR_ENV, ""),
        )

    @classmethod
    def from_file(cls, path: Path) -> MeshSettings:
        """The settings in a file; ConfigError as for `from_env`."""
        where = str(path)
        try:
            require_private_file(path)
            return cls(**documents.decode(path.read_bytes(), where))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"unusable settings: {error}", where=where) from None

    def to_file(self, path: str | Path) -> None:
        """Writes the file whole or not at all, for this user's eyes: the URL of a Redis may hold a
        password. StorageFull.
        """
        documents.write(Path(path), dataclasses.asdict(self), durable=False)
