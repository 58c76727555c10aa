"""Rows of the pool: workers, gangs of workers, and the instances of a gang.

The planner writes desired states, workers report actual states. Neither writes the other's half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from meshrl.common.base.errors import ConfigError


class Role(StrEnum):
    """Role of an instance."""

    IDLE = "idle"
    ROLLOUT = "rollout"
    TRAINING = "training"
    SCORING = "scoring"  # hosts the job's frozen models


# from those that stay to those that may vanish; the owner of a lent worker may take it back
MARKETS = ("reserved", "lent", "spot")
PREEMPTIBLE_MARKETS = MARKETS[1:]


def check_price(price: float) -> float:
    """Return the price of an hour of a worker; ConfigError unless it is finite and not negative."""
    if not 0 <= price < math.inf:
        raise ConfigError(
            f"{price:g} is no price of an hour of a worker",
            where="--price",
            fix="Set a finite number that is not negative",
        )
    return price


class Tier(StrEnum):
    """Place of an instance's tensors."""

    ACCELERATOR = "accelerator"
    MEMORY = "memory"  # of the host, in segments that its worker owns
    DISK = "disk"  # of the host, in files with digests
    ABSENT = "absent"  # no process: only a checkpoint is left


class TensorKind(StrEnum):
    """Kind of an instance's tensors: the unit in which a worker moves them between tiers."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    KV_CACHE = "kv_cache"


class InstancePhase(StrEnum):
    """State of an instance's process, as its worker reports it."""

    STARTING = "starting"
    READY = "ready"  # at the desired tier
    MOVING = "moving"  # from tier to tier
    DRAINING = "draining"
    FAILED = "failed"
    GONE = "gone"  # no process, and none is desired now: the instance is absent, or offloaded


@dataclass(frozen=True, slots=True)
class TierBytes:
    """Limits in bytes for the instances of a worker; 0: unlimited."""

    accelerator: int = 0  # on a CPU worker a declared number, accounted in the same way
    memory: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One accelerator, or a slot of a CPU host. A worker polls only this record."""

    id: str  # the registry has its process as worker/<id>
    host: str
    accelerator: str  # as cpu:0
    token: int  # of its process's lease
    alive: bool = True
    budget: TierBytes = TierBytes()
    uuid: str = ""  # of its GPU or MIG instance; empty: a CPU slot
    market: str = "reserved"  # one of MARKETS
    price: float = 0.0  # of an hour, in any one currency; 0: that of its market in the settings
    # announced end of its host, in seconds since 1970, 0: within seconds; None: not announced
    preempt_at_s: float | None = None
    network: str = ""  # name of its host's network; empty: the head's
    # measured bytes per second of moved tensors, by `source>target` of tiers
    copy_rates: Mapping[str, float] = field(default_factory=dict)
    gang: str = ""  # its gang; empty: idle
    membership: int = 0  # number of assignments so far: another gang, or another rank in one
    revision: int = 0  # raised with each change of its gang's record


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """Report of a worker on an instance's process."""

    rank: int  # of the worker in its gang
    generation: int  # of the process
    epoch: int  # of the desired state that it follows
    token: int  # of the worker's lease
    phase: InstancePhase
    tier: Tier  # where the tensors are now
    detail: str = ""
    usage: TierBytes = TierBytes()  # bytes that it uses of each tier


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """Split of a core's ranks for a mixture, chosen by the planner.

    The first ranks hold attention, the others experts.
    """

    attention_ranks: int  # ranks with it
    micro_batches: int  # bins of each attention rank in a round
    hosted_experts: tuple[int, ...]  # by MoE layer: experts that each attention rank hosts

    def to_list(self) -> list[int]:
        """Return all fields as a JSON list."""
        return [self.attention_ranks, self.micro_batches, *self.hosted_experts]

    @classmethod
    def from_list(cls, numbers: Sequence[int] | None) -> ExpertSplit | None:
        """Return the split of a list from `to_list`; None for None."""
        if numbers is None:
            return None
        attention, micro_batches, *hosted = numbers
        return cls(attention, micro_batches, tuple(hosted))


@dataclass(frozen=True, slots=True)
class Instance:
    """Role of a job on a gang: one role process on each of the ranks that it occupies.

    A new `generation` is a new process. A new `epoch` is a new desired state, never a restart.
    """

    id: str  # <gang>.<number>, never used again
    job: str
    role: Role
    core: bool = False  # in a training role: owns parameters and optimizer
    ranks: tuple[int, ...] = (0,)  # of the gang
    tier: Tier = Tier.ACCELERATOR  # desired
    time_sliced: bool = False  # computes in time slices with the other instances of its gang
    pinned: bool = False  # placed by a user: the policy does not move it
    expert_split: ExpertSplit | None = None  # of a core's ranks; None: as in its job file
    generation: int = 1
    epoch: int = 1
    desired_since_ms: int = 0  # when the desired state was written
    reports: Mapping[int, InstanceReport] = field(default_factory=dict)  # by rank

    @property
    def is_reconciled(self) -> bool:
        """True if all ranks have reached the latest desired state."""
        return all(self._is_rank_reconciled(self.reports.get(rank)) for rank in self.ranks)

    @property
    def phase(self) -> InstancePhase:
        """Phase of the rank that is furthest from the desired state."""
        return max(map(self._rank_phase, map(self.reports.get, self.ranks)), key=_PHASE_ORDER.index)

    @property
    def detail(self) -> str:
        """First detail reported by the ranks in `phase`."""
        far = self.phase
        details = (r.detail for r in self.reports.values() if r.phase == self._rank_phase(r) == far)
        return next(filter(None, details), "")

    def _rank_phase(self, report: InstanceReport | None) -> InstancePhase:
        """Return a rank's phase; a report on an earlier desired state says nothing about this
        one.
        """
        if report is None or report.generation != self.generation:
            return InstancePhase.STARTING
        if report.epoch == self.epoch or report.phase == InstancePhase.STARTING:
            return report.phase
        return InstancePhase.MOVING

    def _is_rank_reconciled(self, report: InstanceReport | None) -> bool:
        if report is None or (report.generation, report.epoch) != (self.generation, self.epoch):
            return False
        # a process that exited while offloaded restarts at its wake-up
        if report.phase == InstancePhase.GONE:
            return self.tier != Tier.ACCELERATOR
        return report.phase == InstancePhase.READY and report.tier == self.tier != Tier.ABSENT


_PHASE_ORDER = (
    InstancePhase.GONE,
    InstancePhase.READY,
    InstancePhase.MOVING,
    InstancePhase.STARTING,
    InstancePhase.DRAINING,
    InstancePhase.FAILED,
)


@dataclass(frozen=True, slots=True)
class Gang:
    """Workers that compute together, in rank order, and their instances."""

    id: str
    workers: tuple[str, ...]  # ids, in rank order
    membership: int  # of its workers' records
    instances: tuple[Instance, ...] = ()
    formed_ms: int = 0
    next_instance: int = 0  # instances so far: the next one is <gang>.<placed>

    @property
    def is_reconciled(self) -> bool:
        """True if all instances have reached their latest desired state."""
        return all(resident.is_reconciled for resident in self.instances)
