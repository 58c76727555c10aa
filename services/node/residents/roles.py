"""Maps the record of a gang to the processes that serve it on one worker; pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from meshrl.common.base.errors import ConfigError
from meshrl.common.state.pool.workers import names
from meshrl.common.state.pool.workers.rows import Gang, Report, Resident, Role, Tier
from meshrl.common.state.pool.workers.seat import Seat

COMMANDS: Mapping[str, list[str]] = {
    Role.ROLLOUT: [sys.executable, "-m", "meshrl.services.engine"],
    Role.TRAINING: [sys.executable, "-m", "meshrl.services.trainer"],
    Role.SCORING: [sys.executable, "-m", "meshrl.services.scoring"],
}


@dataclass(frozen=True)
class RoleWish:
    """What one worker should have of a resident of its gang."""

    gang: str
    resident: Resident
    rank: int  # of the worker in its gang
    keeper: str  # the process that gives the gang's turns

    @property
    def name(self) -> str:
        return names.role_process(self.resident, self.place)

    @property
    def place(self) -> int:
        """Of the worker among those of the resident."""
        return self.resident.ranks.index(self.rank)

    @property
    def keeps(self) -> bool:
        """Whether the worker has no process of its own for it, and keeps its accelerator for the
        one of its first worker.
        """
        return self.resident.role == Role.ROLLOUT and self.place > 0

    @property
    def gathers(self) -> bool:
        """Whether its process computes on accelerators that others keep for it, too."""
        return (
            self.resident.role == Role.ROLLOUT and not self.place and len(self.resident.ranks) > 1
        )

    @property
    def process(self) -> tuple[str, int]:
        """What no other process is: a wish for another one ends this one."""
        return self.resident.id, self.resident.generation

    @property
    def absent(self) -> bool:
        return self.resident.tier == Tier.ABSENT

    @property
    def asleep(self) -> bool:
        """Whether it is to keep what it has, and leave the accelerator to others."""
        return self.resident.tier in (Tier.MEMORY, Tier.DISK)

    @property
    def reported(self) -> Report | None:
        return self.resident.reports.get(self.rank)

    def argv(self, commands: Mapping[str, list[str]]) -> list[str]:
        """The command line; ConfigError for a role that nothing serves."""
        resident = self.resident
        if resident.role not in commands:
            raise ConfigError(
                f"no process serves the role '{resident.role}'", where=f"resident {resident.id}"
            )
        seat = Seat(
            self.gang,
            resident.id,
            resident.job,
            resident.generation,
            resident.core,
            self.place,
            len(resident.ranks),
            resident.turns,
            self.keeper,
            resident.apart,
        )
        return [*commands[resident.role], *seat.words()]


def wishes(gang: Gang | None, worker: str) -> dict[str, RoleWish]:
    """What a worker should run of its gang, by the names of the processes; nothing without one. Of
    two residents with one name the first on record has it.
    """
    found: dict[str, RoleWish] = {}
    for wish in _all(gang, worker):
        found.setdefault(wish.name, wish)
    return found


def clashes(gang: Gang | None, worker: str) -> list[tuple[RoleWish, str]]:
    """What it cannot run, each with the resident that has the name of its process already."""
    has = wishes(gang, worker)
    found = ((wish, has[wish.name].resident.id) for wish in _all(gang, worker))
    return [(wish, holder) for wish, holder in found if wish.resident.id != holder]


def _all(gang: Gang | None, worker: str) -> list[RoleWish]:
    if gang is None or worker not in gang.workers:
        return []
    rank, keeper = gang.workers.index(worker), names.worker_process(gang.workers[0])
    return [RoleWish(gang.id, r, rank, keeper) for r in gang.residents if rank in r.ranks]


def with_overrides(overrides: list[str]) -> dict[str, list[str]]:
    """The commands, with `ROLE=COMMAND` replacing or adding some."""
    commands = dict(COMMANDS)
    for override in overrides:
        role, equals, command = override.partition("=")
        if not equals or not command:
            raise ConfigError(f"{override!r} is not ROLE=COMMAND", fix="rollout='python -m x'")
        commands[role] = shlex.split(command)
    return commands
