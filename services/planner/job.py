"""A job as the planner sees it: what it needs of the mesh, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass

from common.job.config import PlannerConfig
from common.state.jobs import JobRow, Phase


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job of the mesh: what it asks for, and how many steps it has committed."""

    id: str
    phase: Phase
    steps_done: int
    workers: int  # workers that its file asks for
    ranks: int  # ranks of its core, a worker each
    samples: bool  # whether anything is rolled out for it
    scoring: bool  # whether it has frozen models, which one gang hosts
    groups_per_step: int
    config: PlannerConfig


def planned(row: JobRow) -> PlannedJob:
    """The job that a row of Redis describes."""
    document = row.document
    return PlannedJob(
        id=row.id,
        phase=row.phase,
        steps_done=row.steps_done,
        workers=document["mesh"]["workers"],
        ranks=int(document["training"].get("ranks", 1)),
        samples=document["algorithm"]["name"] != "sft",
        scoring=any(model["path"] for model in document.get("models", {}).values()),
        groups_per_step=document["algorithm"]["groups_per_step"],
        config=PlannerConfig(**document["planner"]),
    )
