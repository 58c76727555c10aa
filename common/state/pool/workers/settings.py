"""The settings of the pool, which are the mesh's and no job's: `mesh.toml`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshrl.common.job.constraints import ConfigTable, NonNegativeNumber, PositiveNumber
from meshrl.common.state.pool.workers.rows import WorkerRow


@dataclass(frozen=True)
class PoolSettings(ConfigTable):
    """How the planner shares the pool between jobs."""

    turns: bool = True  # whether engine and core of a job may share a worker where workers are few
    gangs: Literal["host", "network"] = "host"  # what the workers of a gang have in common
    move_s: PositiveNumber = 120.0  # that a move may take until it is undone
    gather_s: NonNegativeNumber = (
        5.0  # that workers of a new mesh may take to join before it is divided
    )
    lost_s: PositiveNumber = (
        10.0  # a worker whose lease has been gone for so long is not waited for
    )
    gone_s: PositiveNumber = 300.0  # away so long, it no longer belongs to the mesh
    # a mesh too small for a job for so long is not one that still gathers
    short_s: NonNegativeNumber = 15.0
    keep_days: NonNegativeNumber = 30.0  # that records of jobs that have ended are kept

    def get_gang_location(self, worker: WorkerRow) -> str:
        """What the workers of a gang have in common: the name of a host, or of a network."""
        if self.gangs == "host":
            return worker.host
        return f"network {worker.network}" if worker.network else "the head's network"
