"""Mapping from a gang's record to the processes that serve it on one worker; pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from meshrl.common.base.errors import ConfigError
from meshrl.common.state.pool.workers import process_names
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.pool.workers.rows import Gang, Instance, InstanceReport, Role, Tier

COMMANDS: Mapping[str, list[str]] = {
    Role.ROLLOUT: [sys.executable, "-m", "meshrl.services.engine"],
    Role.TRAINING: [sys.executable, "-m", "meshrl.services.trainer"],
    Role.SCORING: [sys.executable, "-m", "meshrl.services.scoring"],
}


@dataclass(frozen=True)
class DesiredRole:
    """Desired state of an instance on one worker of its gang."""

    gang: str
    instance: Instance
    rank: int  # of the worker in its gang
    slice_scheduler: str  # the process that grants the gang's time slices

    @property
    def name(self) -> str:
        """Registry name of the process, such as `engine/g3.0`."""
        return process_names.role_process_name(self.instance, self.rank_index)

    @property
    def rank_index(self) -> int:
        """Index of the worker among those of the instance."""
        return self.instance.ranks.index(self.rank)

    @property
    def is_reservation(self) -> bool:
        """True if the worker only reserves its accelerator for the process of the first worker."""
        return self.instance.role == Role.ROLLOUT and self.rank_index > 0

    @property
    def spans_workers(self) -> bool:
        """True if the process also computes on accelerators that other workers reserve for it."""
        return (
            self.instance.role == Role.ROLLOUT
            and not self.rank_index
            and len(self.instance.ranks) > 1
        )

    @property
    def process_key(self) -> tuple[str, int]:
        """Identity of the process; another desired key ends it."""
        return self.instance.id, self.instance.generation

    @property
    def is_absent(self) -> bool:
        return self.instance.tier == Tier.ABSENT

    @property
    def is_asleep(self) -> bool:
        """True if the process is to keep its state and leave the accelerator to others."""
        return self.instance.tier in (Tier.MEMORY, Tier.DISK)

    @property
    def last_report(self) -> InstanceReport | None:
        """Last report of this worker on the instance, from the record; None: none yet."""
        return self.instance.reports.get(self.rank)

    def build_argv(self, commands: Mapping[str, list[str]]) -> list[str]:
        """Return the command line; ConfigError for a role without a command."""
        instance = self.instance
        if instance.role not in commands:
            raise ConfigError(
                f"no command is configured for the role '{instance.role}'",
                where=f"instance {instance.id}",
            )
        placement = Placement(
            self.gang,
            instance.id,
            instance.job,
            instance.generation,
            instance.core,
            self.rank_index,
            len(instance.ranks),
            instance.time_sliced,
            self.slice_scheduler,
            instance.expert_split,
        )
        return [*commands[instance.role], *placement.to_args()]


def list_desired_roles(gang: Gang | None, worker: str) -> dict[str, DesiredRole]:
    """Return the roles that a worker should run of its gang, by process name; empty without a gang.

    Of two instances with one process name, the first on record has it.
    """
    roles: dict[str, DesiredRole] = {}
    for desired in _list_roles(gang, worker):
        roles.setdefault(desired.name, desired)
    return roles


def find_name_conflicts(gang: Gang | None, worker: str) -> list[tuple[DesiredRole, str]]:
    """Return the roles that a worker cannot run, each with the instance that has its name."""
    roles = list_desired_roles(gang, worker)
    holders = ((desired, roles[desired.name].instance.id) for desired in _list_roles(gang, worker))
    return [(desired, holder) for desired, holder in holders if desired.instance.id != holder]


def _list_roles(gang: Gang | None, worker: str) -> list[DesiredRole]:
    if gang is None or worker not in gang.workers:
        return []
    rank, slice_scheduler = gang.workers.index(worker), process_names.worker_name(gang.workers[0])
    return [
        DesiredRole(gang.id, instance, rank, slice_scheduler)
        for instance in gang.instances
        if rank in instance.ranks
    ]


def override_commands(overrides: list[str]) -> dict[str, list[str]]:
    """Return the commands of roles; each `ROLE=COMMAND` replaces or adds one.

    Raises:
        ConfigError: An override has another form.
    """
    commands = dict(COMMANDS)
    for override in overrides:
        role, equals, command = override.partition("=")
        if not equals or not command:
            raise ConfigError(
                f"{override!r} is not ROLE=COMMAND", fix="Write it as rollout='python -m x'"
            )
        commands[role] = shlex.split(command)
    return commands
