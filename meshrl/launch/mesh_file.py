"""`mesh.toml`: what a mesh is told beside the options of `meshrl up`, checked as job files are."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.constraints import FileTable
from meshrl.common.job.schema import Schema
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.job.toml import reading


@dataclass(frozen=True)
class DurableConfig(FileTable):
    """Where a copy is kept of what another host goes on from when this one is gone."""

    url: str = ""  # of any kind that fsspec knows; empty: there is none


@dataclass(frozen=True)
class MeshFile(FileTable):
    """A whole `mesh.toml`, checked."""

    pool: PoolSettings = field(default_factory=PoolSettings)
    durable: DurableConfig = field(default_factory=DurableConfig)


MESH = Schema(MeshFile, "docs/operations.md lists all keys of mesh.toml")


def read(path: Path) -> MeshFile:
    """What a file says; ConfigError names the line that is wrong."""
    document, places = reading.read(path, "the file of the mesh")

    def fail(key: str, message: str, fix: str) -> ConfigError:
        return reading.mistake(path, places, key, message, fix)

    return MESH.validated(document, fail)
