"""Runner of a workload on a virtual mesh without faults, with its duration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.base.files import json_lines
from meshrl.common.base.random import Random
from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.planner_reports import SPEEDUP_RULES
from meshrl.sim.event_record import EventRecord
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload
from meshrl.sim.mesh.runtime.virtual_mesh import VirtualMesh, VirtualMeshSize
from meshrl.sim.mesh.seed_runner import run_scenario
from meshrl.sim.virtual_loop import VirtualLoop
from meshrl.view.recording.run_record import EVENTS_FILE, parse_event

LIMIT_S = 14_400.0  # of virtual time: far beyond any workload
POLL_S = 1.0
RECORD_DELAY_S = 5.0  # time until the record has the last events


@dataclass
class EmulatedRun:
    """Result of a workload; seconds are virtual, except `cpu_s`."""

    rl_s: float = 0.0  # from the start of its training phase to its last commit
    steps_s: list[float] = field(default_factory=list)  # between two commits
    moves: list[dict[str, Any]] = field(default_factory=list)  # details of each, with `at_s`
    judged_moves: list[dict[str, Any]] = field(default_factory=list)  # of `move_judged`
    cpu_s: float = 0.0
    failures: list[str] = field(default_factory=list)


def run_workload(workload: EmulatedWorkload, seed: int = 0, log: Path | None = None) -> EmulatedRun:
    """Run a workload from an empty directory to its last step; the same seed gives the same run."""
    found, loop = EmulatedRun(), VirtualLoop()
    loop.limit_s = LIMIT_S
    found.cpu_s = run_scenario(
        loop, lambda record, root: _run_scenario(loop, record, root, workload, seed, found), log
    )
    return found


async def _run_scenario(
    loop: VirtualLoop,
    record: EventRecord,
    root: Path,
    workload: EmulatedWorkload,
    seed: int,
    result: EmulatedRun,
) -> None:
    size = VirtualMeshSize(workers=workload.workers, steps=workload.steps, workload=workload)
    world = VirtualMesh(loop, Random(seed), root, record, size)
    await world.start()
    try:
        while not world.is_over:
            await world.clock.sleep(POLL_S)
    except DeadlineExceeded as error:
        result.failures.append(str(error))
    await world.clock.sleep(RECORD_DELAY_S)
    await world.stop()
    if world.phase != "finished":
        result.failures.append(f"the job ended in phase {world.phase}")
    result.failures += world.machine.failures
    _read_events(
        result, [parse_event(row) for row in json_lines.read_lines(root / EVENTS_FILE).rows]
    )
    if len(result.steps_s) != workload.steps - 1:
        result.failures.append(f"{len(result.steps_s) + 1} of {workload.steps} steps are recorded")


def compute_rl_s(events: Sequence[Event]) -> float:
    """Compute the seconds from the start of a run's training phase to its last committed step."""
    return (max(e.ms for e in events if e.kind == "step") - find_training_start_ms(events)) / 1e3


def find_training_start_ms(events: Sequence[Event]) -> int:
    return next(e.ms for e in events if e.kind == "phase" and e.fields["phase"] == "training")


def _read_events(result: EmulatedRun, events: list[Event]) -> None:
    began_s, commits = 0.0, [event.ms / 1e3 for event in events if event.kind == "step"]
    if commits:
        began_s, result.rl_s = find_training_start_ms(events) / 1e3, compute_rl_s(events)
        result.steps_s = [round(then - now, 3) for now, then in pairwise(commits)]
    for event in events:
        fields = event.fields | {"at_s": round(event.ms / 1e3 - began_s, 3)}
        if event.kind == "move" and fields.get("policy") in SPEEDUP_RULES:
            result.moves.append(fields)
        elif event.kind == "move_judged":
            result.judged_moves.append(fields)
