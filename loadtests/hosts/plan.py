"""How long and on what the arms run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.jobs.mesh import Paces
from loadtests.measuring.rounds import Arm
from loadtests.namespaces.hosts import Hosts

BOOKS = ("lost", "trained_twice", "typed_drops", "host_lost", "hosts_lost")


@dataclass(frozen=True)
class Plan:
    """What all arms have in common."""

    job: Path
    steps: int  # of a paced job
    problems: int  # held-out ones of its evaluations
    cut_s: float  # how long each host is cut off
    rate: str
    delay_s: float
    frames: int  # of a flood
    paces: Paces = field(default_factory=Paces)

    @asynccontextmanager
    async def hosts(self, count: int = 3) -> AsyncIterator[Hosts]:
        """Hosts with the network of all arms."""
        async with Hosts(count, rate=self.rate, delay_s=self.delay_s) as hosts:
            yield hosts

    def paced(self, steps: int = 0) -> list[str]:
        """Changes to the job file that make it a paced job of so many steps."""
        return [
            f"budget.steps={steps or self.steps}",
            f"evaluation.problems={self.problems}",
            *self.paces.overrides(),
        ]


def books(summary: dict[str, Any]) -> Arm:
    """What a summary tells of what was lost or done twice."""
    return {key: int(summary[key]) for key in BOOKS}
