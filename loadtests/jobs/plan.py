"""How long and on what the arms run."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.jobs.mesh import Paces
from loadtests.measuring.rounds import Arm

_COUNT = itertools.count()


@dataclass(frozen=True)
class Plan:
    """What all arms have in common."""

    job: Path
    steps: int  # of each job
    problems: int = 256  # held-out ones of an evaluation
    paces: Paces = field(default_factory=Paces)
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    moves: int = 3  # of each kind; and preemptions
    window_s: float = 60.0  # that shares are measured over

    def overrides(self, seed: int, *more: str) -> list[str]:
        """Of a job with this seed, as of `--set`."""
        return [
            f"seed={seed}",
            f"budget.steps={self.steps}",
            f"evaluation.problems={self.problems}",
            *self.paces.overrides(),
            *more,
        ]

    @contextmanager
    def folder(self, arm: str) -> Iterator[Path]:
        """A folder for one mesh, which is gone afterwards; short, as paths of sockets are."""
        with tempfile.TemporaryDirectory(prefix=f"j{next(_COUNT)}-{arm}-") as made:
            yield Path(made)


def accounts(summaries: list[dict[str, Any]]) -> Arm:
    """Whether anything was lost or trained twice in any of these jobs."""
    return {
        key: sum(int(summary[key]) for summary in summaries)
        for key in ("lost", "trained_twice", "typed_drops")
    }


def greedy(summary: dict[str, Any]) -> float:
    """Held-out accuracy at the end."""
    return float((summary["held_out"].get("after") or {}).get("greedy") or 0.0)
