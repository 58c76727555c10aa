"""Runs of one emulated job on its own mesh, with step times, moves, their cost, and host load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.jobs.mesh import RunningMesh, mesh_up
from loadtests.measuring.processes import beside
from loadtests.paced.job import write
from loadtests.regret.figures import judgement
from meshrl.common.base.errors import MeshError
from meshrl.common.state import registry
from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.planner_reports import SPEEDUP_RULES
from meshrl.sim.mesh.emulated_run import compute_rl_s
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload

JOB = "paced"
PLANNER = "planner"  # kind of the processes that decide


@dataclass
class Arm:
    """One run; seconds are of the wall, and `planner_cpu_s` and `cpu_s` of processors."""

    name: str
    rl_s: float = 0.0  # of its phase of training, to its last committed step
    steps: list[dict[str, Any]] = field(default_factory=list)  # records
    ends_s: list[float] = field(default_factory=list)  # of its steps, by the wall clock
    moves: list[dict[str, Any]] = field(default_factory=list)  # for faster steps
    undone: list[dict[str, Any]] = field(default_factory=list)  # moves back: they had not paid
    judged: list[dict[str, Any]] = field(default_factory=list)
    planner_cpu_s: float = 0.0
    cpu_s: float = 0.0
    killed: int = 0
    honest: dict[str, Any] = field(default_factory=dict)  # of the host

    @property
    def switches_s(self) -> list[float]:
        """Return the seconds of each move, in both directions, from decision to completion."""
        every = self.moves + self.undone
        return [(m["finished_ms"] - m["started_ms"]) / 1e3 for m in every]

    def row(self) -> dict[str, Any]:
        return {
            "arm": self.name,
            "rl_s": round(self.rl_s, 1),
            "trained_s": [round(row["train_s"], 1) for row in self.steps],
            "waited_s": [round(row["wait_s"], 1) for row in self.steps],
            "moves": [f"{m['from']} to {m['to']} at step {m.get('step')}" for m in self.moves],
            "judged": [judgement(told) for told in self.judged],
            "switches_s": [round(s, 2) for s in self.switches_s],
            "killed": self.killed,
            **self.honest,
        }


async def run(
    name: str,
    job: EmulatedWorkload,
    seed: int,
    most: int,
    kill_every_s: float = 0.0,
    changes: Sequence[str] = (),
) -> Arm:
    """Run the job on a mesh of its workers, and optionally kill an engine process periodically.

    `changes` are further overrides, as for `--set`.
    """
    arm = Arm(name)
    with tempfile.TemporaryDirectory(prefix=f"p-{name}-") as made:
        folder = Path(made)
        path = write(folder / "job", job, seed, most)
        async with mesh_up(folder, job.workers) as mesh:
            handle = await mesh.submit(path, JOB, *job.format_overrides(), *changes)
            async with beside(_kill(mesh, arm, kill_every_s, seed)):
                await mesh.finished(handle)
            take(arm, await mesh.events())
            used = mesh.cpu_s()
            arm.planner_cpu_s, arm.cpu_s = used.get(PLANNER, 0.0), sum(used.values())
        arm.honest = mesh.watched.honest()
    return arm


def take(arm: Arm, events: Sequence[Event]) -> None:
    commits = [event for event in events if event.kind == "step"]
    arm.steps = [event.fields["metrics"] for event in commits]
    arm.ends_s = [event.ms / 1e3 for event in commits]
    arm.rl_s = compute_rl_s(events)
    for event in events:
        policy = event.fields.get("policy")
        if event.kind == "move" and policy in SPEEDUP_RULES:
            arm.moves.append(event.fields)
        elif event.kind == "move" and policy == "unpaid":
            arm.undone.append(event.fields)
        elif event.kind == "move_judged":
            arm.judged.append(event.fields)


async def _kill(mesh: RunningMesh, arm: Arm, every_s: float, seed: int) -> None:
    """Kill an engine process of the job periodically until cancelled."""
    rng = random.Random(seed)
    while every_s:
        await asyncio.sleep(every_s)
        with contextlib.suppress(MeshError, ProcessLookupError):
            entries = await registry.list_entries(mesh.state, "engine")
            if alive := sorted(entry.pid for entry in entries if entry.alive):
                os.kill(rng.choice(alive), signal.SIGKILL)
                arm.killed += 1


def honest(arms: Sequence[Arm]) -> dict[str, Any]:
    """Return the worst host figures of all arms."""
    told = [arm.honest for arm in arms]
    keys = ("late_share", "host_cores", "mesh_cores", "steal_cores", "load")
    worst = {key: max((one.get(key) or 0.0 for one in told), default=0.0) for key in keys}
    return {**worst, "valid": min((one["valid"] for one in told), default=0)}


def ratios(arm: Arm) -> Iterator[float]:
    """Yield T_rollout / T_train of each step but the first, if it trained, by its record.

    The value is waiting and training time over training time. Where rollout binds, this is the
    ratio. Elsewhere it exceeds the ratio, which is below 1 then.
    """
    for row in arm.steps[1:]:
        if row["tokens_trained"]:
            yield (row["wait_s"] + row["train_s"]) / row["train_s"]


def ratio_span(arm: Arm) -> float:
    """Return the median ratio of the last third of the steps over that of the first third."""
    found = list(ratios(arm))
    third = max(1, len(found) // 3)
    return statistics.median(found[-third:]) / statistics.median(found[:third])
