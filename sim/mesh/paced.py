"""Runs a workload on a virtual mesh without faults, and says how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.base.files import lines
from meshrl.common.base.random import Random
from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.explained import PLANNED
from meshrl.sim.loop import VirtualLoop
from meshrl.sim.mesh.job.workload import PacedWorkload
from meshrl.sim.mesh.running import run_story
from meshrl.sim.mesh.world.world import Size, World
from meshrl.sim.record import EventRecord
from meshrl.view.recording.recorded import EVENTS, event_of

LONGEST_S = 14_400.0  # of virtual time: far beyond any workload's
LOOK_S = 1.0
RECORDED_S = 5.0  # for the last events to be in the record


@dataclass
class PacedRun:
    """What became of a workload; seconds are virtual, but for `cpu_s`."""

    rl_s: float = 0.0  # of its phase of training, to its last committed step
    steps_s: list[float] = field(default_factory=list)  # between two commits
    moves: list[dict[str, Any]] = field(default_factory=list)  # details of each, with `at_s`
    judged: list[dict[str, Any]] = field(default_factory=list)  # of `move_judged`
    cpu_s: float = 0.0
    failures: list[str] = field(default_factory=list)


def run(workload: PacedWorkload, seed: int = 0, log: Path | None = None) -> PacedRun:
    """A workload from an empty directory to its last step; the same seed gives the same run."""
    found, loop = PacedRun(), VirtualLoop()
    loop.limit = LONGEST_S
    found.cpu_s = run_story(
        loop, lambda record, root: _story(loop, record, root, workload, seed, found), log
    )
    return found


async def _story(
    loop: VirtualLoop,
    record: EventRecord,
    root: Path,
    workload: PacedWorkload,
    seed: int,
    found: PacedRun,
) -> None:
    size = Size(workers=workload.workers, steps=workload.steps, workload=workload)
    world = World(loop, Random(seed), root, record, size)
    await world.start()
    try:
        while not world.over:
            await world.clock.sleep(LOOK_S)
    except DeadlineExceeded as error:
        found.failures.append(str(error))
    await world.clock.sleep(RECORDED_S)
    await world.stop()
    if world.phase != "finished":
        found.failures.append(f"the job is {world.phase}")
    found.failures += world.machine.failures
    _take(found, [event_of(row) for row in lines.read(root / EVENTS).rows])
    if len(found.steps_s) != workload.steps - 1:
        found.failures.append(f"{len(found.steps_s) + 1} steps of {workload.steps} are recorded")


def rl_s(events: Sequence[Event]) -> float:
    """Seconds from the beginning of a run's phase of training to its last committed step."""
    return (max(e.ms for e in events if e.kind == "step") - began_ms(events)) / 1e3


def began_ms(events: Sequence[Event]) -> int:
    return next(e.ms for e in events if e.kind == "phase" and e.fields["phase"] == "training")


def _take(found: PacedRun, events: list[Event]) -> None:
    began_s, commits = 0.0, [event.ms / 1e3 for event in events if event.kind == "step"]
    if commits:
        began_s, found.rl_s = began_ms(events) / 1e3, rl_s(events)
        found.steps_s = [round(then - now, 3) for now, then in pairwise(commits)]
    for event in events:
        told = event.fields | {"at_s": round(event.ms / 1e3 - began_s, 3)}
        if event.kind == "move" and told.get("policy") in PLANNED:
            found.moves.append(told)
        elif event.kind == "move_judged":
            found.judged.append(told)
