"""The rows of the pool: workers, the gangs that they compute in, and the residents of a gang.

The planner writes what is wanted, workers report what is; nobody writes the other's half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """What a resident does."""

    IDLE = "idle"
    ROLLOUT = "rollout"
    TRAINING = "training"
    SCORING = "scoring"  # it hosts the job's frozen models


class Tier(StrEnum):
    """Where a resident's tensors are."""

    ACCELERATOR = "accelerator"
    MEMORY = "memory"  # of the host, in segments that its worker owns
    DISK = "disk"  # of the host, in files with digests
    ABSENT = "absent"  # there is no process: a checkpoint is what is left


class InstancePhase(StrEnum):
    """What a worker says of one resident's process."""

    STARTING = "starting"
    READY = "ready"  # it is at the tier that was wanted, and does what it can there
    MOVING = "moving"  # from tier to tier
    DRAINING = "draining"
    FAILED = "failed"
    GONE = "gone"  # there is no process, and none is wanted now: it is absent, or to be asleep


@dataclass(frozen=True, slots=True)
class TierBytes:
    """Bytes that residents of a worker may take; 0: as many as there are."""

    accelerator: int = 0  # on a CPU worker a declared number, which is accounted all the same
    memory: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One accelerator, or a slot of a CPU host. Its record is all that it polls."""

    id: str  # the registry has its process as worker/<id>
    host: str
    accelerator: str  # as cpu:0
    token: int  # of its process's lease
    alive: bool = True
    budget: TierBytes = TierBytes()
    uuid: str = ""  # of its GPU or MIG instance; empty: a CPU slot
    market: str = "reserved"  # reserved | spot | lent
    network: str = ""  # that its host is in, by name; empty: the head's
    gang: str = ""  # the one that it is in; empty: idle
    membership: int = 0  # counts the workers' gangs: another gang, or another place in one
    revision: int = 0  # raised with each change of its gang's record


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """What a worker says of a resident's process on it."""

    rank: int  # of the worker in its gang
    generation: int  # of the process
    epoch: int  # the wish that it acts under
    token: int  # of the worker's lease
    doing: InstancePhase
    tier: Tier  # where the tensors are now
    detail: str = ""
    held: TierBytes = TierBytes()  # bytes that it takes of each


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """How the ranks of a core divide a mixture, as the planner has chosen: the first ones have
    attention, the others experts.
    """

    attention: int  # ranks with it
    micro_batches: int  # bins of each of them in a round
    hosted: tuple[int, ...]  # by mixture layer: experts that each of them has, too

    def to_list(self) -> list[int]:
        """All of it, as JSON takes it."""
        return [self.attention, self.micro_batches, *self.hosted]

    @classmethod
    def from_list(cls, numbers: Sequence[int] | None) -> ExpertSplit | None:
        """The value of `numbers`; None of None."""
        if numbers is None:
            return None
        attention, micro_batches, *hosted = numbers
        return cls(attention, micro_batches, tuple(hosted))


@dataclass(frozen=True, slots=True)
class Instance:
    """A role of a job on a gang: a role process on each of the gang's ranks that it occupies.

    Another `generation` is another process; another `epoch` is another wish, and never a restart.
    """

    id: str  # <gang>.<number>, never used again
    job: str
    role: Role
    core: bool = False  # in a training role: owns parameters and optimizer
    ranks: tuple[int, ...] = (0,)  # of the gang
    tier: Tier = Tier.ACCELERATOR  # wanted
    turns: bool = False  # it computes by turns with the other residents of its gang
    pinned: bool = False  # put there by hand: the policy leaves it alone
    apart: ExpertSplit | None = None  # of a core's ranks; None: as its job file has it
    generation: int = 1
    epoch: int = 1
    changed_ms: int = 0  # when the wish was written
    reports: Mapping[int, InstanceReport] = field(default_factory=dict)  # by rank

    @property
    def is_reconciled(self) -> bool:
        """Whether all its ranks do what was wished last."""
        return all(self._is_rank_reconciled(self.reports.get(rank)) for rank in self.ranks)

    @property
    def phase(self) -> InstancePhase:
        """What the rank does that is furthest from done."""
        return max(map(self._rank_phase, map(self.reports.get, self.ranks)), key=_PHASE_ORDER.index)

    @property
    def detail(self) -> str:
        """What the first rank that is furthest from done says."""
        far = self.phase
        told = (r.detail for r in self.reports.values() if r.doing == self._rank_phase(r) == far)
        return next(filter(None, told), "")

    def _rank_phase(self, report: InstanceReport | None) -> InstancePhase:
        """What a rank does; what it said of an earlier wish says nothing of how this one goes."""
        if report is None or report.generation != self.generation:
            return InstancePhase.STARTING
        if report.epoch == self.epoch or report.doing == InstancePhase.STARTING:
            return report.doing
        return InstancePhase.MOVING

    def _is_rank_reconciled(self, report: InstanceReport | None) -> bool:
        if report is None or (report.generation, report.epoch) != (self.generation, self.epoch):
            return False
        if report.doing == InstancePhase.GONE:  # one that died asleep starts when it is to wake
            return self.tier != Tier.ACCELERATOR
        return report.doing == InstancePhase.READY and report.tier == self.tier != Tier.ABSENT


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
    """Workers that compute together, in rank order, and who resides on them."""

    id: str
    workers: tuple[str, ...]  # ids, in rank order
    membership: int  # of its workers' records
    residents: tuple[Instance, ...] = ()
    formed_ms: int = 0
    placed: int = 0  # residents that it has had: the next one is <gang>.<this>

    @property
    def is_reconciled(self) -> bool:
        """Whether all its residents do what was wished last."""
        return all(resident.is_reconciled for resident in self.residents)
