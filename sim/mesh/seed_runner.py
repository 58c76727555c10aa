"""Runner of one seed, from an empty directory to the check of the final state."""

from __future__ import annotations

import asyncio
import gc
import io
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Coroutine, MutableMapping
from contextlib import redirect_stderr, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog

from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.base.files.disk_sync import simulate_disk
from meshrl.common.base.random import Random
from meshrl.sim.event_record import EventRecord
from meshrl.sim.mesh.faults import invariants
from meshrl.sim.mesh.faults.fault_schedule import FaultSchedule, parse_kinds
from meshrl.sim.mesh.faults.state_observer import StateObserver
from meshrl.sim.mesh.job.job_setup import MAX_STALENESS, build_config
from meshrl.sim.mesh.runtime.virtual_mesh import VirtualMesh, VirtualMeshSize
from meshrl.sim.virtual_loop import VirtualLoop
from meshrl.sim.virtual_process import ProcessExit

T = TypeVar("T")
SHARED_MEMORY_DIR = Path("/dev/shm")  # temporary files need no disk
STEP_BUDGET_S = 12.0  # time with faults per step of the budget
POLL_S = 1.0
RECOVERY_LIMIT_S = 300.0  # from the last fault to the end of the job, plus its steps
MAX_STEP_S = 20.0
DRAIN_S = 5.0  # time for gangs to stop after the job


@dataclass(frozen=True)
class MeshPlan:
    """Complete plan of a run: the same plan gives the same run."""

    seed: int
    faults: str = "all"
    hours: float = 1 / 6
    workers: int = 2
    shards: int = 1
    ranks: int = 1
    pace: float = 1.0  # factor of the times between two faults
    budget: int = 0  # steps of each job; 0: derived from the time of faults
    jobs: int = 1  # on the mesh
    staleness: int = MAX_STALENESS  # `max_staleness` of each job; 0: strictly on-policy
    colocated: bool = False  # engines also on the core's workers

    @property
    def steps(self) -> int:
        return self.budget or max(3, round(self.hours * 3600 / STEP_BUDGET_S))

    @property
    def size(self) -> VirtualMeshSize:
        shape = self.workers, self.shards, self.ranks, self.steps, self.jobs
        return VirtualMeshSize(*shape, max_staleness=self.staleness, colocated=self.colocated)

    @property
    def replay_command(self) -> str:
        """Command that repeats the run."""
        words = ["python -m meshrl.sim.mesh", f"--seed {self.seed}", f"--faults {self.faults}"]
        words.append(f"--hours {self.hours:g} --pace {self.pace:g} --budget {self.budget}")
        words += [f"--{name} {getattr(self, name)}" for name in ("workers", "shards", "ranks")]
        words.append(f"--mesh-jobs {self.jobs} --staleness {self.staleness}")
        words += ["--colocated"] * self.colocated
        return " ".join(words)


@dataclass
class MeshOutcome:
    plan: MeshPlan
    digest: str = ""
    violations: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    version: int = -1
    lineage: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    processes: int = 0

    def to_document(self) -> dict[str, Any]:
        ratio = self.virtual_s / max(self.cpu_s, 1e-9)
        return asdict(self) | {
            "virtual_s_per_cpu_s": round(ratio, 1),
            "command": self.plan.replay_command,
        }


def run_plan(plan: MeshPlan, log: Path | None = None) -> MeshOutcome:
    outcome, loop = MeshOutcome(plan), VirtualLoop()
    outcome.cpu_s = run_scenario(
        loop, lambda record, root: _run_scenario(loop, record, root, plan, outcome), log
    )
    outcome.virtual_s = loop.now_s
    return outcome


def run_scenario(
    loop: VirtualLoop,
    scenario: Callable[[EventRecord, Path], Coroutine[Any, Any, None]],
    log: Path | None,
) -> float:
    """Run a scenario in a temporary directory; return the seconds of CPU time."""
    began = time.process_time()
    root = Path(
        tempfile.mkdtemp(
            prefix="mesh-", dir=SHARED_MEMORY_DIR if SHARED_MEMORY_DIR.is_dir() else None
        )
    )
    path = list(sys.path)  # environments add their job's modules
    record = EventRecord(lambda: loop.now_s, root, log)
    try:
        run_on_loop(loop, record, scenario(record, root))
    finally:
        sys.path[:] = path
        for place in root.parent.glob(f"{root.name}*"):
            shutil.rmtree(place, ignore_errors=True)
    return time.process_time() - began


def run_on_loop(loop: VirtualLoop, record: EventRecord, scenario: Coroutine[Any, Any, T]) -> T:
    """Run a scenario to its end. Tasks of dead processes are closed only then, so that their
    clean-up has no effect.
    """
    logs = structlog.get_config() if structlog.is_configured() else None

    def take(logger: Any, method: str, told: MutableMapping[str, Any]) -> Any:
        """Write log messages of processes into the record."""
        if record.has_log:
            record.log_note(f"{method} {told}")
        raise structlog.DropEvent

    structlog.configure(processors=[take], cache_logger_on_first_use=False)
    gc.freeze()  # the collection at the end skips imported objects
    gc.disable()  # the time of a collection would not be deterministic
    simulate_disk(lambda descriptor: None)  # no power cut is simulated until the disk is watched
    try:
        with redirect_stderr(_StderrRecorder(record)):
            return loop.run_until_complete(scenario)
    finally:
        simulate_disk(None)
        record.close()
        _close_dead_tasks(loop)
        gc.enable()
        if logs is None:
            structlog.reset_defaults()
        else:
            structlog.configure(**logs)


