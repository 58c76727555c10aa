"""Maps the desired state of a gang to the command line of the process that serves it; pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from common.api.scoring import scoring_name
from common.errors import ConfigError
from common.state.gangs import Gang, Role

COMMANDS: Mapping[str, list[str]] = {
    Role.ROLLOUT: [sys.executable, "-m", "services.engine"],
    Role.TRAINING: [sys.executable, "-m", "services.trainer"],
    Role.SCORING: [sys.executable, "-m", "services.scoring"],
}


@dataclass(frozen=True)
class Assignment:
    """What a gang should run under one decision of the planner."""

    role: Role
    job: str
    core: bool
    epoch: int
    rank: int = 0  # the worker's rank in its gang
    ranks: int = 1  # workers of the gang

    @classmethod
    def of(cls, gang: Gang, rank: int = 0) -> Assignment:
        """What the worker of that rank should run."""
        return cls(
            gang.desired_role, gang.desired_job, gang.desired_core, gang.epoch, rank, gang.size
        )

    def name(self, gang: str) -> str:
        """The registry name of the role process."""
        if self.role == Role.ROLLOUT:
            return f"engine/{gang}"
        if self.rank:
            return f"rank/{self.job}/{self.rank}"
        if self.role == Role.SCORING:
            return scoring_name(self.job)
        return f"trainer/{self.job}" if self.core else f"hybrid/{gang}"

    def argv(self, gang: str, commands: Mapping[str, list[str]]) -> list[str]:
        if self.role not in commands:
            raise ConfigError(f"no process serves the role '{self.role}'", where=f"gang {gang}")
        options = ["--gang", gang, "--job", self.job, "--epoch", str(self.epoch)]
        if self.core:
            options.append("--core")
        if self.ranks > 1:
            options += ["--rank", str(self.rank), "--ranks", str(self.ranks)]
        return [*commands[self.role], *options]


def with_overrides(overrides: list[str]) -> dict[str, list[str]]:
    """The commands, with `ROLE=COMMAND` replacing or adding some."""
    commands = dict(COMMANDS)
    for override in overrides:
        role, equals, command = override.partition("=")
        if not equals or not command:
            raise ConfigError(f"{override!r} is not ROLE=COMMAND", fix="rollout='python -m x'")
        commands[role] = shlex.split(command)
    return commands
