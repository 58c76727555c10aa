"""Settings of the pool, which belong to the mesh and not to a job: `mesh.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshrl.common.job.constraints import (
    ConfigTable,
    NonNegativeInteger,
    NonNegativeNumber,
    PositiveInteger,
    PositiveNumber,
)
from meshrl.common.state.pool.workers.rows import WorkerRow


@dataclass(frozen=True)
class ScalerSettings(ConfigTable):
    """Provider of spot workers, and limits of what the planner asks it for."""

    command: list[str] = field(default_factory=list)  # program that scales; empty: none
    kubernetes: str = ""  # NAMESPACE/deployment/NAME or NAMESPACE/statefulset/NAME; empty: none
    most: NonNegativeInteger = 0  # spot workers at most
    workers_per_host: PositiveInteger = 1  # of a host that the provider starts
    max_cost_per_hour: NonNegativeNumber = 0.0  # of all spot workers; 0: unlimited
    # a host without instances that no job wants is given back after this time
    release_after_s: NonNegativeNumber = 300.0
    timeout_s: PositiveNumber = 60.0  # time limit of a request to the provider
    dry_run: bool = False  # True: requests are displayed and not sent

    @property
    def is_on(self) -> bool:
        """True if the planner computes how many spot workers the jobs want."""
        return bool(self.command or self.kubernetes or self.dry_run)

    @property
    def most_hosts(self) -> int:
        """Hosts that the provider may start at most."""
        return self.most // self.workers_per_host


@dataclass(frozen=True)
class PoolSettings(ConfigTable):
    """Settings by which the planner shares the pool between jobs."""

    time_slicing: bool = True  # True: engines and cores, also of several jobs, may share workers
    # order in which a gang's instances get time slices; see `meshrl.services.node.slices`
    slice_policy: Literal["hrrs", "fifo", "round_robin", "exhaustive"] = "hrrs"
    # jobs whose cores share workers by time slices, at most; 1: jobs wait and are paused instead
    jobs_per_gang: PositiveInteger = 2
    gang_scope: Literal["host", "network"] = "host"  # common location of the workers of a gang
    move_timeout_s: PositiveNumber = 120.0  # time limit of a move until it is undone
    # time for workers of a new mesh to join before the first placement
    join_grace_s: NonNegativeNumber = 5.0
    worker_lost_s: PositiveNumber = 10.0  # a worker without a lease for this long is lost
    forget_after_s: PositiveNumber = 300.0  # a worker away for this long is removed
    # a mesh too small for a job for this long is not waiting for workers to join
    shortage_grace_s: NonNegativeNumber = 15.0
    keep_days: NonNegativeNumber = 30.0  # retention of the records of ended jobs
    # prices of an hour of a worker, by its market; 0: unknown
    reserved_price: NonNegativeNumber = 0.0
    spot_price: NonNegativeNumber = 0.0
    lent_price: NonNegativeNumber = 0.0
    scaler: ScalerSettings = field(default_factory=ScalerSettings)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> PoolSettings:
        """Return the settings that `dataclasses.asdict` has made a document of.

        Raises TypeError for unknown keys.
        """
        return cls(**{**document, "scaler": ScalerSettings(**document.get("scaler", {}))})

    def get_price(self, worker: WorkerRow) -> float:
        """Return the price of an hour of a worker: its own, or that of its market; 0: unknown."""
        by_market = {
            "reserved": self.reserved_price,
            "spot": self.spot_price,
            "lent": self.lent_price,
        }
        return worker.price or by_market[worker.market]

    def get_gang_location(self, worker: WorkerRow) -> str:
        """Return the common location of a gang's workers: the name of a host, or of a network."""
        if self.gang_scope == "host":
            return worker.host
        return f"network {worker.network}" if worker.network else "the head's network"
