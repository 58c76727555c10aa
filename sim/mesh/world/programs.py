"""What virtual processes run: each program opens a mesh in memory, then lives as the product's
process does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from meshrl.common.api.calls.callers import CALLERS
from meshrl.common.api.weights import STORE
from meshrl.common.environment.framing import packed
from meshrl.common.generation.contract import TokenEngine
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.lease import LOST
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.mesh.runtime.seams import Access, Seams, Terms
from meshrl.common.state.pool.workers import names
from meshrl.common.state.pool.workers.seat import Seat, parser
from meshrl.common.state.redis.client import State
from meshrl.services.engine import running as engine_running
from meshrl.services.engine.service import EngineService
from meshrl.services.environment import environments
from meshrl.services.node import __main__ as node
from meshrl.services.node import worker
from meshrl.services.planner import __main__ as planner
from meshrl.services.rollout import __main__ as rollout
from meshrl.services.trainer import running as trainer_running
from meshrl.services.weights import __main__ as weights
from meshrl.sim.engines.simulated import SimulatedEngine
from meshrl.sim.machine import Machine, ProcessHost
from meshrl.sim.mesh.job.arithmetic import TinyArithmetic
from meshrl.sim.mesh.job.computing import PacedArithmetic, SteppedEngine
from meshrl.sim.mesh.job.task import owed_s
from meshrl.sim.mesh.job.workload import PacedWorkload
from meshrl.sim.mesh.world.redis import VirtualRedis, state_of
from meshrl.sim.network import MemoryNetwork, MemoryTransport
from meshrl.sim.process import Program, VirtualProcess

HOST = "one"  # the id of the one host
START_S = 1.2  # mean of what a process needs for its imports
TOKENS_PER_S = 8.0
MEDIAN_TOKENS = 12.0
FLUSH_S = 0.4  # between two turns of a simulated engine that is busy
IDLE_S = 2.0


class Surroundings:
    """What processes find: a machine, a network, a Redis, and a directory."""

    def __init__(
        self,
        machine: Machine,
        network: MemoryNetwork,
        redis: VirtualRedis,
        root: Path,
        workload: PacedWorkload | None = None,
    ) -> None:
        """`workload`: paces that its engines and trainers keep to; None: they have none."""
        self.machine, self.network, self.redis, self.root = machine, network, redis, root
        self.workload = workload
        self.meshes: dict[str, Mesh] = {}  # the newest of each name
        self.state_of: Callable[[VirtualProcess], State] = partial(state_of, redis)

    def mesh(self, process: VirtualProcess, name: str, kind: str) -> Mesh:
        """A membership for the process, as `Mesh.open` makes it for a real one."""
        machine, host = self.machine, ProcessHost(process)
        transport = MemoryTransport(self.network, f"mem://{process.label}", role=kind)
        mesh = Mesh(
            name,
            kind,
            Seams(
                state=self.state_of(process),
                transport=transport,
                clock=machine.clock,
                random=machine.random.child(f"mesh {process.label}"),
                host=host,
            ),
            settings=MeshSettings(
                redis_url="simulated:", run_root=str(self.root), bind="", host=HOST, metrics="off"
            ),
            terms=Terms(on_lost=lambda why: host.exit(LOST, why)),
            access=Access(callers=CALLERS),
        )
        mesh.state.renewed = mesh._lease.renewed
        self.meshes[name] = mesh
        process.at_end.append(lambda: self.network.detach(transport))
        network, address = self.network, transport.address
        process.at_stop.append(
            lambda stopped: (network.pause if stopped else network.resume)(address)
        )
        return mesh

    def programs(self) -> dict[str, Program]:
        """By the module that a command line names; each begins with its imports."""
        programs = {
            "meshrl.services.planner": self._planner,
            "meshrl.services.weights": self._weights,
            "meshrl.services.rollout": self._rollout,
            "meshrl.services.node": self._node,
            "meshrl.services.node.worker": self._worker,
            "meshrl.services.engine": self._engine,
            "meshrl.services.trainer": self._trainer,
            "meshrl.services.environment": self._environment,
        }
        return {module: partial(self._begin, program) for module, program in programs.items()}

    async def _begin(self, program: Program, process: VirtualProcess, argv: list[str]) -> None:
        pause_s = START_S * self.machine.random.child(f"start {process.label}").uniform(0.5, 1.5)
        await self.machine.clock.sleep(pause_s)
        await program(process, argv)

    async def _planner(self, process: VirtualProcess, argv: list[str]) -> None:
        a = planner.parser().parse_args(argv)
        await planner.serve(self.mesh(process, a.name, "planner"))

    async def _weights(self, process: VirtualProcess, argv: list[str]) -> None:
        await weights.serve(self.mesh(process, STORE, "weights"))

    async def _rollout(self, process: VirtualProcess, argv: list[str]) -> None:
        a = rollout.parser().parse_args(argv)
        await rollout.serve(self.mesh(process, names.shard(a.job, a.shard), "rollout"))

    async def _node(self, process: VirtualProcess, argv: list[str]) -> None:
        a = node.parser().parse_args(argv)
        await node.serve(self.mesh(process, f"node/{HOST}", "node"), a)

    async def _worker(self, process: VirtualProcess, argv: list[str]) -> None:
        a = worker.parser().parse_args(argv)
        await worker.serve(self.mesh(process, names.worker_process(a.worker), "worker"), a)

    async def _engine(self, process: VirtualProcess, argv: list[str]) -> None:
        seat = Seat.of(parser(None).parse_args(argv))
        mesh = self.mesh(process, f"engine/{seat.resident}", "engine")
        driver = TaskDriver(mesh)
        await engine_running.serve(mesh, seat, self._open_engine, driver)

    async def _open_engine(self, mesh: Mesh, data: JobData, seat: Seat) -> TokenEngine:
        limits = data.config.rollout
        if self.workload is not None:
            return SteppedEngine(self.workload)
        engine = SimulatedEngine(
            mesh.clock,
            limits.slots,
            TOKENS_PER_S * seat.ranks,
            max_length=limits.max_tokens,
            lengths=(MEDIAN_TOKENS, 0.8),
            version=-1,
        )
        engine.tensor_parallel = seat.ranks
        return engine

    async def _trainer(self, process: VirtualProcess, argv: list[str]) -> None:
        seat = Seat.of(parser(None).parse_args(argv))
        kind, name = trainer_running.place(seat)
        arithmetic = TinyArithmetic() if self.workload is None else PacedArithmetic()
        await trainer_running.serve(self.mesh(process, name, kind), seat, arithmetic)

    async def _environment(self, process: VirtualProcess, argv: list[str]) -> None:
        arguments = environments.parser().parse_args(argv)
        served = environments.made(arguments)
        if arguments.threads > 1:
            return await self._threaded(process, served)
        while (block := await process.channel.to_child.get()) is not None:
            process.channel.to_parent.put_nowait(environments.answered(served, block))
        served.close()

    async def _threaded(self, process: VirtualProcess, served: environments.Environments) -> None:
        """What each operation takes, it says (`meshrl.sim.mesh.job.task.waits`); the others go
        on."""
        answers: set[asyncio.Task[None]] = set()

        async def answer(number: int, *operation: Any) -> None:
            told = served.perform(*operation)
            if (seconds := owed_s()) > 0:
                await self.machine.clock.sleep(seconds)
            process.channel.to_parent.put_nowait(packed([[number, *told]]))

        while (block := await process.channel.to_child.get()) is not None:
            for operation in msgpack.unpackb(block, raw=False):
                task = asyncio.create_task(answer(*operation))
                answers.add(task)
                task.add_done_callback(answers.discard)
        served.close()


class _Wake(threading.Event):
    """Wakes a driver that is a task."""

    def __init__(self) -> None:
        super().__init__()
        self.soon = asyncio.Event()

    def set(self) -> None:
        self.soon.set()


class TaskDriver:
    """Runs an engine service's turns in a task, no more often than tokens are worth it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._task: asyncio.Task[None] | None = None

    def deliver(self, action: Callable[[], None]) -> None:
        action()

    def start(self, service: EngineService) -> None:
        self._task = asyncio.get_running_loop().create_task(self._drive(service))

    async def _drive(self, service: EngineService) -> None:
        wake = service.commands.wake = _Wake()
        while True:
            wait_s = IDLE_S
            if service.turn():
                wait_s = FLUSH_S if service.emulated is None else service.steps.due_s
            timer = asyncio.get_running_loop().call_later(wait_s, wake.soon.set)
            await wake.soon.wait()
            timer.cancel()
            wake.soon.clear()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
