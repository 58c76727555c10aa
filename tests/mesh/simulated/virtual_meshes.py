"""Virtual meshes for tests: a complete one that a story runs on, and bare processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from meshrl.common.base.random import Random
from meshrl.common.mesh.runtime.calls.actor import Actor
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import events, groups, jobs
from meshrl.common.state.events import Event
from meshrl.common.state.job_lifecycle.trajectory_accounting import compute_account
from meshrl.common.state.redis.client import StateClient
from meshrl.sim.event_record import EventRecord
from meshrl.sim.mesh.job.job_setup import JOB_NAME
from meshrl.sim.mesh.runtime.programs import ProcessContext
from meshrl.sim.mesh.runtime.virtual_mesh import VirtualMesh, VirtualMeshSize
from meshrl.sim.mesh.runtime.virtual_redis import VirtualRedis, open_state
from meshrl.sim.mesh.seed_runner import run_on_loop
from meshrl.sim.virtual_loop import VirtualLoop
from meshrl.sim.virtual_machine import MachineClock, VirtualMachine
from meshrl.sim.virtual_network import MemoryNetwork
from meshrl.sim.virtual_process import VirtualProcess
from tests.stories import Story, story_on

T = TypeVar("T")
M = TypeVar("M", bound="BareMesh")


def run_on_mesh(
    root: Path,
    size: VirtualMeshSize,
    story: Callable[[VirtualMesh], Coroutine[Any, Any, T]],
    *,
    seed: int = 1,
    limit_s: float = 14_400.0,
) -> T:
    """Run a story on a mesh with a started job, end the mesh, and return the story's result."""
    loop = VirtualLoop()
    loop.limit_s = limit_s
    record = EventRecord(lambda: loop.now_s, root)

    async def main() -> T:
        world = VirtualMesh(loop, Random(seed), root, record, size)
        await world.start()
        answer = await story(world)
        await world.stop()
        assert not world.machine.failures, world.machine.failures
        assert not world.machine.live_processes
        return answer

    return run_on_loop(loop, record, main())


async def wait_until_ended(world: VirtualMesh) -> None:
    """Wait until the job has ended."""
    while world.phase not in ("finished", "failed"):
        await world.clock.sleep(1.0)
    assert world.phase == "finished"


async def wait_for_version(world: VirtualMesh, version: int) -> jobs.JobRow:
    """Wait until the job has this version, and return its row."""
    while (row := await jobs.read_job(world.state, JOB_NAME)).version < version:
        await world.clock.sleep(0.5)
    return row


async def check_account(state: StateClient) -> tuple[dict[str, int], list[Event]]:
    """Return the job's account and events. Assert that nothing is lost or trained twice."""
    main = [e for e in await events.read_all(state) if e.fields.get("job") == JOB_NAME]
    counted = compute_account(
        main, (await groups.count_in_flight(state, JOB_NAME)).samples, JOB_NAME
    )
    assert counted["lost"] == counted["trained_twice"] == 0
    return counted, main


class BareProcess:
    """Process whose actions a test defines."""

    def __init__(self, around: ProcessContext, name: str, kind: str) -> None:
        self.process = around.machine.spawn("bare", [], name, None, dies_with_parent=False)
        self.mesh: Mesh = self.process.context.copy().run(
            around.open_mesh, self.process, name, kind
        )
        self.tasks: list[asyncio.Task[Any]] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        loop = asyncio.get_running_loop()
        task = loop.create_task(work, context=self.process.context.copy())
        self.tasks.append(task)
        return task

    @property
    def name(self) -> str:
        return self.mesh.name

    async def join(self, actor: Actor, stats: Callable[[], dict[str, Any]]) -> None:
        await self.run(self.mesh.join(actor, stats=stats))

    def stop(self) -> None:
        """Stop the process by SIGSTOP."""
        self.process.stop()

    def check(self) -> None:
        """Raise the error that one of its tasks raised."""
        for task in self.tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


class BareMesh:
    """Virtual machine, network and Redis without services."""

    def __init__(self, loop: VirtualLoop, root: Path, record: EventRecord, seed: int = 3) -> None:
        random = Random(seed)
        self.root = root
        self.machine = VirtualMachine(loop, random.child("machine"), record, root)
        self.clock = self.machine.clock
        self.network = MemoryNetwork(self.clock, random.child("network"))
        self.redis = VirtualRedis(MachineClock(loop), random.child("redis"))
        self.around = ProcessContext(self.machine, self.network, self.redis, root)
        self.machine.programs = {"bare": _bare}
        self.processes: list[BareProcess] = []
        self.state: StateClient = open_state(
            self.redis, self.machine.spawn("bare", [], "test", None, False)
        )

    def process(self, name: str, kind: str) -> BareProcess:
        made = BareProcess(self.around, name, kind)
        self.processes.append(made)
        return made


async def _bare(process: VirtualProcess, argv: list[str]) -> None:
    await process.channel.to_child.get()


def run_on_bare_mesh(root: Path, story: Callable[[BareMesh], Coroutine[Any, Any, T]]) -> T:
    """Run a story on such a mesh and return its result."""
    return run_on_kind(BareMesh, root, story)


def run_on_kind(kind: type[M], root: Path, story: Callable[[M], Coroutine[Any, Any, T]]) -> T:
    """Run a story on a mesh of a subclass and return its result."""
    loop = VirtualLoop()
    loop.limit_s = 7200.0
    record = EventRecord(lambda: loop.now_s, root)

    async def main() -> T:
        return await story(kind(loop, root, record))

    return run_on_loop(loop, record, main())


def mesh_story(size: VirtualMeshSize, **options: Any) -> Callable[[Story], Callable[..., None]]:
    """Decorate a story as a test on a mesh with a job; `options` are those of `run_on_mesh`."""
    return story_on(lambda root, story: run_on_mesh(root, size, story, **options), "tmp_path")
