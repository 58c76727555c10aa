"""Runs a workload on a virtual mesh without faults, and says how long it took."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.errors import DeadlineExceeded
from common.random import Random
from common.records import lines
from common.records.durable import heard_by
from common.state.events import Event
from meshrl.observe.recording.recorded import EVENTS, event_of
from sim.loop import VirtualLoop
from sim.mesh.paced.workload import Workload
from sim.mesh.running import MEMORY, keeping_path, run_in
from sim.mesh.world import Size, World
from sim.record import Record

LONGEST_S = 14_400.0  # of virtual time: far beyond any workload's
LOOK_S = 1.0
RECORDED_S = 5.0  # for the last events to be in the record


@dataclass
class Run:
    """What became of a workload; seconds are virtual, but for `cpu_s`."""

    rl_s: float = 0.0  # from its first committed step to its last
    steps_s: list[float] = field(default_factory=list)  # between two commits
    moves: list[dict[str, Any]] = field(default_factory=list)  # details of each, with `at_s`
    judged: list[dict[str, Any]] = field(default_factory=list)  # of `move_judged`
    cpu_s: float = 0.0
    failures: list[str] = field(default_factory=list)


def run(workload: Workload, seed: int = 0, log: Path | None = None) -> Run:
    """A workload from an empty directory to its last step; the same seed gives the same run."""
    began = time.process_time()
    root = Path(tempfile.mkdtemp(prefix="mesh-", dir=MEMORY if MEMORY.is_dir() else None))
    loop = VirtualLoop()
    loop.limit = LONGEST_S
    record = Record(lambda: loop.now, root, log)
    try:
        with keeping_path():
            found = run_in(loop, record, _story(loop, record, root, workload, seed))
    finally:
        for place in root.parent.glob(f"{root.name}*"):
            shutil.rmtree(place, ignore_errors=True)
        heard_by(None)
    found.cpu_s = time.process_time() - began
    return found


async def _story(
    loop: VirtualLoop, record: Record, root: Path, workload: Workload, seed: int
) -> Run:
    size = Size(workers=workload.workers, steps=workload.steps, workload=workload)
    world = World(loop, Random(seed), root, record, size)
    await world.start()
    found = Run()
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
    return found


def _take(found: Run, events: list[Event]) -> None:
    """What a run's events say of it."""
    commits = [event.ms / 1e3 for event in events if event.kind == "step"]
    if commits:
        found.rl_s = commits[-1] - commits[0]
        found.steps_s = [round(then - now, 3) for now, then in pairwise(commits)]
    for event in events:
        told = event.fields | {"at_s": round(event.ms / 1e3 - commits[0], 3)} if commits else {}
        if event.kind == "move" and told.get("policy") == "stage_time":
            found.moves.append(told)
        elif event.kind == "move_judged":
            found.judged.append(told)