def _close_dead_tasks(loop: VirtualLoop) -> None:
    """Close the tasks of dead processes without messages."""
    loop.set_exception_handler(lambda *_: None)
    before, sys.unraisablehook = sys.unraisablehook, lambda *_: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with suppress(BaseException):
                task.get_coro().close()
        loop.close()
        gc.collect()
    gc.unfreeze()
    sys.unraisablehook = before


class _StderrRecorder(io.TextIOBase):
    """Recorder of the processes' stderr."""

    def __init__(self, record: EventRecord) -> None:
        self._record = record

    def write(self, text: str) -> int:
        self._record.log_note(text.rstrip("\n"))
        return len(text)


async def _run_scenario(
    loop: VirtualLoop, record: EventRecord, root: Path, plan: MeshPlan, outcome: MeshOutcome
) -> None:
    random = Random(plan.seed)
    world = VirtualMesh(loop, random, root, record, plan.size)
    loop.set_exception_handler(lambda _, details: _record_unhandled(world, details))
    witnesses = [
        StateObserver(world.redis, run_dir, job) for job, run_dir in world.run_dirs.items()
    ]
    await world.start()
    faults = FaultSchedule(world, random.child("faults"), parse_kinds(plan.faults), plan.pace)
    settled_at = plan.hours * 3600
    await _wait_until_over(world, settled_at)
    await faults.stop_and_repair()
    bound = max(settled_at, loop.now_s) + RECOVERY_LIMIT_S + MAX_STEP_S * plan.steps * plan.jobs
    has_settled = await _wait_until_over(world, bound)
    late_s = 0.0 if has_settled else loop.now_s - bound + 1.0
    await world.clock.sleep(DRAIN_S)
    leftovers = await _stop_mesh(world)
    found = [witness.read_final_state() for witness in witnesses]
    for facts in found:
        facts.leftovers, facts.finished_late_s, facts.errors = (
            leftovers,
            late_s,
            world.machine.failures,
        )
        facts.corruptions, facts.lost_files = faults.corruptor.corruptions, world.lost_files
        facts.start_error = world.start_error
        facts.replaced_files = {d.path for d in facts.corruptions if d.is_replaced(root)}
    config = build_config(plan.workers, plan.shards, plan.ranks, plan.steps)
    terms = invariants.InvariantLimits(plan.steps, plan.staleness, config.training.keep_checkpoints)
    several = len(found) > 1
    outcome.violations = [
        f"{facts.name}: {details}" if several else details
        for facts in found
        for details in invariants.check_invariants(facts, terms)
    ]
    for facts in found:
        for kind, details in facts.events:
            world.record.log_event(f"event {kind} {details}")
    outcome.version = min(int(facts.job_row.get("version", -1)) for facts in found)
    outcome.lineage = max(int(facts.job_row.get("lineage", 0)) for facts in found)
    outcome.faults = faults.counts
    outcome.processes = len(world.machine.processes)
    outcome.digest = world.record.digest


async def _wait_until_over(mesh: VirtualMesh, until_s: float) -> bool:
    while mesh.clock.monotonic() < until_s:
        await mesh.clock.sleep(POLL_S)
        if mesh.is_over:
            return True
    return False


async def _stop_mesh(mesh: VirtualMesh) -> list[str]:
    """Stop the mesh; return the names of leftovers."""
    try:
        async with mesh.clock.timeout(180.0, "stopping the mesh"):
            await mesh.stop()
    except DeadlineExceeded as error:
        return [
            str(error),
            *(f"{process.label} is still running" for process in mesh.machine.live_processes),
        ]
    leftovers = [f"{process.label} is still running" for process in mesh.machine.live_processes]
    leftovers += [f"{address} is still on the network" for address in mesh.network.addresses]
    leftovers += [f"{path} is still open" for path in mesh.machine.list_unclosed_files()]
    dead = {*mesh.machine.dead_tasks, asyncio.current_task()}
    tasks = [task for task in asyncio.all_tasks() if task not in dead]
    return leftovers + [
        f"task {task.get_name()} is still running: {describe_coroutine(task)}" for task in tasks
    ]


def _record_unhandled(mesh: VirtualMesh, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if isinstance(error, ProcessExit):
        return
    mesh.record.log_note(f"unhandled: {context}")
    mesh.machine.failures.append(f"unhandled: {context.get('message')}: {error!r}")


def describe_coroutine(task: asyncio.Task[Any]) -> str:
    """Describe the coroutine of a task by name and line."""
    stack = task.get_stack(limit=1)
    place = f" at {stack[-1].f_code.co_filename}:{stack[-1].f_lineno}" if stack else ""
    return f"{getattr(task.get_coro(), '__qualname__', '?')}{place}"
