"""What a mesh is made of, and the settings of its pool: kept for its next start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.common.base.errors import ConfigError, Damaged
from meshrl.common.base.host.settings import OFF
from meshrl.common.state.pool.placing import taking
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.directory.places import MeshPlace, read_json

POOL = "pool.json"  # the settings of the pool, as `mesh.toml` has them


@dataclass(frozen=True)
class MeshShape:
    """What a mesh is made of, when nothing has started yet."""

    workers: int = 3
    device: str = "cpu"
    bind: str = "tcp://127.0.0.1:*"
    advertise: str = ""
    metrics: str = "127.0.0.1:*"
    gateway: str = OFF  # where the gateway listens; off: there is none
    listen: str = ""  # where processes are reached by those of other hosts; empty: there are none
    encrypt: bool | None = None  # see MeshSettings
    takes: Sequence[str] = taking.ALL  # the services that may be placed on its host
    rate_up: int = 0  # see MeshSettings
    rate_down: int = 0


def shape_of(place: MeshPlace) -> MeshShape:
    """The shape of a mesh that was started before."""
    try:
        return MeshShape(**read_json(place.shape))
    except (Damaged, FileNotFoundError, TypeError) as error:
        raise ConfigError(
            f"{place.shape}, which says what the mesh is made of, is gone or damaged: {error}",
            fix=f"meshrl up --root {place.root}, with the options that it had, writes it anew",
        ) from error


def pool_of(place: MeshPlace) -> PoolSettings:
    """The settings that the pool of a mesh had when it was started last."""
    path = place.directory / POOL
    try:
        return PoolSettings(**read_json(path))
    except FileNotFoundError:
        return PoolSettings()
    except (Damaged, TypeError) as error:
        raise ConfigError(
            f"{path}, the settings of the pool, is damaged: {error}",
            fix=f"Delete it; meshrl up --root {place.root} --config mesh.toml writes it anew",
        ) from error
