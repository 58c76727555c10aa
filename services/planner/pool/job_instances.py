"""Instances of one job, by role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshrl.common.state.pool.workers.rows import Instance, Role, Tier


@dataclass(frozen=True, slots=True)
class InstancePlacement:
    """Instance with its gang and workers."""

    gang: str
    instance: Instance
    workers: tuple[str, ...]  # ids, in the order of its ranks

    @property
    def is_awake(self) -> bool:
        """True if its tensors belong on the accelerators."""
        return self.instance.tier == Tier.ACCELERATOR


@dataclass(frozen=True)
class JobInstances:
    """Instances of one job, by role."""

    core: InstancePlacement | None = None
    scoring: InstancePlacement | None = None
    engines: tuple[InstancePlacement, ...] = ()  # with their own workers
    time_sliced_engines: tuple[
        InstancePlacement, ...
    ] = ()  # engines that time-slice the core's workers
    hybrids: tuple[InstancePlacement, ...] = ()

    @classmethod
    def from_placements(cls, placements: Sequence[InstancePlacement]) -> JobInstances:
        """Group placements of a job by role, each in the given order."""
        engines = [s for s in placements if s.instance.role == Role.ROLLOUT]
        trains = [s for s in placements if s.instance.role == Role.TRAINING]
        return cls(
            core=next((s for s in trains if s.instance.core), None),
            scoring=next((s for s in placements if s.instance.role == Role.SCORING), None),
            engines=tuple(s for s in engines if not s.instance.time_sliced),
            time_sliced_engines=tuple(s for s in engines if s.instance.time_sliced),
            hybrids=tuple(s for s in trains if not s.instance.core),
        )

    @cached_property
    def placements(self) -> tuple[InstancePlacement, ...]:
        """All placements."""
        one = tuple(s for s in (self.core, self.scoring) if s is not None)
        return (*one, *self.engines, *self.time_sliced_engines, *self.hybrids)

    @cached_property
    def awake_workers(self) -> frozenset[str]:
        """Workers on which the job has an awake instance."""
        return frozenset(worker for s in self.placements if s.is_awake for worker in s.workers)

    @property
    def awake_worker_count(self) -> int:
        """Number of workers on which the job has an awake instance."""
        return len(self.awake_workers)

    @property
    def is_reconciled(self) -> bool:
        """True if all instances have reached their desired state."""
        return all(s.instance.is_reconciled for s in self.placements)
