"""Interface of the mesh whose jobs are recorded, as its launcher offers it."""

from __future__ import annotations

from typing import Protocol

from common.base.clock import Clock
from common.mesh.process.handle import Child
from common.mesh.process.host import Host
from common.state.redis.client import State
from meshrl.directory.places import MeshPlace


class RunningMesh(Protocol):
    """A mesh that this process has started, with its Redis."""

    state: State

    @property
    def clock(self) -> Clock: ...
    @property
    def host(self) -> Host: ...
    @property
    def place(self) -> MeshPlace: ...
    @property
    def going_back(self) -> bool:
        """True while Redis has lost what it had, and jobs are being put back."""

    @property
    def pids(self) -> dict[int, str]:
        """Names of the mesh's own processes that run now, by pid."""

    def start_program(self, argv: list[str], name: str) -> Child:
        """Start a program of MeshRL that is no service."""
