"""Shape of a mesh and settings of its pool, stored for its next start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.common.base.errors import ConfigError, CorruptData
from meshrl.common.base.files.documents import rename_keys
from meshrl.common.base.host.settings import METRICS_OFF
from meshrl.common.job.renamed_keys import RENAMED_POOL_KEYS
from meshrl.common.state.pool.scheduling import host_services
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.directory.directory_paths import MeshPaths, read_json

POOL_FILE = "pool.json"  # the settings of the pool, as `mesh.toml` has them


@dataclass(frozen=True)
class MeshShape:
    """Shape of a mesh when nothing has started yet."""

    workers: int = 3
    device: str = "cpu"
    bind: str = "tcp://127.0.0.1:*"
    advertise: str = ""
    metrics: str = "127.0.0.1:*"
    gateway: str = METRICS_OFF  # where the gateway listens; off: there is none
    listen: str = ""  # where processes are reached by those of other hosts; empty: there are none
    encrypt_bulk: bool | None = None  # see MeshSettings
    # the services that may be placed on its host
    accepted_services: Sequence[str] = host_services.ALL_SERVICES
    upload_bytes_per_s: int = 0  # see MeshSettings
    download_bytes_per_s: int = 0


_OLD_KEYS = {
    "encrypt": "encrypt_bulk",
    "takes": "accepted_services",
    "rate_up": "upload_bytes_per_s",
    "rate_down": "download_bytes_per_s",
}
_OLD_POOL_KEYS = {
    old.removeprefix("pool."): new.removeprefix("pool.") for old, new in RENAMED_POOL_KEYS.items()
}


def read_shape(mesh_paths: MeshPaths) -> MeshShape:
    """Return the shape of a mesh that was started before."""
    try:
        return MeshShape(**rename_keys(read_json(mesh_paths.shape), _OLD_KEYS))
    except (CorruptData, FileNotFoundError, TypeError) as error:
        raise ConfigError(
            f"{mesh_paths.shape}, the shape of the mesh, is missing or corrupt: {error}",
            fix=f"Run `meshrl up --root {mesh_paths.root}` with its former options to rewrite it",
        ) from error


def read_pool_settings(mesh_paths: MeshPaths) -> PoolSettings:
    """Return the pool settings of the mesh's last start."""
    path = mesh_paths.directory / POOL_FILE
    try:
        return PoolSettings.from_document(rename_keys(read_json(path), _OLD_POOL_KEYS))
    except FileNotFoundError:
        return PoolSettings()
    except (CorruptData, TypeError) as error:
        raise ConfigError(
            f"{path}, the settings of the pool, is corrupt: {error}",
            fix=f"Delete it, then run `meshrl up --root {mesh_paths.root} --config mesh.toml` "
            "to rewrite it",
        ) from error
