"""Gangs, a job and processes as a planner sees them, of which a test says what differs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from common.job.config import PlannerConfig
from common.state.gangs import Gang
from services.planner.job import PlannedJob


def gang(number: int, role: str = "idle", **other: Any) -> Gang:
    """Does what was decided last, unless told otherwise."""
    about: dict[str, Any] = {
        "id": f"g{number}",
        "workers": [f"worker/g{number}"],
        "accelerator": "cpu",
        "desired_role": role,
        "desired_job": "" if role == "idle" else "job",
        "desired_core": False,
        "epoch": 1,
        "actual_role": role,
        "actual_state": "idle" if role == "idle" else "ready",
        "actual_epoch": 1,
        "changed_ms": 0,
        "pinned": False,
    }
    return Gang(**(about | other))


def job(**other: Any) -> PlannedJob:
    about: dict[str, Any] = {
        "id": "job",
        "phase": "training",
        "steps_done": 10,
        "workers": 3,
        "ranks": 1,
        "samples": True,
        "scoring": False,
        "groups_per_step": 16,
        "config": PlannerConfig(),
    }
    return PlannedJob(**(about | other))


def entry(kind: str, gang: str = "", **stats: Any) -> Any:
    about = {"job": "job", "gang": gang} | stats
    return SimpleNamespace(name=f"{kind}/{gang}", kind=kind, incarnation="a", stats=about)


def counters(
    steps: int, rollout_s: float = 1.0, train_s: float = 1.0, engines: int = 2
) -> list[Any]:
    """What processes publish after so many steps that took so long."""
    rolled = {"occupied_s": steps * rollout_s, "tokens": 100 * steps}
    return [
        *(entry("engine", f"g{n + 1}", **rolled) for n in range(engines)),
        entry("rollout", groups=16 * steps),
        entry("trainer", "g0", busy_s=steps * train_s, step=steps),
    ]
