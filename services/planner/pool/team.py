"""The residents of one job, by what they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshrl.common.state.pool.workers.rows import Resident, Role, Tier


@dataclass(frozen=True, slots=True)
class Seated:
    """A resident, and where it is."""

    gang: str
    resident: Resident
    workers: tuple[str, ...]  # ids, in the order of its ranks

    @property
    def awake(self) -> bool:
        """Whether its tensors are to be on the accelerators."""
        return self.resident.tier == Tier.ACCELERATOR


@dataclass(frozen=True)
class Team:
    """The residents of one job, by what they do."""

    core: Seated | None = None
    scoring: Seated | None = None
    engines: tuple[Seated, ...] = ()  # with workers of their own
    turning: tuple[Seated, ...] = ()  # engines that share the core's workers by turns
    helpers: tuple[Seated, ...] = ()

    @classmethod
    def of(cls, seats: Sequence[Seated]) -> Team:
        """The residents of a job, each kind in their order."""
        engines = [s for s in seats if s.resident.role == Role.ROLLOUT]
        trains = [s for s in seats if s.resident.role == Role.TRAINING]
        return cls(
            core=next((s for s in trains if s.resident.core), None),
            scoring=next((s for s in seats if s.resident.role == Role.SCORING), None),
            engines=tuple(s for s in engines if not s.resident.turns),
            turning=tuple(s for s in engines if s.resident.turns),
            helpers=tuple(s for s in trains if not s.resident.core),
        )

    @cached_property
    def all(self) -> tuple[Seated, ...]:
        """All of them."""
        one = tuple(s for s in (self.core, self.scoring) if s is not None)
        return (*one, *self.engines, *self.turning, *self.helpers)

    @cached_property
    def workers(self) -> int:
        """Workers that it has: those that it is awake on."""
        return len({worker for s in self.all if s.awake for worker in s.workers})

    @property
    def settled(self) -> bool:
        """Whether all of it does what was wished last."""
        return all(s.resident.settled for s in self.all)
