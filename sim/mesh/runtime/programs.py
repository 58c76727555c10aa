"""Programs of virtual processes: each opens a mesh in memory, then runs the product's service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from meshrl.common.api.calls.call_permissions import CALL_PERMISSIONS
from meshrl.common.api.weights import STORE_NAME
from meshrl.common.environment.framing import pack_message
from meshrl.common.generation.engine_contract import TokenEngine
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.dependencies import AccessRules, LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.lease import LEASE_LOST_EXIT_STATUS
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.state.pool.workers import process_names
from meshrl.common.state.pool.workers.placement import Placement, build_parser
from meshrl.common.state.redis.client import StateClient
from meshrl.services.engine import role_process as engine_running
from meshrl.services.engine.service import EngineService
from meshrl.services.environment import environments
from meshrl.services.node import __main__ as node
from meshrl.services.node import worker
from meshrl.services.planner import __main__ as planner
from meshrl.services.rollout import __main__ as rollout
from meshrl.services.trainer import role_process as trainer_running
from meshrl.services.weights import __main__ as weights
from meshrl.sim.engines.simulated_engine import SimulatedEngine
from meshrl.sim.mesh.job.emulated_compute import InstantArithmetic, SteppedEngine
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload
from meshrl.sim.mesh.job.task_environments import take_pending_wait_s
from meshrl.sim.mesh.job.vector_arithmetic import VectorArithmetic
from meshrl.sim.mesh.runtime.virtual_redis import VirtualRedis, open_state
from meshrl.sim.virtual_machine import VirtualHost, VirtualMachine
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport
from meshrl.sim.virtual_process import VirtualProcess, VirtualProgram

HOST_ID = "one"  # the id of the only host
MEAN_START_S = 1.2  # mean duration of a process's imports
TOKENS_PER_S = 8.0
MEDIAN_TOKENS = 12.0
FLUSH_INTERVAL_S = 0.4  # between two iterations of a busy simulated engine
IDLE_INTERVAL_S = 2.0


class ProcessContext:
    """Context of all processes: a machine, a network, a Redis, and a directory."""

    host_type: type[VirtualHost] = VirtualHost

    def __init__(
        self,
        machine: VirtualMachine,
        network: MemoryNetwork,
        redis: VirtualRedis,
        root: Path,
        workload: EmulatedWorkload | None = None,
    ) -> None:
        """Create a context. `workload`: emulated speeds of its engines and trainers; None: no
        emulation.
        """
        self.machine, self.network, self.redis, self.root = machine, network, redis, root
        self.workload = workload
        self.meshes: dict[str, Mesh] = {}  # the newest of each name
        self.open_state: Callable[[VirtualProcess], StateClient] = partial(open_state, redis)

    def open_mesh(self, process: VirtualProcess, name: str, kind: str) -> Mesh:
        """Open a mesh for the process, as `Mesh.open` does for a real one."""
        machine, host = self.machine, self.host_type(process)
        transport = MemoryTransport(self.network, f"mem://{process.label}", role=kind)
        mesh = Mesh(
            name,
            kind,
            MeshDependencies(
                state=self.open_state(process),
                transport=transport,
                clock=machine.clock,
                random=machine.random.child(f"mesh {process.label}"),
                host=host,
            ),
            settings=MeshSettings(
                redis_url="simulated:",
                run_root=str(self.root),
                bind="",
                host=HOST_ID,
                metrics="off",
            ),
            terms=LeaseTerms(on_lost=lambda why: host.exit(LEASE_LOST_EXIT_STATUS, why)),
            access=AccessRules(callers=CALL_PERMISSIONS),
        )
        mesh.state.renew_lease = mesh._lease.renew_now
        self.meshes[name] = mesh
        process.exit_callbacks.append(lambda: self.network.detach(transport))
        network, address = self.network, transport.address
        process.stop_callbacks.append(
            lambda stopped: (network.pause if stopped else network.resume)(address)
        )
        return mesh

    def build_programs(self) -> dict[str, VirtualProgram]:
        """Build the programs by their modules; each begins with the duration of its imports."""
        programs = {
            "meshrl.services.planner": self._run_planner,
            "meshrl.services.weights": self._run_weights,
            "meshrl.services.rollout": self._run_rollout,
            "meshrl.services.node": self._run_node,
            "meshrl.services.node.worker": self._run_worker,
            "meshrl.services.engine": self._run_engine,
            "meshrl.services.trainer": self._run_trainer,
            "meshrl.services.environment": self._run_environment,
        }
        return {module: partial(self._start, program) for module, program in programs.items()}

    async def _start(
        self, program: VirtualProgram, process: VirtualProcess, argv: list[str]
    ) -> None:
        pause_s = MEAN_START_S * self.machine.random.child(f"start {process.label}").uniform(
            0.5, 1.5
        )
        await self.machine.clock.sleep(pause_s)
        await program(process, argv)

    async def _run_planner(self, process: VirtualProcess, argv: list[str]) -> None:
        a = planner.build_parser().parse_args(argv)
        await planner.run_planner(self.open_mesh(process, a.name, "planner"))

    async def _run_weights(self, process: VirtualProcess, argv: list[str]) -> None:
        await weights.run_store(self.open_mesh(process, STORE_NAME, "weights"))

    async def _run_rollout(self, process: VirtualProcess, argv: list[str]) -> None:
        a = rollout.create_parser().parse_args(argv)
        await rollout.serve(
            self.open_mesh(process, process_names.shard_name(a.job, a.shard), "rollout")
        )

    async def _run_node(self, process: VirtualProcess, argv: list[str]) -> None:
        a = node.build_parser().parse_args(argv)
        await node.serve(self.open_mesh(process, f"node/{HOST_ID}", "node"), a)

    async def _run_worker(self, process: VirtualProcess, argv: list[str]) -> None:
        a = worker.build_parser().parse_args(argv)
        await worker.serve(
            self.open_mesh(process, process_names.worker_name(a.worker), "worker"), a
        )

    async def _run_engine(self, process: VirtualProcess, argv: list[str]) -> None:
        seat = Placement.from_args(build_parser(None).parse_args(argv))
        mesh = self.open_mesh(process, f"engine/{seat.instance}", "engine")
        driver = TaskDriver(mesh)
        await engine_running.serve(mesh, seat, self._open_engine, driver)

    async def _open_engine(self, mesh: Mesh, data: JobData, placement: Placement) -> TokenEngine:
        limits = data.config.rollout
        if self.workload is not None:
            return SteppedEngine(self.workload)
        engine = SimulatedEngine(
            mesh.clock,
            limits.slots,
            TOKENS_PER_S * placement.ranks,
            max_length=limits.max_tokens,
            lengths=(MEDIAN_TOKENS, 0.8),
            version=-1,
        )
        engine.tensor_parallel_size = placement.ranks
        return engine

    async def _run_trainer(self, process: VirtualProcess, argv: list[str]) -> None:
        seat = Placement.from_args(build_parser(None).parse_args(argv))
        kind, name = trainer_running.get_process_kind_and_name(seat)
        arithmetic = VectorArithmetic() if self.workload is None else InstantArithmetic()
        await trainer_running.run_role(self.open_mesh(process, name, kind), seat, arithmetic)

    async def _run_environment(self, process: VirtualProcess, argv: list[str]) -> None:
        arguments = environments.build_parser().parse_args(argv)
        served = environments.build_environments(arguments)
        if arguments.threads > 1:
            return await self._serve_concurrently(process, served)
        while (block := await process.channel.to_child.get()) is not None:
            process.channel.to_parent.put_nowait(environments.answer_frame(served, block))
        served.close()

    async def _serve_concurrently(
        self, process: VirtualProcess, job_environments: environments.Environments
    ) -> None:
        """Serve operations concurrently, each with its own duration
        (`meshrl.sim.mesh.job.task_environments.take_pending_wait_s`).
        """
        answers: set[asyncio.Task[None]] = set()

        async def answer(number: int, *operation: Any) -> None:
            result = job_environments.run_operation(*operation)
            if (seconds := take_pending_wait_s()) > 0:
                await self.machine.clock.sleep(seconds)
            process.channel.to_parent.put_nowait(pack_message([[number, *result]]))

        while (block := await process.channel.to_child.get()) is not None:
            for operation in msgpack.unpackb(block, raw=False):
                task = asyncio.create_task(answer(*operation))
                answers.add(task)
                task.add_done_callback(answers.discard)
        job_environments.close()


class _WakeupEvent(threading.Event):
    """Event that wakes a driver task."""

    def __init__(self) -> None:
        super().__init__()
        self.async_event = asyncio.Event()

    def set(self) -> None:
        self.async_event.set()


class TaskDriver:
    """Driver that runs an engine service's iterations in a task, no more often than tokens
    arrive.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._task: asyncio.Task[None] | None = None

    def call_on_loop(self, action: Callable[[], None]) -> None:
        action()

    def start(self, service: EngineService) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(service))

    async def _run(self, service: EngineService) -> None:
        wake = service.commands.wake_event = _WakeupEvent()
        while True:
            wait_s = IDLE_INTERVAL_S
            if service.run_once():
                wait_s = (
                    FLUSH_INTERVAL_S
                    if service.emulation is None
                    else service.steps.next_step_delay_s
                )
            timer = asyncio.get_running_loop().call_later(wait_s, wake.async_event.set)
            await wake.async_event.wait()
            timer.cancel()
            wake.async_event.clear()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
