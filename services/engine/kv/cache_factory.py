"""Factory of the KV tiers of a job's engines on this host, as the job file configures them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.generation.builtin.engine import BuiltinEngine
from meshrl.common.generation.engine_contract import TokenEngine
from meshrl.common.generation.kv_directories import (
    get_disk_root,
    get_memory_root,
    make_private_directory,
)
from meshrl.common.job.config import RolloutConfig
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.engine.kv.host_cache import HostCache
from meshrl.services.engine.kv.kv_tier import KVTier
from meshrl.services.engine.kv.peers import PeerEngines

GIB = 1 << 30
OPEN_TIMEOUT_S = (
    60.0  # for the first count of a directory, after its last engine removed its chunks
)


def _open_tier(name: str, directory: Path, budget_bytes: int, clock: Callable[[], float]) -> KVTier:
    make_private_directory(directory.parent)
    return KVTier(name, directory, budget_bytes, clock)


def log_unused_tier(mesh: Mesh, setting: str, error: ConfigError) -> None:
    """Log that a tier of the cache is not used, because its directory is not this user's."""
    mesh.telemetry.log.warning(
        "the KV tier is not used",
        setting=setting,
        why=error.message,
        where=error.where,
        fix=error.fix,
    )
    mesh.telemetry.count("kv_not_kept")


async def open_tiers(mesh: Mesh, job: str, limits: RolloutConfig) -> list[KVTier]:
    """Open the KV tiers that a job asks for.

    Omit those whose directories belong to another user.
    """
    kv, root = limits.kv, mesh.settings.run_root
    places = []
    if limits.kv_tier_gib:
        places.append(("memory", get_memory_root(root), limits.kv_tier_gib))
    if kv.disk:
        places.append(("disk", get_disk_root(root, kv.path), kv.disk))
    shelves = []
    for name, place, size in places:
        try:
            open_ = partial(_open_tier, name, place / job, int(size * GIB), mesh.clock.wall)
            shelves.append(await mesh.host.run_blocking(open_, deadline_s=OPEN_TIMEOUT_S))
        except ConfigError as error:
            log_unused_tier(mesh, f"rollout.kv.{name}", error)
            continue
        except OSError as error:
            raise MeshError(
                f"the directory of the KV tier cannot be used: {error}",
                where=f"rollout.kv.{name} on {mesh.settings.host}, {place}",
                fix="Make it writable, or set the key to 0",
            ) from error
        free = shutil.disk_usage(place).free
        if free < size * GIB:
            mesh.telemetry.log.warning(
                "less free space than the KV tier requires",
                setting=f"rollout.kv.{name}",
                gib=size,
                free_gib=round(free / GIB, 2),
                where=str(place),
                fix="Enlarge the file system (of a container: --shm-size), or lower the setting",
            )
    return shelves


async def open_host_cache(
    mesh: Mesh, job: str, limits: RolloutConfig, engine: TokenEngine, wake: Callable[[], None]
) -> HostCache | None:
    """Open the engine's host cache and attach it; return None if the engine has none.

    An engine has no host cache if the job asks for none, if no other process can read its keys and
    values, or if every directory belongs to another user.
    """
    kv = limits.kv
    if not isinstance(engine, BuiltinEngine):
        return None
    shelves = await open_tiers(mesh, job, limits)
    if not shelves:
        return None
    cache = HostCache(
        shelves,
        mesh.clock,
        engine,
        limits.kv_on_update,
        wake,
        lambda error: mesh.host.exit(70, f"the KV tiers failed: {error!r}", error),
        PeerEngines(mesh, job, asyncio.get_running_loop()) if kv.peers else None,
    )
    engine.prefix_store = cache
    return cache
